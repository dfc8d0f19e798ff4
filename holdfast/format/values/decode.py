"""From a node back to the tree of Python values. What a node says is data: nothing is executed."""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from holdfast.errors import CorruptionError, HoldfastError, MismatchError
from holdfast.format.values.codecs import Codecs
from holdfast.format.values.encode import (
    FACTORIES,
    MAX_DEPTH,
    join_path,
    key_name,
    shorten,
)
from holdfast.format.values.nodes import (
    MAPPINGS,
    SEQUENCES,
    SETS,
    TAG,
    Node,
    is_like_a_tag,
    tag_of,
)

OnLeaf = Callable[[str, dict[str, Node]], object]

_DECIMAL = re.compile(r"-?[1-9][0-9]{0,4000}", re.ASCII)
_HEXADECIMAL = re.compile(r"-?0x[1-9a-f][0-9a-f]*", re.ASCII)
_SCALAR = re.compile(r"[|<](b1|[iu][1248]|f[248]|c8|c16|[mM]8(\[[0-9A-Za-z]{1,12}\])?)", re.ASCII)
_FLOATS = ("nan", "inf", "-inf")
_NAN = re.compile(r"nan:[0-9a-f]{16}", re.ASCII)


def decode_tree(
    node: Node,
    *,
    path: str = "",
    codecs: Codecs | None = None,
    on_leaf: OnLeaf | None = None,
    run_codecs: bool = True,
) -> object:
    """The tree of a node. Time and memory are linear in its size; no code but codecs' own runs.

    `on_leaf(path, node)` is called for tags that are not built in. Raises CorruptionError naming
    the path for a malformed node, MismatchError for a dataclass, enum or codec that is not
    registered here or whose definition has changed. Without `run_codecs`, what a codec would be
    given stands for what it would make (but in dict keys and sets): for a first look, while tensors
    are not there yet.
    """
    return _Decoder(codecs or Codecs(), on_leaf, run_codecs=run_codecs).decode(node, path, 0)


class _Decoder:
    """The walk back; one method per family of tags."""

    def __init__(self, codecs: Codecs, on_leaf: OnLeaf | None, *, run_codecs: bool) -> None:
        self._codecs = codecs
        self._on_leaf = on_leaf
        self._run_codecs = run_codecs

    def _hashable(self, node: Node, path: str, depth: int) -> object:
        """A dict key or member of a set, for which codecs always run."""
        before, self._run_codecs = self._run_codecs, True
        value = self.decode(node, path, depth)
        self._run_codecs = before
        return value

    def decode(self, node: Node, path: str, depth: int) -> object:
        if depth > 2 * MAX_DEPTH:
            raise CorruptionError(f"{shorten(path)}: nested deeper than any stored value can be")
        if isinstance(node, list):
            return self._items(node, path, depth)
        if not isinstance(node, dict):
            return node
        if TAG in node:
            try:
                return self._tagged(node, path, depth)
            except HoldfastError:
                raise
            except (KeyError, TypeError, ValueError, OverflowError, binascii.Error) as error:
                raise _malformed(node, path, error) from None
        for key in node:
            if is_like_a_tag(key):
                raise _malformed(node, path, f"unknown member {key!r}")
        return {key: self.decode(v, join_path(path, key), depth + 1) for key, v in node.items()}

    def _tagged(self, node: dict[str, Node], path: str, depth: int) -> object:
        tag = node[TAG]
        if tag in ("int", "float", "str", "bytes", "bytearray", "complex", "numpy"):
            return _decode_scalar(str(tag), node, path)
        if tag in (*SEQUENCES, *SETS, "range", "slice"):
            return self._sequence(str(tag), node, path, depth)
        if tag in MAPPINGS:
            return self._mapping(str(tag), node, path, depth)
        if tag in ("dataclass", "enum", "codec"):
            return self._registered(str(tag), node, path, depth)
        if self._on_leaf is None or not isinstance(tag, str):
            raise _malformed(node, path, f"unknown tag {tag!r}")
        return self._on_leaf(path, node)

    def _items(self, node: Node, path: str, depth: int) -> list[object]:
        if not isinstance(node, list):
            raise TypeError("a list is expected")
        return [self.decode(item, join_path(path, i), depth + 1) for i, item in enumerate(node)]

    def _sequence(self, tag: str, node: dict[str, Node], path: str, depth: int) -> object:
        if tag in SETS:
            _expect(node, "v")
            raw = node["v"]
            if not isinstance(raw, list):
                raise TypeError("a list is expected")
            members = frozenset(self._hashable(item, path, depth + 1) for item in raw)
            if len(members) != len(raw):
                raise ValueError("a member is there twice")
            return members if tag == "frozenset" else set(members)
        _expect(node, *(("max", "v") if tag == "deque" else ("v",)))
        items = self._items(node["v"], path, depth)
        if tag in SEQUENCES:
            return sequence_of(node, items)
        start, stop, step = items
        if tag == "slice":
            return slice(start, stop, step)
        if not (type(start) is type(stop) is type(step) is int):
            raise TypeError("a range is made of three integers")
        return range(start, stop, step)

    def _mapping(self, tag: str, node: dict[str, Node], path: str, depth: int) -> object:
        _expect(node, *(("f", "v") if tag == "defaultdict" else ("v",)))
        raw = node["v"]
        if not isinstance(raw, list):
            raise TypeError("a list of pairs is expected")
        table: dict[object, object] = {}
        for pair in raw:
            if not isinstance(pair, list):
                raise TypeError("a pair is expected")
            raw_key, raw_item = pair
            key = self._hashable(raw_key, path, depth + 1)
            below = join_path(path, key_name(key))
            if key in table:
                raise ValueError(f"the key {key!r} is there twice")
            table[key] = self.decode(raw_item, below, depth + 1)
        return mapping_of(node, table)

    def _registered(self, tag: str, node: dict[str, Node], path: str, depth: int) -> object:
        name = node["n"]
        if not isinstance(name, str):
            raise TypeError("the name is not a string")
        if tag == "codec":
            _expect(node, "n", "v")
            codec = self._codecs.codec_named(name)
            if codec is None:
                raise _unregistered("codec", name, path, "codecs")
            plain = self.decode(node["v"], path, depth + 1)
            return codec.decoded(plain, path) if self._run_codecs else plain
        if tag == "enum":
            return self._enum(name, node, path)
        _expect(node, "n", "v")
        parts = node["v"]
        if not isinstance(parts, dict):
            raise TypeError("the fields are not an object")
        cls = self._codecs.dataclass_named(name)
        if cls is None:
            raise _unregistered("dataclass", name, path, "dataclasses")
        known = [field.name for field in fields(cls)]
        if set(known) != set(parts):
            raise MismatchError(
                f"{path}: dataclass {name} has the fields {sorted(known)} here, "
                f"{sorted(parts)} were stored; give it a Codec that knows both"
            )
        return dataclass_of(
            cls,
            {name: self.decode(parts[name], join_path(path, name), depth + 1) for name in known},
        )

    def _enum(self, name: str, node: dict[str, Node], path: str) -> object:
        cls = self._codecs.enum_named(name)
        if cls is None:
            raise _unregistered("enum", name, path, "enums")
        member = "i" if "i" in node else "v"
        _expect(node, "n", member)
        value = self.decode(node[member], path, 0)
        try:
            return cls(value) if member == "i" else cls[str(value)]
        except (KeyError, ValueError):
            raise MismatchError(
                f"{path}: enum {name} has no member {shorten(value)} here; "
                f"it has {list(cls.__members__)}"
            ) from None


def mapping_of(node: Node, table: dict[Any, Any]) -> Any:
    """A dict's members as the type of mapping that a node is: dict, OrderedDict, Counter, …

    Raises KeyError or TypeError for a defaultdict of an unknown factory.
    """
    tag = tag_of(node)
    if tag == "odict":
        return OrderedDict(table)
    if tag == "counter":
        return _counter(table)
    if tag == "defaultdict" and isinstance(node, dict):
        factories: dict[Node, type | None] = {f.__name__: f for f in FACTORIES} | {None: None}
        return defaultdict(factories[node["f"]], table)
    return table


def sequence_of(node: Node, items: list[Any]) -> Any:
    """Items as the type of sequence that a node is: list, tuple or deque.

    Raises TypeError or ValueError for a malformed deque.
    """
    tag = tag_of(node)
    if tag == "tuple":
        return tuple(items)
    if tag != "deque" or not isinstance(node, dict):
        return items
    longest = node["max"]
    if longest is not None and type(longest) is not int:
        raise TypeError("max is not a number")
    if longest is not None and len(items) > longest:
        raise ValueError("more items than its maximum")
    return deque(items, maxlen=longest)


def dataclass_of(cls: type[Any], values: dict[str, Any]) -> Any:
    """A dataclass with these fields, set as they were: __init__ could compute others."""
    value = object.__new__(cls)
    for name, item in values.items():
        object.__setattr__(value, name, item)
    return value


def _expect(node: dict[str, Node], *names: str) -> None:
    if node.keys() - {TAG} != set(names):
        raise ValueError(f"members {sorted(names)} are expected")


def _decode_scalar(tag: str, node: dict[str, Node], path: str) -> object:
    _expect(node, *(("d", "v") if tag == "numpy" else ("v",)))
    raw = node["v"]
    if tag == "complex":
        if not isinstance(raw, list):
            raise TypeError("two numbers are expected")
        real, imag = (_decode_float(part) for part in raw)
        return complex(real, imag)
    if tag == "numpy":
        return _decode_numpy(node["d"], raw)
    if not isinstance(raw, str):
        raise TypeError("a string is expected")
    if tag == "float":
        return _decode_float(node)
    if tag == "int":
        if _DECIMAL.fullmatch(raw):
            return int(raw)
        if _HEXADECIMAL.fullmatch(raw):
            return int(raw, 16)
        raise ValueError("not an integer")
    data = base64.b64decode(raw, validate=True)
    if tag == "str":
        return data.decode("utf-8", "surrogatepass")
    return bytearray(data) if tag == "bytearray" else data


def _decode_float(node: Node) -> float:
    if type(node) is float:
        return node
    text = node.get("v") if isinstance(node, dict) and tag_of(node) == "float" else None
    if text in _FLOATS:
        return float(str(text))
    if isinstance(text, str) and _NAN.fullmatch(text):
        (value,) = struct.unpack(">d", bytes.fromhex(text[4:]))
        if math.isnan(value):
            return float(value)
    raise ValueError("not a floating-point number")


def _decode_numpy(code: Node, raw: Node) -> object:
    if code == "str":
        text = raw if isinstance(raw, str) else _decode_scalar("str", _as_dict(raw), "")
        return np.str_(text)
    if not isinstance(code, str) or not isinstance(raw, str):
        raise TypeError("type code and bytes are expected")
    data = base64.b64decode(raw, validate=True)
    if code == "bytes":
        return np.bytes_(data)
    if not _SCALAR.fullmatch(code):
        raise ValueError(f"numpy type {code[:20]!r} is not allowed")
    dtype = np.dtype(code)
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are not one {code}")
    return np.frombuffer(data, dtype=dtype)[0]


def _counter(table: dict[Any, Any]) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    for key, count in table.items():
        counter[key] = count
    return counter


def _as_dict(node: Node) -> dict[str, Node]:
    if not isinstance(node, dict):
        raise TypeError("an object is expected")
    return node


def _malformed(node: Node, path: str, why: object) -> CorruptionError:
    return CorruptionError(f"{path or 'value'}: {shorten(node)} is not a stored value: {why}")


def _unregistered(kind: str, name: str, path: str, argument: str) -> MismatchError:
    return MismatchError(
        f"{path or 'value'}: it was stored with the {kind} {name!r}, which is not registered here; "
        f"pass Codecs({argument}=[…])"
    )
