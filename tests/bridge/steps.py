"""Random steps over one edge, and what one process would make of them: concatenate and narrow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from holdfast.bridge import Bridge, Bridged
from holdfast.errors import LayoutError
from holdfast.parallel import Layout, ModuleGroups, ModuleLayouts

AXES = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples of a step: for each piece that the wider end cuts, the tokens of each sample."""

    counts: tuple[tuple[int, ...], ...]
    seed: int
    features: tuple[int, ...] = (3,)
    dtype: torch.dtype = torch.float32

    def _random(self, what: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + what)
        return [
            torch.randn((sum(piece), *self.features), generator=generator).to(self.dtype)
            for piece in self.counts
        ]

    def block(self, dp: int, num_blocks: int, what: int = 0) -> Tensor:
        """The tokens of one data rank of `num_blocks`; or the weights of a cp coordinate."""
        each = len(self.counts) // num_blocks
        return torch.cat(self._random(what)[dp * each : (dp + 1) * each])

    def counts_of_block(self, dp: int, num_blocks: int) -> list[int]:
        each = len(self.counts) // num_blocks
        return [count for piece in self.counts[dp * each : (dp + 1) * each] for count in piece]

    def gradient(self, dp: int, num_blocks: int, num_cp: int) -> Tensor:
        """The gradient of a block: the weights of all cp coordinates, added in their order."""
        total = self.block(dp, num_blocks, 1).to(torch.promote_types(self.dtype, torch.float32))
        for cp in range(1, num_cp):
            total = total + self.block(dp, num_blocks, 1 + cp)
        return total.to(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One or more forwards of one edge, and their backwards."""

    source: Layout
    destination: Layout
    batches: tuple[Batch, ...]
    backward_order: tuple[int, ...] = field(default=())
    name: str = "step"

    @property
    def layouts(self) -> ModuleLayouts:
        return ModuleLayouts(
            {"vision": self.source, "language": self.destination},
            edges=[("vision", "language")],
            ranks=sorted({*self.source.ranks, *self.destination.ranks}),
            name=self.name,
        )


def check_step(step: Step, rank: int) -> bool:
    """Run a step on this rank, if it has part in it, and compare with one process."""
    if rank not in {*step.source.ranks, *step.destination.ranks}:
        return False
    with ModuleGroups.create(step.layouts) as groups:
        bridge = Bridge(groups, "vision", "language")
        pending = [forward(step, batch, bridge, rank) for batch in step.batches]
        for index in step.backward_order or range(len(pending)):
            backward(step, step.batches[index], *pending[index], rank)
    return True


def forward(step: Step, batch: Batch, bridge: Bridge, rank: int) -> tuple[Tensor | None, Bridged]:
    """One forward, checked; the leaf that this rank gave, and what it got."""
    source, destination = step.source, step.destination
    leaf = counts = None
    if rank in source.ranks and source.coordinate(rank)["pp"] == source.pp - 1:
        dp = source.coordinate(rank)["dp"]
        leaf = batch.block(dp, source.dp)
        if batch.seed % 2 and leaf.dim() > 1:  # a view that is not contiguous
            leaf = leaf.transpose(0, -1).contiguous().transpose(0, -1)
        leaf.requires_grad_()
        counts = batch.counts_of_block(dp, source.dp)
    bridged = bridge(leaf, counts)
    if rank in destination.ranks and destination.coordinate(rank)["pp"] == 0:
        dp = destination.coordinate(rank)["dp"]
        assert bridged.tokens is not None, step
        assert bridged.counts is not None, step
        assert bridged.counts.dtype == torch.int64, step
        assert bridged.counts.tolist() == batch.counts_of_block(dp, destination.dp), step
        assert bridged.tokens.dtype == batch.dtype, step
        assert torch.equal(bridged.tokens, batch.block(dp, destination.dp)), step
    else:
        assert bridged.tokens is None, step
        assert bridged.counts is None, step
    assert bridged.anchor.item() == 0, step
    return leaf, bridged


def backward(step: Step, batch: Batch, leaf: Tensor | None, bridged: Bridged, rank: int) -> None:
    """One backward, checked. In turns through a loss, and with a gradient that was made elsewhere.

    Neither is reached by ranks of other stages but through the anchor.
    """
    weights = None
    if bridged.tokens is not None:
        at = step.destination.coordinate(rank)
        weights = batch.block(at["dp"], step.destination.dp, 1 + at["cp"])
    if batch.seed % 3 == 0:
        bridged.backward(weights)
    elif bridged.tokens is not None:
        ((bridged.tokens * weights).sum() + bridged.anchor).backward()
    else:
        bridged.anchor.backward()
    if leaf is not None:
        dp = step.source.coordinate(rank)["dp"]
        expected = batch.gradient(dp, step.source.dp, step.destination.cp)
        assert leaf.grad is not None, step
        assert torch.equal(leaf.grad, expected), (step, rank, leaf.grad, expected)


def random_layout(choose: random.Random, ranks: Sequence[int], dp: int) -> Layout:
    """A layout with `dp` data ranks over some of the ranks, in any order."""
    ranks = list(ranks)
    rest = len(ranks) // dp
    factors = [(tp, cp) for tp in range(1, rest + 1) for cp in range(1, rest + 1)]
    while True:
        tp, cp = choose.choice([(tp, cp) for tp, cp in factors if rest % (tp * cp) == 0])
        sizes = {"tp": tp, "cp": cp, "pp": rest // (tp * cp)}
        order = "-".join(choose.sample(AXES, len(AXES)))
        try:
            return Layout(
                **sizes,
                dp=dp,
                ep=choose.choice((1, 2)),
                expt_tp=choose.choice((None, 1)),
                order=order,
                ranks=choose.sample(ranks, len(ranks)),
            )
        except LayoutError:
            continue


def random_step(seed: int, num_ranks: int) -> Step:
    """A step of two modules on at most `num_ranks` ranks."""
    choose = random.Random(seed)
    ranks = choose.sample(range(num_ranks), num_ranks)
    widths = choose.choice([(1, 1), (2, 2), (2, 1), (1, 2), (4, 2), (2, 4), (1, 3), (3, 1)])
    if choose.random() < 0.4:  # colocated
        num_each = choose.choice([n for n in (2, 4, 6, 8) if n <= num_ranks])
        if any(num_each % dp for dp in widths):
            widths = (choose.choice((1, 2)), choose.choice((1, 2)))
        spans = [ranks[:num_each]] * 2
    else:
        sizes = [dp * choose.choice((1, 1, 2)) for dp in widths]
        if sum(sizes) > num_ranks:
            sizes = list(widths)
        spans = [ranks[: sizes[0]], ranks[sizes[0] : sum(sizes)]]
    source, destination = (
        random_layout(choose, span, dp) for span, dp in zip(spans, widths, strict=True)
    )
    batches = tuple(
        random_batch(choose, source.dp, destination.dp) for _ in range(choose.choice((1, 1, 2, 3)))
    )
    return Step(
        source=source,
        destination=destination,
        batches=batches,
        backward_order=tuple(choose.sample(range(len(batches)), len(batches))),
        name=f"step {seed}",
    )


def random_batch(choose: random.Random, source_dp: int, destination_dp: int) -> Batch:
    """Uneven samples, some without tokens; now and then a batch without any."""
    num_pieces = max(source_dp, destination_dp)
    samples = [choose.randrange(4) for _ in range(source_dp)]
    most = choose.choice((0, 1, 5, 5, 5))
    return Batch(
        counts=tuple(
            tuple(choose.randint(0, most) for _ in range(samples[i * source_dp // num_pieces]))
            for i in range(num_pieces)
        ),
        seed=choose.randrange(1000),
        features=choose.choice([(), (1,), (4,), (2, 3)]),
        dtype=choose.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    )
