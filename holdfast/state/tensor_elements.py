"""Elements of tensors: their types in the format, casts, bytes, equality, and NumPy arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast.errors import CorruptionError, PlacementError
from holdfast.format.digest import digest128
from holdfast.format.dtypes import TORCH_DTYPES, is_plain_numpy
from holdfast.format.values import join_path


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, detached."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor to look at: the tensor itself if it is not sharded.

    Cost: nothing for most tensors, where `local_of` makes an object.
    """
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


MemoryKey = tuple[torch.device, int, torch.Size, tuple[int, ...], torch.dtype, bool, bool]


def memory_key(tensor: torch.Tensor) -> MemoryKey | None:
    """Return where a tensor's elements are and how they are read.

    Two tensors with one key are the same elements. None if nothing can be known by that: the tensor
    has no elements, or no strided memory (lazy, sparse, nested and meta tensors, wrappers).
    """
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a wrapper without memory
        return None
    if address == 0:
        return None
    return (
        tensor.device, address, tensor.shape, tensor.stride(), tensor.dtype,
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def element_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a rank's elements in row-major order, as a 1-d uint8 tensor."""
    local = local_of(tensor)
    if local.layout is not torch.strided:
        local = local.to_dense()
    flat = local.resolve_conj().resolve_neg().contiguous().reshape(-1)
    # A single element is contiguous whatever its stride says, but no view as bytes.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def tensor_digest(tensor: torch.Tensor) -> str:
    """XXH3-128 of a rank's elements; empty for a tensor without data (lazy, meta)."""
    if is_lazy(tensor) or tensor.is_meta:
        return ""
    return digest128(element_bytes(tensor).cpu().numpy().data)


def flat_copies(tensors: Sequence[torch.Tensor], *, on_host: bool = False) -> list[torch.Tensor]:
    """Return flat copies of tensors, on their devices or on the host.

    Cost: a launch or two for all tensors of a device and dtype, and one read of them for the host.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(number)
    copies: dict[int, torch.Tensor] = {}
    for numbers in alike.values():
        flat = torch.cat([tensors[number].reshape(-1) for number in numbers])
        flat = flat.cpu() if on_host else flat
        parts = torch.split(flat, [tensors[number].numel() for number in numbers])
        copies.update(zip(numbers, parts, strict=True))
    return [copies[number] for number in range(len(tensors))]


def tensors_of(tree: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a tree of mappings and sequences, with their paths."""
    yield from instances_in(tree, torch.Tensor)


def instances_in(tree: object, kinds: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the objects of some types in a tree of mappings and sequences, with their paths."""
    children: Iterable[tuple[object, object]] = ()
    if isinstance(tree, kinds):
        yield path, tree
    elif isinstance(tree, Mapping):
        children = tree.items()
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    for name, child in children:
        yield from instances_in(child, kinds, join_path(path, name))


def equal_bits(one: object, other: object) -> bool:
    """Return True if two values are equal, tensors bit by bit: NaN equals itself, 0.0 is not -0.0.

    Of DTensors only what this rank holds is compared: no collectives.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if isinstance(one, DTensor) != isinstance(other, DTensor) or one.shape != other.shape:
            return False
        if isinstance(one, DTensor) and one.placements != getattr(other, "placements", None):
            return False
        mine, theirs = local_of(one), local_of(other)
        if not (mine.shape == theirs.shape and mine.dtype == theirs.dtype):
            return False
        return torch.equal(element_bytes(mine).to(theirs.device), element_bytes(theirs))
    try:
        return bool(one == other)
    except Exception:
        return False


def equal_trees(one: object, other: object) -> bool:
    """Return True if two trees are equal, tensors and arrays by dtype and value; NaN equals NaN.

    Of DTensors only dtype and shape are compared, so that there are no collectives.
    """
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return False
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if isinstance(one, DTensor) or isinstance(other, DTensor):
            return True
        same = one.to(other.device) == other
        return bool((same | ((one != one) & (other != other)).to(same.device)).all())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal_trees(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal_trees, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if any(isinstance(each, np.ndarray) and each.size != 1 for each in (one, other)):
        return False
    return bool(one == other) or (one != one and other != other)


NAME_TO_TORCH: Mapping[str, torch.dtype] = MappingProxyType(
    {
        name: getattr(torch, theirs)
        for theirs, name in TORCH_DTYPES.items()
        if hasattr(torch, theirs)  # a release may be older than a type
    }
)
TORCH_TO_NAME = MappingProxyType({dtype: name for name, dtype in NAME_TO_TORCH.items()})


_FLOAT_DIGITS = MappingProxyType(
    {
        "F64": 53, "F32": 24, "F16": 11, "BF16": 8, "F8_E4M3": 4, "F8_E4M3FNUZ": 4,
        "F8_E5M2": 3, "F8_E5M2FNUZ": 3, "F8_E8M0": 1,
    }
)  # fmt: skip
"""Binary digits of the significand: integers of so many bits are exact."""
_COMPONENT = MappingProxyType({"C32": "F16", "C64": "F32", "C128": "F64"})


def dtype_name(dtype: torch.dtype, *, key: str) -> str:
    """Return the format's name of a torch dtype; raise PlacementError if there is none."""
    name = TORCH_TO_NAME.get(dtype)
    if name is None:
        raise PlacementError(
            f"{key}: dtype {dtype} cannot be stored; convert the tensor to one of "
            f"{', '.join(sorted(NAME_TO_TORCH))} or mark it Transient"
        )
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a format name; raise PlacementError if it has none."""
    dtype = NAME_TO_TORCH.get(name)
    if dtype is None:
        raise PlacementError(
            f"dtype {name} of the checkpoint is not known to torch {torch.__version__}"
        )
    return dtype


def refused_cast(stored: str, target: str) -> str:
    """Return why elements of one dtype do not go into another; empty if they do.

    | stored | goes into |
    |---|---|
    | a float | any float, but `F8_E8M0`, which holds only powers of two; any complex type |
    | a complex number | any complex type |
    | an integer | any integer, float or complex type that has every value of it exactly |
    | a truth value | any type, but `F8_E8M0`, which has no zero |

    Everything else loses what the stored type is for: imaginary parts, fractions, digits, signs.
    """
    if stored == target:
        return ""
    if stored == "BOOL":
        return "F8_E8M0 has no zero" if target == "F8_E8M0" else ""
    if stored in _COMPONENT:
        return "" if target in _COMPONENT else f"{target} has no imaginary part"
    into = _COMPONENT.get(target, target)
    if stored in _FLOAT_DIGITS:
        if into not in _FLOAT_DIGITS:
            return f"{target} has no fractions"
        return f"{target} holds only powers of two" if into == "F8_E8M0" else ""
    if into == "BOOL":
        return "BOOL only tells zero from the rest"
    signed, bits = stored[0] == "I", int(stored[1:])
    digits = bits - signed
    if into in _FLOAT_DIGITS:
        fits = digits <= _FLOAT_DIGITS[into] and into != "F8_E8M0"
        return "" if fits else f"{target} does not hold every {stored} exactly"
    if signed and into[0] == "U":
        return f"{target} has no negative numbers"
    room = int(into[1:]) - (into[0] == "I")
    return "" if digits <= room else f"{target} is too small for some {stored}"


_DTYPE = re.compile(r"[<>](i[248]|u[248]|f[248]|c8|c16|[mM]8(\[[0-9A-Za-z]{1,12}\])?)", re.ASCII)


def array_tensor(path: str, array: np.ndarray) -> tuple[torch.Tensor, str | None]:
    """Return the array as a tensor, and the code of its dtype if the tensor's does not tell it.

    Shares memory where NumPy's layout allows. Dates and time spans are stored as 64-bit integers,
    foreign byte orders as the native one; strides and memory order are not kept.

    Raises:
        PlacementError: Naming `path`, for a subclass, whose mask or names would be lost, and for a
            dtype that is not numeric (objects, texts, records) or has more than 64 bits.
    """
    if type(array) is not np.ndarray:
        kind = type(array)
        raise PlacementError(
            f"{path}: a {kind.__module__}.{kind.__qualname__} is more than its elements (a mask, a "
            f"file, names), which would be lost; save np.asarray(it) and the rest as values of "
            f"their own, or register a codec for its type"
        )
    dtype = array.dtype
    if not is_plain_numpy(dtype):
        raise PlacementError(
            f"{path}: a NumPy array of dtype {dtype} cannot be stored without pickle; "
            f"convert it to numbers, or register a codec"
        )
    # Through native bytes first: a view as integers must see them.
    native = array.astype(dtype.newbyteorder("="), copy=False)
    contiguous = np.ascontiguousarray(native).reshape(native.shape)
    if dtype.kind in "mM":
        contiguous = contiguous.view(np.int64)
    if not contiguous.flags.writeable:
        contiguous = contiguous.copy()
    is_plain = dtype.isnative and dtype.kind not in "mM"
    try:
        return torch.from_numpy(contiguous), None if is_plain else dtype.str
    except TypeError as error:
        raise PlacementError(f"{path}: NumPy dtype {dtype} has no torch dtype") from error


def tensor_array(tensor: torch.Tensor, code: object, *, path: str) -> np.ndarray:
    """Return the array of `array_tensor` again; it shares the tensor's memory if it can.

    Raises:
        CorruptionError: For a code that `array_tensor` does not write, or that does not fit.
    """
    array = tensor.numpy()
    if code is None:
        return array
    if not isinstance(code, str) or not _DTYPE.fullmatch(code):
        raise CorruptionError(f"{path}: {str(code)[:40]!r} is not the dtype of an array")
    dtype = np.dtype(code)
    native = dtype.newbyteorder("=")
    if dtype.kind in "mM":
        if array.dtype != np.int64:
            raise CorruptionError(f"{path}: {array.dtype} elements cannot be {code}")
        array = array.view(native)
    elif array.dtype != native:
        raise CorruptionError(f"{path}: {array.dtype} elements cannot be {code}")
    return array.astype(dtype, copy=False)
