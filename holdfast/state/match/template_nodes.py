"""Looking into templates: what a rank holds of a tensor, what registered objects are made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from holdfast.arrays.boxes import Box
from holdfast.format.values import Codecs
from holdfast.parallel.layout import Layout
from holdfast.state.markers import Marked, Padded, PerRank, Stored, Transient, Union
from holdfast.state.match.result import TensorRequest
from holdfast.state.placement import ReplicaSets, clip_leaf, padding_views, tensor_leaf, unreadable
from holdfast.state.torch_dtypes import TORCH_TO_NAME

PLAIN = (torch.Tensor, torch.nn.Parameter)
LocalTarget = tuple[str, tuple[int, ...], tuple[Box, ...] | None, tuple[torch.Tensor, ...]]
"""Dtype name, global shape, boxes (None: the whole), and what is filled."""


class LocalTargets:
    """The targets of one load on this rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._replica_sets: ReplicaSets = {}
        self._boxes: dict[tuple[object, ...], tuple[Box, ...]] = {}
        self._paddings: dict[int, tuple[torch.Tensor, ...]] = {}
        self.cleared: list[TensorRequest] = []
        """The padding that is set to zero in the end."""

    def clear_padding(self, template: Marked) -> None:
        """Set the padding of a target to zero, if it has any."""
        for view in self._paddings.get(id(template), ()):
            view.zero_()

    def local_target(
        self, template: torch.Tensor | Marked, path: str, layout: Layout
    ) -> LocalTarget:
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
            layout=layout,
            rank=self._rank,
            replica_sets=self._replica_sets,
        )
        if isinstance(template, Padded):
            if id(template) not in self._paddings:
                views = self._paddings[id(template)] = padding_views(leaf, template.shape)
                self.cleared.append(TensorRequest(f"the padding of {path}", -1, None, views))
            leaf = clip_leaf(leaf, template.shape)
        if like is not None and len(leaf.boxes) == 1 and leaf.boxes[0].shape == like[3]:
            self._boxes[like] = leaf.boxes
        return leaf.dtype, leaf.shape, leaf.boxes, leaf.locals


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether `tensor_leaf` takes a plain tensor."""
    return type(tensor) in PLAIN and not unreadable(tensor)


def shape_mismatch(
    template: torch.Tensor | Marked, path: str, held: tuple[int, ...], stored: tuple[int, ...]
) -> str:
    """In words: the state and the checkpoint differ in shape, and whether padding may be why."""
    message = f"{path}: the state's shape is {list(held)}, the checkpoint's {list(stored)}"
    if isinstance(template, Padded):
        return (
            f"{message}; the state's is declared as the real one of {list(template.padded_shape)}"
        )
    if len(held) == len(stored):
        message += (
            "; if they differ by padding alone, declare the real shape where it is saved and where "
            "it is loaded: declare_padding(module, name, shape), Padded(value, shape)"
        )
    return message


class RegisteredTypes:
    """The dataclasses and codecs that a load knows, for as long as it takes."""

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs
        self._encoded: dict[int, tuple[object, object]] = {}

    def fields_of(self, template: object) -> object:
        """What a registered dataclass or a codec's type is made of; None for any other object.

        A codec is asked once for each object: what it gives then is what is filled.
        """
        cls = type(template)
        codec = self._codecs.codec_for(cls)
        if codec is not None:
            held = self._encoded.get(id(template))
            if held is None:  # the object is kept, so that its id stays its own
                held = self._encoded[id(template)] = (template, codec.encode(template))
            return held[1]
        if is_dataclass(cls) and self._codecs.dataclass_named(cls.__qualname__) is cls:
            names = [each.name for each in fields(cls) if hasattr(template, each.name)]
            return {name: getattr(template, name) for name in names}
        return None

    def tag_and_name(self, template: object) -> tuple[str, str]:
        """How an object that has fields is stored: tag and registered name."""
        codec = self._codecs.codec_for(type(template))
        return (
            ("dataclass", type(template).__qualname__) if codec is None else ("codec", codec.name)
        )

    def holds_tensors(self, tree: object) -> bool:
        """Whether a load fills something in a tree in place, or leaves it as it is."""
        if isinstance(tree, torch.Tensor | Marked | PerRank | Stored | Transient | np.ndarray):
            return True
        if isinstance(tree, Union):
            return self.holds_tensors(tree.mapping)
        inner = self.fields_of(tree)
        if inner is not None:
            return self.holds_tensors(inner)
        if isinstance(tree, Mapping):
            return any(self.holds_tensors(child) for child in tree.values())
        if isinstance(tree, list | tuple | deque):
            return any(self.holds_tensors(child) for child in tree)
        return False


def unmarked(template: object) -> object:
    """What stays of a template for which nothing is stored: the tensors as they are."""
    if isinstance(template, Marked):
        return template.local
    if isinstance(template, Union):
        return unmarked(template.mapping)
    if type(template) is dict:
        return {name: unmarked(child) for name, child in template.items()}
    return template
