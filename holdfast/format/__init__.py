"""The meaning of a checkpoint's bytes: manifest, index, data files, values. Torch-free.

In come records and rows of a plan; out come the bytes of a checkpoint directory, and back. The
manifest is the commit record. Its digest covers all bytes of the file before the digest member,
including white space, so that a reader in another language needs no canonical JSON. The index has
the file and the place of each chunk of each tensor. Digest blocks have 1 MiB, so that a verified
read of a slice costs at most one block more at each end. Names of steps are part of the format:
tools and other readers find steps by them.

A reader opens one *version* of a step and keeps it, even while the step is saved again.

Read first: `manifest.py`, `index.py`, `reader.py`.
"""
