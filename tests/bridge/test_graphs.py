"""Graphs of modules, microbatches and evaluation over bridges, against one process (M16)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.bridge import Bridge, Bridged, parcels
from holdfast.errors import GroupError, HoldfastError
from holdfast.parallel import Layout, ModuleGroups, ModuleLayouts
from tests.harness import RankContext, run_ranks

SAMPLES = 4
COUNTS = [2, 0, 3, 1]


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 3, dtype=torch.float64)


def images() -> Tensor:
    """The tokens of all samples."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn((sum(COUNTS), 3), generator=generator, dtype=torch.float64)


def block(dp: int, num_blocks: int) -> tuple[Tensor, list[int]]:
    """Tokens and counts of one data rank."""
    each = SAMPLES // num_blocks
    counts = COUNTS[dp * each : (dp + 1) * each]
    start = sum(COUNTS[: dp * each])
    return images()[start : start + sum(counts)], counts


def gathered(groups: ModuleGroups, module: str, gradient: Tensor | None) -> Tensor | None:
    """The gradient of a module's weight, summed over its data ranks."""
    if gradient is None or not groups.has(module) or groups.layouts[module].dp == 1:
        return gradient
    torch.distributed.all_reduce(gradient, group=groups[module].group("dp"))
    return gradient


# One module feeds two others.

FORKS = {
    "disjoint": {"stem": Layout(dp=2), "left": Layout(ranks=(2,)), "right": Layout(ranks=(3,))},
    "colocated": {m: Layout(dp=4, ranks=r) for m, r in
                  (("stem", (0, 1, 2, 3)), ("left", (3, 1, 2, 0)), ("right", (0, 1, 2, 3)))},
    "mixed": {"stem": Layout(dp=2), "left": Layout(tp=2), "right": Layout(cp=2, ranks=(2, 3))},
}  # fmt: skip


def fork(rank: RankContext, name: str) -> Any:
    """The stem's gradient when each branch has a loss of its own."""
    layouts = ModuleLayouts(
        FORKS[name], edges=[("stem", "left"), ("stem", "right")], name=f"fork {name}"
    )
    with ModuleGroups.create(layouts) as groups:
        stem = tokens = counts = None
        if groups.has("stem"):
            role = groups.roles["stem"]
            stem = linear(0)
            part, counts = block(role.coordinates["dp"], layouts["stem"].dp)
            tokens = stem(part)
        losses = []
        for module, seed in (("left", 1), ("right", 2)):
            if groups.has("stem") or groups.has(module):
                bridged = Bridge(groups, "stem", module)(tokens, counts)
                loss = bridged.anchor
                if bridged.tokens is not None and rank.rank != 3 and name == "colocated":
                    loss = loss + (linear(seed)(bridged.tokens) ** 2).sum()
                elif bridged.tokens is not None and name != "colocated":
                    loss = loss + (linear(seed)(bridged.tokens) ** 2).sum() / shares(
                        layouts[module]
                    )
                losses.append(loss)
        sum(losses[1:], losses[0]).backward()
        return gathered(groups, "stem", None if stem is None else stem.weight.grad)


def shares(layout: Layout) -> int:
    """Each cp rank has a share of the loss; here an equal one."""
    return layout.cp


@pytest.mark.parametrize("name", FORKS)
def test_a_module_that_feeds_two_gets_the_sum_of_their_gradients(name: str) -> None:
    """M16. Colocated, one rank uses none of its tokens, in either module."""
    stem = linear(0)
    every = stem(images())
    total = torch.zeros((), dtype=torch.float64)
    for module, seed in (("left", 1), ("right", 2)):
        layout = FORKS[name][module]
        used = every
        if name == "colocated":
            skipped = layout.coordinate(3)["dp"]
            used = torch.cat([part for dp, part in enumerate(every.split(COUNTS)) if dp != skipped])
        total = total + (linear(seed)(used) ** 2).sum()
    total.backward()
    for result in run_ranks(4, fork, name).results:
        if result is not None:
            torch.testing.assert_close(result, stem.weight.grad, rtol=1e-12, atol=1e-12)


# Three modules in a row, several microbatches, forwards before backwards.


def chain_layouts() -> ModuleLayouts:
    return ModuleLayouts(
        {
            "a": Layout(dp=2),
            "b": Layout(tp=2),
            "c": Layout(dp=2, cp=1, ranks=(2, 3)),
        },
        edges=[("a", "b"), ("b", "c")],
        name="chain",
    )


def chain(rank: RankContext, order: list[int]) -> Any:
    """Every module's gradient after microbatches whose backwards come in the given order."""
    layouts = chain_layouts()
    with ModuleGroups.create(layouts) as groups:
        models = {m: linear(i) for i, m in enumerate("abc") if groups.has(m)}
        bridges = {e: Bridge(groups, *e) for e in layouts.edges if any(map(groups.has, e))}
        losses = []
        for factor in range(1, len(order) + 1):
            losses.append(chain_forward(groups, models, bridges, float(factor)))
        for index in order:
            losses[index].backward()
        return {m: gathered(groups, m, model.weight.grad) for m, model in models.items()}


def chain_forward(
    groups: ModuleGroups,
    models: dict[str, nn.Linear],
    bridges: dict[tuple[str, str], Bridge],
    factor: float,
) -> Tensor:
    """The loss of this rank for images that are scaled by a factor."""
    loss: Tensor = torch.zeros(())
    tokens = counts = None
    if "a" in models:
        tokens, counts = block(groups.roles["a"].coordinates["dp"], 2)
        tokens = models["a"](tokens * factor)
    for (source, destination), bridge in bridges.items():
        bridged: Bridged = bridge(tokens, counts) if source in models else bridge()
        loss = loss + bridged.anchor
        tokens = counts = None
        if bridged.tokens is not None and bridged.counts is not None:
            tokens, counts = models[destination](bridged.tokens).tanh(), bridged.counts.tolist()
    if "c" in models and tokens is not None:
        loss = loss + (tokens**2).sum()
    return loss


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_a_chain_of_modules_trains_on_microbatches_as_one_process(order: list[int]) -> None:
    """M16: all forwards, then all backwards, in any order that all ranks share."""
    models = [linear(i) for i in range(3)]
    for factor in range(1, 4):
        tokens = images() * factor
        tokens = models[2](models[1](models[0](tokens)).tanh()).tanh()
        (tokens**2).sum().backward()
    expected = {m: model.weight.grad for m, model in zip("abc", models, strict=True)}
    for result in run_ranks(4, chain, order).results:
        assert result
        for module, gradient in result.items():
            torch.testing.assert_close(gradient, expected[module], rtol=1e-12, atol=1e-12)


# Backwards in another order on one rank.


def swapped(rank: RankContext) -> str:
    layouts = ModuleLayouts({"a": Layout(), "b": Layout(ranks=(1,))}, edges=[("a", "b")])
    with ModuleGroups.create(layouts) as groups:
        bridge = Bridge(groups, "a", "b")
        if rank.rank == 0:
            leaves = [torch.ones(2, 3, requires_grad=True) for _ in range(2)]
            bridged = [bridge(leaf, [2]) for leaf in leaves]
        else:
            bridged = [bridge() for _ in range(2)]
        try:
            bridged[rank.rank].backward()
        except GroupError as error:
            return str(error)
        return ""


def test_backwards_in_another_order_are_an_error_and_no_swap() -> None:
    """Equal shapes would let the gradient of one microbatch pass for that of another."""
    for text in run_ranks(2, swapped).results:
        assert "rank 0 in phase 'backward 1 of a -> b'" in text
        assert "rank 1 in phase 'backward 2 of a -> b'" in text


# Without gradients.


def evaluate(rank: RankContext) -> list[Any]:
    """Whether anything here needs a gradient, and messages, under no_grad and with a frozen end."""
    layouts = ModuleLayouts(
        {"a": Layout(dp=2), "b": Layout(dp=2, ranks=(1, 0))}, edges=[("a", "b")]
    )
    seen: list[Any] = []
    with ModuleGroups.create(layouts) as groups:
        bridge = Bridge(groups, "a", "b")
        control = groups.edge("a", "b").control
        tokens = torch.full((2, 3), float(rank.rank), requires_grad=True)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                bridged = bridge(tokens, [1, 1])
            assert bridged.tokens is not None
            assert torch.equal(bridged.tokens, torch.full((2, 3), 1.0 - rank.rank))
            seen.append(bridged.tokens.requires_grad)
        with torch.no_grad():  # the encoder alone is frozen: the rest of the step is not
            frozen = tokens * 2
        bridged = bridge(frozen, [1, 1])
        assert bridged.tokens is not None
        weight = torch.ones(3, requires_grad=True)
        before = control.num_collectives
        ((bridged.tokens * weight).sum() + bridged.anchor).backward()
        bridged.anchor.backward()
        bridged.backward(torch.ones(2, 3))
        with pytest.raises(HoldfastError, match=r"'b' on rank .* shape \(3,\)"):
            bridged.backward(torch.ones(3))
        seen += [bridged.tokens.requires_grad, control.num_collectives - before]
        assert weight.grad is not None
        return [*seen, weight.grad.tolist()]


def test_nothing_is_sent_back_to_a_source_that_needs_no_gradient() -> None:
    """Frozen encoders and evaluation; the anchor can be used all the same."""
    assert run_ranks(2, evaluate).results == [
        [False, False, False, 0, [4.0 * (1 - r)] * 3] for r in range(2)
    ]


# What a module does to its own tokens.

COLOCATED = {"stem": Layout(dp=2), "left": Layout(dp=2), "right": Layout(tp=2)}
DISJOINT = {"stem": Layout(), "left": Layout(ranks=(1,)), "right": Layout(ranks=(2,))}


def in_place(context: RankContext) -> list[str]:
    """By case, what a change of one module's own tokens did to another module."""
    wrong = []
    for num_destinations in (1, 2):
        for place, layouts_of in (("colocated", COLOCATED), ("disjoint", DISJOINT)):
            chosen = dict(list(layouts_of.items())[: 1 + num_destinations])
            layouts = ModuleLayouts(
                chosen,
                edges=[("stem", name) for name in list(chosen)[1:]],
                name=f"{place} {num_destinations}",
            )
            if context.rank not in layouts.union.ranks:
                continue
            with ModuleGroups.create(layouts) as groups:
                for is_trained in (False, True):
                    for by in ("left", "stem"):
                        case = f"{layouts.name} {is_trained} {by}"
                        wrong += [f"{case}: {what}" for what in changed(groups, is_trained, by)]
    return wrong


def changed(groups: ModuleGroups, is_trained: bool, by: str) -> list[str]:
    """What is wrong after `by` has changed its tokens in place, once all have theirs."""
    wrong = []
    leaf = torch.ones(2, 3, requires_grad=is_trained) if groups.has("stem") else None
    tokens = None if leaf is None else leaf * 2
    counts = None if leaf is None else [1, 1]
    bridges = {e: Bridge(groups, *e) for e in groups.layouts.edges if any(map(groups.has, e))}
    taken = {to: bridge(tokens, counts) for (_, to), bridge in bridges.items()}
    if by == "stem" and tokens is not None:
        tokens.mul_(5)
    elif by in taken and taken[by].tokens is not None:
        taken[by].tokens.mul_(5)  # type: ignore[union-attr]
    loss: Any = 0
    for name, bridged in taken.items():
        expected = 10.0 if name == by else 2.0
        if bridged.tokens is not None:
            if not (bridged.tokens == expected).all():
                wrong.append(f"{name} has {bridged.tokens.tolist()}")
            loss = loss + bridged.tokens.sum()
        loss = loss + bridged.anchor
    if tokens is not None and not (tokens == (10 if by == "stem" else 2)).all():
        wrong.append(f"stem has {tokens.tolist()}")
    if torch.is_tensor(loss) and loss.requires_grad:
        loss.backward()
    # Every destination takes each token once: the gradient is the sum of their factors.
    factor = 2.0 * sum(5 if name == by else 1 for name in list(groups.layouts)[1:])
    if is_trained and leaf is not None and not (leaf.grad == factor).all():
        wrong.append(f"gradient {leaf.grad.tolist()} instead of {factor}")  # type: ignore[union-attr]
    return wrong


def test_what_a_module_does_to_its_own_tokens_no_other_module_sees() -> None:
    """M16: colocated as disjoint, a frozen source as a trained one."""
    assert run_ranks(3, in_place).results == [[]] * 3


def kept_gradient(context: RankContext) -> list[float]:
    """The source's gradient, after the destination has changed the one that it gave."""
    layouts = ModuleLayouts({"a": Layout(), "b": Layout()}, edges=[("a", "b")])
    if context.rank not in layouts.union.ranks:
        return []
    with ModuleGroups.create(layouts) as groups:
        leaf = torch.ones(1, 3, requires_grad=True)
        bridged = Bridge(groups, "a", "b")(leaf, [1])
        gradient = torch.ones(1, 3)
        bridged.backward(gradient)
        gradient.zero_()
        assert leaf.grad is not None
        return list(leaf.grad.flatten().tolist())


def test_a_gradient_that_is_given_stays_the_givers() -> None:
    assert run_ranks(1, kept_gradient).results == [[1.0] * 3]


# A source of which one data rank needs no gradient.


def partly(rank: RankContext) -> tuple[Any, int]:
    """The gradient here, and how many messages the backward had for this rank."""
    layouts = ModuleLayouts({"a": Layout(dp=2), "b": Layout(ranks=(2,))}, edges=[("a", "b")])
    num_messages = 0
    start = parcels.dist.batch_isend_irecv

    def counted(batch: list[Any]) -> Any:
        nonlocal num_messages
        num_messages += len(batch)
        return start(batch)

    with ModuleGroups.create(layouts) as groups:
        bridge = Bridge(groups, "a", "b")
        leaf = torch.ones(2, 3, requires_grad=rank.rank == 0) if rank.rank < 2 else None
        bridged = bridge(leaf, None if leaf is None else [1, 1])
        parcels.dist.batch_isend_irecv = counted
        bridged.backward(None if bridged.tokens is None else torch.full((4, 3), 2.0))
        parcels.dist.batch_isend_irecv = start
        gradient = None if leaf is None or leaf.grad is None else leaf.grad.tolist()
        bridged = bridge(leaf, None if leaf is None else [1, 1])
        parcels.dist.batch_isend_irecv = None  # nothing was used: nothing is sent
        bridged.anchor.backward()
        if leaf is not None and leaf.grad is not None:
            assert leaf.grad.tolist() == gradient
    return gradient, num_messages


def test_only_data_ranks_that_need_a_gradient_get_one() -> None:
    """As where one of them had no images, and its tokens do not come from the encoder."""
    assert run_ranks(3, partly).results == [([[2.0] * 3] * 2, 1), (None, 0), (None, 1)]
