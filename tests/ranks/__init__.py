"""Processes that serve as ranks: a pool of live ones, their jobs, and the check between two jobs.

`job.py` is what travels to a rank and back, `process.py` the rank's side, `pool.py` the test's
side, `state.py` compares a rank with what it was before its job, and `writers.py` forks the writers
of live ranks. Tests use `tests.harness`.
"""
