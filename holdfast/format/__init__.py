"""What the bytes of a checkpoint mean: manifest, index, data file images, values. Torch-free.

In come records and rows of a plan; out come the bytes of a checkpoint directory, and back. The
manifest is the commit record, and its digest covers all bytes of the file before the digest member,
white space included, so a stranger needs no canonical JSON. The index says in which file each chunk
of each tensor is. Digest blocks are 1 MiB, so a verified read of a slice costs at most a block more
than the slice. Names of steps are part of the format: tools and other readers find steps by them.

A reader opens one *version* of a step and keeps it, also while the step is saved again.

Read first: `manifest.py`, `index.py`, `reader.py`.
"""
