"""Remove checkpoints safely: tags, leases, and never the newest verified step. Torch-free.

It is not part of `checkpoint/`: the command prunes without a training run, without torch, groups or
a plan.

Read first: `removal.py`, `tags.py`.
"""
