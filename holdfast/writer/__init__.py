"""From staged bytes to a committed checkpoint, without torch and without a communicator.

In comes a job: memory laid out as a data file, and this rank's share of the plan. Out comes a
committed checkpoint, or a failure record that every rank reads. Storage is the coordinator:

1. Write the image past the page cache if the file system allows that (tried, never assumed), and
   publish a done-record with all lengths and digests.
2. One writer waits for the done-records of all ranks, with a deadline that names the missing ones.
   It checks that every planned byte is accounted for, that values agree, that undeclared replicas
   and copies have equal digests, writes index and manifest, and renames the directory. All of that
   is linear in ranks and rows.
3. The others read the outcome from storage, at growing pauses.

The process is started with the interpreter alone, in a session of its own, so that it outlives the
trainer and a launcher's group kill does not reach it. Leftovers of saves that died are finished or
removed by `repair.py`; a save whose heartbeat is renewed is left alone.

Read first: `job.py`, `commit.py`, `process.py`.
"""
