"""Processes that serve as ranks: a pool of live ones, their jobs, and the check between two jobs.

`job.py` is what travels to a rank and back, `process.py` the rank's side, `pool.py` the test's
side, and `state.py` compares a rank with what it was before its job. Tests use `tests.harness`.
"""
