"""What a rank holds of the targets of a load: dtype, global shape, boxes, and padding."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from holdfast.arrays.boxes import Box
from holdfast.parallel.layout import Layout
from holdfast.state.markers import Marked, Padded
from holdfast.state.match.result import Wanted
from holdfast.state.padding import clip_leaf, padding_views
from holdfast.state.placement import ReplicaSets, tensor_leaf
from holdfast.state.torch_dtypes import TORCH_TO_NAME

PLAIN = (torch.Tensor, torch.nn.Parameter)
Held = tuple[str, tuple[int, ...], tuple[Box, ...] | None, tuple[torch.Tensor, ...]]
"""Dtype name, global shape, boxes (None: the whole), and what is filled."""


class Targets:
    """The targets of one load on this rank.

    `cleared`: the padding that is set to zero in the end.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        self._replica_sets: ReplicaSets = {}
        self._boxes: dict[tuple[object, ...], tuple[Box, ...]] = {}
        self._paddings: dict[int, tuple[torch.Tensor, ...]] = {}
        self.cleared: list[Wanted] = []

    def move_to(self, layout: Layout) -> None:
        """What follows lives on this layout."""
        self._layout = layout

    def clear_padding(self, template: Marked) -> None:
        """Set the padding of a target to zero, if it has any."""
        for view in self._paddings.get(id(template), ()):
            view.zero_()

    def held(self, template: torch.Tensor | Marked, path: str) -> Held:
        """What this rank holds of a tensor; equal to its leaf, which costs several times as much.

        Plain tensors are whole. A DTensor with the mesh, placements and shape of one met before
        has the boxes of that one.
        """
        if type(template) in PLAIN and isinstance(template, torch.Tensor):
            dtype = TORCH_TO_NAME.get(template.dtype)
            if dtype is not None and _is_readable(template):
                return dtype, tuple(template.shape), None, (template,)
        like: tuple[object, ...] | None = None
        if type(template) is DTensor:
            local = template._local_tensor
            like = (id(template.device_mesh), template.placements, template.shape, local.shape)
            boxes = self._boxes.get(like)
            dtype = TORCH_TO_NAME.get(local.dtype)
            if boxes is not None and dtype is not None and _is_readable(local):
                return dtype, tuple(template.shape), boxes, (local,)
        leaf = tensor_leaf(
            template.value if isinstance(template, Padded) else template,
            key=path,
            layout=self._layout,
            rank=self._rank,
            replica_sets=self._replica_sets,
        )
        if isinstance(template, Padded):
            if id(template) not in self._paddings:
                views = self._paddings[id(template)] = padding_views(leaf, template.shape)
                self.cleared.append(Wanted(f"the padding of {path}", -1, None, views))
            leaf = clip_leaf(leaf, template.shape)
        if like is not None and len(leaf.boxes) == 1 and leaf.boxes[0].shape == like[3]:
            self._boxes[like] = leaf.boxes
        return leaf.dtype, leaf.shape, leaf.boxes, leaf.locals


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether `tensor_leaf` has nothing to say against a plain tensor."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not tensor.is_nested
        and type(tensor) in PLAIN
    )


def other_shape(
    template: torch.Tensor | Marked, path: str, held: tuple[int, ...], stored: tuple[int, ...]
) -> str:
    """In words: the state and the checkpoint differ in shape, and whether padding may be why."""
    said = f"{path}: the state's shape is {list(held)}, the checkpoint's {list(stored)}"
    if isinstance(template, Padded):
        return f"{said}; the state's is declared as the real one of {list(template.padded_shape)}"
    if len(held) == len(stored):
        said += (
            "; if they differ by padding alone, declare the real shape where it is saved and where "
            "it is loaded: declare_padding(module, name, shape), Padded(value, shape)"
        )
    return said
