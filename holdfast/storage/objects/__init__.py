"""Checkpoints in object stores: S3, GCS, Azure, by obstore. Torch-free, and only on demand.

In come the same calls as to a directory; out come requests. Two ideas make a bucket safe without a
rename: a directory's data lies under a prefix that is used once and never moves, and its name is
one small object that is changed by conditional puts alone (`names.py` has the protocol, and why).
So a commit is one put, whatever the size of the checkpoint; a reader that has a prefix reads one
version to the end; and of two jobs that save one step exactly one gets its name.

Objects of a run at `s3://bucket/run`:

    run/iter_0000100.dir                 the name of a directory: its prefix, and its small files
    run/.store/data/<random>-<name>/…    the data of directories
    run/latest_checkpointed_iteration.txt, run/tags/…, run/.reading/…    files as they are called

Read first: `storage.py` (the protocol), `names.py`. Then `bucket.py` (requests, what is repeated
and what is settled), `files.py` (uploads in parts, reads by ranges), `uploads.py` (those that were
not finished), `_obstore.py` (the library).
"""

from __future__ import annotations

from holdfast.storage.objects.storage import ObjectStorage

__all__ = ["ObjectStorage"]
