"""Optimizers as parts of the state, everything by parameter name.

In come an optimizer and the module that names its parameters; out come one entry per parameter and
state name, in the parameter's global coordinates, however the optimizer is sharded. Containers,
wrappers and classes with a state form of their own are found and taken at their word, then proved.

Read first: `part.py`, `own_form.py`.
"""
