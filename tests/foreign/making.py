"""Bytes as a source, files of torch in memory, and what a tensor of an opened file holds."""

from __future__ import annotations

import io
from typing import Any

import torch

from holdfast.foreign.pickled_values import PickledTensor
from holdfast.foreign.torch_save import TorchFile, open_torch_save
from holdfast.format.dtypes import TORCH_DTYPES

DTYPES = {stored: getattr(torch, name) for name, stored in TORCH_DTYPES.items()}


class MemorySource:
    """A `Source` of bytes in memory; it counts what is read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.num_read = 0

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def readinto(self, buffer: memoryview, *, start: int) -> None:
        assert 0 <= start <= start + len(buffer) <= len(self.data), "a read outside of the file"
        buffer[:] = self.data[start : start + len(buffer)]
        self.num_read += len(buffer)

    def close(self) -> None:
        pass


def saved(value: object, **options: Any) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def opened(data: bytes, **options: Any) -> TorchFile:
    return open_torch_save(MemorySource(data), place="file.pt", **options)


def tensor_of(file: TorchFile, data: bytes, tensor: PickledTensor) -> torch.Tensor:
    """The tensor, made from the bytes that the opened file points at."""
    storage = file.storages[tensor.storage.key]
    raw = bytearray(data[storage.start : storage.start + storage.nbytes])
    dtype = DTYPES[tensor.dtype]
    if 0 in tensor.shape:
        return torch.empty(tensor.shape, dtype=dtype)
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype)
    return flat.as_strided(tensor.shape, tensor.stride, tensor.offset)
