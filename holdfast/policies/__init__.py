"""When to save and what to keep: small policies, joined with `|`.

A save policy sees the step just finished and votes. `SaveSchedule` makes one decision of the votes
of all ranks, and `Checkpointer.maybe_save` and the trainer follow it. A keep policy sees the
committed checkpoints and names those that stay; `retention` removes the others.

Read `save.py`, `schedule.py` and `keep.py`. The policies import no torch; the schedule does.
"""
