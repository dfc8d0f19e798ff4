"""An optimizer as a part of the state: `OptimizerState`, and how a load fills it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from holdfast.errors import MismatchError
from holdfast.state.markers import Fresh, Stored, Transient
from holdfast.state.match.nodes import StoredPart, StoredTensor
from holdfast.state.match.templates import follow_stored
from holdfast.state.optimizer.fresh import absent_groups, as_built, is_nothing, why_fresh
from holdfast.state.optimizer.named import NUM_GROUPS, SHARDING, NamedOptimizer
from holdfast.state.optimizer.own_form import TorchForm, load_form, read_form
from holdfast.state.optimizer.param_groups import set_group, stored_settings
from holdfast.state.optimizer.targets import (
    entry_targets,
    likes_of_others,
    main_target,
    on_device_of,
    placed_like,
    refuse_other_shape,
)


class OptimizerState(NamedOptimizer):
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

    State of a `ShardedOptimizer` or `ChainedOptimizer` is stored in the parameters' coordinates
    under the same keys, so sharded and plain optimizers load what the other saved. Main parameters,
    wider copies of low-precision ones, are stored as `main.<parameter name>`; where the optimizer
    that loads them keeps none, they go into parameters of their dtype, and are left out for
    narrower ones, which the module's own part restores. Of a parameter whose padding is declared
    (`declare_padding`), moments and main parameter are stored without it, too.

    Where the class overrides `state_dict` or `load_state_dict`, or hooks are registered on them,
    these are what is saved and loaded through, and a load proves that `state_dict` then states what
    was loaded. A form like torch's is still stored by name, with `others` (state under other keys
    than parameters) and `extra` (further entries); any other form as it is, under `own`. Optimizers
    in attributes whose state is not shown by that are stored under `inner.<attribute>`.

    Args:
        optimizer: A `torch.optim.Optimizer`, anything with its `param_groups`, `state_dict` and
            `load_state_dict`, or a `PartitionedOptimizer` (`ShardedOptimizer`, `ChainedOptimizer`).
        module: The module that owns the parameters; for one optimizer over several modules a dict
            of them by name, which the parameters' names then begin with.

    Raises:
        ConfigError: For no optimizer or no module, and at a save or load for a parameter of the
            optimizer that no module has.
        PlacementError: At a save, for an optimizer that holds state and shows none of it.

    Cost:
        A save makes no collectives and copies no tensors. A load allocates state that the optimizer
        does not have yet; through an optimizer's own form also a digest of every tensor.
    """

    _name = "optimizer"
    """The part's name in the checkpoint last looked at, for messages."""

    def template(self, stored: StoredPart) -> dict[str, object]:
        """Targets placed like what is held for the state the checkpoint has, nothing stepped."""
        self._name = stored.name
        self._check_num_groups(stored)
        self._optimizer.synchronize()
        form, by_name = self._forms()
        if by_name is not None and is_nothing(stored):
            return {"state": Fresh("the saved run had an empty entry here, nothing was trained")}
        # A tree of one kind does not say what the other kind needs.
        if stored.has("own") == (by_name is not None):
            raise MismatchError(
                f"{stored.name}: the checkpoint has the optimizer's state "
                f"{'in a form of its own' if stored.has('own') else 'by parameter name'}, and "
                f"{type(self._own or self._optimizer).__name__} takes it the other way; build the "
                f"optimizer as the saved run did"
            )
        self._optimizer.begin_load(with_main=stored.has("main"))
        template = (
            self._template_of_form(stored, form or {})
            if by_name is None
            else self._template_by_name(stored, by_name)
        )
        inner = {
            path: state.template(stored.below("inner", path))
            for path, state in self._inner(saving=False).items()
            if stored.has("inner", path)
        }
        return template | ({"inner": inner} if stored.has("inner") else {})

    def _template_by_name(self, stored: StoredPart, form: TorchForm) -> dict[str, object]:
        """Targets for state by parameter name, and for what belongs to no parameter."""
        state: dict[str, object] = {}
        main: dict[str, object] = {}
        made: dict[str, object] = {}
        filled: set[int] = set()
        paddings = self._paddings()
        for name, param in self._named():
            padding = paddings.get(id(param.parameter))
            why = why_fresh(name, param.parameter, stored)
            if why is not None:
                state[name] = Fresh(why)
            if param.updated is None:
                continue
            if stored.has("state", name):
                refuse_other_shape(name, param, stored, padding)
                have = form.entries.get(id(param.updated)) if form.is_live else None
                state[name] = entry_targets(
                    name, param, stored, padding, have=have, made=made, filled=filled
                )
            if stored.has("main", name):
                dtype = stored.tensors_under("main")[name].dtype
                main[name] = main_target(param, dtype, padding)
        template: dict[str, object] = {"state": state, "groups": Stored(), "membership": Stored()}
        if stored.has("main"):
            template["main"] = main
        placed = placed_like(likes_of_others(self._names()))
        if stored.has("others"):
            template["others"] = follow_stored(stored.below("others"), form.others, placed)
        if not form.is_live and (stored.has("extra") or form.extra):
            extra = follow_stored(stored.below("extra"), form.extra, placed)
            extra = extra if isinstance(extra, dict) else {}
            lacking = [key for key in form.extra if isinstance(key, str) and key not in extra]
            template["extra"] = extra | {
                key: Fresh("the checkpoint lacks it", is_required=False) for key in lacking
            }
        template |= absent_groups(self._optimizer.param_groups, list(self._named()), stored)
        once = (NUM_GROUPS, SHARDING, "parameters")
        return template | {name: Transient() for name in once if stored.has(name)}

    def _template_of_form(self, stored: StoredPart, form: Mapping[Any, Any]) -> dict[str, object]:
        """Targets for a form that only the optimizer understands, without other stages' entries."""
        local = self._known_parameters()
        tensors = {name: p for p, name in self._names().items()}
        everywhere = dict.fromkeys(stored.keys_under("parameters"))
        others = likes_of_others(tensors.values())

        def likes(info: StoredTensor, current: object, path: str) -> Iterable[object]:
            return (
                current,
                tensors.get(_owner_of(path, tensors) or ""),
                *others(info, current, path),
            )

        def is_here(path: str) -> bool:
            owner = _owner_of(path, everywhere)
            return owner is None or owner in local

        own = follow_stored(stored.below("own"), form, placed_like(likes), is_requested=is_here)
        for key in form:
            if isinstance(own, dict) and isinstance(key, str) and key not in own:
                owner = _owner_of(key, local)
                is_new = owner is not None and owner not in everywhere
                own[key] = Fresh("the saved run did not have it", is_required=is_new)
        template: dict[str, object] = {"own": own}
        return template | ({"parameters": Transient()} if stored.has("parameters") else {})

    def restore(self, tree: object) -> None:
        """Set state and hyperparameters; MismatchError where a group cannot be identified."""
        if not isinstance(tree, Mapping):
            raise MismatchError("the stored optimizer part is no mapping; was it saved from one?")
        form, by_name = self._forms()
        if by_name is not None and isinstance(why := tree.get("state"), Fresh):
            names = (name for name, _ in self._named())
            nothing = {"state": dict.fromkeys(names, why), "groups": [], "membership": {}}
            self._restore_by_name(nothing, by_name)
            return
        if by_name is not None:
            self._restore_by_name(tree, by_name)
        else:
            built = form or {}
            own = {k: built[k] if isinstance(v, Fresh) else v for k, v in tree["own"].items()}
            load_form(self._own, own, where=f"{self._name}.own")
        stored_inner = tree.get("inner", {})
        shown = None if form is None else read_form(self._own)
        for path, state in self._inner(saving=False).items():
            if path in stored_inner:
                state.restore(stored_inner[path])
        for path, state in self._inner(saving=True, shown=shown).items():
            if path not in stored_inner:
                state._own.state.clear()  # the saved run had none there

    def _restore_by_name(self, tree: Mapping[str, Any], form: TorchForm) -> None:
        """Set state by parameter, main parameters and the settings of groups."""
        members: list[list[str]] = [[] for _ in form.groups]
        main = tree.get("main")
        entries: dict[int, Any] = {}
        for name, param in self._named():
            members[param.group].append(name)
            if param.updated is None:
                continue
            value = tree["state"].get(name)
            if isinstance(value, Fresh):
                value = as_built(param, form.entries.get(id(param.updated)))
            if value is not None:
                entries[id(param.updated)] = on_device_of(value, param)
            wide = None if main is None else main.get(name)
            if isinstance(wide, torch.Tensor) and wide is not param.updated:
                with torch.no_grad():
                    param.updated.copy_(wide)
                param.markers.pop("main", None)
        settings = stored_settings(tree, members, form.groups, where=self._name)
        restore = self._set_state if form.is_live else self._load_torch_form
        restore(tree, form, settings, entries)
        self._optimizer.finish_load(with_main=main is not None)

    def _set_state(
        self,
        tree: Mapping[str, Any],
        form: TorchForm,
        settings: list[dict[str, Any] | None],
        entries: Mapping[int, Any],
    ) -> None:
        """Put state and settings where a plain torch optimizer has them; nothing else stays."""
        optimizers = self._torch_optimizers()
        for _, param in self._named():
            if param.updated is None:
                continue
            param.optimizer.state.pop(param.updated, None)
            if id(param.updated) in entries:
                param.optimizer.state[param.updated] = entries[id(param.updated)]
        if self._own is not None:
            for key in form.others:
                del self._own.state[key]
            self._own.state.update(tree.get("others", {}))
        for group, values in zip(self._optimizer.param_groups, settings, strict=True):
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
        form: TorchForm,
        settings: list[dict[str, Any] | None],
        entries: Mapping[int, Any],
    ) -> None:
        """Assemble the form again, with the optimizer's own numbers, and load it."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        names = self._names()
        shown_as: dict[str, str] = {}
        for group, numbers, built, values in zip(
            self._own.param_groups, form.numbers, form.groups, settings, strict=True
        ):
            listed = {"params": list(numbers)}
            if "param_names" in group:
                listed["param_names"] = group["param_names"]
            groups.append({**(built if values is None else values), **listed})
            for number, parameter in zip(numbers, group["params"], strict=True):
                shown_as[f"state.{number}"] = f"state.{names[parameter]}"
                if id(parameter) in entries:
                    state[number] = entries[id(parameter)]
        state.update(tree.get("others", {}))
        extra = {
            key: form.extra[key] if isinstance(value, Fresh) else value
            for key, value in tree.get("extra", {}).items()
        }
        whole = {"state": state, "param_groups": groups} | extra
        load_form(self._own, whole, where=self._name, names=shown_as)

    def _check_num_groups(self, stored: StoredPart) -> None:
        """MismatchError where an optimizer of the same name had another number of groups."""
        for name, count in self._optimizer.num_groups().items():
            saved = stored.value(NUM_GROUPS, name)
            if isinstance(saved, int) and saved != count:
                raise MismatchError(
                    f"{stored.name}: optimizer '{name}' has {count} parameter groups, the "
                    f"checkpoint's has {saved}; build the same parameter groups as the saved run"
                )


def _owner_of(path: str, names: Mapping[str, object]) -> str | None:
    """The longest of the names that a dotted path contains as a whole run of its components."""
    components = path.split(".")
    for length in range(len(components), 0, -1):
        for start in range(len(components) - length + 1):
            name = ".".join(components[start : start + length])
            if name in names:
                return name
    return None
