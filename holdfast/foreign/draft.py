"""The catalog of a location while its reader makes it: no tensor and no part is there twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from holdfast.errors import CorruptionError
from holdfast.foreign.catalog import Catalog, CatalogTensor, Checksum, OpenFiles, no_checksums
from holdfast.foreign.location import Location
from holdfast.foreign.pickles import NOT_READ
from holdfast.foreign.weights import with_optimizers
from holdfast.format.values import tensor_node


class Draft:
    """A catalog that grows.

    Args:
        location: Of the checkpoint.
        title: Of its format.

    Attributes:
        tensors: By key.
        parts: The tree of the state.
        left_out: What the catalog will not have.
        versions: Of modules by part.
    """

    def __init__(self, location: Location, title: str) -> None:
        self.location = location
        self.title = title
        self.tensors: dict[str, CatalogTensor] = {}
        self.parts: dict[str, Any] = {}
        self.left_out: list[str] = []
        self.versions: dict[str, dict[str, int]] = {}

    def add_tensors(self, tensors: Iterable[CatalogTensor]) -> None:
        """Add tensors: all, or none if there is one of the same key.

        Two paths may be one when they are joined with dots.

        Raises:
            CorruptionError: A key is there twice.
        """
        more: dict[str, CatalogTensor] = {}
        for tensor in tensors:
            if tensor.key in self.tensors or tensor.key in more:
                raise twice(self.location, tensor.key)
            more[tensor.key] = tensor
        self.tensors |= more

    def add_tensor(self, tensor: CatalogTensor) -> Any:
        """Add one tensor, and return its node."""
        self.add_tensors([tensor])
        return tensor_node(tensor.key)

    def free_name(self, name: str) -> str:
        """Return the name of a new part, changed if it is taken, or the path of a tensor is in it.

        What a part `model.w` has would get the key of the weight `w` in the part `model`.
        """
        taken = {*self.parts, *self.tensors}
        while name in taken or any(key.startswith(f"{name}.") for key in self.tensors):
            name = f"{name}_common"
        return name

    def catalog(
        self,
        *,
        identity: bytes,
        files: Iterable[str],
        step: int = 0,
        metadata: Mapping[str, Any] | None = None,
        drift: str = "",
        checksums: Callable[[OpenFiles], Iterable[Checksum]] = no_checksums,
    ) -> Catalog:
        """Return the catalog; optimizers of PyTorch are in it as Holdfast stores them.

        Args:
            identity: As of `Catalog`, like all but `files`.
            files: Those that it was made from: the newest tells when it was saved.
            step: Of training.
            metadata: The user's own.
            drift: Which stored copies differ.
            checksums: Returns those that the files state.
        """
        return Catalog(
            format=self.title,
            storage=self.location.storage,
            label=self.location.label,
            identity=identity,
            step=step,
            created=self.location.created(files),
            tensors=self.tensors,
            parts=with_optimizers(self.parts, self.tensors),
            left_out=self.left_out,
            metadata=metadata or {},
            versions=self.versions or None,
            drift=drift,
            checksums=checksums,
        )


def twice(location: Location, what: str) -> CorruptionError:
    """Return the error for a tensor or part of whose name there are two."""
    return CorruptionError(f"{location.label}: {what!r} is there twice", details=NOT_READ)
