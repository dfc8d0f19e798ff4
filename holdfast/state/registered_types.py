"""Dataclasses and types with codecs in what a load fills: to their fields and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from holdfast.format.values import Codecs, dataclass_of
from holdfast.state.markers import Marked, PerRank, Stored, Transient, Union

PLAIN_VALUES = frozenset({type(None), bool, int, float, str, bytes})
"""Types of values that JSON or a tag has, so that no codec is asked for them."""


class RegisteredTypes:
    """The dataclasses and codecs that a load knows, for as long as it takes."""

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs
        self._encoded: dict[int, tuple[object, object]] = {}

    def fields_of(self, template: object) -> object:
        """Return the fields of a dataclass or a codec's type; None for any other object.

        A codec is asked once for each object: what it gives then is what is filled.
        """
        cls = type(template)
        if cls in PLAIN_VALUES or cls in (list, dict, tuple):
            return None
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
        """Return the tag and the name under which an object with fields is stored."""
        codec = self._codecs.codec_for(type(template))
        return (
            ("dataclass", type(template).__qualname__) if codec is None else ("codec", codec.name)
        )

    def made_of(self, template: object, inner: Any, path: str) -> Any:
        """Return an object of the template's type, made of other fields."""
        codec = self._codecs.codec_for(type(template))
        if codec is None:
            return dataclass_of(type(template), inner)
        return codec.decoded(inner, path)

    def holds_tensors(self, tree: object) -> bool:
        """Return True if a load fills something in a tree in place, or leaves it as it is."""
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
