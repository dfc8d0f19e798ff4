"""Plain tensors that ranks hold shards of: tensor parallelism and experts without DTensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.arguments import check_choice
from holdfast.errors import ConfigError
from holdfast.optim.agreement import Hints
from holdfast.parallel import ProcessGroups

Shards = Mapping[str, Iterable[nn.Parameter]]
"""Axis of the layout -> parameters of which each rank along it holds another shard."""

_STAGE = ("expt_tp", "ep", "expt_dp")
"""Axes of a pipeline stage, as experts see it."""

HINTS = Hints(
    missing="build it with the same parameters on all of them, or declare shards in shards=",
    values="Give all ranks the same initial values (one seed, or a broadcast)",
    shards=(
        "If each holds a shard of one tensor, make it a DTensor on groups.mesh('dp_cp', 'tp'), or "
        "declare it: shards={'tp': [parameter, ...]}"
    ),
    alone=(
        "make it a DTensor on groups.mesh('expt_dp', 'ep'), give each expert its own name, or "
        "declare it: shards={'ep': [parameter, ...]}"
    ),
)


class PlainShards:
    """The axes along which ranks hold other shards of a plain parameter.

    A DTensor says so itself. A plain tensor is the same on all ranks of its pipeline stage, unless
    it is declared here, or is an expert: gradients that are added up over `expt_dp` alone belong to
    another expert at each coordinate of `ep`.

    Args:
        declared: by axis (`tp`; for experts `ep`, `expt_tp`), as users pass them.
        parameters: those of the optimizer.
        groups: the communicators.
        over: the group that gradients are added up over; None if something else does that.
        who: start of messages.

    Raises:
        ConfigError: A declaration does not fit.
    """

    def __init__(
        self,
        declared: Shards | None,
        parameters: Iterable[nn.Parameter],
        *,
        groups: ProcessGroups,
        over: str | None,
        who: str,
    ) -> None:
        self._layout = groups.layout
        self._is_expert = (over or "").startswith("expt_dp")
        self._axes: dict[nn.Parameter, tuple[str, ...]] = {}
        if declared is not None and not isinstance(declared, Mapping):
            raise ConfigError(f"{who}: shards= must be a dict of axes, got {declared!r}")
        known = set(parameters)
        for axis, members in (declared or {}).items():
            check_choice(axis, name=f"{who}: an axis in shards=", choices=("tp", "ep", "expt_tp"))
            fits = over is None or (axis == "tp") != self._is_expert
            if not fits:
                raise ConfigError(
                    f"{who}: shards= has {axis!r}, but gradients are added up over {over!r}; "
                    f"experts are cut along 'ep' and 'expt_tp', dense parameters along 'tp'"
                )
            for parameter in _checked(members, known, axis=axis, who=who):
                self._axes[parameter] = (*self._axes.get(parameter, ()), axis)
        for parameter, axes in self._axes.items():
            if "tp" in axes and len(axes) > 1:
                raise ConfigError(
                    f"{who}: shards= has a parameter of shape {list(parameter.shape)} along "
                    f"{', '.join(map(repr, axes))}; experts are cut along 'ep' and 'expt_tp'"
                )

    def axes(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Return the axes along which ranks hold other shards; none for a DTensor."""
        if isinstance(parameter, DTensor):
            return ()
        axes = self._axes.get(parameter, ())
        return (*axes, "ep") if self.is_alone(parameter) else axes

    def is_declared(self, parameter: nn.Parameter) -> bool:
        """Return True if the user has declared axes of a parameter."""
        return parameter in self._axes

    def is_alone(self, parameter: nn.Parameter) -> bool:
        """Return True for a plain expert that is not declared along `ep`: its name tells it."""
        return (
            self._is_expert
            and self._layout.ep > 1
            and not isinstance(parameter, DTensor)
            and "ep" not in self._axes.get(parameter, ())
        )

    def num_parts(self, parameter: nn.Parameter) -> int:
        """Return the number of different shards of a plain parameter on its stage."""
        return math.prod(self._layout.size(axis) for axis in self.axes(parameter))

    def same_over(self, parameter: nn.Parameter) -> str:
        """Return the group of all ranks that hold the same as this one of a plain parameter."""
        axes = self.axes(parameter)
        if not axes:
            return "tp-cp-dp"
        return "dp_cp" if "tp" in axes else "-".join(a for a in _STAGE if a not in axes)


def _checked(
    members: object, known: set[nn.Parameter], *, axis: str, who: str
) -> Sequence[nn.Parameter]:
    """Return the parameters of one axis; raise ConfigError for anything else."""
    if isinstance(members, torch.Tensor) or not isinstance(members, Iterable):
        members = [members]
    checked = list(members)
    for each in checked:
        if isinstance(each, DTensor):
            raise ConfigError(
                f"{who}: shards= has a DTensor of shape {list(each.shape)}, which says itself how "
                f"it is cut; declare plain tensors alone"
            )
        if not isinstance(each, nn.Parameter) or each not in known:
            what = f" of shape {list(each.shape)}" if isinstance(each, torch.Tensor) else ""
            raise ConfigError(
                f"{who}: shards={{{axis!r}: ...}} has a {type(each).__name__}{what} that is not a "
                f"parameter of the optimizer; pass the parameters themselves, not names"
            )
    return list(dict.fromkeys(checked))  # a tied one may be listed by each of its names
