"""Objects of registered types in a load's template, split into fields to fill their tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import numpy as np

from holdfast.format.values import Codecs
from holdfast.state.markers import PerRank, Stored, Transient, Union
from holdfast.state.placement import is_tensor_like


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
            if held is None:  # the object is kept, so that none is mistaken for another one
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
        if is_tensor_like(tree) or isinstance(tree, PerRank | Stored | Transient | np.ndarray):
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
