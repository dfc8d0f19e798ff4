"""Remove checkpoints safely, and never the newest sound one; tags. Torch-free.

In come committed checkpoints and a policy; out comes a plan of what stays and what goes, and its
result. The room is not part of `checkpoint/`, because `holdfast prune` removes checkpoints without
a training run, torch, groups or a plan of a save.

Read first: `removal.py`, `tags.py`.
"""
