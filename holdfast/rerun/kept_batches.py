"""Kept batches as bytes, and back: values as a tree without pickle, memory as it is.

    magic | digest of what follows (32 hexadecimal digits) | length of header | header | memory

The header is JSON: what was drawn, in order, each batch as a tree (`holdfast/format/values/`) in
which tensors name a run of memory, dtype, offset, shape and strides; so overlapping tensors overlap
again, and any dtype and stride is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from holdfast.errors import ConfigError, CorruptionError, ErrorRecord, HoldfastError, PlacementError
from holdfast.format.digest import digest128
from holdfast.format.values import TAG, Codecs, Node, decode_tree, encode_tree
from holdfast.rerun.sparse_tensors import (
    from_members,
    is_coalesced,
    is_sparse,
    is_strided,
    layout_name,
    members_of,
)
from holdfast.state.numpy_arrays import array_tensor, tensor_array
from holdfast.state.torch_dtypes import NAME_TO_TORCH, dtype_name

_MAGIC = b"holdfast batches 1\n"
_DIGEST_NBYTES = 32
_LENGTH_NBYTES = 8
_DECODING_ERRORS = (
    AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError,
    msgspec.DecodeError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one request to the source gave: a batch, the end of the source, or an error."""

    batch: Any = None
    error: Exception | None = None
    """A `StopIteration` is the end."""


def encode_batches(drawn: Sequence[Drawn], *, codecs: Codecs) -> bytes:
    """What was drawn as bytes.

    Tensors on a device are copied to the host. An error of the source is kept as its class and
    text.

    Raises:
        ConfigError: Naming the batch, the place in it and the type that cannot be stored.

    Cost: time and memory of the batches, twice for a moment.
    """
    encoder = _BatchEncoder(codecs)
    entries = [encoder.entry(i, each) for i, each in enumerate(drawn)]
    memory = [_host_bytes(storage) for storage in encoder.storages]
    header = msgspec.json.encode(
        {
            "drawn": entries,
            "memory": [
                {"nbytes": len(data), "device": storage.device.type}
                for data, storage in zip(memory, encoder.storages, strict=True)
            ],
        }
    )
    length = len(header).to_bytes(_LENGTH_NBYTES, "little")
    rest = b"".join([length, header, *memory])
    return b"".join([_MAGIC, digest128(rest).encode(), rest])


def check_encodable(drawn: Sequence[Drawn], *, codecs: Codecs, what: str = "") -> None:
    """ConfigError as of `encode_batches`, without its copies of memory.

    Args:
        drawn: what is checked.
        codecs: as for `encode_batches`.
        what: what it is, for messages; default: a batch by its number.
    """
    encoder = _BatchEncoder(codecs, what)
    for i, each in enumerate(drawn):
        encoder.entry(i, each)


def decode_batches(data: bytes, *, codecs: Codecs) -> list[Drawn]:
    """What `encode_batches` made bytes of.

    Tensors of a CUDA device come to the current one, or to the host where there is none.

    Raises:
        CorruptionError: The bytes are not those that were encoded.
        MismatchError: A dataclass, enum or codec is not registered here, or has changed.
    """
    start = len(_MAGIC) + _DIGEST_NBYTES
    rest = memoryview(data)[start:]
    if not data.startswith(_MAGIC) or len(data) < start + _LENGTH_NBYTES:
        raise _damaged(f"{len(data)} bytes that do not begin as kept batches do")
    if data[len(_MAGIC) : start] != digest128(rest).encode():
        raise _damaged("their digest differs from the stored one")
    try:
        length = int.from_bytes(rest[:_LENGTH_NBYTES], "little")
        header = msgspec.json.decode(rest[_LENGTH_NBYTES : _LENGTH_NBYTES + length])
        memory = []
        offset = _LENGTH_NBYTES + length
        for run in header["memory"]:
            memory.append(_on_device(rest[offset : offset + run["nbytes"]], run))
            offset += run["nbytes"]
        if offset != len(rest):
            raise ValueError("bytes are missing, or there are too many")
        decoder = _BatchDecoder(memory, codecs)
        return [decoder.drawn(i, entry) for i, entry in enumerate(header["drawn"])]
    except HoldfastError:
        raise
    except _DECODING_ERRORS as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error


class _BatchEncoder:
    """The trees of batches, and the memory that their tensors are in."""

    def __init__(self, codecs: Codecs, what: str = "") -> None:
        self._what = what
        self.storages: list[torch.UntypedStorage] = []
        self._codecs = codecs
        self._numbers: dict[tuple[torch.device, int], int] = {}
        self._arrays: dict[int, tuple[np.ndarray, torch.Tensor, str | None]] = {}

    def entry(self, index: int, drawn: Drawn) -> dict[str, object]:
        if isinstance(drawn.error, StopIteration):
            return {"end": True}
        if drawn.error is not None:
            record = ErrorRecord.of(drawn.error)
            return dict(msgspec.to_builtins(record))
        path = self._what or f"batch {index}"
        try:
            tree = encode_tree(drawn.batch, path=path, codecs=self._codecs, on_leaf=self._leaf)
        except PlacementError as error:
            # Markers are not for batches.
            reason = error.details.get("without_markers", error)
            raise ConfigError(
                f"this cannot be kept for a rerun after a restart: {reason}. Codecs are passed to "
                f"RerunMachine and ReplayableBatches (codecs=…)"
            ) from error
        return {"batch": tree}

    def _leaf(self, path: str, value: object) -> Node:
        if isinstance(value, torch.Tensor | np.ndarray) and self._codecs.codec_for(type(value)):
            return None
        if isinstance(value, torch.Tensor):
            _check_plain(path, value)
            if is_sparse(value):
                return {TAG: "sparse", **self._sparse(path, value)}
            return {TAG: "tensor", **self._run(path, value), **_kind_of(value)}
        if isinstance(value, np.ndarray):
            if id(value) not in self._arrays:
                self._arrays[id(value)] = (value, *array_tensor(path, value))
            _, tensor, code = self._arrays[id(value)]
            return {TAG: "array", **self._run(path, tensor), "code": code}
        return None

    def _sparse(self, path: str, tensor: torch.Tensor) -> dict[str, Node]:
        """A sparse tensor by its members."""
        return {
            "layout": layout_name(tensor),
            "shape": list(tensor.shape),
            "members": [self._run(path, each) for each in members_of(tensor)],
            "is_coalesced": is_coalesced(tensor),
            **_kind_of(tensor),
        }

    def _run(self, path: str, tensor: torch.Tensor) -> dict[str, Node]:
        """Where the elements of a tensor are."""
        plain = tensor.detach().resolve_conj().resolve_neg()
        storage = plain.untyped_storage()
        key = storage.device, storage.data_ptr()
        if key not in self._numbers or storage.nbytes() == 0:
            # Kept in the list, so that no other memory can get the same address meanwhile.
            self._numbers[key] = len(self.storages)
            self.storages.append(storage)
        return {
            "memory": self._numbers[key],
            "dtype": dtype_name(tensor.dtype, key=path),
            "offset": int(plain.storage_offset()),
            "shape": list(plain.shape),
            "strides": list(plain.stride()),
        }


class _BatchDecoder:
    """Batches from their trees, and the memory that their tensors are in."""

    def __init__(self, memory: Sequence[torch.Tensor], codecs: Codecs) -> None:
        self._memory = memory
        self._codecs = codecs

    def drawn(self, index: int, entry: Mapping[str, Any]) -> Drawn:
        if "end" in entry:
            return Drawn(error=StopIteration())
        if "message" in entry:
            return Drawn(error=msgspec.convert(entry, ErrorRecord).to_error())
        path = f"batch {index}"
        return Drawn(
            decode_tree(entry["batch"], path=path, codecs=self._codecs, on_leaf=self._leaf)
        )

    def _leaf(self, path: str, node: Any) -> object:
        tag = node[TAG]
        if tag == "array":
            return tensor_array(self._strided(path, node), node["code"], path=path)
        if tag == "tensor":
            tensor = self._strided(path, node)
        elif tag == "sparse":
            members = [self._strided(path, each) for each in node["members"]]
            tensor = from_members(
                node["layout"], node["shape"], members, is_coalesced=node["is_coalesced"]
            )
        else:
            raise CorruptionError(f"{path}: {tag!r} is no tag of kept batches")
        if node["is_parameter"]:
            return nn.Parameter(tensor, requires_grad=node["requires_grad"])
        return tensor.requires_grad_(node["requires_grad"])

    def _strided(self, path: str, node: Any) -> torch.Tensor:
        """A tensor whose elements `_BatchEncoder._run` has noted."""
        raw = self._memory[node["memory"]]
        dtype, shape, strides = NAME_TO_TORCH[node["dtype"]], node["shape"], node["strides"]
        if len(shape) != len(strides) or min([*shape, *strides, node["offset"]]) < 0:
            raise ValueError(f"{path}: shape {shape} and strides {strides}")
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype, device=raw.device)
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        end = node["offset"] + last + 1
        # `set_` would enlarge the memory instead.
        if end * dtype.itemsize > raw.numel():
            raise ValueError(f"{path}: element {end} lies behind the end of its memory")
        tensor = torch.empty(0, dtype=dtype, device=raw.device)
        return tensor.set_(raw.untyped_storage(), node["offset"], shape, strides)


def _kind_of(tensor: torch.Tensor) -> dict[str, Node]:
    """What of a tensor is not in its elements."""
    return {
        "requires_grad": tensor.requires_grad,
        "is_parameter": type(tensor) is nn.Parameter,
    }


def _check_plain(path: str, tensor: torch.Tensor) -> None:
    """PlacementError for a tensor that is more than boxes of memory."""
    problem = ""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        problem = f"of type {type(tensor).__module__}.{type(tensor).__qualname__}"
    elif not (is_strided(tensor) or is_sparse(tensor)):
        problem = f"of layout {tensor.layout}"
    elif tensor.is_meta or tensor.is_quantized:
        problem = "without data" if tensor.is_meta else f"of dtype {tensor.dtype}"
    elif tensor.__dict__ or tensor.grad is not None:
        what = "a gradient" if tensor.grad is not None else f"attributes {sorted(tensor.__dict__)}"
        problem = f"with {what}"
    if problem:
        raise PlacementError(
            f"{path}: a tensor {problem} cannot be stored as its elements alone; have plain "
            f"tensors there, and convert them where they are used, or register a Codec for its type"
        )


def _host_bytes(storage: torch.UntypedStorage) -> memoryview:
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return raw.cpu().numpy().data


def _on_device(data: memoryview, run: Mapping[str, Any]) -> torch.Tensor:
    """A run of memory of its own, on the device that this process has of that type."""
    if len(data) != run["nbytes"]:
        raise ValueError("bytes are missing")
    raw = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    raw.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    if run["device"] == "cuda" and torch.cuda.is_available():
        return raw.cuda()
    return raw


def _damaged(why: str) -> CorruptionError:
    return CorruptionError(
        f"the kept batches of a rerun are damaged: {why}; load an older checkpoint, or go on "
        f"without the rerun"
    )
