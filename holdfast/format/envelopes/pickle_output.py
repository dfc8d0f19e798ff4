"""Writes pickles of a closed set of values, without the module that runs them.

Protocol 2, as `torch.save` writes, which PyTorch's restricted loader reads. Plain values and
containers are themselves; everything else is described: `Global` names a class or a function,
`Made` calls one, `Persistent` refers to what lies outside of the pickle. Equal values in equal
order give equal bytes; members of sets have no order.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.errors import PlanError
from holdfast.format.values import encode_tree, node_bytes

_MAX_DEPTH = 220
"""Deeper than any stored tree."""
_U32_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Global:
    """A class or a function, by name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a class or function makes of arguments.

    Args:
        by: It.
        args: Its arguments.
        state: What the object's state is set to; None for nothing.
        is_new: True if `__new__` of a class is called, and not `__init__`.
        is_shared: True if all places that have this very description may get one object.
    """

    by: Global
    args: tuple[Any, ...] = ()
    state: Any = None
    is_new: bool = False
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Persistent:
    """What lies outside of the pickle, by its id."""

    id: Any


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict whose keys are described, and so cannot be keys here."""

    items: Sequence[tuple[Any, Any]]


def pickled(value: object) -> bytes:
    """Return the pickle of a value.

    Raises:
        PlanError: A type is none of those that are written, or the value is too deep.

    Cost: linear in the value.
    """
    return _Emitter().whole(value)


def _builtin(name: str) -> Global:
    # Under the name that it has in protocol 2, on which PyTorch's restricted loader insists.
    return Global("__builtin__", name)


class _Emitter:
    """Writes one pickle; names and texts that come again are taken from its memo."""

    def __init__(self) -> None:
        self._out = bytearray()
        self._memo: dict[Hashable, int] = {}
        self._forms: dict[tuple[Global, tuple[str, ...]], list[bytes]] = {}
        """Of new objects, by class and names of their members: what is written in front of each
        member, which is the same from the second one on."""
        self._depth = 0
        self._by_type: dict[type, Callable[[Any], None]] = {
            type(None): lambda _: self._code(b"N"),
            bool: lambda value: self._code(b"\x88" if value else b"\x89"),
            int: self._int,
            float: lambda value: self._code(b"G" + struct.pack(">d", value)),
            str: self._str,
            complex: lambda value: self._call(_builtin("complex"), value.real, value.imag),
            bytes: lambda value: self._call(
                Global("_codecs", "encode"), value.decode("latin1"), "latin1"
            ),
            bytearray: lambda value: self._call(_builtin("bytearray"), bytes(value)),
            tuple: self._tuple,
            list: self._list,
            dict: lambda value: self._dict(value.items()),
            set: lambda value: self._call(_builtin("set"), _in_order(value)),
            frozenset: lambda value: self._call(_builtin("frozenset"), _in_order(value)),
            range: lambda value: self._call(
                _builtin("xrange"), value.start, value.stop, value.step
            ),
            slice: lambda value: self._call(_builtin("slice"), value.start, value.stop, value.step),
            OrderedDict: self._odict,
            Counter: lambda value: self._call(Global("collections", "Counter"), dict(value)),
            defaultdict: self._defaultdict,
            deque: lambda value: self._call(
                Global("collections", "deque"), list(value), value.maxlen
            ),
            np.ndarray: self._array,
            Global: self._global,
            Made: self._made,
            Persistent: self._persistent,
            Pairs: lambda value: self._dict(value.items),
        }

    def whole(self, value: object) -> bytes:
        """Return the pickle of a value."""
        self._code(b"\x80\x02")
        self._emit(value)
        self._code(b".")
        return bytes(self._out)

    def _code(self, data: bytes) -> None:
        self._out += data

    def _emit(self, value: Any) -> None:
        emit = self._by_type.get(type(value))
        if emit is None and isinstance(value, np.generic):
            emit = self._numpy_scalar
        if emit is None:
            raise PlanError(f"a {type(value).__name__} cannot be written as a pickle")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PlanError(f"a value is nested deeper than {_MAX_DEPTH} levels")
        emit(value)
        self._depth -= 1

    def _emit_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._emit(value)

    def _remembered(self, value: Hashable) -> bool:
        """Take a value from the memo, if it was written before."""
        if value not in self._memo:
            return False
        self._out += self._reference(value)
        return True

    def _reference(self, value: Hashable) -> bytes:
        """Return what takes a value from the memo."""
        place = self._memo[value]
        return b"h" + bytes([place]) if place < 256 else b"j" + struct.pack("<I", place)

    def _remember(self, value: Hashable) -> None:
        place = self._memo[value] = len(self._memo)
        self._code(b"q" + bytes([place]) if place < 256 else b"r" + struct.pack("<I", place))

    # Scalars.

    def _int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self._code(b"K" + bytes([value]))
        elif 0 <= value < 1 << 16:
            self._code(b"M" + struct.pack("<H", value))
        elif -(1 << 31) <= value < 1 << 31:
            self._code(b"J" + struct.pack("<i", value))
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            short = len(data) < 256
            self._code(b"\x8a" + bytes([len(data)]) if short else b"\x8b" + _u32(len(data)))
            self._code(data)

    def _str(self, value: str) -> None:
        if not self._remembered(value):
            data = value.encode("utf-8", "surrogatepass")
            self._code(b"X" + _u32(len(data)) + data)
            self._remember(value)

    def _numpy_scalar(self, value: np.generic) -> None:
        reduced: Any = value.__reduce__()
        dtype, data = reduced[1]
        self._call(Global("numpy.core.multiarray", "scalar"), _numpy_type(dtype), data)

    def _array(self, value: np.ndarray[Any, Any]) -> None:
        state = (1, value.shape, _numpy_type(value.dtype), False, value.tobytes())
        empty = (Global("numpy", "ndarray"), (0,), b"b")
        self._made(
            Made(by=Global("numpy.core.multiarray", "_reconstruct"), args=empty, state=state)
        )

    # Containers.

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if len(value) > 3:
            self._code(b"(")
        self._emit_all(value)
        self._code(b")" if not value else b"t" if len(value) > 3 else bytes([0x84 + len(value)]))

    def _list(self, value: list[Any]) -> None:
        self._code(b"]")
        if value:
            self._code(b"(")
            self._emit_all(value)
            self._code(b"e")

    def _items(self, items: Collection[tuple[Any, Any]]) -> None:
        """Write the members of the mapping on the stack."""
        if items:
            self._code(b"(")
            for key, value in items:
                self._emit(key)
                self._emit(value)
            self._code(b"u")

    def _dict(self, items: Collection[tuple[Any, Any]]) -> None:
        self._code(b"}")
        self._items(items)

    def _odict(self, value: OrderedDict[Any, Any]) -> None:
        self._call(Global("collections", "OrderedDict"))
        self._items(value.items())
        if vars(value):  # the versions of modules, which torch pickles with a state dict
            self._dict(vars(value).items())
            self._code(b"b")

    def _defaultdict(self, value: defaultdict[Any, Any]) -> None:
        factory: Any = value.default_factory
        named = None if factory is None else _builtin(factory.__name__)
        self._call(Global("collections", "defaultdict"), named)
        self._items(value.items())

    # What is described.

    def _global(self, value: Global) -> None:
        if not self._remembered(value):
            self._code(b"c" + f"{value.module}\n{value.name}\n".encode())
            self._remember(value)

    def _call(self, by: Global, *args: Any) -> None:
        self._global(by)
        self._tuple(args)
        self._code(b"R")

    def _made(self, value: Made) -> None:
        if value.is_shared and self._remembered(id(value)):
            return
        if value.is_new and not value.args and type(value.state) is dict and value.state:
            self._made_of_members(value.by, value.state)
        else:
            self._made_by_call(value)
        if value.is_shared:
            self._remember(id(value))  # by identity: it lives as long as what is written

    def _made_of_members(self, by: Global, state: dict[str, Any]) -> None:
        form = self._forms.get((by, tuple(state)))
        if form is None:
            self._made_by_call(Made(by=by, state=state, is_new=True))
            names = [self._reference(name) for name in state]
            begin = self._reference(by) + b")\x81}("
            self._forms[by, tuple(state)] = [begin + names[0], *names[1:]]
            return
        for piece, member in zip(form, state.values(), strict=True):
            self._out += piece
            self._emit(member)
        self._out += b"ub"

    def _made_by_call(self, value: Made) -> None:
        self._global(value.by)
        self._tuple(value.args)
        self._code(b"\x81" if value.is_new else b"R")
        if value.state is not None:
            self._emit(value.state)
            self._code(b"b")

    def _persistent(self, value: Persistent) -> None:
        self._emit(value.id)
        self._code(b"Q")


def _in_order(members: Collection[Any]) -> list[Any]:
    """Return the members of a set in the order of a stored tree; each process has another one."""
    return sorted(members, key=lambda member: node_bytes(encode_tree(member)))


def _u32(value: int) -> bytes:
    if value > _U32_MAX:
        raise PlanError(f"a text or number of {value} bytes is too long for a pickle")
    return struct.pack("<I", value)


def _numpy_type(dtype: np.dtype[Any]) -> Made:
    """Describe a type of NumPy as NumPy's own pickles do."""
    reduced: Any = dtype.__reduce__()
    _, args, state = reduced
    return Made(by=Global("numpy", "dtype"), args=args, state=state)
