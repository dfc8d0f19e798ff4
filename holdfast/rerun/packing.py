"""Kept trees as bytes, for a message to another rank: no pickle, tensors as they are in memory."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from holdfast.decoding import decode_msgpack_as
from holdfast.errors import ConfigError
from holdfast.state.tensor_elements import NAME_TO_TORCH, TORCH_TO_NAME, element_bytes

_TENSOR = 1
"""Code of a tensor among the extensions of msgpack."""


def pack_tree(tree: Any) -> bytes:
    """Return a tree of plain values and tensors as bytes; devices are not kept.

    Raises:
        ConfigError: a value has no such form.

    Cost: two copies of the tensors on the host.
    """
    try:
        return msgspec.msgpack.encode(tree, enc_hook=_packed)
    except (TypeError, OverflowError, ValueError) as error:
        raise ConfigError(f"this cannot be sent to another rank: {error}") from error


def unpack_tree(data: bytes) -> Any:
    """Return the tree of `pack_tree`, its tensors on the host."""
    return msgspec.msgpack.decode(data, ext_hook=_unpacked)


def _packed(value: object) -> msgspec.msgpack.Ext:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a {type(value).__qualname__}")
    raw = element_bytes(value.detach()).cpu().numpy().tobytes()
    header = [TORCH_TO_NAME[value.dtype], [*value.shape], raw]
    return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(header))


def _unpacked(code: int, data: memoryview) -> torch.Tensor:
    del code
    name, shape, raw = decode_msgpack_as(data, tuple[str, list[int], bytes])
    if not raw:  # torch makes no view of another dtype of that
        return torch.empty(shape, dtype=NAME_TO_TORCH[name])
    flat = torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy())
    return flat.view(NAME_TO_TORCH[name]).reshape(shape)
