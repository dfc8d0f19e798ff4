"""The content of a checkpoint by its manifest alone; no data are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.format.names import step_dir
from holdfast.format.values import count_values, kind_in_words, tensor_keys
from holdfast.format.versions import read_manifest
from holdfast.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class PartInfo:
    """One part of a checkpoint, by its manifest."""

    kind: str
    """Kind of the part's tree ("mapping", "tensor", "value per dp,tp", …)."""
    num_tensors: int
    """Number of its tensors, each once; a tensor shared with another part counts in both."""
    nbytes: int
    """Bytes of these tensors."""
    num_values: int
    """Number of stored leaves that are not tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """The description of a checkpoint; see `Checkpointer.inspect`."""

    step: int
    """The step."""
    created: str
    """Start of the save, ISO 8601 UTC."""
    total_nbytes: int
    """Bytes of all tensors, each once."""
    num_tensors: int
    """Number of tensors."""
    parts: Mapping[str, PartInfo]
    """The parts by name."""
    metadata: Mapping[str, Any]
    """The `metadata=` of the save; empty if none was given."""


def inspect_checkpoint(storage: Storage, step: int) -> CheckpointInfo:
    """Describe a checkpoint with one read; linear in the manifest. Raises as `read_manifest`."""
    _, manifest = read_manifest(storage, step_dir(step))
    sizes = {info.key: info.nbytes for info in manifest.tensors}
    parts = {}
    for name, node in manifest.parts.items():
        keys = set(tensor_keys(node))
        parts[name] = PartInfo(
            kind=kind_in_words(node).removeprefix("a "),
            num_tensors=len(keys),
            nbytes=sum(sizes[key] for key in keys),
            num_values=count_values(node),
        )
    return CheckpointInfo(
        step=manifest.step,
        created=manifest.created,
        total_nbytes=manifest.totals.nbytes,
        num_tensors=manifest.totals.num_tensors,
        parts=parts,
        metadata=manifest.metadata,
    )
