"""The state of an optimizer by parameter name: everything that a save needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holdfast.errors import ConfigError, PlacementError
from holdfast.state.markers import FlatShard, Padded
from holdfast.state.module.tree import (
    declared_padding,
    overrides,
    parameter_names,
    walk_all,
)
from holdfast.state.optimizer.inner import inner_optimizers, unwrapped_optimizer
from holdfast.state.optimizer.own_form import TorchForm, read_form, shows
from holdfast.state.optimizer.protocol import (
    OptimizerParameter,
    OptimizersByModule,
    PartitionedOptimizer,
)
from holdfast.state.tensors import tensors_of

SHARDING = "param_state_sharding_type"
"""Key of the sharding records, which are stored for people."""
NUM_GROUPS = "num_groups"
"""Key of the number of groups of each optimizer inside a sharded one."""
_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


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
        """Each parameter, held whole."""
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


class NamedOptimizer:
    """An optimizer, the names of its parameters, and its state by these names."""

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
                f"are parts of their own; save each under its module's name, such as "
                f"'{name}.optimizer': OptimizerState(optimizer['{name}'], {name}). This rank "
                f"trains {', '.join(map(repr, modules)) or 'none'}"
            )
        self._own: Any = None
        """The optimizer where it is whole: a torch optimizer, or one that looks like one."""
        self._optimizer: PartitionedOptimizer
        # Asked first: a sharded optimizer is a torch optimizer by type, too.
        if isinstance(optimizer, PartitionedOptimizer):
            self._optimizer = optimizer
        else:
            self._own = _checked(optimizer)
            self._optimizer = UnshardedOptimizer(self._own)
        self._module = module
        self._modules = _modules_by_prefix(module)

    def tree(self) -> dict[str, object]:
        """The state by name, group hyperparameters, membership, and main parameters if any."""
        self._optimizer.synchronize()
        form, by_name = self._forms()
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
        """The tree of an optimizer whose state is known by parameter."""
        state: dict[str, object] = {}
        main: dict[str, object] = {}
        membership: dict[str, int] = {}
        parameters: dict[str, object] = {}
        paddings = self._paddings()
        stepped: set[int] = set()
        for name, param in self._named():
            padding = paddings.get(id(param.parameter))
            membership[name] = param.group
            parameters[name] = parameter_facts(param, padding)
            if param.updated is None:
                continue
            stepped.add(id(param.updated))
            if id(param.updated) in form.entries:
                entries = form.entries[id(param.updated)]
                if type(entries) is dict:
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
        """The form that the optimizer's class or hooks make, if any; and its state by parameter.

        The latter is None for a form that is not like torch's, and is read from the attributes
        where the optimizer has no form of its own.
        """
        optimizers = self._torch_optimizers()
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

    def _torch_optimizers(self) -> list[Any]:
        """The torch optimizers that keep the state, each once."""
        if self._own is not None:
            return [self._own]
        params = self._optimizer.optimizer_parameters()
        return list({id(param.optimizer): param.optimizer for param in params}.values())

    def _refuse_unknown_state(self, stepped: set[int]) -> None:
        """PlacementError for state of unknown tensors, and of no parameter in a sharded one."""
        for optimizer in self._torch_optimizers():
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
        """PlacementError for an optimizer that has state of its own and shows nothing of it."""
        state = getattr(self._own, "state", None)
        has_tensors = isinstance(state, Mapping) and any(tensors_of(list(state.values())))
        if has_tensors and not any(tensors_of(form)):
            raise PlacementError(
                f"{type(self._own).__name__}.state_dict() shows no tensor, though the optimizer "
                f"has state; mend its state_dict, or nothing of it can be kept"
            )

    def _inner(self, *, saving: bool, shown: object = None) -> dict[str, Any]:
        """Optimizers in attributes, each as a part of its own; when saving, those not yet shown."""
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

    # ---- names ----

    def _names(self) -> dict[torch.Tensor, str]:
        """Parameter -> its logical name, behind the module's own where there are several."""
        names: dict[torch.Tensor, str] = {}
        for prefix, module in self._modules.items():
            _refuse_flat_shards(module)
            for parameter, name in parameter_names(module).items():
                # A parameter shared by two of the modules has the first one's name.
                names.setdefault(parameter, f"{prefix}.{name}" if prefix else name)
        if len(self._modules) > 1 and len(set(names.values())) < len(names):
            listed = list(names.values())
            twice = next(name for name in listed if listed.count(name) > 1)
            raise ConfigError(f"OptimizerState: two parameters are named '{twice}'")
        return names

    def _named(self) -> Iterator[tuple[str, OptimizerParameter]]:
        """Each of the optimizer's parameters with its logical name."""
        names = self._names()
        for param in self._optimizer.optimizer_parameters():
            if param.parameter not in names:
                raise ConfigError(self._unknown_parameter(param, names))
            yield names[param.parameter], param

    def _unknown_parameter(self, param: OptimizerParameter, names: Mapping[Any, str]) -> str:
        """That a parameter is none of the module's, in words, and the likely cause."""
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
        """The declared padding of parameters, by `id`."""
        return {
            key: padding
            for module in self._modules.values()
            for key, padding in declared_padding(module).by_tensor.items()
        }

    def _known_parameters(self) -> dict[str, object]:
        """Facts of the parameters that are the module's; the optimizer deals with others itself."""
        names, paddings = self._names(), self._paddings()
        return {
            names[param.parameter]: parameter_facts(param, paddings.get(id(param.parameter)))
            for param in self._optimizer.optimizer_parameters()
            if param.parameter in names
        }


def has_own_form(optimizer: Any) -> bool:
    """Whether state goes through the optimizer's own methods rather than its attributes."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return True
    methods = ("state_dict", "load_state_dict")
    has_hooks = any(getattr(optimizer, hooks, None) for hooks in _HOOKS)
    return has_hooks or overrides(optimizer, torch.optim.Optimizer, methods)


def parameter_facts(
    param: OptimizerParameter, padding: tuple[int, ...] | None
) -> dict[str, object]:
    """What a load has to know of a parameter: its real shape, and whether it was frozen."""
    shape = [int(n) for n in (param.parameter.shape if padding is None else padding)]
    return {"shape": shape} if param.parameter.requires_grad else {"shape": shape, "frozen": True}


def stored_form(param: OptimizerParameter, entry: str, value: object) -> object:
    """What is saved for an entry of a parameter's state.

    Of a sharded parameter, tensors of the run's shape are stored in the parameter's coordinates,
    0-d ones as they are.

    Raises:
        PlacementError: An entry is not elementwise.
    """
    if param.over is None or param.updated is None:
        return value
    if not isinstance(value, torch.Tensor):
        if any(tensors_of(value)):
            raise PlacementError(
                f"optimizer entry '{entry}' is a {type(value).__name__} that holds tensors; "
                f"only elementwise optimizers can be sharded by elements"
            )
        return value
    if value.ndim == 0:
        return value
    if value.shape != param.updated.shape:
        raise PlacementError(
            f"optimizer entry '{entry}' has shape {list(value.shape)}, not that of the run it "
            f"belongs to ({list(param.updated.shape)}); only elementwise optimizers can be "
            f"sharded by elements"
        )
    return param.marker(entry, value)


def with_padding(
    value: object, param: OptimizerParameter, padding: tuple[int, ...] | None
) -> object:
    """A value marked as padded where it is elementwise of a parameter whose padding is declared."""
    if padding is None:
        return value
    if isinstance(value, FlatShard) or (
        isinstance(value, torch.Tensor) and value.shape == param.parameter.shape
    ):
        return Padded(value, padding)
    return value


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


def _modules_by_prefix(module: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules by what their parameters' names begin with; ConfigError for anything else."""
    hint = "pass the module whose parameters the optimizer updates, or a dict of modules by name"
    if isinstance(module, nn.Module):
        return {"": module}
    if not isinstance(module, Mapping):
        raise ConfigError(f"OptimizerState: a {type(module).__name__} is no module; {hint}")
    for name, each in module.items():
        if not isinstance(each, nn.Module) or not isinstance(name, str):
            raise ConfigError(f"OptimizerState: {name!r} is a {type(each).__name__}; {hint}")
    if not module:
        raise ConfigError("OptimizerState: a dict of modules needs at least one")
    return dict(module)


def _refuse_flat_shards(module: nn.Module) -> None:
    """PlacementError where FSDP1 has cut parameters into pieces that say nothing of the whole.

    Each rank then has another part of the elements under one name and without a placement.
    """
    for _, actual, inner, is_wrapper in walk_all(module):
        if not is_wrapper or "_fsdp_wrapped_module" not in inner._modules:
            continue
        strategy = getattr(getattr(inner, "sharding_strategy", None), "name", "")
        if getattr(inner, "world_size", 1) > 1 and strategy != "NO_SHARD":
            raise PlacementError(
                f"OptimizerState: {type(inner).__name__} at '{actual or '(root)'}' shards "
                f"parameters as flat pieces, whose optimizer state has no place in the whole "
                f"parameter; shard with fully_shard (FSDP2), whose parameters are DTensors, or "
                f"use NO_SHARD. The module itself can be saved as it is"
            )
