"""Between trees of Python values and nodes: the codecs of types, encoding and decoding.

What a node states is data: nothing in it names code to run. The types beyond the built-in ones are
those that the caller has registered in `Codecs`.
"""

from __future__ import annotations

import base64
import binascii
import builtins
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, MappingProxyType
from typing import Any, TypeVar

import numpy as np

from holdfast.errors import (
    ConfigError,
    CorruptionError,
    HoldfastError,
    MismatchError,
    PlacementError,
)
from holdfast.format.dtypes import is_plain_numpy
from holdfast.format.values.value_nodes import (
    MAPPINGS,
    METADATA_MEMBER,
    SEQUENCES,
    SETS,
    TAG,
    Node,
    are_plain,
    are_plain_keys,
    is_like_a_tag,
    is_unicode,
    join_path,
    key_name,
    node_bytes,
    shorten,
    tag_of,
)

T = TypeVar("T")
EncodeLeaf = Callable[[str, object], Node]
DecodeLeaf = Callable[[str, dict[str, Node]], object]

METADATA = "_metadata"
"""Attribute at which `Module.state_dict()` notes the versions of the modules."""
MAX_DEPTH = 100
MAX_PLAIN_INT = 2**53

USUAL_NAN = "7ff8000000000000"
"""The bits of `float("nan")`; any other NaN is stored with its bits."""
FACTORIES = (bool, bytes, dict, float, int, list, set, str, tuple)
"""The default factories of a defaultdict that can be stored; any other would be code."""
_GENERATORS = (
    "numpy.random._generator.Generator",
    "numpy.random.mtrand.RandomState",
    "random.Random",
    "torch._C.Generator",
)
"""Types of random generators by name: this room imports no torch."""

_NUMBERS = frozenset((type(None), bool, int, float))
"""Types of values that no caller stores in a way of its own."""
_MAX_DECIMAL_BITS = 8192  # beyond this, decimal digits cost more than linear time: hexadecimal
_DECIMAL = re.compile(r"-?[1-9][0-9]{0,4000}", re.ASCII)
_HEXADECIMAL = re.compile(r"-?0x[1-9a-f][0-9a-f]*", re.ASCII)
_SCALAR = re.compile(r"[|<](b1|[iu][1248]|f[248]|c8|c16|[mM]8(\[[0-9A-Za-z]{1,12}\])?)", re.ASCII)
_FLOATS = ("nan", "inf", "-inf")
_NAN = re.compile(r"nan:[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """The stored form of one type: the plain tree that `encode` returns and `decode` takes."""

    name: str
    type: builtins.type[Any]
    encode: Callable[[Any], object]
    decode: Callable[[Any], Any]

    def encoded(self, value: object, path: str) -> object:
        """Return `encode` of a value; PlacementError with the path if it fails."""
        try:
            return self.encode(value)
        except HoldfastError:
            raise
        except Exception as error:
            raise PlacementError(
                f"{path}: the codec {self.name!r} cannot encode this "
                f"{type(value).__name__}: {type(error).__name__}: {error}"
            ) from error

    def decoded(self, plain: object, path: str) -> Any:
        """Return `decode` of a stored tree; MismatchError with the path if it fails.

        Not CorruptionError: the stored bytes are proven by then, and an older checkpoint would not
        help.
        """
        try:
            return self.decode(plain)
        except HoldfastError:
            raise
        except Exception as error:
            raise MismatchError(
                f"{path}: the codec {self.name!r} cannot decode what is stored: "
                f"{type(error).__name__}: {error}; register a codec that knows this form"
            ) from error


class Codecs:
    """The dataclasses, enums and codecs that a state may contain; immutable, passed explicitly.

    Dataclasses and enums are stored by their qualified name, with their fields and member names; a
    codec has its own name. Raises ConfigError for two types with one name.
    """

    __slots__ = ("_codec_types", "_codecs", "_dataclasses", "_enums")

    def __init__(
        self,
        *,
        dataclasses: Iterable[type[Any]] = (),
        enums: Iterable[type[Enum]] = (),
        codecs: Iterable[Codec] = (),
    ) -> None:
        self._dataclasses = _by_name("dataclass", [(t.__qualname__, t) for t in dataclasses])
        self._enums = _by_name("enum", [(t.__qualname__, t) for t in enums])
        self._codecs = _by_name("codec", [(codec.name, codec) for codec in codecs])
        self._codec_types = MappingProxyType({c.type: c for c in self._codecs.values()})
        for cls in self._dataclasses.values():
            if not is_dataclass(cls):
                raise ConfigError(f"Codecs: {cls.__qualname__} in `dataclasses` is not a dataclass")
            native = _native_base(cls)
            if native is not None:
                raise ConfigError(
                    f"Codecs: {cls.__qualname__} in `dataclasses` is a {native.__qualname__}, too, "
                    f"whose contents are not fields and would be lost; register a Codec for it"
                )
        if len(self._codec_types) != len(self._codecs):
            raise ConfigError(f"Codecs: two of {sorted(self._codecs)} are for one type")

    def joined(self, other: Codecs) -> Codecs:
        """Return both sets together; ConfigError if they use one name for two types."""
        return Codecs(
            dataclasses=_joined(self._dataclasses, other._dataclasses),
            enums=_joined(self._enums, other._enums),
            codecs=_joined(self._codecs, other._codecs),
        )

    def dataclass_named(self, name: str) -> type[Any] | None:
        """Return the registered dataclass of that name, or None."""
        return self._dataclasses.get(name)

    def enum_named(self, name: str) -> type[Enum] | None:
        """Return the registered enum of that name, or None."""
        return self._enums.get(name)

    def codec_named(self, name: str) -> Codec | None:
        """Return the codec of that name, or None."""
        return self._codecs.get(name)

    def codec_for(self, cls: type[Any]) -> Codec | None:
        """Return the codec of exactly that type, or None."""
        return self._codec_types.get(cls)


def _native_base(cls: type[Any]) -> type[Any] | None:
    """Return the base of a class that is implemented in C and has contents; None if none is."""
    bases = (base for base in cls.__mro__ if base is not object)
    return next((b for b in bases if isinstance(vars(b).get("__new__"), BuiltinFunctionType)), None)


def _attributes_of(value: object) -> set[str]:
    """Return the names of the attributes that an object holds, in its dict and in slots."""
    names = set(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            own = f"_{base.__name__.lstrip('_')}{name}" if is_private else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, own):
                names.add(own)
    return names


def _by_name(kind: str, named: list[tuple[str, T]]) -> Mapping[str, T]:
    table: dict[str, T] = {}
    for name, value in named:
        if name in table and table[name] is not value:
            raise ConfigError(f"Codecs: two {kind}s are named {name!r}; rename one")
        table[name] = value
    return MappingProxyType(table)


def _joined(first: Mapping[str, T], second: Mapping[str, T]) -> list[T]:
    return [*first.values(), *(v for v in second.values() if v not in first.values())]


def encode_tree(
    tree: object,
    *,
    path: str = "",
    codecs: Codecs | None = None,
    on_leaf: EncodeLeaf | None = None,
    on_key: EncodeLeaf | None = None,
) -> Node:
    """Encode a tree as a node. Time and memory are linear in its size.

    An object that is in the tree twice is stored twice.

    Args:
        tree: Plain values, containers, and values of registered types.
        path: Path of the tree, for messages.
        codecs: The registered types.
        on_leaf: Called first with every object and its path ("a.b.3"), except None, truth values,
            integers, floats, keys of mappings and members of sets. Returns a node for those that it
            takes (tensors, arrays, markers), else None.
        on_key: The same for keys of mappings and members of sets.

    Raises:
        PlacementError: A type has no stored form, the tree contains itself, or it is deeper than
            100 levels. The message names path and type.
    """
    return _Encoder(codecs or Codecs(), on_leaf, on_key).encode(tree, path)


class _Encoder:
    """The walk of `encode_tree`; it keeps the open objects to detect cycles and depth."""

    def __init__(
        self, codecs: Codecs, on_leaf: EncodeLeaf | None, on_key: EncodeLeaf | None
    ) -> None:
        self._codecs = codecs
        self._on_leaf = on_leaf
        self._on_key = on_key
        self._open: list[int] = []
        """By `id`: callers hold the objects."""

    def encode(self, value: object, path: str) -> Node:
        """Encode a value: the caller's `on_leaf` first, then scalars, then containers."""
        if self._on_leaf is not None and type(value) not in _NUMBERS:
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
        if id(value) in self._open:
            raise PlacementError(f"{path or 'value'}: it contains itself; a cycle cannot be stored")
        if len(self._open) >= MAX_DEPTH:
            raise PlacementError(
                f"{shorten(path)}: nested deeper than {MAX_DEPTH} levels; store it flatter"
            )
        self._open.append(id(value))
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
                return {TAG: "odict", "v": self._pairs(value, path), **_metadata_node(value, path)}
            case Counter() if type(value) is Counter:
                _refuse_attributes(value, path)
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
            # A combination of flags has no name, only a number.
            return {TAG: "enum", "n": cls.__qualname__, "i": self._plain(value.value, path)}
        if is_dataclass(value) and self._codecs.dataclass_named(cls.__qualname__) is cls:
            return self._dataclass(value, path)
        raise self._refusal(value, path)

    def _items(self, items: Iterable[object], path: str) -> list[Node]:
        return [
            self._plain(item, "")  # which needs no path, as most items of most lists
            if type(item) in _NUMBERS
            else self.encode(item, join_path(path, i))
            for i, item in enumerate(items)
        ]

    def _dict(self, value: dict[object, object], path: str) -> Node:
        if are_plain_keys(value):
            return {
                str(key): self._plain(item, "")
                if type(item) in _NUMBERS
                else self.encode(item, join_path(path, key))
                for key, item in value.items()
            }
        return {TAG: "dict", "v": self._pairs(value, path)}

    def _pairs(self, value: Mapping[Any, object], path: str) -> list[Node]:
        pairs: list[Node] = []
        names: set[bytes] = set()
        for key, item in value.items():
            below = join_path(path, key_name(key))
            node = self._key(key, below)
            name = node_bytes(node)
            if name in names:
                raise PlacementError(
                    f"{below}: two keys of one mapping have the same stored form "
                    f"({shorten(key)}), although they differ in Python; use other keys"
                )
            names.add(name)
            pairs.append([node, self.encode(item, below)])
        return pairs

    def _defaultdict(self, value: defaultdict[object, object], path: str) -> Node:
        factory = value.default_factory
        if factory is not None and factory not in FACTORIES:
            names = " ".join(f.__name__ for f in FACTORIES)
            raise PlacementError(
                f"{path}: a defaultdict with the factory {factory!r} cannot be stored without "
                f"running code on load; use one of {names}, or convert it to a dict"
            )
        name = None if factory is None else factory.__name__
        return {TAG: "defaultdict", "f": name, "v": self._pairs(value, path)}

    def _members(self, members: Iterable[object], path: str) -> list[Node]:
        # Sorted by bytes, not by hash: equal sets must give equal files in every process.
        return sorted((self._key(item, path) for item in members), key=node_bytes)

    def _key(self, key: object, path: str) -> Node:
        node = None if self._on_key is None else self._on_key(path, key)
        return self._plain(key, path) if node is None else node

    def _numpy_scalar(self, value: np.generic, path: str) -> Node:
        if type(value) is np.str_:
            # Not `str(value)`: NumPy's own drops characters of zero at the end.
            return {TAG: "numpy", "d": "str", "v": _encode_str(str.__str__(value))}
        if type(value) is np.bytes_:
            return {TAG: "numpy", "d": "bytes", "v": base64.b64encode(bytes(value)).decode()}
        dtype = value.dtype.newbyteorder("<")
        if type(value) is not dtype.type:  # a subclass: what it adds would be lost
            raise self._refusal(value, path)
        if not is_plain_numpy(dtype):
            raise self._refusal(value, path)
        raw = np.asarray(value).astype(dtype).tobytes()
        return {TAG: "numpy", "d": dtype.str, "v": base64.b64encode(raw).decode()}

    def _dataclass(self, value: Any, path: str) -> Node:
        names = [field.name for field in fields(value)]
        missing = [name for name in names if not hasattr(value, name)]
        extra = sorted(_attributes_of(value) - set(names))
        if missing or extra:
            raise PlacementError(
                f"{path}: {type(value).__qualname__} has attributes that are not fields {extra} or "
                f"fields without a value {missing}, which would be lost: register a codec for it"
            )
        parts = {name: self.encode(getattr(value, name), join_path(path, name)) for name in names}
        return {TAG: "dataclass", "n": type(value).__qualname__, "v": parts}

    def _refusal(self, value: object, path: str) -> PlacementError:
        cls = type(value)
        marker = ""
        if isinstance(value, Enum):
            hint = f"register it: Codecs(enums=[{cls.__name__}])"
        elif is_dataclass(value) and not isinstance(value, type):
            hint = f"register it: Codecs(dataclasses=[{cls.__name__}])"
        elif any(f"{base.__module__}.{base.__qualname__}" in _GENERATORS for base in cls.__mro__):
            hint = "convert its state to plain values"
            marker = ", or keep it in a part of its own: RNG(generators={name: generator})"
        else:
            hint = "convert it to plain values, register a Codec for its type"
            marker = ", or mark it Transient"
            if all(hasattr(value, name) for name in ("state_dict", "load_state_dict")):
                hint = "convert it to plain values, as its state_dict() does"
                marker = (
                    ", or make it a part of its own, which a load fills; if each rank has its own "
                    "state, its state_dict() returns PerRank(...)"
                )
        text = (
            f"{path or 'value'}: a value of type {cls.__module__}.{cls.__qualname__} "
            f"({shorten(value)}) cannot be stored without pickle; {hint}"
        )
        return PlacementError(text + marker, details={"without_markers": text})


def _metadata_node(value: OrderedDict[Any, Any], path: str) -> dict[str, Node]:
    """Return what `Module.state_dict()` notes at its dict: the versions of the modules.

    A module that loads the dict may convert the entries of an earlier version, so that without the
    note it would convert what is right.
    """
    if not vars(value):
        return {}
    _refuse_attributes(value, path, but_for=METADATA)
    noted, below = vars(value)[METADATA], join_path(path, METADATA)
    return {METADATA_MEMBER: encode_tree(noted, path=below, codecs=_noted_types())}


def _noted_types() -> Codecs:
    """Return the codecs of what TensorDict notes at its state dicts: a size and a device.

    Without torch, in a command or a writer, they are a tuple and a text.
    """
    torch: Any = sys.modules.get("torch")
    size, device = (tuple, str) if torch is None else (torch.Size, torch.device)
    return Codecs(
        codecs=[
            Codec(name="torch.Size", type=size, encode=list, decode=size),
            Codec(name="torch.device", type=device, encode=str, decode=device),
        ]
    )


def _refuse_attributes(value: object, path: str, *, but_for: str = "") -> None:
    """Raise PlacementError for a container with attributes, which no stored form has."""
    own = sorted(vars(value).keys() - {but_for})
    if own:
        raise PlacementError(
            f"{path or 'value'}: this {type(value).__name__} has attributes ({', '.join(own)}), "
            f"which would be lost; store them as values of their own, or register a Codec for its "
            f"type"
        )


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


def decode_tree(
    node: Node,
    *,
    path: str = "",
    codecs: Codecs | None = None,
    on_leaf: DecodeLeaf | None = None,
    run_codecs: bool = True,
) -> object:
    """Decode the tree of a node. Time and memory are linear in its size; only codecs run code.

    Args:
        node: A stored node.
        path: Path of the node, for messages.
        codecs: The registered types.
        on_leaf: Called with path and node for tags that are not built in.
        run_codecs: If False, the input of a codec takes the place of its result, except in dict
            keys and sets: for a first look, before the tensors are there.

    Raises:
        CorruptionError: A node is malformed; the message names the path.
        MismatchError: A dataclass, enum or codec is not registered here, or its definition has
            changed.
    """
    return _Decoder(codecs or Codecs(), on_leaf, run_codecs=run_codecs).decode(node, path, 0)


class _Decoder:
    """The walk of `decode_tree`; one method per family of tags."""

    def __init__(self, codecs: Codecs, on_leaf: DecodeLeaf | None, *, run_codecs: bool) -> None:
        self._codecs = codecs
        self._on_leaf = on_leaf
        self._run_codecs = run_codecs

    def _hashable(self, node: Node, path: str, depth: int) -> object:
        """Decode a dict key or member of a set, for which codecs always run."""
        before, self._run_codecs = self._run_codecs, True
        value = self.decode(node, path, depth)
        self._run_codecs = before
        return value

    def decode(self, node: Node, path: str, depth: int) -> object:
        if depth > 2 * MAX_DEPTH:
            raise CorruptionError(f"{shorten(path)}: nested deeper than any stored value")
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
        if any(map(is_like_a_tag, node)):
            key = next(filter(is_like_a_tag, node))
            raise _malformed(node, path, f"unknown member {key!r}")
        if are_plain(node.values()):
            return node.copy()
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
        if are_plain(node):
            return [*node]
        return [self.decode(item, join_path(path, i), depth + 1) for i, item in enumerate(node)]

    def _sequence(self, tag: str, node: dict[str, Node], path: str, depth: int) -> object:
        if tag in SETS:
            _expect(node, "v")
            raw = node["v"]
            if not isinstance(raw, list):
                raise TypeError("a list is expected")
            members = frozenset(self._hashable(item, path, depth + 1) for item in raw)
            if len(members) != len(raw):
                raise ValueError("a member is repeated")
            return members if tag == "frozenset" else set(members)
        _expect(node, *(("max", "v") if tag == "deque" else ("v",)))
        items = self._items(node["v"], path, depth)
        if tag in SEQUENCES:
            return sequence_of(node, items)
        start, stop, step = items
        if tag == "slice":
            return slice(start, stop, step)
        if not (type(start) is type(stop) is type(step) is int):
            raise TypeError("a range has three integers")
        return range(start, stop, step)

    def _mapping(self, tag: str, node: dict[str, Node], path: str, depth: int) -> object:
        has_metadata = tag == "odict" and METADATA_MEMBER in node
        _expect(
            node,
            *(("f", "v") if tag == "defaultdict" else ("v",)),
            *((METADATA_MEMBER,) if has_metadata else ()),
        )
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
                raise ValueError(f"the key {key!r} is repeated")
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
                f"{path}: dataclass {name} has the fields {sorted(known)} here, but "
                f"{sorted(parts)} were stored; register a Codec that knows both"
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
    """Return members as the type of mapping that a node states: dict, OrderedDict, Counter, …

    Raises KeyError or TypeError for a defaultdict with an unknown factory.
    """
    tag = tag_of(node)
    if tag == "odict" and isinstance(node, dict):
        ordered = OrderedDict(table)
        if METADATA_MEMBER in node:
            noted = decode_tree(node[METADATA_MEMBER], codecs=_noted_types())
            setattr(ordered, METADATA, noted)
        return ordered
    if tag == "counter":
        return Counter(table)
    if tag == "defaultdict" and isinstance(node, dict):
        factories: dict[Node, type | None] = {f.__name__: f for f in FACTORIES} | {None: None}
        return defaultdict(factories[node["f"]], table)
    return table


def sequence_of(node: Node, items: list[Any]) -> Any:
    """Return items as the type of sequence that a node states: list, tuple or deque.

    Raises TypeError or ValueError for a malformed deque.
    """
    tag = tag_of(node)
    if tag == "tuple":
        return tuple(items)
    if tag != "deque" or not isinstance(node, dict):
        return items
    longest = node["max"]
    if longest is not None and type(longest) is not int:
        raise TypeError("max is not an integer")
    if longest is not None and len(items) > longest:
        raise ValueError("more items than its maximum")
    return deque(items, maxlen=longest)


def dataclass_of(cls: type[Any], values: dict[str, Any]) -> Any:
    """Make a dataclass with these fields; `__init__` does not run, as it could change them."""
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
