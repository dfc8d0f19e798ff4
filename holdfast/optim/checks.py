"""Checks that an optimizer makes before it changes anything, when it is built and in a step."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast._torch import has_step_hooks, local_tensor
from holdfast.arguments import check_choice, check_int, check_number
from holdfast.errors import ConfigError
from holdfast.optim.in_flight import gradient_hook
from holdfast.optim.plain_shards import PlainShards
from holdfast.optim.scaler import LossScaler
from holdfast.optim.shard_groups import ShardGroups, mesh_lines
from holdfast.parallel import Layout, ProcessGroups

_NOT_ELEMENTWISE = (
    *("Adafactor", "DistributedShampoo", "LAMB", "LARS", "LBFGS", "Lamb", "Lars", "Muon"),
    *("SOAP", "Shampoo", "SparseAdam"),
)
"""Names of classes that always join elements; all others are tried (`elementwise`)."""
_ELEMENTWISE = frozenset(
    {
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD"),
    }
)
"""Names of torch's classes that update elements one by one: no others, whatever torch adds."""


def read_groups(
    parameters: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return parameter groups as torch takes them; raise ConfigError if a parameter is in two."""
    items: Sequence[Any] = list(parameters)
    mappings = [dict(item) for item in items if isinstance(item, Mapping)]
    if mappings and len(mappings) != len(items):
        raise ConfigError("parameters and parameter groups cannot be mixed in one list")
    groups = mappings or [{"params": items}]
    seen: set[nn.Parameter] = set()
    for group in groups:
        members = group["params"]
        group["params"] = [members] if isinstance(members, torch.Tensor) else list(members)
        for parameter in group["params"]:
            if not isinstance(parameter, nn.Parameter):
                raise ConfigError(f"a {type(parameter).__name__} is not a parameter of a module")
            if parameter in seen:
                raise ConfigError(
                    f"a parameter of shape {list(parameter.shape)} is in the groups twice"
                )
            seen.add(parameter)
    return groups


def check_settings(
    *, name: str, divisor: int, num_averaged: int, stage: int, sizes: Mapping[str, int]
) -> None:
    """Raise ConfigError if a divisor or size is not an integer of at least 1, or at an unknown
    stage."""
    check_int(
        divisor,
        name=f"optimizer '{name}': divisor",
        least=1,
        hint=f"; it is the number of ranks whose losses are averaged, {num_averaged} here",
    )
    check_choice(stage, name=f"optimizer '{name}': stage", choices=(1, 2))
    for setting, size in sizes.items():
        check_int(size, name=f"optimizer '{name}': {setting}", least=1)


def check_inner(
    inner: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], *, name: str
) -> None:
    """Raise ConfigError unless an optimizer has exactly these groups of tensors."""
    kind = type(inner).__name__
    if not isinstance(inner, torch.optim.Optimizer) or len(inner.param_groups) != len(groups):
        raise ConfigError(
            f"optimizer '{name}': make gave a {kind}; it has to be a torch optimizer of the "
            f"{len(groups)} groups it is called with"
        )
    for number, (actual, passed) in enumerate(zip(inner.param_groups, groups, strict=True)):
        if [id(t) for t in actual["params"]] != [id(t) for t in passed["params"]]:
            raise ConfigError(
                f"optimizer '{name}': group {number} of the {kind} that make gave has other "
                f"tensors than make was called with; it has to update those, in their order"
            )


def check_kind(inner: torch.optim.Optimizer, *, name: str) -> None:
    """Raise ConfigError if an optimizer, or an ancestor of its class, is known to join elements."""
    for ancestor in type(inner).__mro__:
        if ancestor.__name__ in _NOT_ELEMENTWISE:
            kind = type(inner).__name__
            what = kind if ancestor is type(inner) else f"{kind} (a {ancestor.__name__})"
            raise ConfigError(
                f"optimizer '{name}': {what} does not update elements one by one, so parts "
                f"of a tensor would not be updated like the whole. Keep its parameters whole, in "
                f"a ReducedOptimizer, and chain it with the sharded ones (ChainedOptimizer)"
            )


def is_known_elementwise(kind: type) -> bool:
    """Return True for torch's own classes that update elements one by one, not for subclasses."""
    name = kind.__name__
    return name in _ELEMENTWISE and kind.__module__ == f"torch.optim.{name.lower()}"


def steps_as_torch_wrote_it(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer is of a known elementwise class, and a step runs torch's code.

    False if a step runs hooks, or if `step` was replaced, in the object or in the class.
    """
    return (
        is_known_elementwise(type(optimizer))
        and not has_step_hooks(optimizer)
        and "step" not in vars(optimizer)
        and _is_torchs(type(optimizer).step)
    )


def _is_torchs(function: object) -> bool:
    """Return True if a function, and all that its decorators have wrapped, is code of torch."""
    while isinstance(function, FunctionType):
        # `__module__` is copied by functools.wraps, the globals are those of the code.
        if not str(function.__globals__.get("__name__")).startswith("torch."):
            return False
        function = getattr(function, "__wrapped__", None)
    return function is None


def refuse_shared(members: Mapping[str, Iterable[nn.Parameter]], *, where: str) -> None:
    """Raise ConfigError if two optimizers would update one parameter.

    Args:
        members: the parameters of each, by its name.
        where: in what they are, for messages.
    """
    owners: dict[nn.Parameter, str] = {}
    for name, parameters in members.items():
        for parameter in parameters:
            owner = owners.setdefault(parameter, name)
            if owner != name:
                raise ConfigError(
                    f"a parameter of shape {list(parameter.shape)} is in {where} '{owner}' and "
                    f"'{name}'; it belongs to one of them"
                )


def check_free(parameters: Iterable[nn.Parameter], *, names: Mapping[nn.Parameter, str]) -> None:
    """Raise ConfigError if another sharded optimizer takes the gradients of a parameter."""
    for parameter in parameters:
        hook = gradient_hook(parameter)
        if hook is not None:
            raise ConfigError(
                f"{names[parameter]} is in sharded optimizer '{hook.name}' already, which "
                f"takes its gradients; close() that one first, or give each its own parameters"
            )


def check_limit(max_norm: float) -> float:
    """Return the largest norm allowed; raise ConfigError if it is negative or not a number."""
    return check_number(
        max_norm,
        name="max_norm",
        least=0,
        hint="; it is the largest 2-norm of the whole gradient, 0 or math.inf for no limit",
    )


def check_scaler(
    scaler: LossScaler | Mapping[str, LossScaler] | None,
    *,
    layouts: Container[str],
    trained: Iterable[str],
) -> float | None:
    """Return the loss scale of a step, None without a scaler; raise ConfigError if scales differ.

    Args:
        scaler: one for all modules, or one for each by name.
        layouts: all modules.
        trained: the modules of this rank that are trained.
    """
    if isinstance(scaler, Mapping):
        for module in scaler:
            if module not in layouts:
                raise ConfigError(f"scaler: {module!r} is not a module")
        missing = [module for module in trained if module not in scaler]
        if missing or not scaler:
            raise ConfigError(
                f"scaler has no LossScaler for {', '.join(map(repr, missing)) or 'any module'}; "
                f"give each trained module one, or all of them the same one"
            )
    for each in distinct_scalers(scaler):
        if not isinstance(each, LossScaler):
            raise ConfigError(f"scaler: a {type(each).__name__} is not a LossScaler")
    scales = {each.scale for each in distinct_scalers(scaler)}
    if len(scales) > 1 and isinstance(scaler, Mapping):
        listed = ", ".join(f"{each.scale:g} of {m!r}" for m, each in scaler.items())
        raise ConfigError(
            f"the loss scales of the modules differ: {listed}; one loss is scaled once: use one "
            f"LossScaler, or load all of them from one checkpoint"
        )
    return next(iter(scales), None)


def distinct_scalers(
    scaler: LossScaler | Mapping[str, LossScaler] | None,
) -> Sequence[LossScaler]:
    """Return the scalers of a step, each once."""
    if scaler is None:
        return []
    listed = scaler.values() if isinstance(scaler, Mapping) else [scaler]
    return list({id(each): each for each in listed}.values())


def check_tokens(
    num_tokens: int | None, *, module: str | None, layouts: Mapping[str, Layout], rank: int
) -> int | None:
    """Return the count as an int; raise ConfigError if it is not one, or not for this rank.

    Args:
        num_tokens: of this rank, or None.
        module: whose ranks count tokens; None if it is unknown.
        layouts: of all modules.
        rank: this one.
    """
    if num_tokens is None:
        return None
    if module is None:
        raise ConfigError(
            "num_tokens: several modules feed no other, so the one whose tokens count is unknown; "
            "pass loss_module= to MultiModuleOptimizer"
        )
    if rank not in layouts[module].ranks:
        raise ConfigError(
            f"num_tokens={num_tokens!r}: this rank does not have module {module!r}, whose tokens "
            f"count; pass None here"
        )
    return check_int(
        num_tokens,
        name="num_tokens",
        least=0,
        below=2**50,  # the sum of all ranks is exact in a float64
        hint="; it is this rank's number of tokens that are part of the loss",
    )


def check_parameter(
    parameter: nn.Parameter,
    *,
    names: Mapping[nn.Parameter, str],
    shard_groups: ShardGroups,
    groups: ProcessGroups,
    shards: PlainShards,
) -> None:
    """Raise ConfigError unless a parameter is repeated over exactly the ranks that reduce it."""
    if parameter not in names:
        raise ConfigError(
            f"a parameter of shape {list(parameter.shape)} is not one of the module's"
        )
    name = names[parameter]
    layout = groups.layout
    is_expert = shard_groups.over.startswith("expt_dp")
    if not isinstance(parameter, DTensor):
        if is_expert and layout.expt_tp > 1 and not shards.is_declared(parameter):
            raise ConfigError(
                f"{name}: an expert parameter that is a plain tensor does not say how expt_tp = "
                f"{layout.expt_tp} splits it; make it a DTensor on groups.mesh('expt_dp', 'ep', "
                f"'expt_tp'), or declare it: shards={{'ep': [...], 'expt_tp': [...]}}"
            )
        return
    local = local_tensor(parameter)
    if not local.is_contiguous():
        raise ConfigError(
            f"{name}: the local tensor of a DTensor must be contiguous, its strides are "
            f"{list(local.stride())}; make it with .contiguous()"
        )
    reduced = shard_groups.data_ranks
    for dim, placement, line in mesh_lines(parameter):
        shared = reduced.intersection(line) - {groups.rank}
        if not placement.is_replicate():
            fits = not shared  # else other parts would be added to this one
        elif shared:
            fits = reduced.issuperset(line)  # else copies would get different sums
        else:
            # Copies that this reduction does not reach: right along tp, wrong along a data axis.
            fits = len(line) == 1 or not dim.startswith(("dp", "expt_dp"))
        if fits:
            continue
        hint = "dense parameters" if is_expert else "experts"
        other = "dp_cp" if is_expert else "expt_dp"
        raise ConfigError(
            f"{name}: along mesh dim {dim!r} (ranks {sorted(line)}) it is {placement}, which does "
            f"not fit a reduction over {shard_groups.over!r} (ranks {sorted(reduced)}); {hint} "
            f"take over={other!r}"
        )
