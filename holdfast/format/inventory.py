"""What is in a checkpoint, from its manifest alone: nothing of the data is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.format.dtypes import DTYPES
from holdfast.format.names import step_dir
from holdfast.format.values import count_values, kind_in_words, tensor_keys
from holdfast.format.versions import read_manifest
from holdfast.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class PartInfo:
    """One part of a checkpoint, as its manifest has it."""

    kind: str
    """What the part's tree is ("mapping", "tensor", "value per dp,tp", …)."""
    num_tensors: int
    """Tensors that it refers to, each once; those it shares with another part count in both."""
    nbytes: int
    """Of these tensors."""
    num_values: int
    """Leaves of the tree that are stored and are not tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What a checkpoint says about itself; see `Checkpointer.inspect`."""

    step: int
    """Its step."""
    created: str
    """When the save began, ISO 8601 UTC."""
    total_nbytes: int
    """Of all tensors, each once."""
    num_tensors: int
    """Tensors."""
    parts: Mapping[str, PartInfo]
    """Its parts by name."""
    metadata: Mapping[str, Any]
    """What was given as `metadata=` to the save; empty for none."""


def inspect_checkpoint(storage: Storage, step: int) -> CheckpointInfo:
    """What a checkpoint holds. One read; linear in the manifest. Raises as `read_manifest`."""
    _, manifest = read_manifest(storage, step_dir(step))
    sizes = {
        info.key: math.prod(info.shape) * DTYPES[info.dtype].itemsize for info in manifest.tensors
    }
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
