"""`nn.Module` as a part of the state.

In comes a module, wrapped or not; out come entries under names that wrappers never change. What
`state_dict` shows is either one of the module's own tensors or another form of one (a hook, an
override, extra state). Own tensors are filled in place by a load; forms go through the module's
`load_state_dict`, and are proved by asking for them again.

Read first: `part.py`, `state_dict.py`, `load.py`.
"""
