"""What modules and optimizers keep in plain attributes: a load does not bring it back.

A counter of steps, a queue of negatives in a list, messages in a dict, a flag "initialised": torch
stores none of them, and a run that resumes silently trains differently. No type tells whether an
attribute is state or a setting. But a setting stays, and what *changes* between two saves of one
object is state or a cache. Such an attribute is named, once, unless a state dict shows it in some
form (extra state, code of the module's or the optimizer's).
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import is_dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from holdfast._torch import registered_in, storage_id, write_counter
from holdfast.state.module_tree import walk_all
from holdfast.state.tensor_elements import equal_bits, local_of

_VALUES = (bool, int, float, str)
_PLAIN = frozenset((bool, int, str, type(None)))
"""Types of values that are their own tokens."""
_KINDS = (*_VALUES, torch.Tensor, np.ndarray)
_MAPPINGS = frozenset((dict, defaultdict, OrderedDict, Counter))
_SEQUENCES = frozenset((list, tuple, deque))
_SETS = (set, frozenset)
_MAX_DEPTH = 3
_MAX_MEMBERS = 256
"""Looked at in a container, besides its length: the cost is bounded, the watch is a watch."""
_MAX_ARRAY_NBYTES = 1 << 16
_OWN = frozenset(vars(nn.Module()))
"""What every module has: its tables, its hooks, `training`."""


class _WithoutGroups(torch.optim.Optimizer):
    """An optimizer as it is before its first group: adding one imports torch's compiler."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Do nothing."""


_OPTIMIZERS_OWN = frozenset(vars(_WithoutGroups([{}], {}))) | {"_opt_called"}
"""What every optimizer has, and what torch's schedules set in it."""
_SETTINGS = ("p", "dropout", "momentum")
"""Settings of torch's own modules that a training loop may change step by step."""
_LIBRARIES = ("torch.", "builtins", "typing", "abc", "holdfast.")


class PlainAttributes:
    """Notices attributes that change between the looks at modules and optimizers; see above.

    Keeps what it saw by object, weakly: modules made again for each save are never compared.
    By identity, because the hash of a module may change with its state (torchmetrics).

    Args:
        kinds: types of values that an attribute must hold to be named.
    """

    def __init__(self, *, kinds: Any = _KINDS) -> None:
        """See nothing yet."""
        self._kinds = kinds
        self._seen: dict[str, dict[int, tuple[weakref.ref[Any], dict[str, object]]]] = {}
        """The last look at each part: by `id`, the object and its attributes."""
        self._settled: set[str] = set()
        self._watched: dict[type, tuple[str, ...] | None] = {}
        """By class the attributes that are looked at; None: all but those of every module."""

    def look(self, part: str, root: nn.Module, made: Mapping[str, object]) -> list[str]:
        """Compare the modules of a part with the look before.

        Args:
            part: Its name.
            root: Its module.
            made: What its state dict shows and does not hold itself: extra state, forms, by name.

        Returns:
            The path of each attribute that changed, holds something and is not shown; each path
            once.

        Cost: 2 to 7 µs for each module with code of the user's, and what it keeps in containers;
        1.5 µs for one of torch's that has a setting which training may change.
        """
        changed = self._changed(part, root.modules(), own=_OWN)
        if not changed:
            return []
        paths = {
            f"{part}.{prefix}{name}": (module, name)
            for prefix, _, module, is_wrapper in walk_all(root)
            if not is_wrapper
            for name in changed.get(id(module), ())
        }
        shown = None

        def shown_by(_: object) -> _Shown:
            nonlocal shown
            shown = shown or _Shown(made, memory=_registered_memory(root))
            return shown

        return self._named(paths, shown_by)

    def look_at_optimizers(
        self, part: str, optimizers: Sequence[Any], form_of: Callable[[Any], Mapping[Any, Any]]
    ) -> list[str]:
        """Compare the optimizers of a part with the look before, as `look` does with modules.

        Args:
            part: Its name.
            optimizers: Those that keep its state.
            form_of: Returns what a save reads of an optimizer; called if an attribute changed.
        """
        optimizers = [each for each in optimizers if hasattr(each, "__dict__")]
        changed = self._changed(part, optimizers, own=_OPTIMIZERS_OWN)
        paths = {
            f"{part}.{f'{number}.' if len(optimizers) > 1 else ''}{name}": (optimizer, name)
            for number, optimizer in enumerate(optimizers)
            for name in changed.get(id(optimizer), ())
        }
        return self._named(paths, lambda optimizer: _shown_by_optimizer(optimizer, form_of))

    def look_at_modules(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        made: Mapping[str, object],
        *,
        memory: Collection[int] = (),
    ) -> list[str]:
        """Compare modules of any trees with the look before, as `look` does with those of one.

        Args:
            modules: each with the start of its attributes' paths; those inside are not looked at.
            made: what is shown elsewhere, by name.
            memory: storages of tensors that are shown elsewhere.
        """
        changed = self._changed("", (module for _, module in modules), own=_OWN)
        paths = {
            f"{start}{name}": (module, name)
            for start, module in modules
            for name in changed.get(id(module), ())
        }
        shown = _Shown(made, memory=memory) if paths else None
        return self._named(paths, lambda _: cast(_Shown, shown))

    def _changed(
        self, part: str, owners: Iterable[Any], *, own: frozenset[str]
    ) -> dict[int, list[str]]:
        """Return the attributes that differ from the look before, by `id` of their object."""
        before, self._seen[part] = self._seen.get(part, {}), {}
        changed: dict[int, list[str]] = {}
        for owner in owners:
            kind, held = type(owner), vars(owner)
            if kind not in self._watched:
                settings = tuple(name for name in _SETTINGS if name in held)
                self._watched[kind] = None if _is_users(kind) else settings
            watched = self._watched[kind]
            if watched is None:
                now = {
                    name: value if type(value) in _PLAIN else _token(value, _MAX_DEPTH)
                    for name, value in held.items()
                    if name not in own
                }
            elif watched:
                now = {name: held.get(name) for name in watched}
            else:
                continue
            self._seen[part][id(owner)] = weakref.ref(owner), now
            ref, then = before.get(id(owner), (None, now))
            if ref is not None and ref() is owner and then != now:
                changed[id(owner)] = [
                    name
                    for name in now
                    if then.get(name) != now[name] and not name.startswith("_holdfast_")
                ]
        return changed

    def _named(
        self, paths: Mapping[str, tuple[Any, str]], shown_by: Callable[[Any], _Shown]
    ) -> list[str]:
        """Return those attributes that hold something and are not shown, each once."""
        undecided = {
            path: (owner, name)
            for path, (owner, name) in paths.items()
            if path not in self._settled and _holds_any(vars(owner)[name], self._kinds)
        }
        self._settled |= undecided.keys()
        return [
            path
            for path, (owner, name) in undecided.items()
            if not shown_by(owner).has(owner, name)
        ]


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
    if kind in _SETS:
        return len(value)  # type: ignore[arg-type]
    members = _members(value) if depth else None
    if members is None:
        return None
    first = [(name, _token(child, depth - 1)) for name, child in islice(members, _MAX_MEMBERS)]
    return len(value) if isinstance(value, Sized) else 0, first


def _members(value: object) -> Iterable[tuple[object, object]] | None:
    """Return what a container or a record of the user's has, with names; None for anything else.

    Names are texts and numbers; another key, whose comparison may be anything, counts as None.
    """
    if type(value) in _MAPPINGS:
        items = cast(dict[object, object], value).items()
        return ((key if type(key) in _PLAIN else None, child) for key, child in items)
    if type(value) in _SEQUENCES or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return ((None, child) for child in cast(Iterable[object], value))
    if type(value) is SimpleNamespace or (is_dataclass(value) and not isinstance(value, type)):
        return vars(value).items() if hasattr(value, "__dict__") else None
    return None


def _is_users(kind: type) -> bool:
    """Return True if a class of modules has code that is neither torch's nor this package's."""
    return any(not each.__module__.startswith(_LIBRARIES) for each in kind.__mro__)


class _Shown:
    """What a state dict makes, and the memory of the tensors that are stored as they are."""

    def __init__(self, made: Mapping[Any, object], *, memory: Collection[Any]) -> None:
        self._values: dict[str, set[tuple[type, object]]] = {}
        """Numbers and texts that are shown, by the name nearest to them."""
        for key, value in _leaves(made, _KINDS):
            single = _single(value)
            if single is not None:
                self._values.setdefault(_bare(key), set()).add((type(single), single))
        self._tensors = [each for _, each in _leaves(made, torch.Tensor)]
        self._arrays = [each for _, each in _leaves(made, np.ndarray)]
        self._memory = memory

    def has(self, module: object, name: str) -> bool:
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


def _registered_memory(root: nn.Module) -> set[Any]:
    return {
        storage_id(local_of(tensor))
        for *_, module, _ in walk_all(root)
        for tensor in registered_in(module).values()
        if _has_storage(tensor)
    }


def _shown_by_optimizer(optimizer: Any, form_of: Callable[[Any], Mapping[Any, Any]]) -> _Shown:
    """Return what a save reads of an optimizer.

    In `state` and `param_groups` an attribute is the number of its name, or the tensor that has its
    memory: steps, settings and moments are equal by chance.
    """
    form = form_of(optimizer)
    usual = {key: form[key] for key in ("state", "param_groups") if key in form}
    names = {_bare(name) for name in vars(optimizer)}
    made: dict[str, object] = {"": {key: form[key] for key in form if key not in usual}}
    for key, value in _leaves(usual, _VALUES):
        if _bare(key) in names:
            made.setdefault(key, [])
            cast(list[object], made[key]).append(value)
    tensors = [each for _, each in _leaves(usual, torch.Tensor)]
    memory = {storage_id(local_of(each)) for each in tensors if _has_storage(each)}
    return _Shown(made, memory=memory)


def _single(value: Any) -> bool | int | float | str | None:
    """Return a value that is one number or text, also in an array or tensor of one element."""
    if isinstance(value, np.ndarray):
        return value.item() if value.size == 1 else None
    if isinstance(value, torch.Tensor):
        return local_of(value).item() if value.numel() == 1 and not value.is_meta else None
    return value  # type: ignore[no-any-return]


def _bare(name: str) -> str:
    return name.rsplit(".", 1)[-1].strip("_")


def _holds_any(value: object, kinds: Any) -> bool:
    return any(True for _ in _leaves(value, kinds))


def _has_storage(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and local_of(tensor).layout is torch.strided


def _leaves(
    tree: object, kinds: Any, key: str = "", depth: int = _MAX_DEPTH
) -> Iterator[tuple[str, Any]]:
    """Yield the objects of some types in a tree of containers, each with the nearest text key.

    Of records within records `depth`, as they may refer to each other in a circle.
    """
    if isinstance(tree, kinds):
        yield key, tree
    elif isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from _leaves(child, kinds, name if isinstance(name, str) else key, depth)
    elif isinstance(tree, (*_SETS, list, tuple, deque)):
        for child in tree:
            yield from _leaves(child, kinds, key, depth)
    elif depth:
        for name, child in _members(tree) or ():
            yield from _leaves(child, kinds, name if isinstance(name, str) else key, depth - 1)
