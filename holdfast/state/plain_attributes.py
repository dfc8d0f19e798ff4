"""What modules keep in plain attributes: no state dict shows it, so a load does not bring it back.

A counter of steps, a queue of negatives in a list, messages in a dict, a flag "initialised": torch
stores none of them, and a run that resumes silently trains differently. No type tells whether an
attribute is state or a setting. But a setting stays, and what *changes* between two saves of one
module object is state or a cache. Such an attribute is named, once, unless a state dict shows it in
some form (extra state, code of the module's).
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from holdfast._torch import storage_id, write_counter
from holdfast.state.module_tree import registered_in, walk_all
from holdfast.state.tensor_elements import equal_bits, local_of

_VALUES = (bool, int, float, str)
_PLAIN = frozenset((bool, int, str, type(None)))
"""Types of values that are their own tokens."""
_KINDS = (*_VALUES, torch.Tensor, np.ndarray)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MAX_DEPTH = 3
_MAX_MEMBERS = 256
"""Looked at in a container, besides its length: the cost is bounded, the watch is a watch."""
_MAX_ARRAY_NBYTES = 1 << 16
_OWN = frozenset(vars(nn.Module()))
"""What every module has: its tables, its hooks, `training`."""
_LIBRARIES = ("torch.", "builtins", "typing", "abc", "holdfast.")


class PlainAttributes:
    """Notices attributes that change between the looks at modules; see above.

    Keeps what it saw by module object, weakly: modules made again for each save are never compared.
    By identity, because the hash of a module may change with its state (torchmetrics).
    """

    def __init__(self) -> None:
        self._seen: dict[str, dict[int, tuple[weakref.ref[nn.Module], dict[str, object]]]] = {}
        """The last look at each part: by `id`, the module and its attributes."""
        self._settled: set[str] = set()
        self._users: dict[type, bool] = {}
        """Whether a class has code of the user's, by class."""

    def look(self, part: str, root: nn.Module, made: Mapping[str, object]) -> list[str]:
        """Compare the modules of a part with the look before.

        Args:
            part: Its name.
            root: Its module.
            made: What its state dict shows and does not hold itself: extra state, forms, by name.

        Returns:
            The path of each attribute that changed, holds something and is not shown; each path
            once.

        Cost: 2 to 7 µs for each module with code of the user's, and what it keeps in containers.
        """
        before, self._seen[part] = self._seen.get(part, {}), {}
        changed: dict[int, list[str]] = {}
        for module in root.modules():
            kind = type(module)
            if kind not in self._users:
                self._users[kind] = _is_users(kind)
            if not self._users[kind]:
                continue
            now = {
                name: value if type(value) in _PLAIN else _token(value, _MAX_DEPTH)
                for name, value in vars(module).items()
                if name not in _OWN
            }
            self._seen[part][id(module)] = weakref.ref(module), now
            ref, then = before.get(id(module), (None, now))
            if ref is not None and ref() is module and then != now:
                changed[id(module)] = [name for name in now if then.get(name) != now[name]]
        return self._named(part, root, changed, made) if changed else []

    def _named(
        self,
        part: str,
        root: nn.Module,
        changed: Mapping[int, list[str]],
        made: Mapping[str, object],
    ) -> list[str]:
        """Return those attributes that hold something and are not shown, each once."""
        paths = {
            f"{part}.{prefix}{name}": (module, name)
            for prefix, _, module, is_wrapper in walk_all(root)
            if not is_wrapper
            for name in changed.get(id(module), ())
            if _holds_any(vars(module)[name])
        }
        undecided = paths.keys() - self._settled
        if not undecided:
            return []
        shown = _Shown(root, made)
        self._settled |= undecided
        return [path for path, at in paths.items() if path in undecided and not shown.has(*at)]


class _TensorToken:
    """A tensor as it is now: the object, and how often it was written in place."""

    __slots__ = ("_num_writes", "_ref")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ref = weakref.ref(tensor)
        self._num_writes = 0 if tensor.is_inference() else write_counter(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _TensorToken) or self._num_writes != other._num_writes:
            return False
        tensor = self._ref()
        return tensor is not None and tensor is other._ref()

    __hash__ = None  # type: ignore[assignment]


def _token(value: object, depth: int) -> object:
    """Return what differs if a value has changed; None for what is not looked at."""
    kind = type(value)
    if kind is float and math.isnan(value):  # type: ignore[arg-type]
        return "nan"
    if kind in _PLAIN or kind is float:
        return value
    if isinstance(value, torch.Tensor):
        # A tensor that was computed from others (`weight` of weight_norm) is not state.
        is_state = not isinstance(value, nn.Parameter) and value.grad_fn is None
        return _TensorToken(value) if is_state else None
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.nbytes > _MAX_ARRAY_NBYTES:
            return id(value)
        return value.shape, zlib.crc32(value.tobytes())
    if kind in (set, frozenset):
        return len(value)  # type: ignore[arg-type]
    if kind in _CONTAINERS and depth:
        members: Any = value.items() if kind is dict else value  # type: ignore[attr-defined]
        first = [_token(member, depth - 1) for member in islice(members, _MAX_MEMBERS)]
        return len(value), first  # type: ignore[arg-type]
    return None


def _is_users(kind: type) -> bool:
    """Return True if a class of modules has code that is neither torch's nor this package's."""
    return any(not each.__module__.startswith(_LIBRARIES) for each in kind.__mro__)


class _Shown:
    """What a module's state dict makes, and the memory that is registered in the module."""

    def __init__(self, root: nn.Module, made: Mapping[str, object]) -> None:
        self._values: dict[str, set[tuple[type, object]]] = {}
        """Numbers and texts that are shown, by the name nearest to them."""
        for key, value in _leaves(made, _KINDS):
            single = _single(value)
            if single is not None:
                self._values.setdefault(_bare(key), set()).add((type(single), single))
        self._tensors = [each for _, each in _leaves(made, torch.Tensor)]
        self._arrays = [each for _, each in _leaves(made, np.ndarray)]
        self._memory = {
            storage_id(local_of(tensor))
            for *_, module, _ in walk_all(root)
            for tensor in registered_in(module).values()
            if _has_storage(tensor)
        }

    def has(self, module: nn.Module, name: str) -> bool:
        """Return True if all of an attribute is shown, or is memory of a registered tensor.

        A number under the name of another attribute is that one's: counters run in step.
        """
        others = {_bare(other) for other in vars(module)} - {_bare(name)}
        values = [each for key, each in self._values.items() if key not in others]
        return all(
            any((type(each), each) in those for those in values)
            if isinstance(each, _VALUES)
            else self._has_array(each)
            for _, each in _leaves(vars(module)[name], _KINDS)
        )

    def _has_array(self, array: torch.Tensor | np.ndarray) -> bool:
        if isinstance(array, np.ndarray):
            return any(np.array_equal(array, each) for each in self._arrays)
        if _has_storage(array) and storage_id(local_of(array)) in self._memory:
            return True
        return any(equal_bits(array, each) for each in self._tensors)


def _single(value: Any) -> bool | int | float | str | None:
    """Return a value that is one number or text, also in an array or tensor of one element."""
    if isinstance(value, np.ndarray):
        return value.item() if value.size == 1 else None
    if isinstance(value, torch.Tensor):
        return local_of(value).item() if value.numel() == 1 and not value.is_meta else None
    return value  # type: ignore[no-any-return]


def _bare(name: str) -> str:
    return name.rsplit(".", 1)[-1].strip("_")


def _holds_any(value: object) -> bool:
    return any(True for _ in _leaves(value, _KINDS))


def _has_storage(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and local_of(tensor).layout is torch.strided


def _leaves(tree: object, kinds: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the objects of some types in a tree of containers, each with the nearest text key."""
    if isinstance(tree, kinds):
        yield key, tree
    elif isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from _leaves(child, kinds, name if isinstance(name, str) else key)
    elif isinstance(tree, _CONTAINERS):
        for child in tree:
            yield from _leaves(child, kinds, key)
