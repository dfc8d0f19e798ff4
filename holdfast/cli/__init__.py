"""The `holdfast` command: one file per verb in `commands/`, their common parts in `support/`.

All verbs but `train` and `view` work offline in one process without torch, so that they answer at
once. The page of `view` is made in `page/`.

Read first: `main.py`, `commands/show.py`.
"""
