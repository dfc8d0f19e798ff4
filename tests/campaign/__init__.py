"""Generated programs: any way to train, and to move to another one, equals one process.

`programs.py` draws a program from a seed: a model, the ways in which the ranks hold it, one after
the other, and what they do, as actions (`actions.py`). `models.py` makes the model, `ways.py` holds
it in one way on one rank, `twin.py` does the same in one process, `runs.py` runs programs, and
`verdicts.py` compares what the ranks answered with the twin, action by action. Regular programs
take several ways; irregular ones have something unusual in each step of one way, and maybe a way
before it, whose checkpoint they load in between.

    python -m tests.campaign 17                 # program 17 alone, with what differs
    python -m tests.campaign --irregular 17     # of the irregular ones
"""
