"""Optimizers with a form of their own: what their class overrides is used, and then proved.

A plain torch optimizer is saved and restored entry by entry. One whose class overrides `state_dict`
or `load_state_dict`, or that has hooks on them, says by them what its state is; so its form is
saved, is given back through its own `load_state_dict`, and is compared with what it states after
that. Torch's `load_state_dict` casts floating-point state to the parameter's dtype: what only that
changed is put back as it was stored.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import HoldfastError, MismatchError, PlacementError
from holdfast.format.digest import digest128
from holdfast.state.optimizer.param_groups import GroupsKept, hyperparameters
from holdfast.state.optimizer.protocol import local_of

_METHODS = ("state_dict", "load_state_dict")
_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_MAX_NAMED = 5


def has_own_form(optimizer: Any) -> bool:
    """Whether state goes through the optimizer's own methods rather than its attributes."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return True
    for name in _METHODS:
        if name in vars(optimizer):
            return True
        if getattr(type(optimizer), name) is not getattr(torch.optim.Optimizer, name):
            return True
    return any(getattr(optimizer, hooks, None) for hooks in _HOOKS)


def read_form(optimizer: Any) -> Mapping[Any, Any]:
    """What the optimizer states; PlacementError where it fails or gives no mapping."""
    kind = type(optimizer).__name__
    try:
        form = optimizer.state_dict()
    except HoldfastError:
        raise
    except Exception as error:
        raise PlacementError(
            f"{kind}.state_dict() failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(form, Mapping):
        raise PlacementError(
            f"{kind}.state_dict() returned a {type(form).__name__}, not a mapping; nothing of the "
            f"optimizer can be kept"
        )
    return form


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchForm:
    """A form like torch's: state by number, groups that list the numbers, and whatever else.

    `entries`: by `id` of the parameter. `others`: state under other keys than parameters.
    `extra`: further entries of the form. `numbers`: per group, what stands for each parameter.
    """

    entries: Mapping[int, Any]
    others: Mapping[Any, Any]
    groups: Sequence[dict[str, Any]]
    extra: Mapping[Any, Any]
    numbers: Sequence[Sequence[Hashable]]


def torch_form(form: Mapping[Any, Any], optimizer: Any) -> TorchForm | None:
    """The form by parameter, where it is like torch's and fits the optimizer's groups."""
    state, groups = form.get("state"), form.get("param_groups")
    held = optimizer.param_groups
    if not isinstance(state, Mapping) or not isinstance(groups, list) or len(groups) != len(held):
        return None
    numbered: dict[Hashable, int] = {}
    for group, own in zip(groups, held, strict=True):
        listed = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(listed, list) or len(listed) != len(own["params"]):
            return None
        for number, parameter in zip(listed, own["params"], strict=True):
            if not isinstance(number, int | str):
                return None
            numbered[number] = id(parameter)
    return TorchForm(
        entries={numbered[key]: value for key, value in state.items() if key in numbered},
        others={key: value for key, value in state.items() if key not in numbered},
        groups=[hyperparameters(group) for group in groups],
        extra={key: value for key, value in form.items() if key not in ("state", "param_groups")},
        numbers=[list(group["params"]) for group in groups],
    )


def shows(form: object, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every tensor is in the form: itself, a view of its memory, or an equal copy."""
    shown = [value for _, value in tensors_of(form)]
    places = {_place(value) for value in shown}
    left = [tensor for tensor in tensors if _place(tensor) not in places]
    return all(any(_is_equal(tensor, value) for value in shown) for tensor in left)


def tensors_of(tree: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tree of mappings and sequences, with paths."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from tensors_of(child, f"{path}.{name}" if path else str(name))
    elif isinstance(tree, list | tuple):
        for i, child in enumerate(tree):
            yield from tensors_of(child, f"{path}.{i}" if path else str(i))


def load_form(
    optimizer: Any, form: dict[Any, Any], *, where: str, names: Mapping[str, str] | None = None
) -> None:
    """Give a form to the optimizer's own `load_state_dict` and prove that it arrived.

    `names`: how to call paths of the form in messages; what is below them goes on behind.
    The optimizer's groups stay the objects they are. Raises MismatchError, by path below `where`,
    for what the optimizer does not take, and for what it still states though the form lacks it.
    """
    kind = type(optimizer).__name__
    wanted = _seal(form)
    kept = GroupsKept(optimizer)
    try:
        optimizer.load_state_dict(form)
    except HoldfastError:
        raise
    except Exception as error:
        raise MismatchError(
            f"{where}: {kind}.load_state_dict() does not take what is stored: "
            f"{type(error).__name__}: {error}; build the optimizer as the saved run did"
        ) from error
    finally:
        kept.give_back()
    _undo_casts(optimizer, form, read_form(optimizer))
    found = read_form(optimizer)
    wrong = list(_differences(wanted, found, where))
    if wrong:
        # What differs between two calls in a row was never a part of the state.
        again = _seal(read_form(optimizer))
        restless = {path for path, _ in _differences(again, read_form(optimizer), where)}
        wrong = [(path, why) for path, why in wrong if path not in restless]
    if wrong:
        listed = [f"{_named(path, where, names or {})}: {why}" for path, why in wrong[:_MAX_NAMED]]
        raise MismatchError(
            f"{kind}.load_state_dict() did not take what was stored ({len(wrong)} entries): "
            f"{'; '.join(listed)}; mend its load_state_dict or its hooks, so that state_dict() "
            f"after a load states what was loaded"
        )


def _named(path: str, where: str, names: Mapping[str, str]) -> str:
    """A path of the form as the user knows it."""
    inside = path[len(where) + 1 :]
    head = ".".join(inside.split(".")[:2])
    if head in names:
        return f"{where}.{names[head]}{inside[len(head) :]}"
    return path


def _undo_casts(optimizer: Any, form: Mapping[Any, Any], now: Mapping[Any, Any]) -> None:
    """Put stored tensors back where the load changed nothing but their dtype."""
    given, found = torch_form(form, optimizer), torch_form(now, optimizer)
    state = getattr(optimizer, "state", None)
    if given is None or found is None or not isinstance(state, Mapping):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            wanted, shown = given.entries.get(id(parameter)), found.entries.get(id(parameter))
            own = state.get(parameter)
            if isinstance(wanted, Mapping) and isinstance(shown, Mapping) and own is not None:
                _undo_entry_casts(wanted, shown, own, local_of(parameter).device)


def _undo_entry_casts(wanted: Any, shown: Any, own: Any, device: torch.device) -> None:
    keys = wanted.keys() if isinstance(wanted, Mapping) else range(len(wanted))
    for key in keys:
        try:
            value, seen, held = wanted[key], shown[key], own[key]
        except (KeyError, IndexError, TypeError):
            continue
        if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor):
            if held is seen and held.dtype != value.dtype and held.shape == value.shape:
                own[key] = value.to(device)
        elif isinstance(value, dict | list) and type(held) is type(value):
            _undo_entry_casts(value, seen, held, device)


@dataclass(frozen=True, slots=True)
class _Seal:
    """What a tensor was: dtype, shape, and a digest of what this rank holds of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Seal:
        local = local_of(tensor)
        if local.layout is not torch.strided:
            local = local.to_dense()
        flat = local.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return cls(
            tensor.dtype, tuple(tensor.shape), digest128(flat.view(torch.uint8).numpy().data)
        )


def _seal(tree: object) -> object:
    """The tree with a seal for each tensor; what an optimizer does to the tree leaves it alone."""
    if isinstance(tree, torch.Tensor):
        return _Seal.of(tree)
    if isinstance(tree, Mapping):
        return {name: _seal(child) for name, child in tree.items()}
    if isinstance(tree, list | tuple):
        return [_seal(child) for child in tree]
    return tree


def _differences(wanted: object, found: object, path: str) -> Iterator[tuple[str, str]]:
    """Each path at which an optimizer does not state what it was given, and how."""
    if isinstance(wanted, _Seal):
        if not isinstance(found, torch.Tensor):
            yield path, f"stored is a tensor, the optimizer has a {type(found).__name__}"
            return
        has = _Seal.of(found)
        if has.dtype != wanted.dtype or has.shape != wanted.shape:
            yield (
                path,
                (
                    f"stored is {wanted.dtype} {list(wanted.shape)}, the optimizer has {has.dtype} "
                    f"{list(has.shape)}"
                ),
            )
        elif has.digest != wanted.digest:
            yield path, "the optimizer has other values than the stored ones"
    elif isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            yield path, f"stored is a mapping, the optimizer has a {type(found).__name__}"
            return
        for name in wanted:
            if name in found:
                yield from _differences(wanted[name], found[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}", "the optimizer does not take it"
        for name in found:
            if name not in wanted:
                yield f"{path}.{name}", "the optimizer has it still, the checkpoint has not"
    elif isinstance(wanted, list):
        if not isinstance(found, list | tuple) or len(found) != len(wanted):
            yield path, f"stored is a sequence of {len(wanted)}, the optimizer has another"
            return
        for i, (one, other) in enumerate(zip(wanted, found, strict=True)):
            yield from _differences(one, other, f"{path}.{i}")
    elif not _is_same_value(wanted, found):
        yield path, f"stored is {wanted!r}, the optimizer has {found!r}"


def _is_same_value(wanted: object, found: object) -> bool:
    if isinstance(found, torch.Tensor):
        # Torch turns step counters of old checkpoints into tensors.
        if found.numel() != 1 or not isinstance(wanted, int | float):
            return False
        return float(found) == float(wanted)
    if wanted is found or wanted != wanted:
        return wanted is found or found != found
    try:
        return bool(wanted == found)
    except Exception:  # a user's comparison; equal or not cannot be known
        return True


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    local = local_of(tensor)
    if local.layout is not torch.strided or local.numel() == 0:
        return (id(tensor),)
    return (local.untyped_storage().data_ptr(),)


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(one) is not type(other) or one.shape != other.shape or one.dtype != other.dtype:
        return isinstance(one, DTensor) is False and one.numel() == other.numel() == 0
    return _Seal.of(one) == _Seal.of(other)
