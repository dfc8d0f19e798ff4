"""Generated graphs of modules: what each rank computes, and what one process makes of it all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from holdfast import Layout, ModuleGroups, ModuleLayouts, OptimizerState, ProcessGroups
from holdfast.bridge import Bridge
from holdfast.optim import MultiModuleOptimizer, ShardedOptimizer
from tests.checkpoint.common import full

WIDTH, INNER, NUM_SAMPLES = 4, 6, 8
SHAPES = {"up": (INNER, WIDTH), "down": (WIDTH, INNER), "scale": (WIDTH,)}
_SPLITS = {"up": 0, "down": 1}
MAX_NORM = 3.0


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Modules, which feeds which, and what is peculiar about each; placed nowhere yet."""

    edges: tuple[tuple[str, str], ...]
    modules: tuple[str, ...]
    """Each after those that feed it."""
    frozen: frozenset[str]
    bare: frozenset[str]
    """Without parameters."""
    counts: tuple[int, ...]
    """Tokens of each sample; some have none."""
    is_per_token: bool

    @property
    def sinks(self) -> list[str]:
        """Modules that feed no other, and have a loss."""
        return [m for m in self.modules if all(source != m for source, _ in self.edges)]

    def inputs_of(self, module: str) -> list[tuple[str, str]]:
        return [edge for edge in self.edges if edge[1] == module]


def make_graph(rng: random.Random) -> Graph:
    """Two to four modules; each but the first is fed by one or two before it."""
    names = ["vision", "language", "audio", "projector"]
    rng.shuffle(names)
    modules = names[: rng.randint(2, 4)]
    edges: list[tuple[str, str]] = []
    for number, module in enumerate(modules[1:], start=1):
        num_inputs = rng.randint(1, min(2, number))
        edges += [(source, module) for source in rng.sample(modules[:number], num_inputs)]
    rng.shuffle(edges)
    frozen = {module for module in modules if rng.random() < 0.2}
    if len(frozen) == len(modules):
        frozen.pop()
    bare = {module for module in modules if rng.random() < 0.1} - frozen
    if len(frozen | bare) == len(modules):
        bare.clear()
    counts = [rng.choice((0, 0, 1, 2, 3)) for _ in range(NUM_SAMPLES)]
    counts[rng.randrange(NUM_SAMPLES)] = 2
    graph = Graph(
        edges=tuple(edges),
        modules=tuple(modules),
        frozen=frozenset(frozen),
        bare=frozenset(bare),
        counts=tuple(counts),
        is_per_token=False,
    )
    is_per_token = len(graph.sinks) == 1 and rng.random() < 0.5
    return Graph(**{**vars(graph), "is_per_token": is_per_token})


def place(graph: Graph, rng: random.Random, *, num_ranks: int, first: int, name: str) -> Any:
    """Spans that are disjoint or equal, at an offset, in any order of ranks; a layout for each."""
    spans = draw_spans(graph.modules, list(range(first, first + num_ranks)), rng)
    layouts = {}
    for module, own in spans.items():
        rng.shuffle(own)
        layouts[module] = Layout(**_sizes(len(own), rng), ranks=own)
    listed = list(layouts)
    rng.shuffle(listed)
    return ModuleLayouts({m: layouts[m] for m in listed}, edges=graph.edges, name=name)


def draw_spans(
    modules: Sequence[str], ranks: list[int], rng: random.Random
) -> dict[str, list[int]]:
    """The ranks of each module: those of any two are equal or disjoint."""
    if rng.random() < 0.5:
        rng.shuffle(ranks)
    spans: list[list[int]] = [ranks]
    while len(spans) < min(len(modules), 3) and rng.random() < 0.6:
        widest = max(spans, key=len)
        if len(widest) == 1:
            break
        spans.remove(widest)
        half = len(widest) // 2
        spans += [widest[:half], widest[half:]]
    chosen = [*range(len(spans)), *(rng.randrange(len(spans)) for _ in modules)]
    chosen = chosen[: len(modules)]
    rng.shuffle(chosen)
    return {m: list(spans[number]) for m, number in zip(modules, chosen, strict=True)}


def _sizes(num_ranks: int, rng: random.Random) -> dict[str, Any]:
    sizes: dict[str, Any] = {"tp": 1, "cp": 1, "dp": 1, "pp": 1}
    while num_ranks > 1:
        axis = rng.choice(("tp", "cp", "dp", "dp", "pp"))
        if axis == "pp" and sizes["pp"] == 2:
            continue
        sizes[axis] *= 2
        num_ranks //= 2
    return sizes


class Block(nn.Module):
    """A residual layer of one module, its inner width cut over tp; the names are those of all."""

    def __init__(self, graph: Graph, module: str, groups: ProcessGroups | None) -> None:
        super().__init__()
        self.groups = groups
        is_here = groups is None or groups.index("pp") == 0
        for name, shape in SHAPES.items():
            if module in graph.bare or not is_here:
                continue  # later stages pass on what they get, and have no parameter
            value = full(f"{module} {name}", shape, torch.float64) / 2
            if groups is not None and groups.layout.world_size > 1:
                mesh = groups.mesh("dp_cp", "tp")
                cut = Shard(_SPLITS[name]) if name in _SPLITS else Replicate()
                value = distribute_tensor(value, mesh, [Replicate(), cut], src_data_rank=None)
            parameter = nn.Parameter(value, requires_grad=module not in graph.frozen)
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, WIDTH) -> the same shape."""
        own = {name: _local(parameter) for name, parameter in self.named_parameters()}
        if not own:
            return torch.tanh(x)
        inner: Tensor = torch.tanh(_Copied.apply(x, self.groups) @ own["up"].T)  # type: ignore[no-untyped-call]
        mixed: Tensor = _Summed.apply(inner @ own["down"].T, self.groups)  # type: ignore[no-untyped-call]
        return x + mixed * own["scale"]


def _local(parameter: Any) -> Tensor:
    result: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return result


def _sum(x: Tensor, groups: ProcessGroups | None) -> Tensor:
    if groups is None or groups.size("tp") == 1:
        return x
    x = x.contiguous().clone()
    dist.all_reduce(x, group=groups.group("tp"))
    return x


class _Copied(torch.autograd.Function):
    """The identity, whose gradient is the sum over tp."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Any) -> Tensor:
        ctx.groups = groups
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _sum(gradient, ctx.groups), None


class _Summed(torch.autograd.Function):
    """The sum over tp, whose gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Any) -> Tensor:
        return _sum(x, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _ToNextStage(torch.autograd.Function):
    """Sends to the next pipeline stage; a scalar zero, whose backward receives the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: ProcessGroups) -> Tensor:
        ctx.groups, ctx.like = groups, x
        dist.send(x.contiguous(), groups.ranks("pp")[1], group=groups.group("pp"))
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        gradient = torch.empty_like(ctx.like)
        dist.recv(gradient, ctx.groups.ranks("pp")[1], group=ctx.groups.group("pp"))
        return gradient, None


class _FromStageBefore(torch.autograd.Function):
    """What the stage before has sent; its backward sends the gradient."""

    @staticmethod
    def forward(ctx: Any, hook: Tensor, groups: ProcessGroups, num_tokens: int) -> Tensor:
        ctx.groups = groups
        x = hook.new_empty((num_tokens, WIDTH))
        dist.recv(x, groups.ranks("pp")[0], group=groups.group("pp"))
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        groups = ctx.groups
        dist.send(gradient.contiguous(), groups.ranks("pp")[0], group=groups.group("pp"))
        return None, None, None


def _data(what: str, step: int, counts: tuple[int, ...], dp: int, index: int) -> Tensor:
    """The tokens of one data rank's samples."""
    each = NUM_SAMPLES // dp
    begin, end = sum(counts[: index * each]), sum(counts[: (index + 1) * each])
    return full(f"{what} at {step}", (sum(counts), WIDTH), torch.float64)[begin:end]


class World:
    """All modules of a graph on one rank, or, without groups, in one process."""

    def __init__(self, graph: Graph, groups: ModuleGroups | None) -> None:
        self.graph, self.groups = graph, groups
        self.here = graph.modules if groups is None else groups.modules
        self.blocks = {m: Block(graph, m, self._groups_of(m)) for m in self.here}
        self.optimizers: dict[str, Any] = {}
        for module, block in self.blocks.items():
            own = self._groups_of(module)
            trained = [p for p in block.parameters() if p.requires_grad]
            if own is None:
                self.optimizers[module] = torch.optim.SGD(trained, lr=0.1) if trained else None
            elif module in graph.frozen:
                self.optimizers[module] = None
            else:
                self.optimizers[module] = ShardedOptimizer(
                    block,
                    trained,
                    make=partial(torch.optim.SGD, lr=0.1),
                    groups=own,
                    over="dp_cp",
                    divisor=1,
                    name=f"{module} optimizer",
                    elementwise=True,
                )
        if groups is not None:
            self.bridges = {
                (a, b): Bridge(groups, a, b)
                for a, b in graph.edges
                if groups.has(a) or groups.has(b)
            }
            self.optimizer = MultiModuleOptimizer(groups, self.optimizers)

    def _groups_of(self, module: str) -> ProcessGroups | None:
        return None if self.groups is None else self.groups[module]

    def step(self, step: int) -> float:
        """Forward, backward, update; the norm of the whole gradient."""
        if self.groups is None:
            return self._step_alone(step)
        with self.optimizer.microbatch(is_last=True):
            total, num_tokens = self._forward(step)
            total.backward()  # type: ignore[no-untyped-call]
        count = num_tokens if self.graph.is_per_token else None
        return self.optimizer.step(max_norm=MAX_NORM, num_tokens=count).norm

    def _forward(self, step: int) -> tuple[Tensor, int | None]:
        assert self.groups is not None
        graph, groups = self.graph, self.groups
        total = torch.zeros((), dtype=torch.float64, requires_grad=True) * 1
        outputs: dict[str, Tensor | None] = {}
        num_tokens = None
        for module in graph.modules:
            inputs = []
            for edge in graph.inputs_of(module):
                if edge not in self.bridges:
                    continue
                given = outputs.get(edge[0])
                counts = None if given is None else list(self._counts(edge[0]))
                bridged = self.bridges[edge](given, counts)
                total = total + bridged.anchor
                if bridged.tokens is not None:
                    assert bridged.counts is not None
                    assert bridged.counts.tolist() == list(self._counts(module))
                    inputs.append(bridged.tokens)
            if not groups.has(module):
                continue
            outputs[module], anchor = self._run(module, inputs, step)
            total = total + anchor
            if module in graph.sinks and outputs[module] is not None:
                loss, num_tokens = self._loss(module, outputs[module], step)
                total = total + loss
        return total, num_tokens

    def _counts(self, module: str) -> tuple[int, ...]:
        assert self.groups is not None
        own = self.groups[module]
        each = NUM_SAMPLES // own.size("dp")
        return self.graph.counts[own.index("dp") * each : (own.index("dp") + 1) * each]

    def _run(self, module: str, inputs: list[Tensor], step: int) -> tuple[Tensor | None, Tensor]:
        """What the module gives on this rank, and an anchor of the backward between stages."""
        assert self.groups is not None
        own, graph = self.groups[module], self.graph
        nothing = torch.zeros((), dtype=torch.float64)
        if own.index("pp") == 0:
            if not graph.inputs_of(module):
                where = own.size("dp"), own.index("dp")
                inputs = [_data(module, step, graph.counts, *where)]
            x = self.blocks[module](torch.stack(inputs).sum(0))
            if own.size("pp") > 1:
                return None, _ToNextStage.apply(x.requires_grad_(), own)  # type: ignore[no-untyped-call]
        else:
            hook = torch.zeros((), dtype=torch.float64, requires_grad=True)
            x = _FromStageBefore.apply(hook, own, sum(self._counts(module)))  # type: ignore[no-untyped-call]
        return self._own_share(x, own), nothing

    def _own_share(self, x: Tensor, own: ProcessGroups) -> Tensor:
        """All tokens, of which gradients come back through this context rank's positions alone."""
        if own.size("cp") == 1:
            return x
        mine = torch.arange(len(x)) % own.size("cp") == own.index("cp")
        return torch.where(mine[:, None], x, x.detach())

    def _loss(self, module: str, x: Tensor | None, step: int) -> tuple[Tensor, int]:
        assert self.groups is not None
        assert x is not None
        own = self.groups[module]
        target = _data(f"{module} target", step, self.graph.counts, own.size("dp"), own.index("dp"))
        mine = torch.arange(len(x)) % own.size("cp") == own.index("cp")
        return (x - target)[mine].square().sum(), int(mine.sum())

    def _step_alone(self, step: int) -> float:
        graph = self.graph
        outputs: dict[str, Tensor] = {}
        total = torch.zeros((), dtype=torch.float64)
        for module in graph.modules:
            inputs = [outputs[source] for source, _ in graph.inputs_of(module)]
            inputs = inputs or [_data(module, step, graph.counts, 1, 0)]
            outputs[module] = self.blocks[module](torch.stack(inputs).sum(0))
            if module in graph.sinks:
                target = _data(f"{module} target", step, graph.counts, 1, 0)
                total = total + (outputs[module] - target).square().sum()
        if graph.is_per_token:
            total = total / sum(graph.counts)
        total.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for _, p in self.parameters() if p.grad is not None]
        norm = float(torch.cat([each.flatten() for each in gradients]).norm())
        for each in gradients:  # torch's clipping adds 1e-6 to the norm
            each.mul_(min(1.0, MAX_NORM / norm))
        for optimizer in self.optimizers.values():
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        return norm

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for module, block in self.blocks.items():
            for name, parameter in block.named_parameters():
                yield f"{module}.{name}", parameter

    def parts(self) -> dict[str, Mapping[str, object]]:
        """The state of each module here."""
        return {
            module: {
                "model": block,
                "optimizer": (
                    {} if (own := self.optimizers[module]) is None else OptimizerState(own, block)
                ),
            }
            for module, block in self.blocks.items()
        }


def whole(parameter: Any) -> Tensor:
    """The global tensor."""
    value = parameter.detach()
    result: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return result
