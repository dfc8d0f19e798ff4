"""Asking back: whether an owner states what it was given.

An owner that takes a state by its own code may leave out a part of it, so the load asks for the
state again and compares. What differs between two questions in a row was never a part of the state.
Tensors are compared by digests, taken before any code of the owner runs: it may write to what it
is given.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast._torch import write_counter
from holdfast.errors import HoldfastError
from holdfast.format.values import Codecs, Node, encode_tree, key_name, leaf_node, node_bytes
from holdfast.state.markers import Marked, Padded, PerRank, Transient, Union, as_loaded
from holdfast.state.tensor_elements import (
    array_tensor,
    equal_trees,
    local_of,
    memory_key,
    tensor_digest,
)

_MAX_NAMED = 5
_PLAIN = (type(None), bool, int, float, str)


class Difference(NamedTuple):
    """What is wrong at one path."""

    path: str
    why: str
    is_surplus: bool = False
    """True if the owner has something there of which it was given nothing."""


class _Volatile:
    """The record of a value that no checkpoint keeps."""


_VOLATILE = _Volatile()


class _TensorRecord(NamedTuple):
    """What tells a tensor from others, as it was at one moment."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    place: object = None
    """Memory and counter of writes: the same ones have the same elements."""

    @classmethod
    def of(cls, tensor: torch.Tensor, *, before: object = None) -> _TensorRecord:
        """Return the record of a tensor as it is now.

        Args:
            before: The last record at its path, whose digest is taken if nothing was written since.
        """
        place = _place(tensor)
        if isinstance(before, _TensorRecord) and place is not None and before.place == place:
            return before
        return cls(str(tensor.dtype), tuple(tensor.shape), tensor_digest(tensor), place)


class _Encoded(NamedTuple):
    """A value of any other type that a checkpoint can hold, as it is stored."""

    kind: str
    data: bytes


def _place(tensor: torch.Tensor) -> object:
    """Return where a tensor's elements are and how often it was written; None if not known."""
    local = local_of(tensor)
    key = None if tensor.is_inference() else memory_key(local)
    return key and (key, write_counter(tensor), write_counter(local))


def recorded(tree: object, *, codecs: Codecs | None = None, before: object = None) -> Any:
    """Return what a tree states now; no later change of it changes the record.

    Args:
        tree: Of containers, values, tensors, arrays and markers.
        codecs: The types that are stored by the caller's own rules.
        before: An earlier record of the same owner: tensors that nobody has written since are not
            read again.

    Cost: reads every tensor once; no copies.
    """
    tree = _unmarked(tree)
    if isinstance(tree, torch.Tensor):
        return _TensorRecord.of(tree, before=before)
    if type(tree) in _PLAIN or isinstance(tree, _Volatile):
        return tree
    known = codecs if codecs is not None else Codecs()
    if known.codec_for(type(tree)) is None:
        if isinstance(tree, Mapping):
            earlier = before if isinstance(before, dict) else {}
            return {
                name: recorded(child, codecs=known, before=earlier.get(name))
                for name, child in tree.items()
            }
        if isinstance(tree, list | tuple):
            was = before if isinstance(before, list) else []
            padded = [*was, *[None] * (len(tree) - len(was))]
            return [
                recorded(child, codecs=known, before=old)
                for child, old in zip(tree, padded, strict=False)
            ]
        if isinstance(tree, np.generic) and isinstance(tree.item(), bool | int | float):
            return tree.item()
        if isinstance(tree, io.BytesIO):
            return tree.getvalue()
    return _encoded(tree, known)


def _unmarked(tree: object) -> object:
    """Return what a marker wraps, as a load gives it to the owner."""
    while isinstance(tree, Padded | PerRank | Union):
        if isinstance(tree, Padded):
            tree = tree.value
        else:
            tree = tree.tree if isinstance(tree, PerRank) else tree.mapping
    if isinstance(tree, Transient):
        return _VOLATILE
    return as_loaded(tree) if isinstance(tree, Marked) else tree


def _encoded(value: object, codecs: Codecs) -> object:
    """Return a value in its stored form; the value itself if no checkpoint can hold it."""

    def leaf(path: str, inside: object) -> Node:
        tensor = inside.local if isinstance(inside, Marked) else inside
        code: object = None
        if isinstance(tensor, np.ndarray) and codecs.codec_for(type(tensor)) is None:
            tensor, code = array_tensor(path, tensor)
        if not isinstance(tensor, torch.Tensor):
            return None
        return leaf_node("record", v=[*map(str, _TensorRecord.of(tensor)[:3]), code])

    try:
        if isinstance(value, np.ndarray) and codecs.codec_for(type(value)) is None:
            tensor, code = array_tensor("", value)
            record = _TensorRecord.of(tensor)
            return record._replace(dtype=f"{record.dtype} {code}" if code else record.dtype)
        node = encode_tree(value, codecs=codecs, on_leaf=leaf)
    except HoldfastError:
        return value
    return _Encoded(type(value).__name__, node_bytes(node))


def differences(expected: object, shown: object, path: str, *, owner: str) -> Iterator[Difference]:
    """Yield each path at which a record differs from that of what was given, and how.

    Numbers are equal if their values are, whatever their types, and so are a number and a tensor
    of one element: torch turns step counters of old checkpoints into tensors.

    Args:
        expected: Record of what was given.
        shown: Record of what the owner states.
        path: Of both.
        owner: As messages call it.
    """
    if isinstance(shown, _Volatile):
        return
    if isinstance(expected, dict):
        if not isinstance(shown, dict):
            yield Difference(path, f"stored is a mapping, {owner} has {_in_words(shown)}")
            return
        for name, value in expected.items():
            below = f"{path}.{key_name(name)}"
            if name in shown:
                yield from differences(value, shown[name], below, owner=owner)
            else:
                yield Difference(below, f"{owner} does not take it")
        for name in shown:
            if name not in expected and not isinstance(shown[name], _Volatile):
                below = f"{path}.{key_name(name)}"
                yield Difference(
                    below, f"{owner} still has it, the checkpoint has not", is_surplus=True
                )
    elif isinstance(expected, list):
        if not isinstance(shown, list) or len(shown) != len(expected):
            yield Difference(
                path, f"stored is a sequence of {len(expected)}, {owner} has {_in_words(shown)}"
            )
            return
        for i, (one, other) in enumerate(zip(expected, shown, strict=True)):
            yield from differences(one, other, f"{path}.{i}", owner=owner)
    elif isinstance(expected, _TensorRecord) and isinstance(shown, _TensorRecord):
        if expected[:2] != shown[:2]:
            yield Difference(
                path, f"stored is {_in_words(expected)}, {owner} has {_in_words(shown)}"
            )
        elif expected.digest != shown.digest:
            yield Difference(path, f"{owner} has other values than the stored ones")
    elif not _is_same_value(expected, shown):
        yield Difference(path, f"stored is {_in_words(expected)}, {owner} has {_in_words(shown)}")


def _in_words(record: object) -> str:
    """Return a record for a message."""
    if isinstance(record, _TensorRecord):
        return f"a tensor, {record.dtype} {list(record.shape)}"
    if isinstance(record, _Encoded):
        return f"a {record.kind} of another value"
    if isinstance(record, dict):
        return f"a mapping of {len(record)}"
    if isinstance(record, list):
        return f"a sequence of {len(record)}"
    text = repr(record)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _is_same_value(expected: object, shown: object) -> bool:
    """Return True if an owner shows the value that it was given."""
    if isinstance(expected, _TensorRecord) and isinstance(shown, int | float):
        expected, shown = shown, expected
    if isinstance(expected, int | float) and isinstance(shown, _TensorRecord):
        return math.prod(shown.shape) == 1 and shown.digest == _digest_of(expected, shown)
    if isinstance(expected, float) and isinstance(shown, float) and expected == shown == 0.0:
        return math.copysign(1.0, expected) == math.copysign(1.0, shown)
    try:
        return equal_trees(expected, shown)
    except Exception:  # a user's comparison, of a value that no checkpoint can hold
        return False


def _digest_of(number: float, shown: _TensorRecord) -> str | None:
    """Return the digest of a number as a tensor of the record's type; None if it cannot hold it."""
    dtype = getattr(torch, shown.dtype.removeprefix("torch."), None)
    if dtype is None:  # of an array of dates
        return None
    wide = torch.float64 if isinstance(number, float) else None
    try:
        made = torch.tensor(number, dtype=wide).to(dtype)
    except (OverflowError, RuntimeError, ValueError):  # an integer beyond 64 bits
        return None
    is_held = made.item() == number or number != number
    return tensor_digest(made.reshape(shown.shape)) if is_held else None


def same_containers(tree: Any) -> Any:
    """Return new dicts, lists and streams of bytes with the same members.

    For an owner that takes entries out of what it is given, and may be given it once more.
    """
    if isinstance(tree, io.BytesIO):
        return io.BytesIO(tree.getvalue())
    if isinstance(tree, dict | list):
        tree = copy.copy(tree)  # with torch's versions of modules, if it has any
        for name in list(tree) if isinstance(tree, dict) else range(len(tree)):
            tree[name] = same_containers(tree[name])
    return tree


class AskedBack(NamedTuple):
    """What an owner states after it was given a state."""

    wrong: list[Difference]
    """Where that is not what it was given."""
    is_changed_by_reading: bool
    """True if two questions in a row have had two answers."""


def ask_back(
    expected: object,
    ask: Callable[[], object],
    *,
    where: str,
    owner: str,
    codecs: Codecs | None = None,
) -> AskedBack:
    """Ask an owner for its state, and compare it with the record of what it was given.

    Always asks twice, on all ranks alike: the answer may take collectives.

    Args:
        expected: The record, from before it was given.
        ask: Returns the owner's state.
        where: Path of the state.
        owner: As messages call it.
        codecs: As in `recorded`.
    """
    shown = ask()  # kept until the second answer, so that a new tensor there has a new place
    first = recorded(shown, codecs=codecs)
    second = recorded(ask(), codecs=codecs, before=first)
    unstable = {each.path for each in differences(first, second, where, owner=owner)}
    unstable |= {each.path for each in differences(second, first, where, owner=owner)}
    below = tuple(f"{path}." for path in unstable)
    wrong = [
        each
        for each in differences(expected, first, where, owner=owner)
        if each.path not in unstable and not each.path.startswith(below)
    ]
    return AskedBack(wrong, bool(unstable))


def listed(wrong: list[Difference]) -> str:
    """Return the first differences in words."""
    return "; ".join(f"{each.path}: {each.why}" for each in wrong[:_MAX_NAMED])
