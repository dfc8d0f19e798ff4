"""A state-space mixer in the manner of Mamba-2 (Dao, Gu 2024), in plain PyTorch.

The tensor axis splits groups of heads, as it does in attention. The context axis splits positions
outside of the scan and heads inside of it: one all-to-all before, one after. The scan itself does
not depend on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.parallel import ProcessGroups
from holdfast_trainer.models.collectives import Axis, all_to_all, copy_to, reduce_from
from holdfast_trainer.models.config import GPTConfig, check_state_space
from holdfast_trainer.models.context import restore_order, shard_order

SCAN_CHUNK = 64
"""Positions that the scan takes at once; its memory grows with it."""

_EPS = 1e-6
_STEP_RANGE = (1e-3, 1e-1)
_DECAY_RANGE = (1.0, 16.0)


class StateSpace(nn.Module):
    """Mixes positions through a linear recurrence over heads, then a gate and a norm.

    Every parameter is registered whole; `SPLITS` declares how a rank's shard is split. The letters
    are those of the paper: x is the input of the recurrence, B and C map it into and out of the
    state, dt is the step size and A the decay; z is the gate.
    """

    SPLITS: ClassVar[Mapping[str, Mapping[int, str]]] = MappingProxyType(
        {
            **{
                name: MappingProxyType({0: "tp"})
                for name in (
                    *("in_z", "in_x", "in_B", "in_C", "in_dt"),
                    *("conv_x", "conv_B", "conv_C"),
                    *("conv_x_bias", "conv_B_bias", "conv_C_bias"),
                    *("A_log", "D", "dt_bias", "norm"),
                )
            },
            "out": MappingProxyType({1: "tp"}),
        }
    )
    """Parameter -> {dim: axis that it is split over}; all are replicated over `cp`."""

    def __init__(self, config: GPTConfig, *, groups: ProcessGroups) -> None:
        """Register the parameters, whole and not initialised; no communication.

        Args:
            config: sizes; the groups of heads divide by `tp` x `cp`.
            groups: needs `tp` and `cp` where they are larger than 1.

        Raises:
            ConfigError: the groups of heads do not divide.
            GroupError: a communicator is missing.
        """
        super().__init__()
        self._tp = Axis.of(groups, "tp")
        self._cp = Axis.of(groups, "cp")
        check_state_space(config, tp=self._tp.size, cp=self._cp.size)
        self._head_dim = config.state_inner_dim // config.num_state_heads
        self._group_dim = config.state_inner_dim // config.num_state_groups
        self._state_dim = config.state_dim
        model, inner, heads = config.model_dim, config.state_inner_dim, config.num_state_heads
        mapped = config.num_state_groups * config.state_dim
        self.in_z = _parameter(inner, model)
        self.in_x = _parameter(inner, model)
        self.in_B = _parameter(mapped, model)
        self.in_C = _parameter(mapped, model)
        self.in_dt = _parameter(heads, model)
        self.conv_x = _parameter(inner, config.conv_width)
        self.conv_x_bias = _parameter(inner)
        self.conv_B = _parameter(mapped, config.conv_width)
        self.conv_B_bias = _parameter(mapped)
        self.conv_C = _parameter(mapped, config.conv_width)
        self.conv_C_bias = _parameter(mapped)
        self.A_log = _parameter(heads)
        self.D = _parameter(heads)
        self.dt_bias = _parameter(heads)
        self.norm = _parameter(inner)
        self.out = _parameter(model, inner)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, local positions, model_dim) -> the same shape, type of the projections.

        Positions are distributed over `cp` as in `context.positions`, and are mixed in their
        global order. The scan and the norm compute in float32 or wider, under autocast as well.

        Gradients of the parameters are those of this rank's loss for the projections and the norm.
        Those of the convolutions, A_log, D and dt_bias are zero but for the part that this index
        of `cp` computed, and there they are of the sum of all `cp` ranks' losses: summed over `cp`
        both kinds are whole.

        Cost: one all-reduce over `tp`, and two all-to-alls over `cp` that send inner + 2 x groups
        x state_dim + heads, and inner, numbers per local position; as much again backward.
        """
        x = copy_to(x, axis=self._tp)
        gate = functional.linear(x, self.in_z)
        projected = [
            functional.linear(x, weight) for weight in (self.in_x, self.in_B, self.in_C, self.in_dt)
        ]
        mixed = self._mix(*_split_channels(projected, axis=self._cp))
        normed = self._gated_norm(_split_positions(mixed, axis=self._cp), gate)
        return reduce_from(functional.linear(normed, self.out), axis=self._tp)

    def _mix(self, x: Tensor, B: Tensor, C: Tensor, dt: Tensor) -> Tensor:
        """Convolve and scan whole sequences of this rank's heads: (rows, positions, channels)."""
        own = self._own
        x = _convolve(x, own(self.conv_x), bias=own(self.conv_x_bias))
        B = _convolve(B, own(self.conv_B), bias=own(self.conv_B_bias))
        C = _convolve(C, own(self.conv_C), bias=own(self.conv_C_bias))
        wide = torch.promote_types(torch.float32, x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            heads = torch.unflatten(x.to(wide), -1, (-1, self._head_dim))
            mixed = chunked_scan(
                heads,
                functional.softplus(dt.to(wide) + own(self.dt_bias).to(wide)),
                -own(self.A_log).to(wide).exp(),
                torch.unflatten(B.to(wide), -1, (-1, self._state_dim)),
                torch.unflatten(C.to(wide), -1, (-1, self._state_dim)),
            )
            mixed = mixed + heads * own(self.D).to(wide).unsqueeze(-1)
        return mixed.flatten(2).to(x.dtype)

    def _gated_norm(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """RMSNorm of the gated channels, within each group of heads."""
        wide = torch.promote_types(torch.float32, mixed.dtype)
        gated = mixed.to(wide) * functional.silu(gate.to(wide))
        by_group = torch.unflatten(gated, -1, (-1, self._group_dim))
        normed = functional.rms_norm(by_group, (self._group_dim,), eps=_EPS).flatten(-2)
        return (normed * self.norm.to(wide)).to(mixed.dtype)

    def _own(self, parameter: Tensor) -> Tensor:
        """The part of a parameter that belongs to this index of `cp`: a view."""
        share = parameter.shape[0] // self._cp.size
        return parameter.narrow(0, self._cp.index * share, share)


def initial_state_space(
    name: str, *, shape: tuple[int, ...], generator: torch.Generator
) -> Tensor | None:
    """The whole initial value of one parameter of `StateSpace`, as Mamba-2 chooses it.

    Decay rates are uniform in [1, 16]; step sizes, as softplus of dt_bias gives them for a zero
    input, are log-uniform in [0.001, 0.1]; D and the norm are 1. Convolutions are uniform within
    1 / sqrt(conv_width) (torch's own rule), their biases 0.

    Args:
        name: of the parameter, with or without the modules it is in.
        shape: of the whole parameter.
        generator: of the random values, on the CPU.

    Returns:
        A float32 CPU tensor; None for the matrices, which follow the caller's rule.
    """
    name = name.rpartition(".")[2]
    if name in ("D", "norm"):
        return torch.ones(shape)
    if name in ("conv_x_bias", "conv_B_bias", "conv_C_bias"):
        return torch.zeros(shape)
    if name in ("conv_x", "conv_B", "conv_C"):
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    if name == "A_log":
        return torch.empty(shape).uniform_(*_DECAY_RANGE, generator=generator).log_()
    if name == "dt_bias":
        low, high = (math.log(bound) for bound in _STEP_RANGE)
        step = torch.empty(shape).uniform_(low, high, generator=generator).exp_()
        return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
    return None


def chunked_scan(
    x: Tensor, dt: Tensor, decay: Tensor, B: Tensor, C: Tensor, *, chunk: int = SCAN_CHUNK
) -> Tensor:
    """The recurrence of each head, chunk by chunk in matrix products (SSD, Dao and Gu 2024, 6).

    With a state h of (head_dim, state_dim) that starts at zero:
    ``h[t] = exp(dt[t] decay) h[t-1] + dt[t] x[t] B[t]^T`` and ``y[t] = h[t] C[t]``.

    Args:
        x: (rows, positions, heads, head_dim).
        dt: (rows, positions, heads), positive.
        decay: (heads,), negative.
        B: (rows, positions, groups, state_dim); consecutive heads share a group.
        C: the same shape.
        chunk: positions taken at once; the result does not depend on it but for rounding.

    Returns:
        (rows, positions, heads, head_dim). All operands have one type, float32 or wider for sums
        over long sequences.

    Cost: memory for a few times rows x positions x heads x chunk numbers, and (positions / chunk)^2
    x rows x heads.
    """
    num_positions, (num_groups, _) = x.shape[1], B.shape[2:]
    chunk = min(chunk, num_positions)
    # Added positions have steps of zero: they neither decay nor add to a state.
    x, dt, B, C = (_in_chunks(part, chunk) for part in (x, dt, B, C))
    grouped = (num_groups, dt.shape[3] // num_groups)
    # From here on (rows, chunks, groups, heads of a group, positions, ...).
    log_decay = torch.unflatten((dt * decay).movedim(2, 3), 2, grouped)
    added = torch.unflatten((x * dt.unsqueeze(-1)).movedim(2, 3), 2, grouped)
    B, C = B.movedim(2, 3).unsqueeze(3), C.movedim(2, 3).unsqueeze(3)
    between = _sums_between(log_decay).exp()
    mixed = (C @ B.mT * between) @ added
    if log_decay.shape[1] > 1:
        # What each chunk adds to the state at its end, and the state that each chunk starts with.
        states = (added * between[..., -1, :].unsqueeze(-1)).mT @ B
        totals = log_decay.sum(dim=-1).movedim(1, -1)[..., :-1]
        carried = _sums_between(totals).exp() @ states[:, :-1].movedim(1, 3).flatten(-2)
        begins = torch.unflatten(carried, -1, states.shape[-2:]).movedim(3, 1)
        later = (C[:, 1:] @ begins.mT) * log_decay[:, 1:].cumsum(dim=-1).exp().unsqueeze(-1)
        mixed = torch.cat((mixed[:, :1], mixed[:, 1:] + later), dim=1)
    return mixed.flatten(2, 3).movedim(3, 2).flatten(1, 2)[:, :num_positions]


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """(rows, positions, ...) -> (rows, chunks, chunk, ...), padded with zeros."""
    missing = -x.shape[1] % chunk
    if missing:
        x = torch.cat((x, x.new_zeros((x.shape[0], missing, *x.shape[2:]))), dim=1)
    return torch.unflatten(x, 1, (-1, chunk))


def _sums_between(x: Tensor) -> Tensor:
    """(..., n) -> (..., n, n): [i, j] is the sum of x after j up to i, minus infinity for j > i.

    Row by row for x = [a, b, c]:

        i = 0:  0      -inf   -inf
        i = 1:  b      0      -inf
        i = 2:  b + c  c      0
    """
    # Each sum is added up by itself: differences of one running sum would cancel.
    length = x.shape[-1]
    square = torch.ones(length, length, dtype=torch.bool, device=x.device)
    rows = x.unsqueeze(-1).expand(*x.shape, length).masked_fill(~square.tril(-1), 0)
    return rows.cumsum(dim=-2).masked_fill(~square.tril(0), -math.inf)


def _convolve(x: Tensor, weight: Tensor, *, bias: Tensor) -> Tensor:
    """Each channel's causal convolution over positions, then SiLU: (rows, positions, channels)."""
    padded = functional.pad(x.mT, (weight.shape[1] - 1, 0))
    mixed = functional.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.shape[0])
    return functional.silu(mixed).mT


def _split_channels(parts: Sequence[Tensor], *, axis: Axis) -> Sequence[Tensor]:
    """Tensors of (rows, local positions, channels) -> (rows, positions, own channels) each."""
    if axis.size == 1:
        return parts
    by_owner = torch.cat([torch.unflatten(part, -1, (axis.size, -1)) for part in parts], dim=-1)
    each = [1] * axis.size
    shards = all_to_all(by_owner.movedim(2, 0), axis=axis, send=each, receive=each)
    whole = restore_order(shards.movedim(0, 1).flatten(1, 2), axis=axis, dim=1)
    return torch.split(whole, [part.shape[-1] // axis.size for part in parts], dim=-1)


def _split_positions(x: Tensor, *, axis: Axis) -> Tensor:
    """(rows, positions, own channels) -> (rows, local positions, channels)."""
    if axis.size == 1:
        return x
    by_owner = torch.unflatten(shard_order(x, axis=axis, dim=1), 1, (axis.size, -1))
    each = [1] * axis.size
    shards = all_to_all(by_owner.movedim(1, 0), axis=axis, send=each, receive=each)
    return shards.movedim(0, 2).flatten(2)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))
