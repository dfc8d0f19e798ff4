"""An optimizer as a part of the state: `OptimizerState`, what a save reads and a load fills."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from holdfast._torch import module_table
from holdfast.errors import ConfigError, MismatchError, PlacementError
from holdfast.format.values import is_plain_dict
from holdfast.state.followed_dims import followed_dims
from holdfast.state.kinds import Noted, names_of, other_kinds
from holdfast.state.markers import Fresh, Stored, Transient
from holdfast.state.memory_order import in_orders, map_tensors, unusual_orders
from holdfast.state.module_tree import declared_padding, parameter_names, walk_all
from holdfast.state.optimizer_forms import (
    TorchForm,
    has_own_form,
    homes_of,
    hyperparameters,
    load_form,
    read_form,
    set_groups,
    shows,
    stored_settings,
)
from holdfast.state.optimizer_protocol import (
    GroupLoaded,
    OptimizerParameter,
    OptimizersByModule,
    PartitionedOptimizer,
    inner_optimizers,
    stored_form,
    unwrapped_optimizer,
    with_padding,
)
from holdfast.state.optimizer_targets import (
    StoredParameters,
    absent_groups,
    as_built,
    entry_targets,
    is_nothing,
    likes_of_others,
    main_target,
    on_device_of,
    placed_like,
    refuse_other_shapes,
    why_fresh,
)
from holdfast.state.stored import StoredPart, StoredTensor, follow_stored
from holdfast.state.tensor_elements import equal_trees, tensors_of
from holdfast.state.unfinished import unfinished_on

SHARDING = "param_state_sharding_type"
"""Key of the sharding records, which are stored for people."""
NUM_GROUPS = "num_groups"
"""Key of the number of groups of each optimizer inside a sharded one."""


class UnshardedOptimizer(PartitionedOptimizer):
    """A `torch.optim.Optimizer` seen as a `PartitionedOptimizer` that partitions nothing.

    Also for whatever has its `param_groups`, `state_dict` and `load_state_dict`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own groups."""
        return self._optimizer.param_groups

    def optimizer_parameters(self) -> Sequence[OptimizerParameter]:
        """Return each parameter, held whole."""
        return [
            OptimizerParameter(parameter=p, group=i, optimizer=self._optimizer, updated=p)
            for i, group in enumerate(self._optimizer.param_groups)
            for p in group["params"]
        ]

    def synchronize(self) -> None:
        """Nothing is in flight."""

    def begin_load(self, *, with_main: bool) -> None:
        """Nothing to prepare."""

    def finish_load(self, *, with_main: bool) -> None:
        """Nothing to follow up."""


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

    State of a `ShardedOptimizer` or `ChainedOptimizer` is stored in the parameters' coordinates
    under the same keys, so sharded and plain optimizers load what the other saved. Main parameters,
    wider copies of low-precision ones, are stored as `main.<parameter name>`; if the optimizer
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
            of them by name, which the parameters' names then start with.

    Raises:
        ConfigError: If it is not an optimizer or a module, and at a save or load if no module has
            a parameter of the optimizer.
        PlacementError: At a save, for an optimizer that holds state and shows none of it.

    Cost:
        A save makes no collectives and copies no tensors. A load allocates state that the optimizer
        does not have yet; through an optimizer's own form also a digest of every tensor.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | PartitionedOptimizer,
        module: nn.Module | Mapping[str, nn.Module],
    ) -> None:
        optimizer = unwrapped_optimizer(optimizer)
        if isinstance(optimizer, OptimizersByModule):
            modules = list(optimizer.optimizers_by_module())
            name = modules[0] if modules else "module"
            raise ConfigError(
                f"OptimizerState: a {type(optimizer).__name__} steps several modules, whose states "
                f"are separate parts; save each under its module's name, such as "
                f"'{name}.optimizer': OptimizerState(optimizer['{name}'], {name}). This rank "
                f"trains {', '.join(map(repr, modules)) or 'none'}"
            )
        self._own: Any = None
        """The optimizer if it is whole: a torch optimizer, or one that looks like one."""
        self._optimizer: PartitionedOptimizer
        # Asked first: a sharded optimizer is a torch optimizer by type, too.
        if isinstance(optimizer, PartitionedOptimizer):
            self._optimizer = optimizer
        else:
            self._own = checked(optimizer)
            self._optimizer = UnshardedOptimizer(self._own)
        self._module = module
        self._modules = modules_by_prefix(module)
        self.is_live = False
        """True if the tree of the last save has the optimizer's own tensors, by parameter name."""
        self._name = "optimizer"
        """The part's name in the checkpoint last looked at, for messages."""
        self._first_groups: dict[str, int] = {}
        """By optimizer inside, the number of its first stored group, where there are several."""
        self.groups_loaded: dict[int, GroupLoaded] = {}
        """What the last load gave to each group, by `id`: none to one that stayed as built."""
        self._noted: Noted | None = None

    def unfinished_work(self) -> str | None:
        """Return what the optimizer, or the objects that train the modules, have not finished."""
        own = self._optimizer if self._own is None else self._own
        inside = [inner for m in self._modules.values() for *_, inner, _ in walk_all(m)]
        return unfinished_on(own, *inside)

    # ---- a save ----

    def tree(self) -> dict[str, object]:
        """Return the state by name, the groups' settings, membership, and main parameters."""
        self._optimizer.synchronize()
        form, by_name = self._forms()
        self.is_live = by_name is not None and by_name.is_live
        if by_name is not None:
            tree = self._tree_by_name(by_name)
        else:
            tree = {"own": dict(form or {}), "parameters": self._known_parameters()}
        if form is not None:
            self._refuse_hidden_state(form)
        # Optimizers in attributes come last: what the form shows of them is not stored again.
        inner = {path: state.tree() for path, state in self._inner(saving=True, shown=form).items()}
        return tree | ({"inner": inner} if inner else {})

    def _tree_by_name(self, form: TorchForm) -> dict[str, object]:
        """Return the tree of an optimizer whose state is known by parameter."""
        state: dict[str, object] = {}
        main: dict[str, object] = {}
        membership: dict[str, int] = {}
        parameters: dict[str, dict[str, object]] = {}
        paddings = self._paddings()
        stepped: set[int] = set()
        for name, param in self._named():
            padding = paddings.get(id(param.parameter))
            membership[name] = param.group
            parameters[name] = _parameter_facts(param, padding)
            if param.updated is None:
                continue
            stepped.add(id(param.updated))
            if id(param.updated) in form.entries:
                entries = form.entries[id(param.updated)]
                if type(entries) is dict:
                    orders = {} if param.over else unusual_orders(entries, param.parameter)
                    parameters[name] |= {"order": orders} if orders else {}
                    followed = {} if param.over else followed_dims(entries, param.parameter)
                    parameters[name] |= {"follows": followed} if followed else {}
                    if param.over is not None or padding is not None:
                        entries = {
                            entry: with_padding(stored_form(param, entry, value), param, padding)
                            for entry, value in entries.items()
                        }
                state[name] = entries
            if param.is_main:
                value = stored_form(param, "main", param.updated)
                main[name] = with_padding(value, param, padding)
        if form.is_live:
            self._refuse_unknown_state(stepped)
        sharding = self._optimizer.sharding_records()
        tree: dict[str, object] = {
            "state": state,
            "groups": form.groups,
            "membership": membership,
            "parameters": parameters,
        }
        optional = {
            "others": form.others,
            "extra": form.extra,
            "main": main,
            NUM_GROUPS: self._optimizer.num_groups() if sharding else {},
            SHARDING: sharding,
        }
        return tree | {key: value for key, value in optional.items() if value}

    def _forms(self) -> tuple[Mapping[Any, Any] | None, TorchForm | None]:
        """Return the form that the optimizer's class or hooks make, and its state by parameter.

        The latter is None for a form that is not like torch's, and is read from the attributes
        if the optimizer makes no form itself.
        """
        optimizers = self.torch_optimizers()
        for optimizer in optimizers:
            if has_own_form(optimizer):
                if self._own is None:
                    raise ConfigError(
                        f"{type(optimizer).__name__} overrides state_dict or load_state_dict, or "
                        f"has hooks on them, which know nothing of runs of elements; use the plain "
                        f"class inside a sharded optimizer"
                    )
                form = read_form(optimizer)
                return form, TorchForm.of(form, optimizer)
        return None, TorchForm.of_attributes(optimizers, self._optimizer.param_groups)

    def torch_optimizers(self) -> list[Any]:
        """Return the torch optimizers that keep the state, each once."""
        if self._own is not None:
            return [self._own]
        params = self._optimizer.optimizer_parameters()
        return list({id(param.optimizer): param.optimizer for param in params}.values())

    def kinds(self) -> dict[str, str]:
        """Return the class that updates each group, and those of optimizers in attributes."""
        owners: dict[int, Any]
        if self._own is None:
            parameters = self._optimizer.optimizer_parameters()
            owners = {each.group: each.optimizer for each in parameters}
            inner: dict[str, Any] = {}
        else:
            groups = enumerate(self._own.param_groups)
            owners = {number: self._own for number, group in groups if group["params"]}
            inner = inner_optimizers(self._own)
        return names_of(
            {f"groups.{number}": owner for number, owner in owners.items()}
            | {f"inner.{path}": each for path, each in inner.items()}
        )

    def other_kinds(self) -> dict[str, str]:
        """Return, by path, what is of another class than the one that was saved, in words.

        Of groups that differ alike the first is named.
        """
        noted = self._noted or {}
        homes = {
            f"groups.{number}": [f"groups.{home}" for home in loaded.homes]
            for number, group in enumerate(self._optimizer.param_groups)
            if (loaded := self.groups_loaded.get(id(group))) is not None
        }
        names = self.kinds()
        followed = {
            path: [name for home in homes.get(path, [path]) for name in noted.get(home, ())]
            for path in names
        }
        others = other_kinds(names, followed, self._name)
        first = {words: path for path, words in reversed(others.items())}
        return {path: words for path, words in others.items() if first[words] == path}

    def changed_by_steps(self) -> dict[Any, list[torch.Tensor]]:
        """Return the optimizers that a step runs, each with the tensors that only steps change.

        Those are its parameters on this rank, and its state. An outer optimizer comes with those
        inside of it.
        """
        changed: dict[Any, list[torch.Tensor]] = {}
        for param in self._optimizer.optimizer_parameters():
            tensors = changed.setdefault(param.optimizer, [])
            tensors.append(param.parameter)
            if param.updated is not None and param.updated is not param.parameter:
                tensors.append(param.updated)
        if self._own is not None:
            changed |= {each: [] for each in inner_optimizers(self._own).values()}
        for optimizer, tensors in changed.items():
            state = getattr(optimizer, "state", None)
            tensors += [each for _, each in tensors_of(list((state or {}).values()))]
        return changed

    def _refuse_unknown_state(self, stepped: set[int]) -> None:
        """Raise PlacementError for state that no load could give back."""
        for optimizer in self.torch_optimizers():
            for key, value in optimizer.state.items():
                if not isinstance(key, torch.Tensor):
                    if self._own is None:
                        raise PlacementError(
                            f"{type(optimizer).__name__} has state under {key!r}, which belongs to "
                            f"no parameter; a sharded optimizer keeps state of parameters only"
                        )
                elif id(key) not in stepped and value:
                    raise PlacementError(
                        f"{type(optimizer).__name__} holds state of a tensor of shape "
                        f"{list(key.shape)} that is in none of its parameter groups, so no load "
                        f"could give it back; remove it from optimizer.state, or add the parameter"
                    )

    def _refuse_hidden_state(self, form: Mapping[Any, Any]) -> None:
        """Raise PlacementError for an optimizer that has state and shows nothing of it."""
        state = getattr(self._own, "state", None)
        has_tensors = isinstance(state, Mapping) and any(tensors_of(list(state.values())))
        if has_tensors and not any(tensors_of(form)):
            raise PlacementError(
                f"{type(self._own).__name__}.state_dict() shows no tensor, though the optimizer "
                f"has state; mend its state_dict, or nothing of it can be kept"
            )

    # ---- a load ----

    def template(self, stored: StoredPart) -> dict[str, object]:
        """Return targets for the state that the checkpoint has, placed like what is held."""
        self._name, self._noted = stored.name, stored.kinds
        self._check_num_groups(stored)
        self._optimizer.synchronize()
        form, by_name = self._forms()
        if by_name is not None and is_nothing(stored):
            return {"state": Fresh("the saved run had an empty entry here, nothing was trained")}
        # A tree of one kind does not say what the other kind needs.
        if stored.has("own") == (by_name is not None):
            raise MismatchError(
                f"{stored.name}: the checkpoint has the optimizer's state "
                f"{'in its own form' if stored.has('own') else 'by parameter name'}, and "
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
        """Return targets for state by parameter name, and for what belongs to no parameter."""
        state: dict[str, object] = {}
        main: dict[str, object] = {}
        made: dict[str, object] = {}
        filled: set[int] = set()
        paddings, named = self._paddings(), list(self._named())
        known = StoredParameters(stored)
        refuse_other_shapes(named, known, paddings)
        for name, param in named:
            padding = paddings.get(id(param.parameter))
            why = why_fresh(name, param.parameter, known)
            if why is not None:
                state[name] = Fresh(why)
            if param.updated is None:
                continue
            if known.state.get(name) is not None:
                have = form.entries.get(id(param.updated)) if form.is_live else None
                state[name] = entry_targets(
                    name, param, known, padding, have=have, made=made, filled=filled
                )
            wide = stored.tensor(known.main.get(name))
            if wide is not None:
                main[name] = main_target(param, wide.dtype, padding)
        template: dict[str, object] = {"state": state, "groups": Stored(), "membership": Stored()}
        if stored.has("main"):
            template["main"] = main

        def placed(name: str, current: object) -> Any:
            like = placed_like(likes_of_others(self._names()))
            return follow_stored(stored.below(name), current, like)

        if stored.has("others"):
            template["others"] = placed("others", form.others)
        if not form.is_live and (stored.has("extra") or form.extra):
            extra = placed("extra", form.extra)
            extra = extra if isinstance(extra, dict) else {}
            lacking = [key for key in form.extra if isinstance(key, str) and key not in extra]
            template["extra"] = extra | {
                key: Fresh("the checkpoint lacks it", is_required=False) for key in lacking
            }
        template |= absent_groups(self._optimizer.param_groups, named, known)
        if stored.has("parameters"):
            template["parameters"] = Stored()
        once = (NUM_GROUPS, SHARDING)
        return template | {name: Transient() for name in once if stored.has(name)}

    def _template_of_form(self, stored: StoredPart, form: Mapping[Any, Any]) -> dict[str, object]:
        """Return targets for an optimizer's own form, without entries of other stages."""
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
        """Set state and hyperparameters; raise MismatchError if a group is unknown."""
        if not isinstance(tree, Mapping):
            raise MismatchError(
                "the stored optimizer part is not a mapping; was it saved from one?"
            )
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

    def restore_apart(self, tree: object, others: Sequence[OptimizerState]) -> None:
        """Restore, and leave others that the same load has restored as they are.

        Optimizers that are built with one tensor as learning rate share it, and the saved run may
        have replaced it in some of them.
        """
        own = {id(group) for group in self._optimizer.param_groups}
        held = [
            (group, name, map_tensors(value, lambda _, tensor: tensor.detach().clone()))
            for other in others
            for group in other._optimizer.param_groups
            if id(group) not in own
            for name, value in hyperparameters(group).items()
            if isinstance(value, torch.Tensor | list | tuple | dict) and any(tensors_of(value))
        ]
        self.restore(tree)
        for group, name, value in held:
            if not equal_trees(group[name], value):
                group[name] = value

    def _restore_by_name(self, tree: Mapping[str, Any], form: TorchForm) -> None:
        """Set state by parameter, main parameters and the settings of groups."""
        members: list[list[str]] = [[] for _ in form.groups]
        main = tree.get("main")
        entries: dict[int, Any] = {}
        facts = tree.get("parameters", {})  # checkpoints of early versions have none
        for name, param in self._named():
            members[param.group].append(name)
            if param.updated is None:
                continue
            value = tree["state"].get(name)
            if isinstance(value, Fresh):
                value = as_built(param, form.entries.get(id(param.updated)))
            if value is not None:
                value = on_device_of(value, param)
                if name in facts and param.over is None:
                    value = in_orders(value, facts[name].get("order", {}), param.parameter)
                entries[id(param.updated)] = value
            wide = None if main is None else main.get(name)
            if isinstance(wide, torch.Tensor) and wide is not param.updated:
                with torch.no_grad():
                    param.updated.copy_(wide)
                param.markers.pop("main", None)
        settings = stored_settings(tree, members, form.groups, where=self._name)
        restore = self._set_state if form.is_live else self._load_torch_form
        restore(tree, form, settings, entries)
        self.groups_loaded = self._groups_loaded(tree, members)
        self._optimizer.finish_load(with_main=main is not None)

    def _groups_loaded(
        self, tree: Mapping[str, Any], members: Sequence[Sequence[str]]
    ) -> dict[int, GroupLoaded]:
        """Return which stored groups each group has its settings from."""
        counts = self._optimizer.num_groups() or {"": len(members)}
        firsts = [self._first_groups.get(name, 0) for name, n in counts.items() for _ in range(n)]
        return {
            id(group): GroupLoaded(
                homes_of(names, tree["membership"]) if names else [position], first
            )
            for position, (group, names, first) in enumerate(
                zip(self._optimizer.param_groups, members, firsts, strict=True)
            )
        }

    def _set_state(
        self,
        tree: Mapping[str, Any],
        form: TorchForm,
        settings: list[dict[str, Any] | None],
        entries: Mapping[int, Any],
    ) -> None:
        """Put state and settings into a plain torch optimizer; nothing else stays."""
        optimizers = self.torch_optimizers()
        for param in self._optimizer.optimizer_parameters():
            if param.updated is None:
                continue
            param.optimizer.state.pop(param.updated, None)
            if id(param.updated) in entries:
                param.optimizer.state[param.updated] = entries[id(param.updated)]
        if self._own is not None:
            for key in form.others:
                del self._own.state[key]
            self._own.state.update(tree.get("others", {}))
        groups = zip(self._optimizer.param_groups, settings, strict=True)
        set_groups((group, values) for group, values in groups if values is not None)
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
        """Raise MismatchError if an optimizer of the same name had another number of groups."""
        names = stored.keys_under(NUM_GROUPS)
        counts = [int(str(stored.value(NUM_GROUPS, name))) for name in names]
        self._first_groups = dict(zip(names, accumulate(counts, initial=0), strict=False))
        for name, count in self._optimizer.num_groups().items():
            saved = stored.value(NUM_GROUPS, name)
            if isinstance(saved, int) and saved != count:
                raise MismatchError(
                    f"{stored.name}: optimizer '{name}' has {count} parameter groups, the "
                    f"checkpoint's has {saved}; build the same parameter groups as the saved run"
                )

    # ---- what a save and a load share: inner optimizers and names ----

    def _inner(self, *, saving: bool, shown: object = None) -> dict[str, Any]:
        """Return optimizers in attributes as parts; when saving, those not yet shown."""
        inner_parts: dict[str, Any] = {}
        inner_by_path = {} if self._own is None else inner_optimizers(self._own)
        names = self._names() if inner_by_path else {}
        own_state = getattr(self._own, "state", None)
        for path, inner in inner_by_path.items():
            if inner.state is own_state:
                continue
            tensors = [tensor for _, tensor in tensors_of(list(inner.state.values()))]
            if saving and shown is not None and (not tensors or shows(shown, tensors)):
                continue
            if all(p in names for group in inner.param_groups for p in group["params"]):
                inner_parts[path] = type(self)(inner, self._module)
            elif saving and tensors:
                raise PlacementError(
                    f"attribute '{path}' of {type(self._own).__name__} is an optimizer with state "
                    f"that state_dict() does not show, over parameters that are not the module's; "
                    f"show its state in state_dict()"
                )
        return inner_parts

    def _names(self, params: Sequence[OptimizerParameter] | None = None) -> dict[torch.Tensor, str]:
        """Return the logical name of each parameter, after the module's if there are several.

        Args:
            params: The optimizer's parameters, if they are known.
        """
        names = self._names_in_place()
        if params is None:
            params = self._optimizer.optimizer_parameters()
        if any(param.parameter not in names for param in params):
            for module in self._modules.values():
                put_shards_in_place(module)
            names = self._names_in_place()
        return names

    def _names_in_place(self) -> dict[torch.Tensor, str]:
        names: dict[torch.Tensor, str] = {}
        for prefix, module in self._modules.items():
            refuse_flat_shards(module)
            own = parameter_names(module)
            if prefix:
                own = {parameter: f"{prefix}.{name}" for parameter, name in own.items()}
            # A parameter shared by two of the modules has the first one's name.
            names = names | own | names
        if len(self._modules) > 1 and len(set(names.values())) < len(names):
            listed = list(names.values())
            twice = next(name for name in listed if listed.count(name) > 1)
            raise ConfigError(f"OptimizerState: two parameters are named '{twice}'")
        return names

    def _named(self) -> Iterator[tuple[str, OptimizerParameter]]:
        """Yield each of the optimizer's parameters with its logical name."""
        params = self._optimizer.optimizer_parameters()
        names = self._names(params)
        for param in params:
            name = names.get(param.parameter)
            if name is None:
                raise ConfigError(self._unknown_parameter(param, names))
            yield name, param

    def _unknown_parameter(self, param: OptimizerParameter, names: Mapping[Any, str]) -> str:
        """Return the message that a parameter is not the module's, and the likely cause."""
        shape = param.parameter.shape
        kinds = " or ".join(sorted({type(module).__name__ for module in self._modules.values()}))
        message = (
            f"OptimizerState: a parameter of group {param.group} (shape {list(shape)}) is not "
            f"a parameter of {kinds}; pass the module that owns it"
        )
        if any(known.shape == shape for known in names):
            message += (
                ". If it is a copy of one (the module was copied, materialised, sharded or replaced"
                " after the optimizer was built), build the optimizer again"
            )
        return f"{message}. For one optimizer over several modules pass a dict of them by name"

    def _paddings(self) -> dict[int, tuple[int, ...]]:
        """Return the declared padding of parameters, by `id`."""
        return {
            key: padding
            for module in self._modules.values()
            for key, padding in declared_padding(module).by_tensor.items()
        }

    def _known_parameters(self) -> dict[str, object]:
        """Return what a load must know of each parameter that is the module's."""
        names, paddings = self._names(), self._paddings()
        return {
            names[param.parameter]: _parameter_facts(param, paddings.get(id(param.parameter)))
            for param in self._optimizer.optimizer_parameters()
            if param.parameter in names
        }


def _owner_of(path: str, names: Mapping[str, object]) -> str | None:
    """Return the longest of the names that is a run of components of a dotted path."""
    components = path.split(".")
    for length in range(len(components), 0, -1):
        for start in range(len(components) - length + 1):
            name = ".".join(components[start : start + length])
            if name in names:
                return name
    return None


def is_optimizer_node(node: object) -> bool:
    """Return True if a stored part is that of an optimizer."""
    forms = ({"state", "groups", "membership", "parameters"}, {"own", "parameters"})
    return is_plain_dict(node) and any(form <= node.keys() for form in forms)


def checked(optimizer: Any) -> Any:
    """Return the optimizer if it has what a save and a load need."""
    needed = ("param_groups", "state_dict", "load_state_dict")
    lacking = [name for name in needed if not hasattr(optimizer, name)]
    if lacking:
        raise ConfigError(
            f"OptimizerState: a {type(optimizer).__name__} is not an optimizer: it lacks "
            f"{', '.join(lacking)}"
        )
    return optimizer


def modules_by_prefix(module: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules by the prefix of their parameters' names."""
    hint = "pass the module whose parameters the optimizer updates, or a dict of modules by name"
    if isinstance(module, nn.Module):
        return {"": module}
    given = [module, *module.values()] if isinstance(module, Mapping) else [module]
    if any(isinstance(each, torch.Tensor) for each in given):
        hint = (
            "put parameters that belong to no module into one, a torch.nn.ParameterDict, and make "
            "it a part of the state, too"
        )
    if not isinstance(module, Mapping):
        raise ConfigError(f"OptimizerState: a {type(module).__name__} is not a module; {hint}")
    for name, each in module.items():
        if not isinstance(each, nn.Module) or not isinstance(name, str):
            raise ConfigError(f"OptimizerState: {name!r} is a {type(each).__name__}; {hint}")
    if not module:
        raise ConfigError("OptimizerState: a dict of modules needs at least one")
    return dict(module)


def put_shards_in_place(module: nn.Module) -> None:
    """Let FSDP2 free whole parameters, as its hook does before a `state_dict`.

    A forward without a backward, of an evaluation say, leaves those of the outermost unit in the
    places of the shards that the optimizer knows. No collective is made.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for each in module.modules():
        if isinstance(each, kind):
            each.reshard()


def refuse_flat_shards(module: nn.Module) -> None:
    """Raise PlacementError if FSDP1 has cut parameters into flat pieces.

    Each rank then has another part of the elements under one name and without a placement.
    """
    for _, actual, inner, is_wrapper in walk_all(module):
        if not is_wrapper or "_fsdp_wrapped_module" not in module_table(inner):
            continue
        strategy = getattr(getattr(inner, "sharding_strategy", None), "name", "")
        if getattr(inner, "world_size", 1) > 1 and strategy != "NO_SHARD":
            raise PlacementError(
                f"OptimizerState: {type(inner).__name__} at '{actual or '(root)'}' shards "
                f"parameters as flat pieces, whose optimizer state has no place in the whole "
                f"parameter; shard with fully_shard (FSDP2), whose parameters are DTensors, or "
                f"use NO_SHARD. The module itself can be saved as it is"
            )


def _parameter_facts(
    param: OptimizerParameter, padding: tuple[int, ...] | None
) -> dict[str, object]:
    """Return what a load must know of a parameter: its real shape, and whether it was frozen."""
    shape = list(map(int, param.parameter.shape if padding is None else padding))
    return {"shape": shape} if param.parameter.requires_grad else {"shape": shape, "frozen": True}
