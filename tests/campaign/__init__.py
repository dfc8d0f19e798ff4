"""Generated programs: any way to train, and to move to another one, equals one process.

`programs.py` draws a program from a seed: a model, the ways in which the ranks hold it, one after
the other, and what they do. `models.py` makes the model, `ways.py` holds it in one way on one
rank, `twin.py` runs the same program in one process, and `runs.py` runs and compares both.

    python -m tests.campaign 17     # program 17 alone, with what differs
"""
