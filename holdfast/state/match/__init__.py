"""Match what a load requests with what a checkpoint stores, before any target is touched.

In come the stored tree and the user's; out come requests for tensors, values to hand over, and one
list of everything that does not fit: missing, unexpected, shape, dtype, kind. "Unexpected" is
judged over the union of all ranks' requests, so that pipeline stages may each request their layers.

Read first: `matcher.py`, `nodes.py`.
"""
