"""`nn.Module` as a part of the state: parameters, persistent buffers, extra state."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast.errors import ConfigError, PlacementError
from holdfast.format.values import tag_of
from holdfast.state.markers import Marked, Padded, Stored
from holdfast.state.match.nodes import StoredPart
from holdfast.state.match.templates import PlacedTemplates, zeros_like_target
from holdfast.state.module.load import ModuleLoad, has_user_loader, runs_code
from holdfast.state.module.state_dict import (
    ModuleStateDict,
    RegisteredTensor,
    StateDictEntry,
    forms_of,
    read_state_dict,
    refuse_hidden,
)
from holdfast.state.module.tree import declared_padding, plain_root

Selection = Literal["trainable"] | Callable[[str, object], bool] | None

_BYTES_IO = "$io.BytesIO"


class ModuleState:
    """A module as a part of the state, by choice: some of its entries, or under other names.

        state = {"adapters": ModuleState(model, only="trainable")}

    A module without choice is a part by itself. Tensors come from `state_dict(keep_vars=True)`, so
    that hooks of the module (FSDP2 reshards in one) run. A load writes into the module's own
    parameters and buffers, in place. What the module shows in a form of its own (split, fused,
    packed, copied) is loaded into memory of its own, passed to the module's `load_state_dict`, and
    proved: the state dict then shows what was loaded. Tensors whose padding is declared
    (`declare_padding`) are stored without it.

    A load is as strict over the chosen entries as over all of a module's: entries of the checkpoint
    that are not chosen are 'unexpected' (`ignore_unexpected=True` leaves them and names them in the
    report). `left_out` names what the choice leaves out.

    Args:
        module: The module.
        only: What is stored, and requested by a load. None: everything. "trainable": parameters
            that require a gradient, and every persistent buffer and extra state, which training
            changes, too; frozen parameters are neither stored nor requested, and stay as they are.
            A callable `(name, value) -> bool` chooses by logical name and by the tensor (or extra
            state).
        prefix: Put before every name, as in "decoder."; to load a module's entries from inside of a
            larger module's checkpoint see `FromPart`.

    Raises:
        ConfigError: For no module, another `only`, or a prefix that does not end in a dot.
        PlacementError: At a save, for a chosen parameter or persistent buffer that the module's
            state dict shows in no form.

    Cost:
        A save makes no collectives and copies no tensors, beyond what the module's own `state_dict`
        does.
    """

    def __init__(self, module: nn.Module, *, only: Selection = None, prefix: str = "") -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"ModuleState takes a module, got a {type(module).__name__}")
        if only is not None and only != "trainable" and not callable(only):
            raise ConfigError(
                f"ModuleState: only={only!r} is not 'trainable', a callable (name, value) -> bool, "
                f"or None for everything"
            )
        if not isinstance(prefix, str) or (prefix and not prefix.endswith(".")):
            raise ConfigError(f"ModuleState: prefix={prefix!r} does not end in a dot")
        self._module = plain_root(module)
        self._only = only
        self._prefix = prefix
        self._pending: ModuleLoad | None = None

    def tree(self) -> dict[str, object]:
        """Logical name -> tensor, marked where padding is declared, or extra state.

        Raises:
            PlacementError: Naming parameters and persistent buffers that the module's state dict
                shows in no form.
        """
        shown = self._read()
        padded = declared_padding(self._module)  # after the hooks, which may replace parameters
        result: dict[str, object] = {}
        for entry in self._selected(shown):
            value = entry.value
            if isinstance(value, torch.Tensor) and not entry.is_extra:
                declared = padded.find(value, entry.name)
                value = value if declared is None else Padded(value, declared)
            elif isinstance(value, io.BytesIO):
                value = {_BYTES_IO: value.getvalue()}
            result[self._prefix + entry.name] = value
        return result

    def template(self, stored: StoredPart) -> dict[str, object]:
        """The module's own tensors as targets, new ones for forms; extra state as it is stored."""
        shown = self._read()
        padded = declared_padding(self._module)
        nodes = dict(stored.children(stored.node) or ())
        templates = PlacedTemplates(in_place=False)
        entries = self._selected(shown)
        pending = ModuleLoad(self._module, shown, entries=entries, hidden=self._hidden(shown))
        result: dict[str, object] = {}
        for entry in entries:
            name = self._prefix + entry.name
            target: object = entry.value
            if name not in nodes:
                # Missing, or absent with the caller's consent: the module keeps it, no zeros.
                pending.absent.add(entry.name)
            elif entry.backing is None and not entry.is_form:
                below = StoredPart(nodes[name], stored.tensors, f"{stored.name}.{name}")
                target = templates.template(target, below)
            elif isinstance(target, torch.Tensor | Marked):
                declared = None
                if isinstance(target, torch.Tensor):
                    declared = padded.find(target, entry.name)
                shape = _stored_shape(nodes[name], stored)
                if entry.is_form and declared is not None and shape == declared:
                    shape = None  # memory for the padding, too
                if entry.is_form or (declared is None and _may_grow(entry, shape)):
                    pending.copied.add(entry.name)
                    target = _form_target(target, shape)
                if declared is not None and isinstance(target, torch.Tensor):
                    target = Padded(target, declared)
            result[name] = target
        self._pending = pending
        return result

    def restore(self, tree: object) -> None:
        """Pass on what is no tensor of the module's own, run its hooks, and prove the result.

        Raises:
            MismatchError: Naming the entries that the module did not take.
        """
        pending, self._pending = self._pending, None
        if not isinstance(tree, Mapping) or pending is None:
            raise PlacementError(f"the stored state of {type(self._module).__name__} is no mapping")
        loaded = {
            entry.name: _loaded(tree[self._prefix + entry.name])
            for entry in pending.entries
            if self._prefix + entry.name in tree and entry.name not in pending.absent
        }
        if any(entry.backing is None for entry in pending.entries) or (
            pending.copied or runs_code(self._module)
        ):
            pending.load_entries(loaded)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the parameters and persistent buffers that the selection leaves out, sorted."""
        shown = read_state_dict(self._module)
        return tuple(
            sorted(
                {held.name for held in shown.registered if held.is_persistent}
                - {entry.name for entry in self._selected(shown)}
                - {held.name for held in self._hidden(shown)}
            )
        )

    def _read(self) -> ModuleStateDict:
        """The module's state dict, in which nothing that is selected is missing."""
        shown = read_state_dict(self._module)
        refuse_hidden(shown, self._module, self._is_selected)
        return shown

    def _selected(self, shown: ModuleStateDict) -> list[StateDictEntry]:
        """The entries that are stored and loaded."""
        if self._only is None:
            return list(shown.entries.values())
        if callable(self._only):
            return [e for e in shown.entries.values() if self._only(e.name, e.value)]
        owners = {held.name: held for held in shown.registered}
        any_hidden = [held.tensor.requires_grad for held in forms_of(shown, self._module)]
        result = []
        for entry in shown.entries.values():
            owner = entry.backing or next(_owners(entry.name, owners), None)
            if owner is None:
                keep = entry.is_extra or not any_hidden or any(any_hidden)
            else:
                keep = self._is_selected(owner.name, owner.tensor)
            if keep:
                result.append(entry)
        return result

    def _hidden(self, shown: ModuleStateDict) -> list[RegisteredTensor]:
        """Registered tensors that come back through forms, as far as they are selected."""
        result = forms_of(shown, self._module)
        return [held for held in result if self._is_selected(held.name, held.tensor)]

    def _is_selected(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a registered tensor is stored and loaded."""
        if callable(self._only):
            return bool(self._only(name, tensor))
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        return self._only is None or not frozen


def _loaded(value: object) -> object:
    """What the module is given for an entry, as it was saved."""
    if isinstance(value, dict) and value.keys() == {_BYTES_IO}:
        return io.BytesIO(value[_BYTES_IO])
    return value


def _owners(name: str, registered: Mapping[str, RegisteredTensor]) -> Iterator[RegisteredTensor]:
    """The registered tensors that a form is named after: `weight` for `weight.scale`, too."""
    while name:
        if name in registered:
            yield registered[name]
        name = name.rpartition(".")[0]


def _form_target(value: torch.Tensor | Marked, shape: tuple[int, ...] | None) -> object:
    """New memory for a form, placed like the module's; as it is stored where `shape` is another.

    The shape of a form may depend on values (packed and grown ones); the module is the judge.
    """
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
        if shape not in (None, tuple(value.shape)):
            return Stored()
        if is_lazy(value):
            return value
    dtype = value.dtype if isinstance(value, torch.Tensor) else value.local.dtype
    return zeros_like_target(value, dtype)


def _may_grow(entry: StateDictEntry, shape: tuple[int, ...] | None) -> bool:
    """Whether a tensor has another shape than stored and its module can take that: observers do."""
    value, held = entry.value, entry.backing
    if held is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    if is_lazy(value) or shape in (None, tuple(value.shape)):
        return False
    return has_user_loader(held.owner)


def _stored_shape(node: object, stored: StoredPart) -> tuple[int, ...] | None:
    """The global shape of a stored tensor; None for anything else."""
    if isinstance(node, dict) and tag_of(node) == "tensor":
        return stored.tensors[str(node["k"])][1]
    return None
