"""What a pickle becomes: plain values, and inert stand-ins for everything that is more than plain.

None of these types runs anything of the file's. They are safe at any depth: their memory is
released without recursion, and their `repr` does not show what they contain.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.arrays.boxes import strided_span
from holdfast.arrays.types import AnyArray
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import MAX_NDIM

Args = tuple[Any, ...]

_INTEGER_LIMIT = 2**63
_NUMPY_CODE = re.compile(r"b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)|[mM]8|[SU]\d{1,9}")
_NUMPY_UNIT = re.compile(r"[a-zA-Z]{1,7}")
_MAX_ITEM_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Constructor:
    """What a pickle may ask for by name: a class or function, as data.

    `make` is called with the arguments of the file and returns an inert value; without it, the name
    is only a value. It raises ValueError, TypeError or LookupError for arguments that it does not
    know. `copies`: its work is linear in the length of its arguments, so the reader limits it.
    """

    name: str
    make: Callable[[Args], object] | None = None
    copies: bool = False
    hashes: bool = False

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """An object of a class that is known by name only: its arguments, and its state as stored."""

    name: str
    args: Args = ()
    state: object = None

    def set_state(self, state: object) -> None:
        """Keep the state that the file has for this object."""
        if self.state is not None:
            raise ValueError("it has two states")
        self.state = state

    def get(self, field: str) -> object:
        """Return one attribute of the state; ValueError if there is none of that name."""
        if type(self.state) is not dict or field not in self.state:
            raise ValueError(f"a {self.name} has no {field!r}")
        return self.state[field]

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(frozen=True, slots=True, repr=False)
class EnumValue:
    """A member of an enum: its value, and the member's name if that is known here."""

    name: str
    value: bool | int | float | str | None
    member: str | None = None

    def __repr__(self) -> str:
        return f"<{self.name} {self.member or self.value!r}>"


class PickledMapping(dict[object, object]):
    """A mapping, but not a plain dict: OrderedDict, Counter, defaultdict or a listed subclass."""

    __slots__ = ("factory", "name", "state")

    def __init__(self, name: str, factory: Constructor | None = None) -> None:
        super().__init__()
        self.name = name
        self.factory = factory
        self.state: object = None

    def set_state(self, state: object) -> None:
        """Keep the attributes that the file has for this mapping."""
        self.state = state

    def __repr__(self) -> str:
        return f"<{self.name} of {len(self)}>"


class PickledDeque(list[object]):
    """A `collections.deque`; one of Python's own would exhaust the stack when it is released."""

    __slots__ = ("maxlen",)

    def __init__(self, maxlen: int | None = None) -> None:
        super().__init__()
        self.maxlen = maxlen

    def __repr__(self) -> str:
        return f"<deque of {len(self)}>"


class TorchSize(tuple[int, ...]):
    """A `torch.Size`; its members are integers from 0."""

    __slots__ = ()


@dataclass(slots=True, eq=False, repr=False)
class PickledNumpyType:
    """A `numpy.dtype`: complete once its state has set the byte order."""

    code: str
    order: str = "|"
    unit: str = ""

    def set_state(self, state: object) -> None:
        """Take version, byte order, …, unit of dates, as NumPy writes them."""
        if type(state) is not tuple or not 8 <= len(state) <= 9:
            raise ValueError("this is not the state of a numpy.dtype")
        if state[2] is not None or state[3] is not None or state[4] is not None:
            raise ValueError("structured NumPy types are not read")
        if state[1] not in ("<", ">", "|", "="):
            raise ValueError("this is not a byte order of NumPy")
        self.order = "<" if state[1] == "=" else str(state[1])
        if self.code[0] in "mM" and len(state) == 9:
            self.unit = _date_unit(state[8])

    def numpy(self) -> np.dtype[np.generic]:
        """Return the type; ValueError for objects, structures and what is not known."""
        if not _NUMPY_CODE.fullmatch(self.code):
            raise ValueError(f"NumPy elements of type {self.code[:20]!r} are not read")
        try:
            dtype: np.dtype[np.generic] = np.dtype(f"{self.order}{self.code}{self.unit}")
        except TypeError:  # such as 12-byte floats, which only some machines have
            raise ValueError(f"NumPy has no elements {self.code!r} on this machine") from None
        if dtype.itemsize > _MAX_ITEM_NBYTES:
            raise ValueError(f"NumPy elements of {dtype.itemsize} bytes are not read")
        return dtype

    def __repr__(self) -> str:
        return f"<numpy.dtype {self.order}{self.code[:20]}{self.unit}>"


def _date_unit(stored: object) -> str:
    if type(stored) is not tuple or len(stored) != 2 or type(stored[1]) is not tuple:
        raise ValueError("this is not the unit of a NumPy date")
    name, count = stored[1][:2]
    unit = name.decode("ascii") if type(name) is bytes else str(name)
    if not _NUMPY_UNIT.fullmatch(unit) or type(count) is not int or not 0 < count < 2**31:
        raise ValueError("this is not the unit of a NumPy date")
    return "" if unit == "generic" else f"[{count if count > 1 else ''}{unit}]"


@dataclass(slots=True, eq=False, repr=False)
class PickledArray:
    """A `numpy.ndarray`: complete once it has type, shape and bytes."""

    dtype: np.dtype[np.generic] | None = None
    shape: tuple[int, ...] = ()
    is_fortran: bool = False
    data: bytes | bytearray = b""

    def set_state(self, state: object) -> None:
        """Take version, shape, type, memory order and bytes, as NumPy writes them."""
        if type(state) is not tuple or len(state) != 5 or self.dtype is not None:
            raise ValueError("this is not the state of a numpy.ndarray")
        self.fill(dtype=state[2], shape=state[1], is_fortran=bool(state[3]), data=state[4])

    def fill(self, *, dtype: object, shape: object, is_fortran: bool, data: Any) -> None:
        """Complete the array; ValueError unless the bytes are those of type and shape."""
        if type(dtype) is not PickledNumpyType:
            raise ValueError("an array without a numpy.dtype")
        numpy = dtype.numpy()
        self.shape = dims(shape)
        if type(data) not in (bytes, bytearray):
            raise ValueError("an array of Python objects is not read")
        if len(data) != math.prod(self.shape) * numpy.itemsize:
            raise ValueError(f"{len(data)} bytes are not an array of this shape")
        self.dtype, self.is_fortran, self.data = numpy, is_fortran, data

    def numpy(self) -> AnyArray:
        """Return the array, read-only, over the file's bytes; ValueError if it is unfinished."""
        if self.dtype is None:
            raise ValueError("an array without its bytes")
        flat = np.frombuffer(self.data, dtype=self.dtype)
        array = flat.reshape(self.shape, order="F" if self.is_fortran else "C")
        array.flags.writeable = False
        return array

    def __repr__(self) -> str:
        return f"<numpy.ndarray {self.dtype} {self.shape}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledStorage:
    """The memory of tensors, by the key under which its bytes lie in the file."""

    key: str
    dtype: str
    """Name as in `DTYPES`; U8 if the storage is untyped."""
    numel: int
    location: str
    """The device that it was saved from, such as "cuda:0"."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PickledTensor:
    """A tensor: a view of a storage. Its elements are proven to lie inside of the storage."""

    storage: PickledStorage
    dtype: str
    """Name as in `DTYPES`."""
    offset: int
    """First element, counted in elements of `dtype` from the storage's start."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    attributes: object = None
    """Python attributes that were stored with it; None if there are none."""

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.stride):
            raise ValueError("a tensor whose shape and stride have different lengths")
        if any(size == 0 for size in self.shape):
            return
        end = self.offset + strided_span(self.shape, self.stride)
        if end * DTYPES[self.dtype].itemsize > self.storage.nbytes:
            raise ValueError(
                f"a tensor of shape {self.shape} that ends outside of its storage of "
                f"{self.storage.nbytes} bytes"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, as if they were contiguous."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def start(self) -> int:
        """Byte in the storage at which the first element lies."""
        return self.offset * DTYPES[self.dtype].itemsize

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for tied tensors: the same elements of the same storage, in the same view."""
        return (self.storage.key, self.dtype, self.offset, self.shape, self.stride)


def index(value: object, what: str = "a size") -> int:
    """Return an integer from 0 below 2**63; ValueError for any other value."""
    if type(value) is not int or not 0 <= value < _INTEGER_LIMIT:
        raise ValueError(f"{what} that is not an integer from 0 below 2**63")
    return value


def dims(value: object) -> tuple[int, ...]:
    """Return a tuple or list as sizes or strides; ValueError if it is none."""
    if not isinstance(value, tuple | list) or len(value) > MAX_NDIM:
        raise ValueError(f"a shape that is not a tuple of at most {MAX_NDIM} integers")
    sizes = tuple(index(size) for size in value)
    if math.prod(size for size in sizes if size) >= _INTEGER_LIMIT:
        raise ValueError("a shape of more than 2**63 elements")
    return sizes
