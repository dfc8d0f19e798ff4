"""Loading: find the checkpoint, match the request, plan the reads, fill the targets.

In come a state with targets and a storage; out come filled targets, restored values and a report,
on all ranks or on none. The phases, each of which ends with an agreement of all ranks:

1. Find (`finding`): the same version of the same step on every rank.
2. Match (`holdfast.state.matcher`): the request with what is stored, before a target is touched.
3. Plan (`read_plan`): which rank reads which bytes, from the requests of all (`requests`). Ranks of
   several hosts may send each other what they read: `choose_exchange` decides whether,
   `assign_readers` who reads, `transfers` what goes where.
4. Read (`read_executor`): blocks in the order of the files, digests checked, into the targets; from
   memory where an image of the file is kept on this host, else from storage.
5. Restore values, and random streams last, once every byte on every rank was good.

Read first: `loader.py`, the phases; `read_plan.py`, the arithmetic; `read_executor.py`, the bytes.
"""
