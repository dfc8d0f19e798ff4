"""Padding that is declared: what of a tensor is real, what is never stored and zero after a load.

A vocabulary is padded so that its rows divide over the tensor axis, and another layout pads it
otherwise. The declaration says the real shape. Only the elements inside of it are stored, under the
real shape; a load fills them and sets the padding of its targets to zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from holdfast.arrays.boxes import Box
from holdfast.errors import PlacementError
from holdfast.state.leaves import TensorLeaf
from holdfast.state.markers import FlatShard, Padded, Replicated, Sharded, check_real_shape
from holdfast.state.names import walk

_ATTRIBUTE = "_holdfast_padding"


class Declaration:
    """The declared real shape of one tensor of a module, and of everything of its shape.

    Markers are kept as long as somebody else keeps them: a tensor saved again has the marker of the
    last save, by which what was worked out for it is found again. Copies of a module have the
    declaration too, and no markers.
    """

    __slots__ = ("_markers", "shape")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._markers: WeakValueDictionary[int, Padded] = WeakValueDictionary()

    def __reduce__(self) -> tuple[type[Declaration], tuple[tuple[int, ...]]]:
        """The shape alone."""
        return Declaration, (self.shape,)

    def mark(self, value: torch.Tensor | Sharded | FlatShard | Replicated) -> Padded:
        """The marker of a tensor of the padded shape; the same object for the same tensor."""
        held = self._markers.get(id(value))
        if held is None or held.value is not value:
            held = Padded(value, self.shape)
            self._markers[id(value)] = held
        return held


@dataclass(frozen=True, slots=True, kw_only=True)
class Declarations:
    """What is declared in a tree of modules.

    `by_tensor`: by the `id` of the parameter or buffer, tied ones too. `by_name`: by logical name,
    for tensors that hooks of the modules put into a state dict instead of their own.
    """

    by_tensor: Mapping[int, Declaration] = field(default_factory=dict)
    by_name: Mapping[str, Declaration] = field(default_factory=dict)

    def find(self, tensor: torch.Tensor, name: str) -> Declaration | None:
        """The declaration of a tensor of the modules, None without one."""
        return self.by_tensor.get(id(tensor)) or self.by_name.get(name)


def declare_padding(module: nn.Module, name: str, shape: Sequence[int]) -> None:
    """Declare that only the elements inside `shape` of one parameter or buffer are real.

        declare_padding(model.embedding, "weight", (vocabulary, width))

    The rest is padding, at the end of each dim. It is never stored, neither of the tensor nor of
    its optimizer state and main parameters, and a load sets it to zero; so a checkpoint loads under
    any other padding that declares the same shape.

    `module`: the very module in which the tensor is registered; it keeps the declaration when the
    parameter is replaced, as `to`, `deepcopy`, `parallelize_module` and `fully_shard` do. Of tied
    parameters one declaration is enough. `shape`: global, as many dims as the tensor, none larger
    than the tensor's. A second declaration of one tensor replaces the first.
    Raises PlacementError for a tensor that the module does not have, or a shape that does not fit.
    """
    tensor = _registered(module, name)
    if tensor is None:
        raise PlacementError(
            f"declare_padding: {type(module).__name__} has no parameter or buffer '{name}' of its "
            f"own; pass the module in which it is registered"
        )
    real = tuple(int(n) for n in shape)
    if not isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        check_real_shape(real, tuple(tensor.shape), where=f"declare_padding of '{name}'")
    kept = module.__dict__.get(_ATTRIBUTE, {})
    module.__dict__[_ATTRIBUTE] = {**kept, name: Declaration(real)}


def declarations(module: nn.Module) -> Declarations:
    """All declarations in a tree of modules, each held against the tensor as it is now.

    Raises PlacementError naming a tensor that is gone or smaller than its real shape, and two
    declarations of one tensor that differ. Cost: one pass over the modules.
    """
    by_tensor: dict[int, Declaration] = {}
    by_name: dict[str, Declaration] = {}
    for logical, _, inner in walk(module):
        kept: Mapping[str, Declaration] = inner.__dict__.get(_ATTRIBUTE, {})
        for name, declaration in kept.items():
            where = f"{logical}{name}"
            tensor = _registered(inner, name)
            if tensor is None:
                if name in inner._parameters or name in inner._buffers:
                    continue  # registered as None: there is nothing to store
                raise PlacementError(
                    f"{where}: its padding is declared, but {type(inner).__name__} has no such "
                    f"tensor any more; declare it in the module that has it now"
                )
            check_real_shape(declaration.shape, tuple(tensor.shape), where=where)
            first = by_tensor.setdefault(id(tensor), declaration)
            if first.shape != declaration.shape:
                raise PlacementError(
                    f"{where}: this tied tensor is declared with two real shapes, "
                    f"{list(first.shape)} and {list(declaration.shape)}"
                )
            by_name[where] = first
    return Declarations(by_tensor=by_tensor, by_name=by_name)


def clip_leaf(leaf: TensorLeaf, shape: tuple[int, ...]) -> TensorLeaf:
    """The leaf of the real part of a tensor: boxes and views cut at `shape`, which it then has.

    A rank that holds nothing but padding holds no boxes. A real part without elements is one empty
    box, held where the first element of the padded tensor is: its replicas are declared. Raises
    PlacementError naming the key for a shape that does not fit. Cost: views, no copies.
    """
    check_real_shape(shape, leaf.shape, where=leaf.key)
    if shape == leaf.shape:
        return leaf
    if 0 in shape:
        first = [
            local.new_empty(shape)
            for box, local in zip(leaf.boxes, leaf.locals, strict=True)
            if not any(box.offset) and (box.numel or 0 in leaf.shape)
        ][:1]
        origin = Box((0,) * len(shape), shape)
        return replace(leaf, shape=shape, boxes=(origin,) * len(first), locals=tuple(first))
    boxes: list[Box] = []
    locals_: list[torch.Tensor] = []
    for box, local in zip(leaf.boxes, leaf.locals, strict=True):
        ends = zip(box.offset, box.stop, shape, strict=True)
        size = tuple(min(stop, real) - start for start, stop, real in ends)
        if size and min(size) <= 0:
            continue
        boxes.append(Box(box.offset, size))
        locals_.append(local if size == box.shape else local[tuple(slice(n) for n in size)])
    return replace(leaf, shape=shape, boxes=tuple(boxes), locals=tuple(locals_))


def padding_views(leaf: TensorLeaf, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """What `clip_leaf` cuts off, as disjoint views of the leaf's memory, at most one a dim a box.

    `leaf`: of the padded tensor; `shape`: the real one.
    """
    views: list[torch.Tensor] = []
    for box, local in zip(leaf.boxes, leaf.locals, strict=True):
        rest = local
        for dim, (start, real) in enumerate(zip(box.offset, shape, strict=True)):
            size = rest.shape[dim]
            keep = min(max(real - start, 0), size)
            if keep < size:
                views.append(rest.narrow(dim, keep, size - keep))
                rest = rest.narrow(dim, 0, keep)
    return tuple(view for view in views if view.numel())


def _registered(module: nn.Module, name: str) -> torch.Tensor | None:
    found = module._parameters.get(name)
    return found if found is not None else module._buffers.get(name)
