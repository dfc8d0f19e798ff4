"""What commits by one plan have in common: proven and made once, for the next ones to do the rest.

Saves of an unchanged structure differ in digests and in few values. Everything here is taken again
only where all that it was made of is the same, byte by byte or as the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.format.envelopes.torch_dist import MetadataMemo
from holdfast.format.manifest import ManifestTexts, TensorInfo
from holdfast.format.values import Node

_MAX_PART_NBYTES = 4 << 20
_MAX_TENSORS = 100_000

Supplied = Sequence[tuple[str, bytes]]
"""Encoded tree of a part by the label of each rank that supplies it."""


class PlanMemo:
    """The memory of one plan, in the process that commits its saves; at most tens of megabytes.

    Each attribute is replaced as a whole, so that two commits at a time do each other no harm.

    Attributes:
        metadata: Of files for other programs.
        texts: Of manifests.
        proven: All that an index was proven with, but for the plan: see `assemble`.
    """

    def __init__(self) -> None:
        self.metadata = MetadataMemo()
        self.texts = ManifestTexts(max_tensors=_MAX_TENSORS)
        self.proven: object = None
        self._tensors: list[TensorInfo] | None = None
        self._parts: dict[str, tuple[Supplied, Node]] = {}

    def tensors(self, make: Callable[[], list[TensorInfo]]) -> list[TensorInfo]:
        """Return the plan's tensors without fingerprints: one list for all commits."""
        tensors = self._tensors
        if tensors is None:
            tensors = make()
            if len(tensors) <= _MAX_TENSORS:
                self._tensors = tensors
        return tensors

    def part(self, name: str, supplied: Supplied, merge: Callable[[], Node]) -> Node:
        """Return the merged tree of a part: the last one's object, if ranks supply the same."""
        last = self._parts.get(name)
        if last is not None and last[0] == supplied:
            return last[1]
        node = merge()
        if sum(map(len, {data for _, data in supplied})) <= _MAX_PART_NBYTES:
            self._parts[name] = (supplied, node)
        else:
            self._parts.pop(name, None)
        return node
