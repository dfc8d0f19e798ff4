"""How a tree of Python values becomes a node."""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from holdfast.errors import PlacementError
from holdfast.format.values.codecs import Codecs
from holdfast.format.values.nodes import TAG, Node, is_like_a_tag

MAX_DEPTH = 100
MAX_PLAIN_INT = 2**53

OnLeaf = Callable[[str, object], Node]

USUAL_NAN = "7ff8000000000000"
"""The bits of `float("nan")`; any other NaN is stored with its own."""
FACTORIES = (bool, bytes, dict, float, int, list, set, str, tuple)
"""The default factories of a defaultdict that can be stored; others would be code."""

_MAX_DECIMAL_BITS = 8192  # beyond this, decimal digits cost more than linear time: hexadecimal


def encode_tree(
    tree: object,
    *,
    path: str = "",
    codecs: Codecs | None = None,
    on_leaf: OnLeaf | None = None,
) -> Node:
    """The node of a tree. Time and memory are linear in its size.

    `on_leaf(path, object)` sees every object first, with its path ("a.b.3"; mapping keys and set
    members are not shown), and returns a node for what it takes (tensors, arrays, markers) or
    None. Raises PlacementError naming path and type for a type without a form, for a cycle, and
    for a depth beyond 100. An object that is in the tree twice is stored twice.
    """
    return _Encoder(codecs or Codecs(), on_leaf).encode(tree, path)


class _Encoder:
    """The walk: holds the objects that are open, to see cycles and depth."""

    def __init__(self, codecs: Codecs, on_leaf: OnLeaf | None) -> None:
        self._codecs = codecs
        self._on_leaf = on_leaf
        self._open: list[object] = []

    def encode(self, value: object, path: str) -> Node:
        """First look to the caller, then scalars, then what has parts."""
        if self._on_leaf is not None:
            node = self._on_leaf(path, value)
            if node is not None:
                return node
        return self._plain(value, path)

    def _plain(self, value: object, path: str) -> Node:
        cls = type(value)
        if value is None or cls is bool:
            return value  # type: ignore[return-value]
        if cls is int:
            return _encode_int(value)  # type: ignore[arg-type]
        if cls is float:
            return _encode_float(value)  # type: ignore[arg-type]
        if cls is str:
            return _encode_str(value)  # type: ignore[arg-type]
        if any(value is outer for outer in self._open):
            raise PlacementError(f"{path or 'value'}: it contains itself; a cycle cannot be stored")
        if len(self._open) >= MAX_DEPTH:
            raise PlacementError(
                f"{shorten(path)}: nested deeper than {MAX_DEPTH} levels; store it flatter"
            )
        self._open.append(value)
        node = self._compound(value, path)
        self._open.pop()
        return node

    def _compound(self, value: object, path: str) -> Node:
        match value:
            case list() if type(value) is list:
                return self._items(value, path)
            case dict() if type(value) is dict:
                return self._dict(value, path)
            case tuple() if type(value) is tuple:
                return {TAG: "tuple", "v": self._items(value, path)}
            case OrderedDict() if type(value) is OrderedDict:
                return {TAG: "odict", "v": self._pairs(value, path)}
            case Counter() if type(value) is Counter:
                return {TAG: "counter", "v": self._pairs(value, path)}
            case defaultdict() if type(value) is defaultdict:
                return self._defaultdict(value, path)
            case deque() if type(value) is deque:
                return {TAG: "deque", "max": value.maxlen, "v": self._items(value, path)}
            case set() | frozenset() if type(value) in (set, frozenset):
                return {TAG: type(value).__name__, "v": self._members(value, path)}
            case bytes() | bytearray() if type(value) in (bytes, bytearray):
                return {TAG: type(value).__name__, "v": base64.b64encode(value).decode()}
            case complex() if type(value) is complex:
                return {TAG: "complex", "v": [_encode_float(value.real), _encode_float(value.imag)]}
            case range():
                return {TAG: "range", "v": self._items([value.start, value.stop, value.step], path)}
            case slice():
                return {TAG: "slice", "v": self._items([value.start, value.stop, value.step], path)}
        return self._registered(value, path)

    def _registered(self, value: object, path: str) -> Node:
        cls = type(value)
        codec = self._codecs.codec_for(cls)
        if codec is not None:
            return {
                TAG: "codec",
                "n": codec.name,
                "v": self.encode(codec.encoded(value, path), path),
            }
        if isinstance(value, np.generic):
            return self._numpy_scalar(value, path)
        if isinstance(value, Enum) and self._codecs.enum_named(cls.__qualname__) is cls:
            if value.name in cls.__members__:
                return {TAG: "enum", "n": cls.__qualname__, "v": value.name}
            # A combination of flags has no name of its own, only a number.
            return {TAG: "enum", "n": cls.__qualname__, "i": self._plain(value.value, path)}
        if is_dataclass(value) and self._codecs.dataclass_named(cls.__qualname__) is cls:
            return self._dataclass(value, path)
        raise self._refusal(value, path)

    def _items(self, items: Iterable[object], path: str) -> list[Node]:
        return [self.encode(item, join_path(path, i)) for i, item in enumerate(items)]

    def _dict(self, value: dict[object, object], path: str) -> Node:
        if all(type(key) is str and _is_plain_key(key) for key in value):
            return {str(k): self.encode(v, join_path(path, k)) for k, v in value.items()}
        return {TAG: "dict", "v": self._pairs(value, path)}

    def _pairs(self, value: Mapping[Any, object], path: str) -> list[Node]:
        pairs: list[Node] = []
        names: set[bytes] = set()
        for key, item in value.items():
            below = join_path(path, key_name(key))
            node = self._plain(key, below)
            name = node_bytes(node)
            if name in names:
                raise PlacementError(
                    f"{below}: two members of one mapping have keys that are stored alike "
                    f"({shorten(key)}), though Python holds them to be different; use other keys"
                )
            names.add(name)
            pairs.append([node, self.encode(item, below)])
        return pairs

    def _defaultdict(self, value: defaultdict[object, object], path: str) -> Node:
        factory = value.default_factory
        if factory is not None and factory not in FACTORIES:
            names = " ".join(f.__name__ for f in FACTORIES)
            raise PlacementError(
                f"{path}: a defaultdict whose factory is {factory!r} cannot be stored without "
                f"running code on load; factories that can be: {names}, or convert it to a dict"
            )
        name = None if factory is None else factory.__name__
        return {TAG: "defaultdict", "f": name, "v": self._pairs(value, path)}

    def _members(self, members: Iterable[object], path: str) -> list[Node]:
        # By their bytes, not by hash: equal sets must give equal files in every process.
        return sorted((self._plain(item, path) for item in members), key=node_bytes)

    def _numpy_scalar(self, value: np.generic, path: str) -> Node:
        if type(value) is np.str_:
            return {TAG: "numpy", "d": "str", "v": _encode_str(str(value))}
        if type(value) is np.bytes_:
            return {TAG: "numpy", "d": "bytes", "v": base64.b64encode(bytes(value)).decode()}
        dtype = value.dtype.newbyteorder("<")
        if dtype.kind not in "biufcmM" or dtype.itemsize > (16 if dtype.kind == "c" else 8):
            raise self._refusal(value, path)
        raw = np.asarray(value).astype(dtype).tobytes()
        return {TAG: "numpy", "d": dtype.str, "v": base64.b64encode(raw).decode()}

    def _dataclass(self, value: Any, path: str) -> Node:
        names = [field.name for field in fields(value)]
        missing = [name for name in names if not hasattr(value, name)]
        extra = sorted(set(getattr(value, "__dict__", {})) - set(names))
        if missing or extra:
            raise PlacementError(
                f"{path}: {type(value).__qualname__} has attributes that are no fields {extra} or "
                f"fields without a value {missing}; they would be lost: register a codec for it"
            )
        parts = {name: self.encode(getattr(value, name), join_path(path, name)) for name in names}
        return {TAG: "dataclass", "n": type(value).__qualname__, "v": parts}

    def _refusal(self, value: object, path: str) -> PlacementError:
        cls = type(value)
        marker = ""
        if isinstance(value, Enum):
            hint = f"register it: Codecs(enums=[{cls.__name__}])"
        elif is_dataclass(value):
            hint = f"register it: Codecs(dataclasses=[{cls.__name__}])"
        else:
            hint = "convert it to plain values, register a Codec for its type"
            marker = ", or mark it Transient"
        text = (
            f"{path or 'value'}: a value of type {cls.__module__}.{cls.__qualname__} "
            f"({shorten(value)}) cannot be stored without pickle; {hint}"
        )
        return PlacementError(text + marker, details={"without_markers": text})


def _is_plain_key(key: str) -> bool:
    return not is_like_a_tag(key) and (key.isascii() or is_unicode(key))


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold it: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_int(value: int) -> Node:
    if -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT:
        return value
    text = str(value) if value.bit_length() <= _MAX_DECIMAL_BITS else hex(value)
    return {TAG: "int", "v": text}


def _encode_float(value: float) -> Node:
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value).hex()
    is_usual = not math.isnan(value) or bits == USUAL_NAN
    return {TAG: "float", "v": repr(value) if is_usual else f"nan:{bits}"}


def _encode_str(value: str) -> Node:
    if value.isascii() or is_unicode(value):
        return value
    raw = value.encode("utf-8", "surrogatepass")
    return {TAG: "str", "v": base64.b64encode(raw).decode()}


def join_path(path: str, name: object) -> str:
    """The path of a child: names are joined with dots."""
    return f"{path}.{name}" if path else str(name)


def node_bytes(node: Node) -> bytes:
    """A node as compact JSON: equal bytes mean equal types, values and key order."""
    return msgspec.json.encode(node)


def shorten(value: object, *, limit: int = 80) -> str:
    """A value for a message, cut in the middle when it is long."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # the repr of a foreign type, or of an integer of thousands of digits
        text = f"<{type(value).__qualname__}>"
    half = limit // 2 - 2
    return text if len(text) <= limit else f"{text[:half]} … {text[-half:]}"


def key_name(key: object) -> str:
    """A dict key as a part of a path: text as it is, anything else as Python writes it.

    A type whose text is its address in memory, which differs between ranks, gives its name.
    """
    if type(key) is str:
        return key
    text = shorten(key)
    return f"<{type(key).__qualname__}>" if " at 0x" in text else text
