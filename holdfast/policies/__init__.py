"""When to save and what to keep: small policies, joined with `|`.

In come steps and checkpoints; out come decisions. A save policy sees the step just finished and
votes. `SaveSchedule` makes one decision of the votes of all ranks, which `Checkpointer.maybe_save`
and the trainer follow. A keep policy sees the committed checkpoints and names those that stay;
`retention` removes the others. The policies do not import torch; the schedule does.

Read first: `save.py`, `schedule.py`, `keep.py`.
"""
