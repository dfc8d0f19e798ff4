"""From staged bytes to a committed checkpoint, without torch and without a communicator.

In comes a job: memory laid out as a data file, and this rank's share of the plan. Out comes a
committed checkpoint, or a failure record that every rank reads. Storage is the coordinator:

1. Every writer writes its image, past the page cache if the file system allows it, and publishes a
   done-record with all lengths and digests.
2. One writer waits for the done-records of all ranks, with a deadline that names the missing ranks.
   It checks that every planned byte is accounted for, that values agree, and that undeclared
   replicas and copies have equal digests. Then it writes index and manifest, and renames the
   directory. All of this is linear in ranks and rows.
3. The others read the outcome from storage, at growing intervals.

A writer process runs in its own session, so that it outlives the trainer and a launcher that kills
the trainer's process group does not reach it. `leftovers.py` finishes or removes what dead saves
have left, and leaves a save alone while its heartbeat is renewed.

With `Checkpointer(keep_image_s=…)`, the writer process leaves a keeper behind when its trainer has
gone: the staged image of the newest checkpoint, sealed and proven once more, for a restart on the
same host (`keeper.py`; `kept_images.py` is how a load finds it, `sealed_image.py` the memory).

Read first: `job.py`, `commit.py`, `process.py`.
"""
