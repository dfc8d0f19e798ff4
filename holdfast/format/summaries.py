"""What a list says about a checkpoint, as a note that a storage keeps with the checkpoint's name.

A list of a hundred steps in an object store would read a hundred manifests. A storage that keeps
notes with names (`annotate`, `survey`) gives all of them in two requests. A note is only for lists:
a load reads the manifest and proves its digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.decoding import decode_json_as
from holdfast.format.manifest import LayoutInfo, Manifest
from holdfast.format.names import INDEX, MANIFEST
from holdfast.storage import Storage

_MAX_NBYTES = 4096
"""A larger note (of a user's large metadata) is not kept: lists read the manifest then."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a list says of one checkpoint."""

    step: int
    created: str
    num_tensors: int
    nbytes: int
    stored_nbytes: int
    num_files: int
    layouts: tuple[LayoutInfo, ...]
    metadata: dict[str, Any]
    requests: dict[str, int] = {}
    """By kind, what all ranks had asked of storage when the save was committed."""

    @classmethod
    def of(cls, manifest: Manifest, *, requests: Mapping[str, int] = {}) -> Summary:
        """Return the summary of a checkpoint."""
        return cls(
            step=manifest.step,
            created=manifest.created,
            num_tensors=manifest.totals.num_tensors,
            nbytes=manifest.totals.nbytes,
            stored_nbytes=manifest.totals.stored_nbytes,
            num_files=len(manifest.files),
            layouts=tuple(manifest.layouts),
            metadata=manifest.metadata,
            requests=dict(requests),
        )


def annotate(
    storage: Storage,
    directory: str,
    manifest: Manifest,
    *,
    requests: Mapping[str, int] = {},
    held: Mapping[str, bytes] | None = None,
    aside: Sequence[str] = (),
) -> None:
    """Give a directory the summary of its checkpoint before it gets its name, if notes are kept.

    Args:
        storage: Root of the checkpoints.
        directory: The directory.
        manifest: Of its checkpoint.
        requests: See `Summary`.
        held: Small files that come with the name; None for those that it has.
        aside: Paths of files in it that are to be gone with its present name.
    """
    keep = getattr(storage, "annotate", None)
    if keep is None:
        return
    note = msgspec.json.encode(Summary.of(manifest, requests=requests))
    names = {name.partition("/")[0] for name in manifest.file_sizes}
    files = sorted({*names, INDEX, MANIFEST})
    text = note.decode() if len(note) <= _MAX_NBYTES else ""
    keep(directory, text, files, held=held, aside=aside)


def requests_of_save(storage: Storage, directory: str, *, step: int) -> dict[str, int]:
    """Return by kind the requests that a save took; empty where that was not counted."""
    look = getattr(storage, "note", None)
    summary = read_summary(look(directory), step=step) if look is not None and directory else None
    return summary.requests if summary is not None else {}


def requests_in_words(requests: Mapping[str, int]) -> str:
    """Return numbers of requests for people: `31 requests (put 12, part 9, …)`."""
    kinds = sorted(requests.items(), key=lambda each: (-each[1], each[0]))
    words = ", ".join(f"{kind} {number}" for kind, number in kinds if number)
    return f"{sum(requests.values())} requests ({words})"


def read_summary(note: str, *, step: int) -> Summary | None:
    """Return the summary in a note; None if it is not one of this step."""
    try:
        summary = decode_json_as(note, Summary)
    except (msgspec.DecodeError, RecursionError):
        return None
    return summary if summary.step == step else None
