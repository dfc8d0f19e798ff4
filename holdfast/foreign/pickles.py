"""Reads a pickle without running it: a closed interpreter of its opcodes.

A pickle is a program for a stack machine. This one has no instruction that reaches Python: a name
is looked up in a table of `Constructor`s, and only these are applied to arguments. So the worst
that a file can do is to be refused.

Memory and time are linear in the bytes given, at most about 250 bytes of memory for one of them:
every opcode makes at most one object, lengths are checked against the bytes that are there, and
what constructors copy is paid from a budget. A pickle whose values would take the last memory of
the host is refused on the way. Values that are in the file once and referred to many
times stay shared; a walk of the result as a tree has to be limited (`to_node` does).

Read first: `pickled_values.py`, `pickle_types.py`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from holdfast.errors import CorruptionError, in_bytes
from holdfast.foreign.pickle_types import STANDARD_TYPES
from holdfast.foreign.pickled_values import (
    Constructor,
    EnumValue,
    PickledArray,
    PickledMapping,
    PickledNumpyType,
    PickledTensor,
    Record,
    TorchSize,
)
from holdfast.format.values import shorten
from holdfast.storage.host_memory import available_memory_nbytes

Persistent = Callable[[object], object]

NOT_READ: Mapping[str, object] = {"not_read": True}
"""Details of an error on a file that may be whole, but has what is never read."""
MAX_PICKLE_NBYTES = 1 << 30
"""A longer pickle is refused before it is read."""

_OPCODES_AT_ONCE = 1 << 19
_RESERVE_NBYTES = 256 << 20
"""More than so many opcodes take, and what is made of the values of a metadata after them."""
_HIGHEST_PROTOCOL = 5
_COPIES_PER_BYTE = 4
_MAX_MEMO = 1 << 32
_MAX_ODD_KEYS = 1 << 14
_SMALL_KEY = 2**61 - 1
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_OLD_NAMES = {
    "builtins.long": "builtins.int",
    "builtins.unicode": "builtins.str",
    "builtins.xrange": "builtins.range",
}
"""Names of Python 2, under which protocols 0 to 2, and so `torch.save`, have those of Python 3."""
_PLAIN_KEYS = (str, bytes, bool, float, type(None), Record, Constructor, PickledTensor)
_ODD_KEYS = (int, complex, EnumValue)
_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)
_HASHED = (list, tuple, set, frozenset)
_STATEFUL = (Record, PickledMapping, PickledArray, PickledNumpyType)
_U16 = struct.Struct("<H").unpack_from
_I32 = struct.Struct("<i").unpack_from
_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_F64 = struct.Struct(">d").unpack_from
_STOP = ord(".")
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_LETTERS = {
    b"n": b"\n",
    b"r": b"\r",
    b"t": b"\t",
    b"a": b"\a",
    b"b": b"\b",
    b"f": b"\f",
    b"v": b"\v",
}


def read_pickle(
    data: bytes | bytearray | memoryview,
    *,
    place: str,
    types: Mapping[str, Constructor] = STANDARD_TYPES,
    persistent: Persistent | None = None,
) -> object:
    """Return the value of a pickle; nothing in it is run.

    Args:
        data: One whole pickle, of any protocol from 0 to 5.
        place: The file, for messages.
        types: What the pickle may ask for, by "module.name".
        persistent: Makes the value of a persistent id; such an id is refused without it.

    Returns:
        Plain values are themselves. All others are of the types of `pickled_values.py`. The value
        may contain itself.

    Raises:
        CorruptionError: The bytes are not one whole pickle, or ask for a name that is not in
            `types`; the message names it, and the details are `NOT_READ`.

    Cost: linear in the bytes, less than a microsecond per opcode.
    """
    value, end = read_pickle_at(data, 0, place=place, types=types, persistent=persistent)
    if end != len(data):
        raise CorruptionError(
            f"{place}: the pickle ends at byte {end} of {len(data)}; what follows does not belong "
            f"to it"
        )
    return value


def read_pickle_at(
    data: bytes | bytearray | memoryview,
    start: int,
    *,
    place: str,
    types: Mapping[str, Constructor] = STANDARD_TYPES,
    persistent: Persistent | None = None,
) -> tuple[object, int]:
    """Return the value of the pickle that starts at a byte, and the byte at which it ends.

    Raises CorruptionError like `read_pickle`, but for what follows the pickle.
    """
    if len(data) > MAX_PICKLE_NBYTES:
        raise CorruptionError(
            f"{place}: a pickle of {len(data)} bytes exceeds the limit {MAX_PICKLE_NBYTES}"
        )
    whole = data if type(data) is bytes else bytes(data)
    machine = _Machine(whole, start, place=place, types=types, persistent=persistent)
    return machine.run(), machine.pos


_HINTS: Mapping[str, str] = {
    "torch._utils._rebuild_wrapper_subclass": "a tensor that holds others, such as a DTensor or "
    "one of torchao: store full_tensor() or dequantize(), or save by dcp.save",
    "torch._utils._rebuild_qtensor": "a quantized tensor: store int_repr() with its scale and "
    "zero point, or dequantize()",
}
"""What the names mean that people meet, and what to store instead."""


class _Refusal(Exception):
    """Why a pickle is refused; becomes a CorruptionError with the place."""


class _NotRead(_Refusal):
    """The pickle may be whole: it asks for what is not in the list of what is read."""


class _Machine:
    """The stack machine; one method per opcode, or per family of opcodes."""

    def __init__(
        self,
        data: bytes,
        start: int,
        *,
        place: str,
        types: Mapping[str, Constructor],
        persistent: Persistent | None,
    ) -> None:
        self.pos = start
        self._data = data
        self._place = place
        self._types = types
        self._persistent = persistent
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        # Numbers of the memo are nearly always 0, 1, 2, …: in a list each takes a tenth of the
        # memory that it takes in a dict.
        self._memo: list[Any] = []
        self._odd_memo: dict[int, Any] = {}
        self._copies_left = _COPIES_PER_BYTE * (len(data) - start) + 1024
        self._odd_keys_left = _MAX_ODD_KEYS

    def run(self) -> object:
        """Interpret up to the end of the pickle, and return what it leaves on the stack."""
        table: list[Callable[[], None]] = [self._unknown] * 256
        for letter, name in _OPCODES.items():
            table[ord(letter)] = getattr(self, name)
        data = self._data
        at = self.pos
        try:
            while True:
                for _ in range(_OPCODES_AT_ONCE):
                    at = self.pos
                    code = data[at]
                    self.pos = at + 1
                    if code == _STOP:
                        return self._result()
                    table[code]()
                self._check_memory()
        except _NotRead as refusal:
            raise CorruptionError(f"{self._place}: {refusal}", details=NOT_READ) from None
        except _Refusal as refusal:
            raise CorruptionError(f"{self._place}: {refusal}") from None
        except (ArithmeticError, LookupError, TypeError, ValueError, struct.error) as error:
            raise CorruptionError(
                f"{self._place}: the pickle is damaged or cut short at byte {at} "
                f"({type(error).__name__}); nothing was run"
            ) from None

    def _check_memory(self) -> None:
        """Refuse to go on if what the next opcodes may take is not there."""
        available = available_memory_nbytes()
        if available < _RESERVE_NBYTES:
            raise _Refusal(
                f"it does not fit into memory: {in_bytes(available)} are left after "
                f"{in_bytes(self.pos)} of a pickle of {in_bytes(len(self._data))}; read it on a "
                f"host with more memory, or with fewer ranks on each"
            )

    def _result(self) -> object:
        if len(self._stack) != 1 or self._below:
            raise _Refusal("the pickle ends with a stack that is not one value")
        return self._stack[0]

    def _unknown(self) -> NoReturn:
        code = self._data[self.pos - 1]
        raise _Refusal(f"byte {self.pos - 1} of the pickle is the unknown opcode 0x{code:02x}")

    # Bytes of the pickle.

    def _take(self, nbytes: int) -> bytes:
        start = self.pos
        end = start + nbytes
        if end > len(self._data):
            raise _Refusal(
                f"byte {start} of the pickle announces {nbytes} bytes, but only "
                f"{len(self._data) - start} follow"
            )
        self.pos = end
        return self._data[start:end]

    def _u8(self) -> int:
        pos = self.pos
        self.pos = pos + 1
        return self._data[pos]

    def _u32(self) -> int:
        (value,) = _U32(self._data, self.pos)
        self.pos += 4
        return int(value)

    def _u64(self) -> int:
        (value,) = _U64(self._data, self.pos)
        self.pos += 8
        return int(value)

    def _line(self) -> str:
        end = self._data.index(b"\n", self.pos)
        line = self._data[self.pos : end]
        self.pos = end + 1
        return line.decode("utf-8")

    # Frames and protocol.

    def _proto(self) -> None:
        version = self._u8()
        if version > _HIGHEST_PROTOCOL:
            raise _Refusal(f"the pickle has protocol {version}; known are 0 to {_HIGHEST_PROTOCOL}")

    def _frame(self) -> None:
        nbytes = self._u64()
        if nbytes > len(self._data) - self.pos:
            raise _Refusal(f"the pickle announces a frame of {nbytes} bytes, which are not there")

    def _outside(self) -> NoReturn:
        raise _Refusal("the pickle refers to a buffer or an extension outside of the file")

    # Scalars.

    def _none(self) -> None:
        self._stack.append(None)

    def _true(self) -> None:
        self._stack.append(True)

    def _false(self) -> None:
        self._stack.append(False)

    def _int(self) -> None:
        text = self._line()
        self._stack.append({"00": False, "01": True}[text] if text in ("00", "01") else int(text))

    def _long(self) -> None:
        self._stack.append(int(self._line().removesuffix("L")))

    def _binint(self) -> None:
        self._stack.append(_I32(self._data, self.pos)[0])
        self.pos += 4

    def _binint1(self) -> None:
        pos = self.pos
        self._stack.append(self._data[pos])
        self.pos = pos + 1

    def _binint2(self) -> None:
        self._stack.append(_U16(self._data, self.pos)[0])
        self.pos += 2

    def _long1(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._u8()), "little", signed=True))

    def _long4(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._u32()), "little", signed=True))

    def _float(self) -> None:
        self._stack.append(float(self._line()))

    def _binfloat(self) -> None:
        self._stack.append(_F64(self._data, self.pos)[0])
        self.pos += 8

    # Texts and bytes.

    def _string(self) -> None:
        line = self._line()
        if len(line) < 2 or line[0] != line[-1] or line[0] not in "\"'":
            raise _Refusal("the pickle has a text without quotation marks")
        self._stack.append(_old_text(_ESCAPE.sub(_unescaped, line[1:-1].encode())))

    def _binstring(self) -> None:
        self._stack.append(_old_text(self._take(self._u32())))

    def _short_binstring(self) -> None:
        self._stack.append(_old_text(self._take(self._u8())))

    def _unicode(self) -> None:
        end = self._data.index(b"\n", self.pos)
        raw = self._take(end - self.pos)
        self.pos = end + 1
        self._stack.append(raw.decode("raw-unicode-escape"))

    def _binunicode(self) -> None:
        self._stack.append(self._take(self._u32()).decode("utf-8", "surrogatepass"))

    def _short_binunicode(self) -> None:
        self._stack.append(self._take(self._u8()).decode("utf-8", "surrogatepass"))

    def _binunicode8(self) -> None:
        self._stack.append(self._take(self._u64()).decode("utf-8", "surrogatepass"))

    def _binbytes(self) -> None:
        self._stack.append(self._take(self._u32()))

    def _short_binbytes(self) -> None:
        self._stack.append(self._take(self._u8()))

    def _binbytes8(self) -> None:
        self._stack.append(self._take(self._u64()))

    def _bytearray8(self) -> None:
        self._stack.append(bytearray(self._take(self._u64())))

    # The stack and the memo.

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._below.pop()
        return items

    def _drop_mark(self) -> None:
        self._pop_mark()

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _dup(self) -> None:
        self._stack.append(self._stack[-1])

    def _number(self) -> int:
        """Read a number of the memo; larger ones could be made to collide in its dict."""
        number = int(self._line())
        if not 0 <= number < _MAX_MEMO:
            raise _Refusal("the pickle has a number in its memo that no pickle has")
        return number

    def _get(self) -> None:
        self._stack.append(self._known(self._number()))

    def _binget(self) -> None:
        pos = self.pos
        self._stack.append(self._known(self._data[pos]))
        self.pos = pos + 1

    def _long_binget(self) -> None:
        self._stack.append(self._known(self._u32()))

    def _known(self, number: int) -> Any:
        memo = self._memo
        return memo[number] if number < len(memo) else self._odd_memo[number]

    def _put(self) -> None:
        self._remember(self._number(), self._stack[-1])

    def _binput(self) -> None:
        pos = self.pos
        self._remember(self._data[pos], self._stack[-1])
        self.pos = pos + 1

    def _long_binput(self) -> None:
        self._remember(self._u32(), self._stack[-1])

    def _memoize(self) -> None:
        self._remember(len(self._memo) + len(self._odd_memo), self._stack[-1])

    def _remember(self, number: int, value: Any) -> None:
        memo = self._memo
        if number == len(memo):
            memo.append(value)
            if self._odd_memo:
                self._odd_memo.pop(number, None)
        elif number < len(memo):
            memo[number] = value
        else:
            self._odd_memo[number] = value

    # Containers.

    def _empty_tuple(self) -> None:
        self._stack.append(())

    def _empty_list(self) -> None:
        self._stack.append([])

    def _empty_dict(self) -> None:
        self._stack.append({})

    def _empty_set(self) -> None:
        self._stack.append(set())

    def _tuple(self) -> None:
        items = self._pop_mark()
        self._stack.append(tuple(items))

    def _tuple1(self) -> None:
        self._stack[-1] = (self._stack[-1],)

    def _tuple2(self) -> None:
        stack = self._stack
        last = stack.pop()
        stack[-1] = (stack[-1], last)

    def _tuple3(self) -> None:
        stack = self._stack
        last = stack.pop()
        middle = stack.pop()
        stack[-1] = (stack[-1], middle, last)

    def _list(self) -> None:
        items = self._pop_mark()
        self._stack.append(items)

    def _dict(self) -> None:
        items = self._pop_mark()
        self._stack.append({})
        self._set_items(self._stack[-1], items)

    def _frozenset(self) -> None:
        items = self._pop_mark()
        self._check_keys(items)
        self._stack.append(frozenset(items))

    def _append(self) -> None:
        item = self._stack.pop()
        self._list_to_extend().append(item)

    def _appends(self) -> None:
        items = self._pop_mark()
        self._list_to_extend().extend(items)

    def _list_to_extend(self) -> list[Any]:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise _Refusal(f"the pickle appends to {_kind(target)}, which is not a list")
        return target

    def _setitem(self) -> None:
        item = self._stack.pop()
        key = self._stack.pop()
        self._set_items(self._stack[-1], [key, item])

    def _setitems(self) -> None:
        items = self._pop_mark()
        self._set_items(self._stack[-1], items)

    def _set_items(self, target: Any, items: list[Any]) -> None:
        if not isinstance(target, dict) or len(items) % 2:
            raise _Refusal(f"the pickle sets items of {_kind(target)}, or half of a pair")
        keys = items[::2]
        self._check_keys(keys)
        target.update(zip(keys, items[1::2], strict=True))

    def _additems(self) -> None:
        items = self._pop_mark()
        target = self._stack[-1]
        if type(target) is not set:
            raise _Refusal(f"the pickle adds members to {_kind(target)}, which is not a set")
        self._check_keys(items)
        target.update(items)

    def _check_keys(self, keys: list[Any]) -> None:
        for key in keys:
            if type(key) is not str:
                self._check_key(key)

    def _check_key(self, key: Any) -> None:
        """Refuse what cannot be a key, and limit keys whose hashes a file could make collide.

        A nested key is never hashed before its depth and size are known: Python's hash has no
        limit of its own.
        """
        waiting = [(key, 0)]
        while waiting:
            item, depth = waiting.pop()
            kind = type(item)
            if kind in _PLAIN_KEYS or (kind is int and -_SMALL_KEY < item < _SMALL_KEY):
                continue
            self._odd_keys_left -= 1 + (item.bit_length() // 64 if kind is int else 0)
            if kind in (tuple, frozenset, TorchSize) and depth < 16:
                self._odd_keys_left -= len(item)
                if self._odd_keys_left > 0:
                    waiting += [(inner, depth + 1) for inner in item]
            elif kind not in _ODD_KEYS and not isinstance(item, np.generic):
                raise _Refusal(f"the pickle has a key or member that is {_kind(item)}")
            if self._odd_keys_left <= 0:
                raise _Refusal(f"the pickle has more than {_MAX_ODD_KEYS} composed or huge keys")

    # Names and what is made by them.

    def _global(self) -> None:
        module = self._line()
        self._stack.append(self._look_up(module, self._line()))

    def _stack_global(self) -> None:
        name = self._stack.pop()
        module = self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise _NotRead("the pickle asks for a name that is not text; nothing was run")
        self._stack.append(self._look_up(module, name))

    def _look_up(self, module: str, name: str) -> Constructor:
        whole = f"{_OLD_MODULES.get(module, module)}.{name}"
        whole = _OLD_NAMES.get(whole, whole)
        constructor = self._types.get(whole)
        if constructor is None:
            hint = _HINTS.get(whole, "")
            raise _NotRead(
                f"the file asks for {shorten(f'{module}.{name}')!r}{hint and f' ({hint})'}, which "
                f"is not in the list of what may be read; nothing was run"
            )
        return constructor

    def _inst(self) -> None:
        module = self._line()
        constructor = self._look_up(module, self._line())
        args = self._pop_mark()
        self._stack.append(self._made(constructor, tuple(args)))

    def _obj(self) -> None:
        items = self._pop_mark()
        self._stack.append(self._made(items[0], tuple(items[1:])))

    def _reduce(self) -> None:
        args = self._stack.pop()
        self._stack[-1] = self._made(self._stack[-1], args)

    def _newobj_ex(self) -> None:
        keywords = self._stack.pop()
        if type(keywords) is not dict or keywords:
            raise _NotRead("the pickle makes an object with keyword arguments; nothing was run")
        self._reduce()

    def _made(self, maker: Any, args: Any) -> object:
        if type(maker) is not Constructor or maker.make is None:
            raise _NotRead(f"the pickle calls {_kind(maker)}; nothing was run")
        if type(args) is not tuple:
            raise _NotRead(f"the pickle calls {maker.name} with {_kind(args)}; nothing was run")
        if maker.copies:
            self._pay(args)
        if maker.hashes and args and isinstance(args[0], _HASHED):
            self._check_keys(list(args[0]))
        try:
            return maker.make(args)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise _NotRead(f"{maker.name} cannot be read: {error}; nothing was run") from None

    def _pay(self, args: tuple[Any, ...]) -> None:
        """Subtract what a constructor copies; a file that repeats copies runs out of budget."""
        self._copies_left -= sum(len(arg) for arg in args if isinstance(arg, _SIZED))
        for arg in args:
            if isinstance(arg, dict):  # its keys are compared once more
                self._check_keys(list(arg))
        if self._copies_left < 0:
            raise _Refusal("the pickle copies its values again and again; nothing was run")

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if not isinstance(target, _STATEFUL):
            raise _NotRead(f"the pickle sets the state of {_kind(target)}; nothing was run")
        try:
            target.set_state(state)
        except (LookupError, TypeError, ValueError) as error:
            raise _NotRead(
                f"the pickle has a state of {target!r} that is not one: {error}"
            ) from None

    def _persid(self) -> None:
        self._stack.append(self._of_outside(self._line()))

    def _binpersid(self) -> None:
        self._stack[-1] = self._of_outside(self._stack[-1])

    def _of_outside(self, name: object) -> object:
        if self._persistent is None:
            raise _Refusal("the pickle refers to data outside of itself")
        try:
            return self._persistent(name)
        except (LookupError, TypeError, ValueError) as error:
            raise _Refusal(f"a reference of the pickle cannot be read: {error}") from None


_OPCODES: Mapping[str, str] = {
    "\x80": "_proto", "\x95": "_frame", "\x97": "_outside", "\x98": "_outside",
    "\x82": "_outside", "\x83": "_outside", "\x84": "_outside",
    "N": "_none", "\x88": "_true", "\x89": "_false", "I": "_int", "L": "_long", "J": "_binint",
    "K": "_binint1", "M": "_binint2", "\x8a": "_long1", "\x8b": "_long4", "F": "_float",
    "G": "_binfloat",
    "S": "_string", "T": "_binstring", "U": "_short_binstring", "V": "_unicode",
    "X": "_binunicode", "\x8c": "_short_binunicode", "\x8d": "_binunicode8", "B": "_binbytes",
    "C": "_short_binbytes", "\x8e": "_binbytes8", "\x96": "_bytearray8",
    "(": "_mark", "1": "_drop_mark", "0": "_pop", "2": "_dup", "g": "_get", "h": "_binget",
    "j": "_long_binget", "p": "_put", "q": "_binput", "r": "_long_binput", "\x94": "_memoize",
    ")": "_empty_tuple", "]": "_empty_list", "}": "_empty_dict", "\x8f": "_empty_set",
    "t": "_tuple", "\x85": "_tuple1", "\x86": "_tuple2", "\x87": "_tuple3", "l": "_list",
    "d": "_dict", "\x91": "_frozenset", "a": "_append", "e": "_appends", "s": "_setitem",
    "u": "_setitems", "\x90": "_additems",
    "c": "_global", "\x93": "_stack_global", "i": "_inst", "o": "_obj", "R": "_reduce",
    "\x81": "_reduce", "\x92": "_newobj_ex", "b": "_build", "P": "_persid", "Q": "_binpersid",
}  # fmt: skip
"""Opcode -> method. NEWOBJ is REDUCE here: a constructor of the table is all that there is."""


def _old_text(raw: bytes) -> str | bytes:
    """Return a string of Python 2: text if it is UTF-8, as torch reads it, else bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _unescaped(match: re.Match[bytes]) -> bytes:
    """Return the byte that an escape in a text of protocol 0 stands for."""
    code = match.group(1)
    if code[:1] == b"x" and len(code) == 3:
        return bytes([int(code[1:], 16)])
    return bytes([int(code, 8) & 0xFF]) if code.isdigit() else _LETTERS.get(code, code)


def _kind(value: object) -> str:
    """Describe a value by its type; its content may be huge."""
    if isinstance(value, Constructor | Record):
        return repr(value.name)
    return f"a {type(value).__name__}"
