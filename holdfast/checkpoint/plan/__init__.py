"""Plan a save: what each rank claims, the proof that the claims cover, and who writes which box.

In come the claims of all ranks as columns; out comes a share for each rank, and a digest by which
ranks recognize the plan. The coordinator proves that the boxes of each key tile its shape exactly,
that a key has one dtype, shape and layout, and that no declarations contradict each other. Then it
assigns writers: whole boxes if that balances, pieces of large replicated boxes if not. Which ranks
hold each box, and how the boxes of a tensor follow from coordinates, goes into the index and the
manifest, so that no reader has to infer it from the writers.

A message does not grow with the number of ranks. Coordinates in the keys of values per rank are cut
out of the names and sent as labels, so ranks of a stage have equal names and send them once; the
ranks of a replica set are nested ranges; numbers are packed.

A plan is used again only if every rank's claims are what they were: 2 to 4 µs a tensor, compared as
columns, whatever objects and memory the tensors are now. There is no "assume constant structure"
flag. The committed plan is kept next to the checkpoints (`.plans/`), and the first save of a later
run uses it if every rank proves from its own claims that it fits.

Read first: `claims.py`, `proof.py`, `assign_writers.py`.
"""
