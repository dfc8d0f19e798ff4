"""Traits: everything that decides what a tensor or marker claims, but for its key and layout.

A save compares them with those of the save before, for every tensor. So they are read by loops that
run in C, kind by kind, and compared as columns; the traits of a single tensor are made only where
columns differ.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast._torch import (
    DTENSOR_FORMS,
    DTENSOR_SPECS,
    form_check,
    local_tensor,
    local_tensors,
    spec_of,
)
from holdfast.state.leaves import held_tensor
from holdfast.state.markers import FlatShard, Padded, Pieces, Sharded
from holdfast.state.tensor_memory import Forms, addresses_of, runs

PLAIN = frozenset((torch.Tensor, nn.Parameter))
"""Types that neither wait nor answer for their tensors."""
_DTENSOR = frozenset((DTensor,))
PLAIN_FORMS = attrgetter("dtype", "shape", "layout", "is_meta")
"""The traits of a plain tensor."""


def held_tensors(objects: Sequence[Any]) -> list[torch.Tensor]:
    """Return what each tensor or marker holds on this rank, see `held_tensor`."""
    kinds = list(map(type, objects))
    distinct = set(kinds)
    if distinct <= PLAIN:
        return list(objects)
    if distinct == _DTENSOR:
        return local_tensors(objects)
    if distinct <= PLAIN | {DTensor}:
        is_dtensor = _selector(kinds, distinct, _DTENSOR)
        local = iter(local_tensors(_chosen(objects, is_dtensor)))
        flags = _flags(is_dtensor, kinds)
        return [next(local) if d else obj for obj, d in zip(objects, flags, strict=True)]
    firsts = [each.locals[0] if type(each) is Pieces else each for each in objects]
    return [each if type(each) in PLAIN else held_tensor(each) for each in firsts]


class Traits:
    """The traits of the tensors and markers of one pass over a state, as they were then.

    Args:
        objects: In order.
        held: What each of them holds.

    The meshes are kept, so that no other one has the `id` of one of these.
    """

    def __init__(self, objects: Sequence[Any], held: Sequence[torch.Tensor]) -> None:
        kinds = list(map(type, objects))
        distinct = set(kinds)
        self._other_meshes: dict[int, DeviceMesh] = {}
        self._all: list[object] | None = None
        self._kinds = kinds
        self._runs: list[_Run] = []
        self.forms: Forms | None = None
        """Of what the objects hold; None before `expect_again`, and if some are not plain tensors.
        """
        # Which objects are of each kind; None for all.
        self._is_plain = _selector(kinds, distinct, PLAIN)
        self._is_dtensor = _selector(kinds, distinct, _DTENSOR)
        try:
            self._plain = list(map(PLAIN_FORMS, _chosen(objects, self._is_plain)))
        except RuntimeError:  # a nested tensor, which has no shape
            self._plain, self._is_plain = [], [False] * len(kinds)
        dtensors = _chosen(objects, self._is_dtensor)
        self._forms = list(map(DTENSOR_FORMS, dtensors))
        self._meshes, self._placements = (list(map(each, dtensors)) for each in DTENSOR_SPECS)
        self._local_kinds = list(map(type, _chosen(held, self._is_dtensor)))
        self._others: list[object] = []
        if len(self._plain) + len(self._forms) < len(kinds):
            self._others = self._of_others(objects)

    def _of_others(self, objects: Sequence[Any]) -> list[object]:
        """Return the traits of all objects that are neither plain tensors nor DTensors."""
        is_plain, is_dtensor = (_flags(s, objects) for s in (self._is_plain, self._is_dtensor))
        return [
            traits_of(each, self._other_meshes)
            for each, *is_known in zip(objects, is_plain, is_dtensor, strict=True)
            if not any(is_known)
        ]

    def expect_again(self, objects: Sequence[Any], held: Sequence[torch.Tensor]) -> None:
        """Prepare `look_again` for the passes to come; the arguments are the constructor's.

        Cost: as much as reading the traits, so for traits that were the same twice.
        """
        if not set(map(type, held)) <= PLAIN:
            return
        num_dtensors = 0
        for where in runs(len(objects)):
            kinds = self._kinds[where]
            is_dtensor = _selector(kinds, set(kinds), _DTENSOR)
            dtensors = _chosen(objects[where], is_dtensor)
            placed = slice(num_dtensors, num_dtensors + len(dtensors))
            num_dtensors = placed.stop
            are_alike = form_check(dtensors) if dtensors else operator.not_
            if are_alike is None:
                return
            specs = (self._meshes[placed], self._placements[placed])
            self._runs.append(_Run(kinds, is_dtensor, are_alike, specs))
        self.forms = Forms(held)

    def look_again(self, objects: Sequence[Any]) -> tuple[list[torch.Tensor], list[int]] | None:
        """Return what other objects hold and its addresses, if they have these traits.

        Every tensor is looked at, by a few calls for some hundred of them, which are in the cache
        from the first call to the last: what torch says of it by `Forms`, meshes and placements by
        identity, as in `same_as`.

        Returns:
            As `held_tensors`, and `addresses_of` that. None may mean either.
        """
        if self.forms is None or len(objects) != len(self._kinds):
            return None
        held: list[torch.Tensor] = []
        addresses: list[int] = []
        for run, where in zip(self._runs, runs(len(self._kinds)), strict=True):
            some = objects[where]
            kinds = list(map(type, some))
            if kinds != run.kinds:
                return None
            dtensors = _chosen(some, run.is_dtensor)
            if not run.are_alike(dtensors):
                return None
            for question, last in zip(DTENSOR_SPECS, run.specs, strict=True):
                if not all(map(is_, map(question, dtensors), last)):
                    return None
            held_now = held_tensors(some)
            if not self.forms.are_of(held_now, where):
                return None
            held += held_now
            addresses += addresses_of(held_now)
        if self._others and self._of_others(objects) != self._others:
            return None
        return held, addresses

    def same_as(self, last: Traits) -> bool:
        """Return True if all traits are those of another pass; False may mean either.

        Meshes and placements are compared by identity, which implies that they are the same: these
        objects do not change, and both passes keep them.
        """
        return (
            len(self._kinds) == len(last._kinds)
            and self._is_plain == last._is_plain
            and self._is_dtensor == last._is_dtensor
            and self._plain == last._plain
            and self._forms == last._forms
            and self._local_kinds == last._local_kinds
            and self._others == last._others
            and all(map(is_, self._meshes, last._meshes))
            and all(map(is_, self._placements, last._placements))
        )

    def of_each(self) -> list[object]:
        """Return the traits of each tensor or marker; equal ones claim the same."""
        if self._all is None:
            plain, others = iter(self._plain), iter(self._others)
            dtensors = (
                (dtype, shape, id(mesh), placements, *map(type, placements), kind, *local)
                for (dtype, shape, *local), mesh, placements, kind in zip(
                    self._forms, self._meshes, self._placements, self._local_kinds, strict=True
                )
            )
            is_plain, is_dtensor = (
                _flags(each, self._kinds) for each in (self._is_plain, self._is_dtensor)
            )
            self._all = [
                next(plain) if p else next(dtensors) if d else next(others)
                for p, d in zip(is_plain, is_dtensor, strict=True)
            ]
        return self._all


_Selector = list[bool] | None
"""Whether each object is of a kind; None if all are."""


class _Run(NamedTuple):
    """The traits of some objects in a row."""

    kinds: list[type]
    is_dtensor: _Selector
    are_alike: Callable[[Sequence[torch.Tensor]], bool]
    """Whether as many DTensors have the form of these."""
    specs: tuple[list[Any], list[Any]]
    """Mesh of each DTensor, placements of each."""


def _selector(kinds: Sequence[type], distinct: set[type], which: frozenset[type]) -> _Selector:
    if distinct <= which:
        return None
    if distinct.isdisjoint(which):
        return []
    return list(map(which.__contains__, kinds))


def _chosen(objects: Sequence[Any], selector: _Selector) -> Sequence[Any]:
    return objects if selector is None else list(compress(objects, selector))


def _flags(selector: _Selector, objects: Sequence[Any]) -> list[bool]:
    return selector or [selector is None] * len(objects)


def traits_of(obj: Any, meshes: dict[int, DeviceMesh]) -> object:
    """Return the traits of one tensor or marker.

    A mesh is compared by identity, since another one of the same ranks may have other
    communicators; placements by type, too, since some of different types are equal. None for a
    tensor that has no shape; its leaf is refused.
    """
    if type(obj) in PLAIN and not obj.is_nested:
        return PLAIN_FORMS(obj)
    if isinstance(obj, DTensor):
        local, spec = local_tensor(obj), spec_of(obj)
        placements, mesh = spec.placements, spec.mesh
        meshes[id(mesh)] = mesh
        return (
            obj.dtype, obj.shape, id(mesh), placements, *map(type, placements),
            type(local), local.dtype, local.shape,
        )  # fmt: skip
    if isinstance(obj, torch.Tensor):
        if is_lazy(obj) or obj.is_nested:
            return None
        plain = (obj.dtype, obj.shape, obj.layout, obj.is_meta)
        # A class that answers for its tensors is refused by its name; any other one is like plain.
        is_own = type(obj).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        return (*plain, type(obj)) if is_own else plain
    if isinstance(obj, Sharded):
        dims = None if obj.dims is None else tuple(obj.dims.items())
        return "sharded", traits_of(obj.local, meshes), obj.shape, dims, obj.offset, obj.over
    if isinstance(obj, FlatShard):
        like = traits_of(obj.like, meshes)
        return "flat", traits_of(obj.local, meshes), like, obj.start, obj.over
    if isinstance(obj, Pieces):
        pieces = tuple(traits_of(each, meshes) for each in obj.locals)
        return "pieces", pieces, obj.shape, obj.offsets
    if isinstance(obj, Padded):
        return "padded", traits_of(obj.value, meshes), obj.shape
    return "replicated", traits_of(obj.local, meshes)
