"""Agreement between the ranks of a layout: transport, frames, deadlines, the guard.

In come short payloads of every rank, or the bytes of a load's exchange, and a phase that names the
place in the program. Out come the payloads of all ranks, or one error on all of them, which names
the ranks that failed, are missing or are out of sync. No training communicator is used, so a
checkpoint never waits for, or reorders, the collectives of the model.

From the top down: a `Guard` around an operation raises on all ranks what one rank raises. `Control`
compares frames, so that ranks in different calls are named instead of exchanging bytes that mean
something else. `Transport` adds deadlines and says who is missing. `Connections` and streams move
bytes over sockets, without a thread.

`Direct` is apart from these: it moves small tensors of steps over connections of its own, without
frames.

Read first: `control.py`, `transport.py`, `guard.py`.
"""
