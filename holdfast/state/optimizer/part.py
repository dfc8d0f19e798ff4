"""An optimizer as a part of the state: everything by parameter name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from holdfast.errors import ConfigError, MismatchError, PlacementError
from holdfast.state.markers import Fresh, Stored, Transient
from holdfast.state.match.mirror import mirror, owner_of, placed_like
from holdfast.state.match.stored import StoredPart, StoredTensor
from holdfast.state.optimizer.entries import (
    entries_of,
    entry_targets,
    facts_of,
    main_target,
    marked,
    on_device_of,
    placed_target,
    refuse_other_shape,
)
from holdfast.state.optimizer.fresh import absent_groups, as_built, why_fresh
from holdfast.state.optimizer.inner import inner_optimizers, unwrapped
from holdfast.state.optimizer.own_form import (
    TorchForm,
    has_own_form,
    load_form,
    read_form,
    shows,
    tensors_of,
    torch_form,
)
from holdfast.state.optimizer.owners import Owners
from holdfast.state.optimizer.param_groups import hyperparameters, set_group, stored_settings
from holdfast.state.optimizer.protocol import HeldParameter, PartitionedOptimizer, WholeOptimizer

_RECORD = "param_state_sharding_type"
_COUNTS = "num_groups"


class OptimizerState:
    """An optimizer and the module whose parameters it updates, saved by parameter name.

    Stored are `state.<parameter name>.<entry>`, the hyperparameters of each group, which group each
    parameter belongs to, and each parameter's shape and whether it is frozen. Parameter positions
    are never stored, so that ranks that hold different parameters (pipeline stages) agree on the
    rest, and a load under another layout finds each group by its members. State is allocated by
    shape, never by stepping.

    A load *replaces*: what the optimizer had before and the checkpoint has not is gone. A parameter
    or a setting of which the checkpoint knows nothing, and a parameter that was frozen, start fresh
    only where `allow_missing` agrees, and are then in `LoadReport.fresh`; MismatchError otherwise.
    The dicts in `param_groups` stay the same objects.

    `optimizer`: a `torch.optim.Optimizer`, or one that holds runs of elements (`ShardedOptimizer`,
    `ChainedOptimizer`: a `PartitionedOptimizer`). Their state is stored in the parameters'
    coordinates under the same keys, so each loads what the other saved. Main parameters, wider
    copies of low-precision ones, are stored as `main.<parameter name>`; where the optimizer that
    loads them keeps none, they go into parameters of their dtype, and are left out for narrower
    ones, which the module's own part restores. Of a parameter whose padding is declared
    (`declare_padding`), moments and main parameter are stored without it, too.

    Where the class overrides `state_dict` or `load_state_dict`, or hooks are registered on them,
    these are what is saved and loaded through, and a load proves that `state_dict` then states what
    was loaded. A form like torch's is still stored by name, with `others` (state under other keys
    than parameters) and `extra` (further entries); any other form as it is, under `own`. Optimizers
    in attributes whose state is not shown by that are stored under `inner.<attribute>`.

    `module`: owns the parameters; or a dict of modules by name, for one optimizer over several.

    Raises ConfigError for a parameter of the optimizer that no module has; PlacementError for an
    optimizer that holds state and shows none of it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | PartitionedOptimizer,
        module: nn.Module | Mapping[str, nn.Module],
    ) -> None:
        optimizer = unwrapped(optimizer)
        self._own: Any = None
        """The optimizer where it is whole: a torch optimizer, or one that looks like one."""
        self._holder: PartitionedOptimizer
        if isinstance(optimizer, PartitionedOptimizer):
            self._holder = optimizer  # asked first: a sharded one is a torch optimizer by type, too
        else:
            self._own = _checked(optimizer)
            self._holder = WholeOptimizer(self._own)
        self._module = module
        self._owners = Owners(module)
        self._part = "optimizer"
        """The part's name in the checkpoint last looked at, for messages."""

    # ---- save ----

    def tree(self) -> dict[str, object]:
        """The state by name, group hyperparameters, membership, and main parameters if any."""
        self._holder.synchronize()
        form = self._form()
        view = None if form is None else torch_form(form, self._own)
        if form is not None and view is None:
            shown: dict[str, object] = {"own": dict(form), "parameters": self._known_parameters()}
        else:
            shown = self._tree_by_name(view)
        self._check_shown(form if form is not None else shown)
        inner = {path: state.tree() for path, state in self._inner(saving=True, shown=form).items()}
        return shown | ({"inner": inner} if inner else {})

    def _tree_by_name(self, view: TorchForm | None) -> dict[str, object]:
        state: dict[str, object] = {}
        main: dict[str, object] = {}
        membership: dict[str, int] = {}
        parameters: dict[str, object] = {}
        paddings = self._owners.paddings()
        held_keys: set[int] = set()
        for name, held in self._named():
            padding = paddings.get(id(held.parameter))
            membership[name] = held.group
            parameters[name] = facts_of(held, padding)
            if held.updated is None:
                continue
            held_keys.add(id(held.updated))
            found, entries = entries_of(held, view)
            if found:
                state[name] = (
                    {
                        entry: marked(held.stored_form(entry, value), held, padding)
                        for entry, value in entries.items()
                    }
                    if type(entries) is dict
                    else entries
                )
            if held.is_main:
                main[name] = marked(held.stored_form("main", held.updated), held, padding)
        groups = self._holder.param_groups if view is None else view.groups
        tree: dict[str, object] = {
            "state": state,
            "groups": [hyperparameters(group) for group in groups],
            "membership": membership,
            "parameters": parameters,
        }
        others = self._others(held_keys) if view is None else dict(view.others)
        tree |= {"others": others} if others else {}
        tree |= {"extra": dict(view.extra)} if view is not None and view.extra else {}
        if main:
            tree["main"] = main
        records = self._holder.sharding_records()
        if records:
            tree[_COUNTS] = self._holder.num_groups()
            tree[_RECORD] = records
        return tree

    def _form(self) -> Mapping[Any, Any] | None:
        """The optimizer's own form, where its class or its hooks make one."""
        if self._own is not None:
            return read_form(self._own) if has_own_form(self._own) else None
        for optimizer in _optimizers(self._holder, None):
            if has_own_form(optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__} overrides state_dict or load_state_dict, or has "
                    f"hooks on them, which know nothing of runs of elements; use the plain "
                    f"class inside a sharded optimizer"
                )
        return None

    def _others(self, held: set[int]) -> dict[object, object]:
        """State under other keys than parameters; PlacementError for that of unknown tensors."""
        found: dict[object, object] = {}
        for optimizer in _optimizers(self._holder, self._own):
            for key, value in optimizer.state.items():
                if not isinstance(key, torch.Tensor):
                    if self._own is None:
                        raise PlacementError(
                            f"{type(optimizer).__name__} has state under {key!r}, which belongs to "
                            f"no parameter; a sharded optimizer keeps state of parameters only"
                        )
                    found[key] = value
                elif id(key) not in held and value:
                    raise PlacementError(
                        f"{type(optimizer).__name__} holds state of a tensor of shape "
                        f"{list(key.shape)} that is in none of its parameter groups, so no load "
                        f"could give it back; remove it from optimizer.state, or add the parameter"
                    )
        return found

    def _check_shown(self, shown: object) -> None:
        """PlacementError for an optimizer that has state of its own and shows nothing of it."""
        state = getattr(self._own, "state", None)
        if not isinstance(state, Mapping):
            return
        holds = any(True for entries in state.values() for _ in tensors_of(entries))
        if holds and not any(True for _ in tensors_of(shown)):
            raise PlacementError(
                f"{type(self._own).__name__}.state_dict() shows no tensor, though the optimizer "
                f"has state; mend its state_dict, or nothing of it can be kept"
            )

    def _inner(self, *, saving: bool, shown: object = None) -> dict[str, OptimizerState]:
        """Optimizers in attributes, each as a part of its own; when saving, those not yet shown."""
        found: dict[str, OptimizerState] = {}
        if self._own is None:
            return found
        names = self._owners.names()
        own_state = getattr(self._own, "state", None)
        for path, inner in inner_optimizers(self._own).items():
            if inner.state is own_state:
                continue
            tensors = [t for entries in inner.state.values() for _, t in tensors_of(entries)]
            if saving and shown is not None and (not tensors or shows(shown, tensors)):
                continue
            if all(p in names for group in inner.param_groups for p in group["params"]):
                found[path] = OptimizerState(inner, self._module)
            elif saving and tensors:
                raise PlacementError(
                    f"attribute '{path}' of {type(self._own).__name__} is an optimizer with state "
                    f"that state_dict() does not show, over parameters that are not the module's; "
                    f"show its state in state_dict()"
                )
        return found

    # ---- load ----

    def template(self, stored: StoredPart) -> dict[str, object]:
        """Targets placed like what is held for the state the checkpoint has, nothing stepped."""
        self._part = stored.name
        self._check_counts(stored)
        self._holder.synchronize()
        form = self._form()
        view = None if form is None else torch_form(form, self._own)
        if stored.has("own") != (form is not None and view is None):
            raise MismatchError(
                f"{stored.name}: the checkpoint has the optimizer's state "
                f"{'in a form of its own' if stored.has('own') else 'by parameter name'}, and "
                f"{type(self._own or self._holder).__name__} takes it the other way; build the "
                f"optimizer as the saved run did"
            )
        self._holder.begin_load(with_main=stored.has("main"))
        template = (
            self._template_of_form(stored, form)
            if form is not None and view is None
            else self._template_by_name(stored, view)
        )
        inner = {
            path: state.template(stored.below("inner", path))
            for path, state in self._inner(saving=False).items()
            if stored.has("inner", path)
        }
        return template | ({"inner": inner} if stored.has("inner") else {})

    def _template_by_name(self, stored: StoredPart, view: TorchForm | None) -> dict[str, object]:
        state: dict[str, object] = {}
        main: dict[str, object] = {}
        made: dict[str, object] = {}
        taken: set[int] = set()
        paddings = self._owners.paddings()
        for name, held in self._named():
            padding = paddings.get(id(held.parameter))
            why = why_fresh(name, held.parameter, stored)
            if why is not None:
                state[name] = Fresh(why)
            if held.updated is None:
                continue
            if stored.has("state", name):
                refuse_other_shape(name, held, stored, padding)
                state[name] = entry_targets(
                    name, held, stored, padding, is_live=view is None, made=made, taken=taken
                )
            if stored.has("main", name):
                target = main_target(held, stored.tensors_under("main")[name].dtype)
                main[name] = marked(target, held, padding)
        template: dict[str, object] = {
            "state": state,
            "groups": Stored(),
            "membership": Stored(),
        }
        if stored.has("main"):
            template["main"] = main
        placed = placed_target(self._owners.names())
        if stored.has("others"):
            current = self._own_others() if view is None else view.others
            template["others"] = mirror(stored.below("others"), current, placed)
        if view is not None and (stored.has("extra") or view.extra):
            extra = mirror(stored.below("extra"), view.extra, placed)
            extra = extra if isinstance(extra, dict) else {}
            lacking = [key for key in view.extra if isinstance(key, str) and key not in extra]
            template["extra"] = extra | {
                key: Fresh("the checkpoint lacks it", is_required=False) for key in lacking
            }
        template |= absent_groups(self._holder.param_groups, list(self._named()), stored)
        once = (_COUNTS, _RECORD, "parameters")
        return template | {name: Transient() for name in once if stored.has(name)}

    def _own_others(self) -> dict[object, object]:
        state = {} if self._own is None else self._own.state
        return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}

    def _template_of_form(self, stored: StoredPart, form: Mapping[Any, Any]) -> dict[str, object]:
        """Targets for a form that only the optimizer understands, without other stages' entries."""
        local = self._known_parameters()
        tensors = {name: p for p, name in self._owners.names().items()}
        everywhere = dict.fromkeys(stored.keys_under("parameters"))
        placed = placed_target(tensors.values())

        def make(info: StoredTensor, current: object, path: str) -> object:
            target = placed_like(current, info)
            if target is None:
                owner = owner_of(path, tensors)
                target = None if owner is None else placed_like(tensors[owner], info)
            return placed(info, current, path) if target is None else target

        def is_wanted(path: str) -> bool:
            owner = owner_of(path, everywhere)
            return owner is None or owner in local

        own = mirror(stored.below("own"), form, make, is_wanted=is_wanted)
        for key in form:
            if isinstance(own, dict) and isinstance(key, str) and key not in own:
                owner = owner_of(key, local)
                is_new = owner is not None and owner not in everywhere
                own[key] = Fresh("the saved run did not have it", is_required=is_new)
        template: dict[str, object] = {"own": own}
        return template | ({"parameters": Transient()} if stored.has("parameters") else {})

    def restore(self, tree: object) -> None:
        """Set state and hyperparameters; MismatchError where a group cannot be identified."""
        if not isinstance(tree, Mapping):
            raise MismatchError("the stored optimizer part is no mapping; was it saved from one?")
        form = self._form()
        view = None if form is None else torch_form(form, self._own)
        if form is not None and view is None:
            own = {k: form[k] if isinstance(v, Fresh) else v for k, v in tree["own"].items()}
            load_form(self._own, own, where=f"{self._part}.own")
        else:
            self._restore_by_name(tree, view)
        stored_inner = tree.get("inner", {})
        shown = None if form is None else read_form(self._own)
        for path, state in self._inner(saving=False).items():
            if path in stored_inner:
                state.restore(stored_inner[path])
        for path, state in self._inner(saving=True, shown=shown).items():
            if path not in stored_inner:
                state._own.state.clear()  # the saved run had none there

    def _restore_by_name(self, tree: Mapping[str, Any], view: TorchForm | None) -> None:
        settings = stored_settings(
            tree,
            self._members(),
            self._holder.param_groups if view is None else view.groups,
        )
        main = tree.get("main")
        entries: dict[int, Any] = {}
        for name, held in self._named():
            if held.updated is None:
                continue
            value = tree["state"].get(name)
            if isinstance(value, Fresh):
                value = as_built(held, entries_of(held, view)[1])
            if value is not None:
                entries[id(held.updated)] = on_device_of(value, held)
            wide = None if main is None else main.get(name)
            if isinstance(wide, torch.Tensor) and wide is not held.updated:
                with torch.no_grad():
                    held.updated.copy_(wide)
                held.markers.pop("main", None)
        if view is not None:
            self._load_torch_form(tree, view, settings, entries)
        else:
            self._set_state(tree, settings, entries)
        self._holder.finish_load(with_main=main is not None)

    def _set_state(
        self,
        tree: Mapping[str, Any],
        settings: list[dict[str, Any] | None],
        entries: Mapping[int, Any],
    ) -> None:
        """Put state and settings where a plain torch optimizer has them; nothing else stays."""
        optimizers = _optimizers(self._holder, self._own)
        for _, held in self._named():
            if held.updated is None:
                continue
            held.optimizer.state.pop(held.updated, None)
            if id(held.updated) in entries:
                held.optimizer.state[held.updated] = entries[id(held.updated)]
        if self._own is not None:
            for key in self._own_others():
                del self._own.state[key]
            self._own.state.update(tree.get("others", {}))
        for group, values in zip(self._holder.param_groups, settings, strict=True):
            if values is not None:
                set_group(group, values)
        for optimizer in optimizers:
            # As torch's own load does: a class fills in what older checkpoints lack.
            try:
                optimizer.__setstate__(
                    {"state": optimizer.state, "param_groups": optimizer.param_groups}
                )
            except Exception as error:
                raise MismatchError(
                    f"{type(optimizer).__name__} does not take the stored state: "
                    f"{type(error).__name__}: {error}; was it saved from another kind of optimizer?"
                ) from error

    def _load_torch_form(
        self,
        tree: Mapping[str, Any],
        view: TorchForm,
        settings: list[dict[str, Any] | None],
        entries: Mapping[int, Any],
    ) -> None:
        """Put the form together again, with the optimizer's own numbers, and load it."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for i, group in enumerate(self._own.param_groups):
            values = settings[i]
            made = dict(view.groups[i] if values is None else values)
            if "param_names" in group:
                made["param_names"] = group["param_names"]
            made["params"] = list(view.numbers[i])
            groups.append(made)
            for number, parameter in zip(view.numbers[i], group["params"], strict=True):
                if id(parameter) in entries:
                    state[number] = entries[id(parameter)]
        state.update(tree.get("others", {}))
        extra = {
            key: view.extra[key] if isinstance(value, Fresh) else value
            for key, value in tree.get("extra", {}).items()
        }
        names = self._owners.names()
        said = {
            f"state.{number}": f"state.{names[parameter]}"
            for group, numbers in zip(self._own.param_groups, view.numbers, strict=True)
            for parameter, number in zip(group["params"], numbers, strict=True)
        }
        form = {"state": state, "param_groups": groups} | extra
        load_form(self._own, form, where=self._part, names=said)

    # ---- inside ----

    def _named(self) -> Iterator[tuple[str, HeldParameter]]:
        """Each held parameter with its logical name."""
        names = self._owners.names()
        for held in self._holder.held_parameters():
            if held.parameter not in names:
                raise ConfigError(self._owners.stranger(held.parameter, held.group, names))
            yield names[held.parameter], held

    def _known_parameters(self) -> dict[str, object]:
        """Facts of those parameters that are the module's; others are the optimizer's affair."""
        names = self._owners.names()
        paddings = self._owners.paddings()
        return {
            names[held.parameter]: facts_of(held, paddings.get(id(held.parameter)))
            for held in self._holder.held_parameters()
            if held.parameter in names
        }

    def _check_counts(self, stored: StoredPart) -> None:
        """MismatchError where an optimizer of the same name had another number of groups."""
        for name, count in self._holder.num_groups().items():
            saved = stored.value(_COUNTS, name)
            if isinstance(saved, int) and saved != count:
                raise MismatchError(
                    f"optimizer '{name}' has {count} parameter groups, the checkpoint's has "
                    f"{saved}; build the same parameter groups as the saved run"
                )

    def _members(self) -> list[list[str]]:
        members: list[list[str]] = [[] for _ in self._holder.param_groups]
        for name, held in self._named():
            members[held.group].append(name)
        return members


def _checked(optimizer: Any) -> Any:
    """An optimizer, torch's or not, that has what a load and a save need of one."""
    needed = ("param_groups", "state_dict", "load_state_dict")
    lacking = [name for name in needed if not hasattr(optimizer, name)]
    if lacking:
        raise ConfigError(
            f"OptimizerState: a {type(optimizer).__name__} is no optimizer: it has no "
            f"{', '.join(lacking)}"
        )
    return optimizer


def _optimizers(holder: PartitionedOptimizer, own: Any) -> list[Any]:
    """The torch optimizers that keep the state, each once."""
    if own is not None:
        return [own]
    return list({id(held.optimizer): held.optimizer for held in holder.held_parameters()}.values())
