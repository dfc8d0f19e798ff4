"""Turns the value of a pickle into a stored tree: nodes, and the tensors and arrays in it.

A value that is not plain keeps the name of its class: an enum is an `enum` node, everything else a
`codec` node under its full name ("argparse.Namespace"). `holdfast show` shows both; a program
that loads the tree has to know the name, or is refused by it.
"""

from __future__ import annotations

import datetime
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from holdfast.arrays.types import AnyArray
from holdfast.errors import PlacementError, some_of
from holdfast.foreign.catalog import free_key
from holdfast.foreign.pickled_values import (
    Constructor,
    EnumValue,
    PickledArray,
    PickledDeque,
    PickledMapping,
    PickledNumpyType,
    PickledStorage,
    PickledTensor,
    Record,
    TorchSize,
)
from holdfast.format.dtypes import DTYPES, TORCH_DTYPES, is_plain_numpy
from holdfast.format.manifest import USUAL_VERSION
from holdfast.format.values import (
    MAX_DEPTH,
    Node,
    codec_node,
    encode_tree,
    enum_node,
    join_path,
    key_name,
    shorten,
    tensor_node,
)

MAX_TREE_COST = 1 << 22
"""Limit of a tree: its values, and 64 characters or bytes of text, path or bytes as one more."""

_FACTORIES = {
    f"builtins.{kind.__name__}": kind
    for kind in (bool, bytes, dict, float, int, list, set, str, tuple)
}
_OWN = (PickledMapping, Record, PickledDeque, TorchSize)
_OMEGACONF = "omegaconf."
_VERSIONS = "_metadata"
_PLAIN = (bool, int, float, str, list, dict, tuple, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeaf:
    """A tensor or array of a tree, under the key that its node refers to."""

    key: str
    value: PickledTensor | PickledArray | PickledStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTree:
    """A stored tree: its node, its tensors in order, and what the tree does not keep."""

    node: Node
    leaves: tuple[NodeLeaf, ...]
    left_out: tuple[str, ...]
    """For people: "path: what", such as the versions of modules that torch attaches."""


def to_node(
    value: object, *, path: str = "", taken: Container[str] = (), limit: int = MAX_TREE_COST
) -> NodeTree:
    """Return the stored tree of a value of `read_pickle`.

    A value that the pickle refers to twice is in the tree twice; a tied tensor is two leaves with
    equal `identity`. A `torch.Size` becomes a tuple, and an OrderedDict with names as keys a dict,
    which keeps the order: state dicts are ordered dicts only because they are older than that
    promise.

    Args:
        value: What `read_pickle` has returned, or a part of it.
        path: Path of the tree; the keys of its tensors start with it.
        taken: Keys that other tensors have.
        limit: Largest tree that is made, see `MAX_TREE_COST`.

    Raises:
        PlacementError: A value has no stored form, the tree contains itself, is deeper than 100
            levels or larger than `limit`. The message names the path.

    Cost: linear in the tree.
    """
    _check_tree(value, path, limit)
    walk = _Walk(taken)
    node = walk.encode(value, path)
    trained = [leaf.key for leaf in walk.leaves if getattr(leaf.value, "requires_grad", False)]
    if trained:
        walk.left_out.append(f"{some_of(trained, most=3)}: requires_grad of {_tensors(trained)}")
    return NodeTree(node=node, leaves=tuple(walk.leaves), left_out=tuple(walk.left_out))


def module_versions(value: object, name: str = "") -> dict[str, int] | None:
    """Return the versions of modules that `Module.state_dict()` has noted, by name.

    A module that takes its entries converts those of an earlier version, as torch's own load lets
    it do.

    Args:
        value: Of a file whose tree `to_node` has accepted: a state dict, or dicts with some inside.
        name: Of the value in its part.

    Returns:
        All but those that are 1, as in a manifest; None if nothing is noted.
    """
    if not isinstance(value, dict):
        return None
    noted: dict[str, int] | None = None
    state = value.state if isinstance(value, PickledMapping) else None
    metadata = state.get(_VERSIONS) if isinstance(state, dict) else None
    if isinstance(metadata, dict):
        versions = {inner: _version(facts) for inner, facts in metadata.items()}
        noted = {
            join_path(name, inner) if inner and name else inner or name: version
            for inner, version in versions.items()
            if type(inner) is str and version != USUAL_VERSION
        }
    for key, member in value.items():
        if type(key) is str and isinstance(member, dict):
            path = join_path(name, key_name(key)) if name else key_name(key)
            below = module_versions(member, path)
            noted = noted if below is None else {**(noted or {}), **below}
    return noted


def _version(facts: object) -> int:
    version = facts.get("version") if isinstance(facts, dict) else None
    return version if type(version) is int and abs(version) < 1 << 31 else USUAL_VERSION


def _tensors(keys: list[str]) -> str:
    return "the tensor" if len(keys) == 1 else f"{len(keys)} tensors"


def array_form(array: PickledArray, *, path: str) -> tuple[str, AnyArray, str | None]:
    """Return the stored form of an array: name in `DTYPES`, contiguous elements, NumPy's code.

    The code is None if the elements imply it; otherwise it belongs to the node, as `d`. Raises
    PlacementError for elements that have no stored form, such as texts.
    """
    code = _code(array, path)
    whole = _elements(array, path)
    dtype = whole.dtype
    little = np.ascontiguousarray(whole.astype(dtype.newbyteorder("<"), copy=False))
    little = little.reshape(whole.shape)
    elements = little.view("<i8") if dtype.kind in "mM" else little
    known = {d.numpy: d.name for d in DTYPES.values() if d.numpy is not None}
    return known[elements.dtype], elements, code


def _elements(array: PickledArray, path: str) -> AnyArray:
    try:
        return array.numpy()
    except ValueError as error:
        raise PlacementError(f"{path}: a NumPy array that cannot be stored: {error}") from None


def _code(array: PickledArray, path: str) -> str | None:
    """Return NumPy's code of the elements, or None if a tensor's type implies it."""
    dtype = array.dtype
    if dtype is None or not is_plain_numpy(dtype):
        raise PlacementError(
            f"{path}: a NumPy array of dtype {dtype} cannot be stored; convert it to numbers"
        )
    is_plain = dtype.kind not in "mM" and dtype == dtype.newbyteorder("<")
    return None if is_plain else dtype.str


def _is_text(array: PickledArray) -> bool:
    return array.dtype is not None and array.dtype.kind in "SU"


class _Walk:
    """The walk of `to_node`: containers are encoded by `encode_tree`, all others here."""

    def __init__(self, taken: Container[str]) -> None:
        self._taken = taken
        self.leaves: list[NodeLeaf] = []
        self.left_out: list[str] = []
        self._keys: set[str] = set()

    def encode(self, value: object, path: str) -> Node:
        """Return the node of a value."""
        return encode_tree(value, path=path, on_leaf=self._on_leaf, on_key=self._on_key)

    def _on_key(self, path: str, value: object) -> Node:
        if isinstance(value, Record | PickledTensor):
            raise PlacementError(f"{path}: a {type(value).__name__} as a key cannot be stored")
        return None if type(value) in _PLAIN else self._small(path, value)

    def _on_leaf(self, path: str, value: object) -> Node:
        if type(value) in _PLAIN:
            return None
        match value:
            case PickledTensor():
                return self._tensor(path, value)
            case PickledArray():
                return self._array(path, value)
            case PickledStorage():
                self.leaves.append(NodeLeaf(key=self._key(path), value=value))
                return codec_node("torch.storage", tensor_node(self.leaves[-1].key))
            case PickledMapping():
                return self._mapping(path, value)
            case PickledDeque():
                return self.encode(deque(value, maxlen=value.maxlen), path)
            case TorchSize():
                return self.encode(tuple(value), path)
            case Record():
                return self._record(path, value)
        return self._small(path, value)

    def _small(self, path: str, value: object) -> Node:
        """Return the node of a value that contains no others; None if it is a plain one."""
        match value:
            case EnumValue():
                name = value.name.rpartition(".")[2]
                return enum_node(name, member=value.member, value=self.encode(value.value, path))
            case Constructor():
                is_dtype = value.name.removeprefix("torch.") in TORCH_DTYPES
                return codec_node("torch.dtype" if is_dtype else "type", value.name)
            case PickledNumpyType():
                return codec_node("numpy.dtype", _numpy_name(value, path))
            case datetime.datetime() | datetime.date() | datetime.time():
                return codec_node(f"datetime.{type(value).__name__}", value.isoformat())
            case datetime.timedelta():
                span: list[Node] = [value.days, value.seconds, value.microseconds]
                return codec_node("datetime.timedelta", span)
            case np.generic() if not (is_plain_numpy(value.dtype) or value.dtype.kind in "SU"):
                raise PlacementError(f"{path}: a NumPy scalar of {value.dtype} cannot be stored")
        return None

    def _key(self, path: str) -> str:
        # A member "a.b" may stand next to a member "a" with a member "b".
        key = free_key(path, self._keys, self._taken)
        self._keys.add(key)
        return key

    def _tensor(self, path: str, value: PickledTensor) -> Node:
        if value.attributes:
            self.left_out.append(f"{path}: the Python attributes of the tensor")
        key = self._key(path)
        self.leaves.append(NodeLeaf(key=key, value=value))
        return tensor_node(key)

    def _array(self, path: str, value: PickledArray) -> Node:
        if _is_text(value):
            texts = _elements(value, path)
            form = {"dtype": texts.dtype.str, "shape": [*texts.shape], "v": texts.ravel().tolist()}
            return codec_node("numpy.ndarray", self.encode(form, path))
        code = _code(value, path)
        key = self._key(path)
        self.leaves.append(NodeLeaf(key=key, value=value))
        node = tensor_node(key, tag="array")
        if code is not None:
            node["d"] = code
        return node

    def _record(self, path: str, value: Record) -> Node:
        node = self.encode(_plain_form(value), path)
        if value.name.startswith(_OMEGACONF):
            self.left_out.append(f"{path}: the types and flags of the {value.name}")
        return codec_node(value.name, node)

    def _mapping(self, path: str, value: PickledMapping) -> Node:
        if value.state:
            self.left_out.append(f"{path}: {_names(value.state)} attached to the {value.name}")
        if value.name == "collections.OrderedDict":
            is_plain = all(type(key) is str for key in value)
            return self.encode(dict(value) if is_plain else OrderedDict(value), path)
        if value.name == "collections.Counter":
            counter: Counter[object] = Counter()
            for key, count in value.items():  # Counter's own update would add numbers
                counter[key] = count  # type: ignore[assignment]
            return self.encode(counter, path)
        if value.name != "collections.defaultdict":
            return codec_node(value.name, self.encode(dict(value), path))
        factory = None if value.factory is None else _FACTORIES.get(value.factory.name)
        if factory is None and value.factory is not None:
            raise PlacementError(
                f"{path}: a defaultdict with the factory {value.factory.name} cannot be stored "
                f"without running code on load"
            )
        return self.encode(defaultdict(factory, value), path)


def _numpy_name(value: PickledNumpyType, path: str) -> str:
    try:
        return value.numpy().str
    except ValueError as error:
        raise PlacementError(f"{path}: a numpy.dtype that cannot be stored: {error}") from None


def _names(state: object) -> str:
    """Name the attributes of a state, shortened."""
    if not isinstance(state, dict):
        return "what is"
    return shorten(", ".join(key_name(key) for key in list(state)[:8]))


def _plain_form(record: Record) -> object:
    """Return what a record holds as a plain tree: the shortest form that loses nothing."""
    args, state = record.args, record.state
    if record.name.startswith(_OMEGACONF) and type(state) is dict:
        return _configuration(state)
    match record.name:
        case "pathlib.PurePath":
            return str(PurePosixPath(*map(str, args)))
        case "torch.device" if all(type(arg) in (str, int) for arg in args):
            return ":".join(map(str, args))
        case "_io.BytesIO" if type(state) is tuple and state and not args:
            return state[0]
    if state is None:
        return list(args)
    return {"args": list(args), "state": state} if args else state


def _configuration(state: dict[str, object]) -> object:
    """Return what a container or value of OmegaConf holds, without its references to the outer."""
    content = state.get("_content", state.get("_val"))
    if type(content) is dict:
        return {key: _unwrapped(inner) for key, inner in content.items()}
    return [_unwrapped(inner) for inner in content] if type(content) is list else content


def _unwrapped(value: object) -> object:
    is_wrapped = isinstance(value, Record) and value.name.startswith("omegaconf.nodes.")
    state = value.state if is_wrapped and isinstance(value, Record) else None
    return state.get("_val") if isinstance(state, dict) else value


def _below(value: Any, path: str) -> Iterable[tuple[object, str]]:
    """Return what a value contains, with paths."""
    if isinstance(value, Record):
        return [(_plain_form(value), path)]
    if isinstance(value, dict):
        return _items(value, path)
    if isinstance(value, list | tuple):
        return ((inner, join_path(path, i)) for i, inner in enumerate(value))
    if isinstance(value, set | frozenset):
        return ((inner, path) for inner in value)
    return ()


def _items(value: dict[object, object], path: str) -> Iterator[tuple[object, str]]:
    for key, inner in value.items():
        if type(key) is not str:
            yield key, path
        yield inner, join_path(path, key_name(key))


def _check_tree(value: object, path: str, limit: int) -> None:
    """Raise PlacementError unless the tree is small, shallow and without circles.

    What the pickle shares is counted each time, as the tree repeats it: a small file could
    otherwise unfold into more than any memory.
    """
    left = limit
    open_ids: dict[int, int] = {}
    stack: list[tuple[int, int, Iterator[tuple[object, str]]]] = [(0, 0, iter([(value, path)]))]
    depth = 0
    while stack:
        identity, levels, members = stack[-1]
        item = next(members, None)
        if item is None:
            stack.pop()
            open_ids.pop(identity, None)
            depth -= levels
            continue
        inner, where = item
        left -= 1 + (len(where) + _length(inner)) // 64
        if left < 0:
            raise PlacementError(
                f"{shorten(where)}: the tree is too large to be stored: what the file shares "
                f"unfolds into more than {limit} values"
            )
        if not isinstance(inner, list | dict | tuple | set | frozenset | Record):
            continue
        if id(inner) in open_ids:
            raise PlacementError(f"{shorten(where)}: it contains itself; a cycle cannot be stored")
        levels = 2 if isinstance(inner, _OWN) else 1
        if depth + levels > MAX_DEPTH:
            raise PlacementError(f"{shorten(where)}: nested deeper than {MAX_DEPTH} levels")
        depth += levels
        open_ids[id(inner)] = depth
        stack.append((id(inner), levels, iter(_below(inner, where))))


def _length(value: object) -> int:
    """Return the characters or bytes of a value that is copied as a whole."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if type(value) is int:
        return value.bit_length() // 8
    if isinstance(value, EnumValue):
        return _length(value.value)
    if isinstance(value, np.generic):
        return value.nbytes
    if isinstance(value, PickledArray) and _is_text(value):
        return len(value.data)
    return 0
