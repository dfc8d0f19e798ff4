"""Carry out a save: agree with all ranks, plan if anything changed, stage, hand over to the writer.

In comes a state, out comes a `SaveReport` or a `PendingSave`. The phases, in order:

1. Signature: each rank compares its structure with that of the last save. One small collective
   exchanges step, plan, earlier failures and errors; in steady state it is the only one.
2. Plan, if some rank's structure changed (`plan/`).
3. Budget: disk, memory and descriptors are checked before anything is staged, and the message says
   how much is missing.
4. Stage: rows are copied into memory laid out like the data file. An asynchronous save returns
   after this memcpy; copies from CUDA run on a side stream into page-locked memory. A lazily
   staged save returns before it has copied large parameters and moments (`lazy_staging.py`; those
   of a device: `device_rows.py`).
5. Write: one pipeline (`holdfast.writer`), in a thread for `save`, in a process for `save_async`,
   which finishes even if the trainer dies.
6. Commit and outcome: on storage, without a collective. What some rank has not raised is raised by
   all together at the next save.

Read first: `saver.py`, `handshake.py`, `staging.py`.
"""
