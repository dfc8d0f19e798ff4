"""A mixture of experts that drops no token, split over an expert and an inner-width axis.

One rank holds the experts of its index on `ep`, and of each the slice of the inner width of its
index on `expt_tp`. Those groups are of the layout's expert view, so they need not share ranks with
the rank's `tp` and `cp` groups; nothing here depends on which ranks are in them.

A token is equal on the ranks of `tp`, and one of them routes it: its rows (one for each expert
chosen) go over `ep` to the ranks that hold the experts, and over `expt_tp` to all that hold slices
of them; the outputs of the slices are added, and return the same way. Numbers of rows are exchanged
first, and any of them may be zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.errors import ConfigError
from holdfast.parallel import ProcessGroups
from holdfast_trainer.models.collectives import (
    Axis,
    all_to_all,
    gather_dim,
    gather_sum,
    scatter_sum,
    split_dim,
    split_sizes,
    sum_over,
)
from holdfast_trainer.models.config import GPTConfig, check_experts


class MoE(nn.Module):
    """Experts in place of an MLP, each token going to `top_k` of them.

    A token's outputs are weighted by the softmax over the logits of the experts that it chose:
    weights add up to 1 (as in Mixtral, Jiang et al. 2024). With one choice the weight is therefore
    1 whatever the router says, and the router learns from the balance loss alone. Of experts with
    equal logits the one with the lower number is chosen.

    Parameters have their global shapes and names whatever the layout: every expert of every rank is
    in one tensor. `forward` runs on this rank's shards, split as `SPLITS` declares.
    """

    SPLITS: ClassVar[Mapping[str, Mapping[int, str]]] = MappingProxyType(
        {
            "gate": MappingProxyType({0: "ep", 1: "expt_tp"}),
            "up": MappingProxyType({0: "ep", 1: "expt_tp"}),
            "down": MappingProxyType({0: "ep", 2: "expt_tp"}),
        }
    )
    """Parameter -> {dim: axis that it is split over}; a parameter not named is replicated."""

    def __init__(self, config: GPTConfig, *, groups: ProcessGroups) -> None:
        """Make the full parameters; no collective.

        Args:
            config: num_experts, top_k, expert_inner_dim, load_balance, mlp and model_dim count.
            groups: needs `tp`, `cp`, `ep` and `expt_tp` where they are larger than 1.

        Raises:
            ConfigError: `ep` does not divide the experts, or `expt_tp` the inner width.
            GroupError: a communicator is missing.
        """
        super().__init__()
        self.config = config
        self.tp = Axis.of(groups, "tp")
        self.cp = Axis.of(groups, "cp")
        self.ep = Axis.of(groups, "ep")
        self.expt_tp = Axis.of(groups, "expt_tp")
        check_experts(config, ep=self.ep.size, expt_tp=self.expt_tp.size)
        num, inner, width = config.num_experts, config.expert_inner_dim, config.model_dim
        self.router = _matrix(num, width)
        if config.mlp == "swiglu":
            self.gate = _matrix(num, inner, width)
        self.up = _matrix(num, inner, width)
        self.down = _matrix(num, width, inner)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of the chosen experts, and the balance loss of every row.

        Called by all ranks of a pipeline stage together. `x` is equal on the ranks of `tp`, and so
        are both results and all gradients but the experts'. Local gradients are those of the sum
        of all ranks' own losses, as far as they went through this rank's tokens (x, router) or
        experts; nothing is divided here.

        Args:
            x: (rows, positions, model_dim); of a row, this rank's positions on `cp`.

        Returns:
            The same shape and dtype, and (rows,) float32 or wider: `load_balance` x num_experts x
            sum over experts of the share of the row's choices that went to the expert x the mean
            probability that the row's tokens gave it. It is 1 x `load_balance` where all is even.
            Both shares are of the whole row, so that the loss is equal on the ranks of `cp` and
            does not depend on how rows are assigned to ranks and microbatches.

        Raises:
            ConfigError: the parameters are not this rank's shards; before anything is sent.

        Cost: all-reduce over `cp` of 2 x rows x num_experts numbers; all-to-all over `ep` and
        all-gather over `expt_tp` of num_experts integers, for which the host waits; then
        all-to-all of top_k x tokens / tp rows of model_dim, all-gather and reduce-scatter over
        `expt_tp` of its size x the most rows that one of its ranks got, all-to-all back, and
        all-gather over `tp` of all tokens. Backward as much, without the integers. Rows to and
        from experts travel in autocast's dtype where it is on.
        """
        self._check_shards()
        logits = self._logits(x)
        chosen = _choose(logits, top_k=self.config.top_k)
        weights = logits.gather(2, chosen).softmax(2)
        aux = self._balance_loss(logits.softmax(2), chosen)
        out = self._mix(x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1))
        return out.to(x.dtype).view_as(x), aux

    def _logits(self, x: Tensor) -> Tensor:
        """(rows, positions, num_experts), float32 or wider whatever autocast says."""
        wide = torch.promote_types(torch.float32, x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x.to(wide), self.router.to(wide))

    def _balance_loss(self, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """(rows,): the expert-level balance loss of DeepSeekMoE (Dai et al. 2024), per row."""
        num_rows, _, num_experts = probabilities.shape
        row = torch.arange(num_rows, device=chosen.device)[:, None, None]
        # One bincount for all rows: (row, expert) numbered row * num_experts + expert.
        cells = (row * num_experts + chosen).flatten()
        counts = torch.bincount(cells, minlength=num_rows * num_experts)
        summed = probabilities.sum(1)
        both = torch.stack([counts.view_as(summed).to(summed.dtype), summed])
        counts, summed = sum_over(both, axis=self.cp).unbind()
        num_choices = counts.sum(1, keepdim=True).clamp(min=1)
        share = counts / num_choices
        mean = summed * self.config.top_k / num_choices
        return self.config.load_balance * num_experts * (share * mean).sum(1)

    def _mix(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """(tokens, model_dim), the weighted sum over each token's experts, in `weights`' dtype."""
        sizes = split_sizes(tokens.shape[0], num_parts=self.tp.size)
        own = split_dim(tokens.to(_row_dtype(tokens)), axis=self.tp, dim=0)
        weights = split_dim(weights, axis=self.tp, dim=0)
        chosen = split_dim(chosen, axis=self.tp, dim=0)
        num_copies = self.config.top_k
        # Row t * top_k + c is choice c of token t; stable, so that one order is as good as any.
        by_expert = chosen.flatten().argsort(stable=True)
        back = _inverse(by_expert)
        rows = _take_rows(own, by_expert // num_copies, back=back)
        rows = self._through_experts(rows, self._count(chosen))
        rows = _take_rows(rows, back, back=by_expert)
        copies = rows.view(-1, num_copies, tokens.shape[1])
        mixed = (copies * weights[:, :, None]).sum(1)
        return gather_dim(mixed, axis=self.tp, dim=0, sizes=sizes)

    def _count(self, chosen: Tensor) -> _Counts:
        """Exchange over `ep` and `expt_tp` how many rows go to which expert."""
        num_local = self.config.num_experts // self.ep.size
        sent = torch.bincount(chosen.flatten(), minlength=self.config.num_experts)
        shares = [num_local] * self.ep.size
        received = all_to_all(sent, axis=self.ep, send=shares, receive=shares)
        gathered = gather_dim(
            received, axis=self.expt_tp, dim=0, sizes=[len(received)] * self.expt_tp.size
        )
        shape = (self.expt_tp.size, self.ep.size, num_local)
        on_host = torch.cat([sent, gathered]).tolist()
        return _Counts(
            sent=_sums(on_host[: len(sent)], num_parts=self.ep.size),
            gathered=gathered.view(shape),
            on_host=torch.tensor(on_host[len(sent) :]).view(shape),
        )

    def _through_experts(self, rows: Tensor, counts: _Counts) -> Tensor:
        """Rows ordered by expert -> the outputs of their experts, in the same order."""
        sent, received = counts.sent, counts.on_host.sum(2)[self.expt_tp.index].tolist()
        sizes = counts.on_host.sum((1, 2)).tolist()
        rows = all_to_all(rows, axis=self.ep, send=sent, receive=received)
        rows = gather_sum(rows, axis=self.expt_tp, dim=0, sizes=sizes)
        # Rows arrive ordered by (member of expt_tp, member of ep, expert); each expert's must be
        # contiguous. Example of 1 x 2 members and 2 experts that got 1, 2 and 3, 1 rows:
        #   counts [[[1, 2], [3, 1]]]: expert of each row 0 11 000 1, so by_expert = 0 345 12 6.
        experts = torch.arange(counts.gathered.shape[2], device=rows.device)
        expert = experts.expand(counts.gathered.shape).flatten()
        expert = expert.repeat_interleave(counts.gathered.flatten(), output_size=sum(sizes))
        by_expert = expert.argsort(stable=True)
        back = _inverse(by_expert)
        rows = _take_rows(rows, by_expert, back=back)
        rows = self._compute(rows, num_rows=counts.on_host.sum((0, 1)).tolist())
        rows = _take_rows(rows, back, back=by_expert)
        rows = scatter_sum(rows, axis=self.expt_tp, dim=0, sizes=sizes)
        return all_to_all(rows, axis=self.ep, send=received, receive=sent)

    def _compute(self, rows: Tensor, *, num_rows: Sequence[int]) -> Tensor:
        """Each expert on its run of rows, with this rank's slice of the inner width."""
        parts = torch.split(rows, list(num_rows))
        # unbind, not [i]: the gradient of each index would be as large as the whole parameter.
        ups, downs = self.up.unbind(), self.down.unbind()
        if self.config.mlp == "swiglu":
            inner = [
                functional.silu(functional.linear(part, gate)) * functional.linear(part, up)
                for part, gate, up in zip(parts, self.gate.unbind(), ups, strict=True)
            ]
        else:
            inner = [
                functional.gelu(functional.linear(part, up))
                for part, up in zip(parts, ups, strict=True)
            ]
        return torch.cat(
            [functional.linear(part, down) for part, down in zip(inner, downs, strict=True)]
        )

    def _check_shards(self) -> None:
        """Refuse parameters that are not the shards of this rank."""
        num_local = self.config.num_experts // self.ep.size
        inner = self.config.expert_inner_dim // self.expt_tp.size
        if self.up.shape[:2] != (num_local, inner):
            raise ConfigError(
                f"`up` has {self.up.shape[0]} experts of inner width {self.up.shape[1]}; this "
                f"rank's shard has {num_local} of {inner} (ep {self.ep.size}, expt_tp "
                f"{self.expt_tp.size}): call the module with shards split as MoE.SPLITS declares"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """How many rows go where, of one rank and one call."""

    sent: list[int]
    """Rows to each member of `ep`."""
    gathered: Tensor
    """(expt_tp, ep, own experts): rows that each member of `expt_tp` got from each of its `ep`."""
    on_host: Tensor
    """`gathered` in the memory of the CPU."""


class _TakeRows(torch.autograd.Function):
    """Rows in another order, each of them taken equally often.

    Backward of a plain index would add the copies' gradients in the order of a GPU's threads, so
    two runs would differ in the last bits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        length, width = ctx.shape
        copies = gradient.index_select(0, back)
        if len(back) == length:
            return copies, None, None
        return copies.view(length, len(back) // length, width).sum(1), None, None


def _take_rows(x: Tensor, rows: Tensor, *, back: Tensor) -> Tensor:
    """Rows of a matrix in another order, each taken equally often.

    Args:
        x: the matrix.
        rows: indices of its rows.
        back: puts the result into the order of `x`, copies next to each other.

    Example, two copies of each of two rows: rows = [0, 1, 0, 1], back = [0, 2, 1, 3].
    """
    return cast("Tensor", _TakeRows.apply(x, rows, back))  # type: ignore[no-untyped-call]


def _choose(logits: Tensor, *, top_k: int) -> Tensor:
    """(..., top_k) experts with the largest logits; of equal ones the first."""
    # torch.topk does not define which of equal values it takes.
    return logits.argsort(dim=-1, descending=True, stable=True)[..., :top_k]


def _inverse(permutation: Tensor) -> Tensor:
    """The permutation that undoes one."""
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation), device=permutation.device)
    return inverse


def _sums(numbers: Sequence[int], *, num_parts: int) -> list[int]:
    """The sum of each of `num_parts` equal runs."""
    share = len(numbers) // num_parts
    return [sum(numbers[part * share : (part + 1) * share]) for part in range(num_parts)]


def _row_dtype(x: Tensor) -> torch.dtype:
    """The dtype experts compute in: autocast casts their input anyway, so rows are sent cast."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def _matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).normal_(std=1 / math.sqrt(shape[-1])))
