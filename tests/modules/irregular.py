"""Generated runs of several modules in which something unusual happens, and one process's answer.

A program is a graph of modules, one or two ways to place them on the ranks, and actions: parts of
steps, errors in them, evaluations, writes, saves, loads, moves to the other placement, steps that a
rerun machine runs again, here or from the checkpoint of a fault. `World` does them on one rank,
`Twin` in one process with torch alone. What an action returns is equal on both; or it raises on all
ranks, for a cause that `REFUSALS` lists, and both go on.
"""

from __future__ import annotations

import contextlib
import copy
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from holdfast import (
    Bridge,
    ChainedOptimizer,
    Checkpointer,
    HoldfastError,
    Layout,
    ModuleGroups,
    ModuleLayouts,
    MultiModuleOptimizer,
    OptimizerState,
    ReducedOptimizer,
    ShardedOptimizer,
    module_parts,
)
from holdfast.fsdp import fully_shard_model
from holdfast.rerun import DeviceIdentity, NotFinite, Replayed, RerunMachine
from tests.campaign.ways import is_in_backward
from tests.checkpoint.common import full
from tests.modules.graphs import draw_spans

WIDTH, INNER, NUM_SAMPLES = 4, 6, 8
SHAPES = {"up": (INNER, WIDTH), "down": (WIDTH, INNER), "scale": (WIDTH,)}
SGD = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1, eps=1e-2)
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW}
Kind = Literal["sharded", "chained", "mixed", "reduced", "fsdp", "none"]
KINDS: tuple[Kind, ...] = ("sharded", "sharded", "chained", "mixed", "reduced", "fsdp", "none")


class Trouble(Exception):
    """An error of a kernel, a hook or a loss."""

    def __init__(self) -> None:
        super().__init__("injected")


# ---- programs ----


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One module, wherever it is."""

    kind: Kind
    optimizer: str
    is_recomputed: bool
    has_loss: bool
    dtype: torch.dtype
    """Of parameters, and so of what the module gives to a bridge."""
    foreach: bool
    """True if optimizers update all parameters by one call, which tells autograd of no DTensor."""

    def make(self, parameters: Any, *, is_other: bool = False) -> torch.optim.Optimizer:
        """Return the optimizer of some of the parameters, or the other one."""
        name = self.optimizer if not is_other else {"sgd": "adamw", "adamw": "sgd"}[self.optimizer]
        optimizer: torch.optim.Optimizer = OPTIMIZERS[name](parameters, foreach=self.foreach)
        return optimizer


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Forward and backward of all modules, or less than that."""

    data: int
    counts: tuple[int, ...]
    """Tokens of each sample."""
    is_last: bool
    left_out: frozenset[str]
    """Modules that feed others, and do not in this microbatch: a modality that is not there."""
    twice: frozenset[tuple[str, str]]
    """Edges that are crossed twice, the second time with half of the tokens' values."""
    does: Literal["all", "forward", "nothing", "no_grad"] = "all"
    form: Literal["", "evaluated", "cleared"] = ""
    """What is done between forward and backward: an evaluation, `zero_grad()` of the optimizer."""
    fault: tuple[str, str, tuple[int, ...]] | None = None
    """Module, place, and the indices in its layout of the ranks that fail."""
    nan: tuple[str, int] | None = None
    """Module, and the index of the rank whose gradient is not finite."""


@dataclass(frozen=True, kw_only=True)
class Do:
    """Any other action, by name."""

    what: str
    module: str = ""
    how: str = ""
    number: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """A whole step under a rerun machine, one of whose values is rejected."""

    microbatches: tuple[Microbatch, ...]
    step: Do
    rejects: tuple[str, int, int]
    """Module, the index of the rank that rejects, and in which microbatch."""
    num_bad: int
    """Runs in which it is rejected."""
    has_veto: bool
    """Whether the sum of the optimizer carries what ranks reject."""
    drops_before: bool
    """Whether the loop drops gradients before the attempts, and not in each."""
    restarts_elsewhere: bool
    """Whether a restart from the fault's checkpoint is on the other placement, for this step."""


Action = Microbatch | Do | Attempts


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is run."""

    seed: int
    specs: Mapping[str, Spec]
    """Each module after those that feed it."""
    edges: tuple[tuple[str, str], ...]
    placements: tuple[ModuleLayouts, ...]
    options: tuple[Mapping[str, Mapping[str, Any]], ...]
    """By placement and module, of a sharded optimizer."""
    per_token: bool
    actions: tuple[Action, ...]

    @property
    def tolerance(self) -> float:
        """How far values may be apart, relative to one: sums are made in another order."""
        is_wide = all(spec.dtype == torch.float64 for spec in self.specs.values())
        return 1e-9 if is_wide else 1e-4

    @property
    def sinks(self) -> list[str]:
        return [m for m in self.specs if all(source != m for source, _ in self.edges)]


def draw(seed: int, *, num_ranks: int) -> Program:
    """Draw a program."""
    rng = random.Random(seed)
    names = ["vision", "language", "audio", "projector"]
    rng.shuffle(names)
    modules = names[: rng.choice((2, 2, 3, 3, 4))]
    edges: list[tuple[str, str]] = []
    for number, module in enumerate(modules[1:], start=1):
        edges += [
            (source, module)
            for source in rng.sample(modules[:number], min(number, rng.choice((1, 1, 2))))
        ]
    if len(modules) > 2 and rng.random() < 0.15:
        edges.pop()
    sources = {source for source, _ in edges}
    narrow = random.Random(f"{seed} dtypes")  # its own: all other draws are the same without
    has_narrow = narrow.random() < 0.4
    at_once = random.Random(f"{seed} foreach")
    specs = {
        m: Spec(
            kind=rng.choice(KINDS),
            optimizer=rng.choice(("sgd", "adamw")),
            is_recomputed=rng.random() < 0.3,
            has_loss=m not in sources or rng.random() < 0.3,
            dtype=torch.float32 if has_narrow and narrow.random() < 0.6 else torch.float64,
            foreach=at_once.random() < 0.4,
        )
        for m in modules
    }
    if all(each.kind == "none" for each in specs.values()):
        specs[modules[0]] = replace(specs[modules[0]], kind="sharded")
    per_token = any(each.kind == "fsdp" for each in specs.values()) or rng.random() < 0.5
    placements = tuple(
        _place(modules, edges, rng, num_ranks=num_ranks, name=f"{seed} {n}") for n in range(2)
    )
    options = tuple(
        {
            m: {
                "stage": rng.choice((1, 2)),
                "overlap": rng.random() < 0.5,
                "bucket_nbytes": rng.choice((100, 4000)),
            }
            for m in modules
        }
        for _ in placements
    )
    program = Program(
        seed=seed,
        specs=specs,
        edges=tuple(edges),
        placements=placements,
        options=options,
        per_token=per_token,
        actions=(),
    )
    actions = _altered(program, list(_draw_actions(program, rng)))
    return replace(program, actions=tuple(_under_a_machine(program, [*actions])))


def _altered(program: Program, actions: Sequence[Microbatch | Do]) -> Iterator[Microbatch | Do]:
    """Make some of the actions more unusual; draws of their own, for the same reason as above."""
    rng = random.Random(f"{program.seed} alterations")
    for action in actions:
        if rng.random() < 0.05:
            yield Do(what="clear", module=rng.choice(list(program.specs)))
        chosen, other = rng.random(), rng.random()
        if isinstance(action, Do):
            if action.what == "load" and chosen < 0.4:
                action = replace(action, how="first")
        elif action.fault is not None:
            module, place, failing = action.fault
            if place == "in backward" and chosen < 0.4:
                action = replace(action, fault=(module, "in recompute", failing))
        elif action.does == "forward":
            if chosen < 0.3:
                action = replace(action, does="no_grad")
        elif action.does == "all" and action.nan is None and chosen < 0.15:
            action = replace(action, form="evaluated" if other < 0.5 else "cleared")
        yield action


def _under_a_machine(
    program: Program, actions: Sequence[Microbatch | Do]
) -> Iterator[Microbatch | Do | Attempts]:
    """Run some of the steps under a rerun machine; draws of their own, once more."""
    rng = random.Random(f"{program.seed} attempts")
    where, waiting = 0, list[Microbatch]()
    for action in actions:
        if isinstance(action, Microbatch):
            waiting.append(action)
            continue
        if waiting and action.what == "step" and rng.random() < 0.5:
            module = rng.choice(list(program.specs))
            index = rng.randrange(program.placements[where][module].world_size)
            is_plain = all(each.fault is None and each.nan is None for each in waiting)
            yield Attempts(
                microbatches=tuple(waiting),
                step=action,
                rejects=(module, index, rng.randrange(len(waiting))),
                num_bad=rng.choice((0, 1, 1, 2, 2)),
                has_veto=rng.random() < 0.5,
                drops_before=rng.random() < 0.3,
                restarts_elsewhere=rng.random() < 0.5 and is_plain,
            )
        else:
            yield from (*waiting, action)
        waiting = []
        where = 1 - where if action.what == "move" else where
    yield from waiting


def _place(
    modules: Sequence[str], edges: Any, rng: random.Random, *, num_ranks: int, name: str
) -> ModuleLayouts:
    spans = draw_spans(modules, list(range(num_ranks)), rng)
    layouts = {}
    for module, own in spans.items():
        rng.shuffle(own)
        sizes = {"dp": 1, "tp": 1, "cp": 1}
        left = len(own)
        while left > 1:
            sizes[rng.choice(("dp", "dp", "dp", "tp", "cp"))] *= 2
            left //= 2
        layouts[module] = Layout(**sizes, ranks=own)
    listed = list(layouts)
    rng.shuffle(listed)
    return ModuleLayouts({m: layouts[m] for m in listed}, edges=edges, name=name)


def _draw_actions(program: Program, rng: random.Random) -> Iterator[Microbatch | Do]:
    where = 0
    yield Do(what="save")
    for step in range(rng.choice((2, 3))):
        for _ in range(rng.choice((0, 1, 1, 2))):
            action = _between(program, rng)
            if action.what == "move":
                where = 1 - where
            yield action
        yield from _draw_step(program, rng, step, where)
    yield Do(what="look")


def _draw_step(
    program: Program, rng: random.Random, step: int, where: int
) -> Iterator[Microbatch | Do]:
    kind = rng.choice(
        (
            "fault",
            "fault",
            "forward",
            "nothing",
            "never last",
            "late",
            "nan",
            "bad loss",
            "inside",
            "inside",
            "",
            "",
        )
    )
    count = rng.choice((1, 2, 2, 3))
    odd = rng.randrange(count)
    feeding = sorted({source for source, _ in program.edges})
    for number in range(count):
        counts = tuple(rng.choice((0, 0, 1, 2, 3)) for _ in range(NUM_SAMPLES))
        if rng.random() < 0.1:
            counts = (0,) * NUM_SAMPLES
        each = Microbatch(
            data=10 * step + number,
            counts=counts,
            is_last=number == count - 1 and kind != "never last",
            left_out=frozenset(m for m in feeding if rng.random() < 0.15),
            twice=frozenset(e for e in program.edges if rng.random() < 0.15),
        )
        if number == odd and kind == "fault":
            module = rng.choice(list(program.specs))
            layout = program.placements[where][module]
            failing = list(range(layout.world_size))
            # Ranks whose peers wait in collectives of the model itself fail together.
            if program.specs[module].kind != "fsdp" or layout.world_size == 1:
                failing = sorted(rng.sample(failing, rng.randint(1, len(failing))))
            place = rng.choice(("in forward", "before backward", "in backward", "after backward"))
            yield replace(each, fault=(module, place, tuple(failing)))
            if rng.random() < 0.4:
                return
            continue
        if number == odd and kind in ("forward", "nothing"):
            each = replace(each, does=kind)
        if number == odd and kind == "nan":
            module = rng.choice(list(program.specs))
            index = rng.randrange(program.placements[where][module].world_size)
            each = replace(each, nan=(module, index))
        yield each
        if number == odd and (kind == "inside" or (kind == "forward" and rng.random() < 0.5)):
            for _ in range(rng.choice((1, 1, 2))):
                yield _inside(program, rng)
    if kind == "late":
        yield replace(each, data=each.data + 5, is_last=rng.random() < 0.5)
    yield Do(
        what="step",
        how="bad loss" if kind == "bad loss" else "",
        number=rng.choice((0.0, 0.1, 1e6)),
    )
    if rng.random() < 0.1:
        yield Do(what="step")


def _between(program: Program, rng: random.Random) -> Do:
    kind = rng.choice(
        ("evaluate", "write", "swap", "freeze", "thaw", "save", "load", "move", "move", "set")
    )
    return _anywhere(program, rng, kind)


def _inside(program: Program, rng: random.Random) -> Do:
    kind = rng.choice(
        (
            "evaluate",
            "evaluate",
            "write",
            "swap",
            "freeze",
            "thaw",
            "save",
            "load",
            "drop",
            "look",
            "set",
        )
    )
    return _anywhere(program, rng, kind)


def _anywhere(program: Program, rng: random.Random, kind: str) -> Do:
    module = rng.choice(list(program.specs))
    how, number = "", 0.0
    if kind == "evaluate":
        how = rng.choice(("no_grad", "inference_mode", "generation"))
        number = rng.choice((1, 2))
    if kind == "write":
        how, number = (
            rng.choice(("in place", "data", "load_state_dict")),
            rng.choice((0.5, 0.9, -1.1)),
        )
    if kind == "save":
        how = rng.choice(("", "async", "lazily"))
    if kind == "set":
        number = rng.choice((0.5, 2.0))
    return Do(what=kind, module=module, how=how, number=number)


# ---- what both have in common ----


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, module: str, *, is_recomputed: bool, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            whole = full(f"{module} {name}", shape, torch.float64) / 2
            self.register_parameter(name, nn.Parameter(whole.to(dtype)))
        self._dtype = dtype
        self._is_recomputed = is_recomputed

    fails_in_recompute = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self._dtype)
        if self._is_recomputed or self.fails_in_recompute:
            result: Tensor = checkpoint(self._run, x, use_reentrant=False)
            return result
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        if self.fails_in_recompute and is_in_backward():
            raise Trouble
        result: Tensor = x + torch.tanh(x @ self.up.T) @ self.down.T * self.scale
        return result


def split(block: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [p for p in block.parameters() if p.ndim > 1]
    return matrices, [p for p in block.parameters() if p.ndim < 2]


Rows = dict[str, tuple[Tensor, Tensor, list[int]]]


def data_of(what: str, data: int, counts: Sequence[int]) -> Tensor:
    return full(f"{what} at {data}", (sum(counts), WIDTH), torch.float64)


@torch.no_grad()
def write(block: nn.Module, how: str, factor: float) -> None:
    if how == "load_state_dict":
        block.load_state_dict({n: v * factor for n, v in block.state_dict().items()})
        return
    for p in block.parameters():
        (p.data if how == "data" else p).mul_(factor)


class Twin:
    """All modules in one process."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.blocks = {
            m: Block(m, is_recomputed=False, dtype=s.dtype) for m, s in program.specs.items()
        }
        self.optimizers: dict[str, list[torch.optim.Optimizer]] = {}
        for m, spec in program.specs.items():
            make, other = spec.make, partial(spec.make, is_other=True)
            matrices, rest = split(self.blocks[m])
            if spec.kind == "none":
                self.optimizers[m] = []
                self.blocks[m].requires_grad_(False)
            elif spec.kind in ("chained", "mixed"):
                self.optimizers[m] = [make(matrices), other(rest)]
            else:
                self.optimizers[m] = [make(self.blocks[m].parameters())]
        self.num_tokens = 0
        self.has_nan = False
        self.saved: Any = None
        self.saved_first: Any = None

    # The situation, by which refusals are judged.
    num_open = 0
    is_in_step = False
    is_written = False
    has_had_last = False
    ended_with_last = False

    @property
    def has_gradients(self) -> bool:
        return any(p.grad is not None for b in self.blocks.values() for p in b.parameters())

    def forward(self, each: Microbatch, *, twice: bool = True) -> tuple[dict[str, Tensor], Tensor]:
        program = self.program
        outputs: dict[str, Tensor] = {}
        total = torch.zeros((), dtype=torch.float64)
        for m, block in self.blocks.items():
            x = data_of(m, each.data, each.counts)
            for edge in program.edges:
                if edge[1] != m or edge[0] in each.left_out:
                    continue
                x = x + outputs[edge[0]]
                if edge in each.twice:
                    x = x + outputs[edge[0]] * 0.5
            outputs[m] = block(x)
            if program.specs[m].has_loss:
                target = data_of(f"{m} target", each.data, each.counts)
                total = total + (outputs[m] - target).square().sum()
        return outputs, total

    def do(self, action: Action) -> dict[str, Any]:
        if isinstance(action, Attempts):
            return self._step(action.step)
        if isinstance(action, Microbatch):
            return self._microbatch(action)
        return getattr(self, f"_{action.what}")(action) or {}

    def begin(self, action: Action) -> None:
        """Do what comes before the step of attempts, which may fail for it."""
        if isinstance(action, Attempts):
            self._drop(action)
            for each in action.microbatches:
                self._microbatch(each)

    def fail(self, action: Action) -> None:
        """The action has raised on all ranks, which have then dropped their gradients."""
        if isinstance(action, Do) and action.what in ("save", "load", "move"):
            return
        self._drop(action)

    def _microbatch(self, each: Microbatch) -> dict[str, Any]:
        if each.form == "cleared":
            self._drop(each)
        self.is_in_step = True
        self.has_had_last = self.has_had_last or each.is_last
        self.ended_with_last = each.is_last
        if each.does in ("nothing", "no_grad"):
            return {}
        _, total = self.forward(each)
        if each.does == "forward":
            self.num_open += 1
            return {}
        if total.requires_grad:
            total.backward()
        self.num_tokens += sum(each.counts)
        return {}

    def _step(self, action: Do) -> dict[str, Any]:
        tokens, self.num_tokens = self.num_tokens, 0
        parameters = [p for b in self.blocks.values() for p in b.parameters() if p.grad is not None]
        divisor = tokens if self.program.per_token else 1
        result: dict[str, Any] = {"skipped": self.has_nan or action.how == "bad loss"}
        if not self.has_nan:
            for p in parameters:
                p.grad.div_(divisor)
            squares = [p.grad.double().square().sum() for p in parameters]
            norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
            result["norm"] = norm
            for p in parameters:
                if action.number and norm > action.number:
                    p.grad.mul_(action.number / norm)
        if not result["skipped"]:
            for optimizers in self.optimizers.values():
                for each in optimizers:
                    each.step()
        self._drop(action)
        return result

    def _drop(self, action: object) -> None:
        self.has_nan, self.num_tokens = False, 0
        self.num_open, self.is_in_step, self.is_written = 0, False, False
        self.has_had_last = self.ended_with_last = False
        for block in self.blocks.values():
            block.zero_grad()

    def _look(self, action: Do) -> dict[str, Any]:
        return {
            "parameters": {
                f"{m}.{n}": p.detach().clone()
                for m, b in self.blocks.items()
                for n, p in b.named_parameters()
            }
        }

    def _evaluate(self, action: Do) -> dict[str, Any]:
        with torch.no_grad():
            outputs, _ = self.forward(evaluated(action))
        return {"outputs": outputs}

    def _write(self, action: Do) -> None:
        self.is_written = self.is_written or self.is_in_step
        write(self.blocks[action.module], action.how, action.number)

    def _swap(self, action: Do) -> dict[str, Any]:
        self.is_written = self.is_written or self.is_in_step
        write(self.blocks[action.module], "in place", 0.5)
        outputs = self._evaluate(replace(action, how="no_grad", number=1))
        write(self.blocks[action.module], "in place", 2.0)
        return outputs

    def _freeze(self, action: Do) -> None:
        self.blocks[action.module].requires_grad_(False)

    def _thaw(self, action: Do) -> None:
        for m, block in self.blocks.items():
            block.requires_grad_(self.program.specs[m].kind != "none")

    def _save(self, action: Do) -> None:
        self.saved = copy.deepcopy(
            (
                {m: b.state_dict() for m, b in self.blocks.items()},
                {m: [o.state_dict() for o in each] for m, each in self.optimizers.items()},
            )
        )
        self.saved_first = self.saved_first or self.saved

    def _clear(self, action: Do) -> None:
        for optimizer in self.optimizers[action.module]:
            optimizer.state.clear()

    def _load(self, action: Do) -> None:
        saved = self.saved_first if action.how == "first" else self.saved
        blocks, optimizers = copy.deepcopy(saved)
        for m, state in blocks.items():
            self.blocks[m].load_state_dict(state)
            for optimizer, own in zip(self.optimizers[m], optimizers[m], strict=True):
                optimizer.load_state_dict(own)

    def _move(self, action: Do) -> None:
        self._drop(action)
        self._load(action)

    def _set(self, action: Do) -> None:
        for optimizer in self.optimizers[action.module]:
            for group in optimizer.param_groups:
                group["lr"] *= action.number


def evaluated(action: Do) -> Microbatch:
    counts = tuple((3 * i + 1) % 4 for i in range(NUM_SAMPLES * int(action.number)))
    return Microbatch(
        data=99, counts=counts, is_last=False, left_out=frozenset(), twice=frozenset()
    )


# ---- one rank ----


class World:
    """All modules of one rank."""

    def __init__(self, program: Program, root: str) -> None:
        self.program, self.root = program, root
        self.num_saves = self.num_attempts = self.num_machines = 0
        self.where = -1
        self._stack = contextlib.ExitStack()
        self.frozen: set[str] = set()
        self._move_to(0)

    def close(self) -> None:
        """End the save in flight, and everything that this placement has."""
        self._wait()
        self.optimizer.close()
        self._stack.close()

    def _move_to(self, where: int) -> None:
        if self.where >= 0:
            self.close()
        self.where = where
        self._stack = contextlib.ExitStack()
        program = self.program
        layouts = program.placements[where]
        self.groups = groups = self._stack.enter_context(ModuleGroups.create(layouts, timeout_s=30))
        self.checkpointer = self._stack.enter_context(Checkpointer(self.root, groups=groups.union))
        self.pending: Any = None
        self.num_tokens = 0
        self.blocks = {}
        self.steppers = {}
        for m in groups.modules:
            spec = program.specs[m]
            self.blocks[m] = Block(m, is_recomputed=spec.is_recomputed, dtype=spec.dtype)
            self.steppers[m] = self._stepper(m)
        self.bridges = {
            e: Bridge(groups, *e) for e in program.edges if groups.has(e[0]) or groups.has(e[1])
        }
        loss = next(m for m in program.specs if program.specs[m].has_loss)
        self.optimizer = MultiModuleOptimizer(groups, self.steppers, loss_module=loss)
        self.loss_module = loss
        self._set_frozen()
        self._make_machine()

    def _make_machine(self) -> None:
        """Make a machine, as a start of the job on other devices does."""
        self.num_machines += 1
        self.machine = RerunMachine(
            self.groups.union,
            directory=f"{self.root}/rerun",
            replayed=Replayed(modules=[*self.blocks.values()]),
            optimizers=[self.optimizer],
            device=DeviceIdentity(host="h", uuid=f"{self.num_machines} {self.groups.rank}"),
            note=lambda line: None,
        )
        self.rows: list[Rows] = []
        self.batches = self.machine.replayable(self._source(self.rows), is_rewound=True)

    @staticmethod
    def _source(rows: list[Rows]) -> Iterator[Rows]:
        while True:
            yield rows.pop(0)

    def _set_frozen(self) -> None:
        for m, block in self.blocks.items():
            block.requires_grad_(m not in self.frozen and self.program.specs[m].kind != "none")

    def _stepper(self, m: str) -> Any:
        spec, own, block = self.program.specs[m], self.groups[m], self.blocks[m]
        make, other = spec.make, partial(spec.make, is_other=True)
        options = self.program.options[self.where][m]
        if spec.kind == "none":
            block.requires_grad_(False)
            return None
        if spec.kind == "fsdp":
            sharded = fully_shard_model(block, own, units=(), experts=())
            return sharded.stepper(make(block.parameters()))
        if spec.kind == "reduced":
            return ReducedOptimizer(make(block.parameters()), own, reduce="dp_cp")

        def one(parameters: list[nn.Parameter], make: Any, name: str) -> ShardedOptimizer:
            return ShardedOptimizer(
                block,
                parameters,
                make=make,
                groups=own,
                over="dp_cp",
                divisor=1,
                name=name,
                elementwise=True,
                **options,
            )

        if spec.kind == "sharded":
            return one(list(block.parameters()), make, f"{m} optimizer")
        matrices, rest = split(block)
        first: Any
        if spec.kind == "mixed":
            first = ReducedOptimizer(make(matrices), own, reduce="dp_cp", name="matrices")
        else:
            first = one(matrices, make, "matrices")
        return ChainedOptimizer({"matrices": first, "rest": one(rest, other, "rest")})

    def do(self, action: Action) -> dict[str, Any]:
        if isinstance(action, Attempts):
            return self._attempts(action)
        if isinstance(action, Microbatch):
            return self._microbatch(action, self._rows_of(action))
        return getattr(self, f"_{action.what}")(action) or {}

    def recover(self, action: Action) -> None:
        if isinstance(action, Do) and action.what in ("save", "load", "move"):
            return
        self._drop(action)

    def _samples(self, m: str, num_samples: int) -> slice:
        own = self.groups[m]
        each = num_samples // own.size("dp")
        return slice(own.index("dp") * each, (own.index("dp") + 1) * each)

    def mine(self, m: str, values: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of this data rank."""
        where = self._samples(m, len(counts))
        return values[sum(counts[: where.start]) : sum(counts[: where.stop])]

    def _rows_of(self, each: Microbatch) -> Rows:
        """This rank's batch, by module: inputs, targets, and the counts of its samples."""
        return {
            m: (
                self.mine(m, data_of(m, each.data, each.counts), each.counts),
                self.mine(m, data_of(f"{m} target", each.data, each.counts), each.counts),
                list(each.counts[self._samples(m, len(each.counts))]),
            )
            for m in self.groups.modules
        }

    def _forward(
        self, each: Microbatch, rows: Rows, fault: str | None, at: str
    ) -> tuple[dict[str, Tensor], Tensor]:
        program, groups = self.program, self.groups
        total = torch.zeros((), dtype=torch.float64)
        outputs: dict[str, Tensor] = {}
        for m in program.specs:
            x = rows[m][0] if groups.has(m) else None
            for edge in program.edges:
                if edge[1] != m or edge[0] in each.left_out or edge not in self.bridges:
                    continue
                for factor in (1.0, 0.5) if edge in each.twice else (1.0,):
                    given = outputs.get(edge[0])
                    counts = None
                    if given is not None:
                        given = given * factor
                        counts = rows[edge[0]][2]
                    bridged = self.bridges[edge](given, counts)
                    total = total + bridged.anchor
                    if x is not None:
                        x = x + bridged.tokens
            if x is None:
                continue
            if at == m and fault == "in forward":
                raise Trouble
            self.blocks[m].fails_in_recompute = at == m and fault == "in recompute"
            out = self.blocks[m](x)
            if at == m and fault == "in backward" and out.requires_grad:
                out.register_hook(_fail)
            if at == m and fault == "nan" and out.requires_grad:
                out.register_hook(self._poison)
            own = groups[m]
            if own.size("cp") > 1:  # gradients come back through this rank's own positions alone
                positions = torch.arange(len(out)) % own.size("cp") == own.index("cp")
                out = torch.where(positions[:, None], out, out.detach())
            outputs[m] = out
            if program.specs[m].has_loss:
                positions = torch.arange(len(out)) % own.size("cp") == own.index("cp")
                total = total + (out - rows[m][1])[positions].square().sum()
                if m == self.loss_module:
                    self._seen = int(positions.sum())
        return outputs, total

    def _microbatch(self, each: Microbatch, rows: Rows) -> dict[str, Any]:
        fault, at = None, ""
        for chosen in (
            each.fault,
            None if each.nan is None else (each.nan[0], "nan", (each.nan[1],)),
        ):
            if chosen is None:
                continue
            layout = self.groups.layouts[chosen[0]]
            if self.groups.rank in [layout.ranks[i] for i in chosen[2]]:
                at, fault = chosen[0], chosen[1]
        self._seen = 0
        with self.optimizer.microbatch(is_last=each.is_last):
            if each.does == "nothing":
                return {}
            with torch.set_grad_enabled(each.does != "no_grad"):
                _, total = self._forward(each, rows, fault, at)
            if fault == "before backward":
                raise Trouble
            if each.form == "evaluated":
                seen = self._seen
                self._evaluate(Do(what="evaluate", how="no_grad", number=1))
                self._seen = seen
            if each.form == "cleared":
                self.num_tokens, self.had_nan = 0, False
                self.optimizer.zero_grad()
            if each.does == "all" and total.requires_grad:
                total.backward()
            if fault in ("after backward", "in backward", "in recompute"):
                raise Trouble
        if each.does == "all":
            self.num_tokens += self._seen
        return {}

    had_nan = False
    """Whether a gradient was not finite in the last action."""

    def _poison(self, gradient: Tensor) -> Tensor:
        self.had_nan = self.had_nan or gradient.numel() > 0
        return gradient * float("nan")

    def _step(self, action: Do, veto: RerunMachine | None = None) -> dict[str, Any]:
        tokens, self.num_tokens = self.num_tokens, 0
        count = None
        if self.program.per_token and self.groups.has(self.loss_module):
            count = tokens
        outcome = self.optimizer.step(
            max_norm=action.number,
            num_tokens=count,
            veto=veto,
            is_finite=not (action.how == "bad loss" and self.groups.rank == 1),
        )
        result: dict[str, Any] = {"skipped": outcome.skipped}
        if outcome.norm == outcome.norm:
            result["norm"] = outcome.norm
        return result

    def _attempts(self, action: Attempts) -> dict[str, Any]:
        """Run a step until the machine has accepted it, over a restart if it asks for one."""
        self._drop(action)
        self.num_attempts += 1
        number, was_moved, num_runs = self.num_attempts, False, 0
        while True:
            self.rows[:] = map(self._rows_of, action.microbatches)
            result: dict[str, Any] = {}
            for _ in self.machine.attempts(number, self.batches):
                num_runs += 1
                if not action.drops_before:
                    self._drop(action)
                self.num_tokens = 0
                for position, each in enumerate(action.microbatches):
                    self._microbatch(each, next(self.batches))
                    self._validate(action, position, num_runs)
                if action.has_veto:
                    result = self._step(action.step, self.machine)
            if self.machine.decision.exit_code is None:
                break
            assert self.machine.decision.exit_code == 16, self.machine.decision
            was_moved = self._restart(number, moves=action.restarts_elsewhere)
        if not action.has_veto:
            result = self._step(action.step)
        if was_moved:
            self._save(Do(what="save"))
            self._move(Do(what="move"))
            result["was_moved"] = True
        return result

    def _validate(self, action: Attempts, position: int, num_runs: int) -> None:
        """Show a value to the machine, on the rank that rejects it so many times."""
        module, index, where = action.rejects
        layout = self.program.placements[self.where][module]
        is_there = where == position and index < layout.world_size
        if is_there and self.groups.rank == layout.ranks[index]:
            value = float("nan") if num_runs <= action.num_bad else 1.0
            self.machine.validate("loss", value, NotFinite(), fatal=False)

    def _restart(self, number: int, *, moves: bool) -> bool:
        """Continue from the checkpoint of a fault, on other devices; return whether it moved."""
        root = self.machine.checkpoints
        if self.machine.decision.save:
            with Checkpointer(root, groups=self.groups.union) as faults:
                faults.save(number, {**self._parts(), "rerun": self.machine}, overwrite=True)
        self._drop(number)  # a process that starts has none
        if moves:
            self._move_to(1 - self.where)
        else:
            self._make_machine()
        with Checkpointer(root, groups=self.groups.union) as faults:
            faults.load({**self._parts(), "rerun": self.machine})
        return moves

    def _drop(self, action: object) -> None:
        self.num_tokens, self.had_nan = 0, False
        self.optimizer.drop_gradients()

    @torch.no_grad()
    def _look(self, action: object) -> dict[str, Any]:
        self.optimizer.synchronize()
        values = {}
        for m, block in self.blocks.items():
            for n, p in block.named_parameters():
                values[f"{m}.{n}"] = (
                    (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
                )
        return {"parameters": values}

    def _evaluate(self, action: Do) -> dict[str, Any]:
        each = evaluated(action)
        with torch.inference_mode() if action.how == "inference_mode" else torch.no_grad():
            for number in (2, 1) if action.how == "generation" else ():
                before = evaluated(replace(action, number=number))
                self._forward(before, self._rows_of(before), None, "")
            outputs, _ = self._forward(each, self._rows_of(each), None, "")
        return {"outputs": {m: (out, each.counts) for m, out in outputs.items()}}

    def _write(self, action: Do) -> None:
        if action.module in self.blocks:
            write(self.blocks[action.module], action.how, action.number)

    def _swap(self, action: Do) -> dict[str, Any]:
        here = self.blocks.get(action.module)
        if here is not None:
            write(here, "in place", 0.5)
        try:
            return self._evaluate(replace(action, how="no_grad", number=1))
        finally:
            if here is not None:
                write(here, "in place", 2.0)

    def _freeze(self, action: Do) -> None:
        self.frozen.add(action.module)
        self._set_frozen()

    def _thaw(self, action: Do) -> None:
        self.frozen.clear()
        self._set_frozen()

    def _parts(self) -> dict[str, object]:
        parts: dict[str, Any] = {}
        for m, block in self.blocks.items():
            stepper = self.steppers[m]
            parts[m] = {
                "model": block,
                "optimizer": {} if stepper is None else OptimizerState(self.optimizer[m], block),
            }
        return module_parts(self.groups, parts)

    def _wait(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _save(self, action: Do) -> None:
        self._wait()
        number = self.num_saves + 1
        if action.how:
            self.pending = self.checkpointer.save_async(
                number, self._parts(), **({"stage": "lazily"} if action.how == "lazily" else {})
            )
        else:
            self.checkpointer.save(number, self._parts())
        self.num_saves += 1

    def _load(self, action: Do) -> None:
        self._wait()
        step = 1 if action.how == "first" else None
        self.checkpointer.load(self._parts(), step=step, allow_missing=("*.optimizer.state.*",))

    def _clear(self, action: Do) -> None:
        if self.steppers.get(action.module) is not None:
            self.optimizer[action.module].state.clear()

    def _move(self, action: Do) -> None:
        self._wait()
        self._move_to(1 - self.where)
        self._load(action)

    def _set(self, action: Do) -> None:
        if self.steppers.get(action.module) is not None:
            for group in self.optimizer[action.module].param_groups:
                group["lr"] *= action.number


def _fail(*_: Any) -> Any:
    raise Trouble


# ---- comparison ----


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An error that an action may end in, instead of values."""

    actions: tuple[str, ...]
    text: str
    """A regular expression for the error's text."""
    fits: Callable[[Twin], bool]
    """Returns True if the error's cause is there."""


REFUSALS = (
    Refusal(
        actions=("step",),
        text=r"no parameter of .*got a gradient on any rank",
        fits=lambda now: not now.has_gradients,
    ),
    Refusal(
        actions=("step",),
        text=r"no data rank has any token",
        fits=lambda now: now.program.per_token and not now.num_tokens,
    ),
    Refusal(
        actions=("step",),
        text=r"gradients of the last microbatch are not reduced",
        fits=lambda now: not now.ended_with_last,
    ),
    Refusal(
        actions=("step",),
        text=r"forwards? over the bridge .*waits? for a backward",
        fits=lambda now: now.num_open > 0,
    ),
    Refusal(
        actions=("step", "microbatch"),
        text=r"forward.*without.*backward|had no backward",
        fits=lambda now: now.num_open > 0,
    ),
    Refusal(
        actions=("microbatch",),
        text=r"a microbatch after the last one of this step",
        fits=lambda now: now.has_had_last,
    ),
    Refusal(
        actions=("microbatch", "evaluate", "swap"),
        text=r"were changed \(a step, a load\) while",
        fits=lambda now: now.is_written or now.is_in_step,
    ),
    Refusal(
        actions=("save", "load"),
        text=r"in the middle of a step",
        fits=lambda now: now.is_in_step,
    ),
)
"""All that may be refused, each with its cause: everything else has to have values."""


def run_program(program: Program, root: str) -> Counter[str]:
    """Do all actions, and compare; return how they ended.

    Raises:
        AssertionError: on all ranks, with what differs on any.
    """
    twin, world = Twin(program), World(program, root)
    ends: Counter[str] = Counter()
    for number, action in enumerate(program.actions):
        where = f"seed {program.seed}, action {number}, {action}"
        is_fault = has_fault(action)
        values: dict[str, Any] = {}
        error = ""
        try:
            world.had_nan = False
            values = world.do(action)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            if not isinstance(caught, HoldfastError | Trouble):
                error = f"unexpected: {''.join(traceback.format_exception(caught)[-3:])}"
        answers = _gather((error, world.had_nan))
        errors = [text for text, _ in answers]
        twin.begin(action)
        twin.has_nan = twin.has_nan or any(has_nan for _, has_nan in answers)
        wrong: list[str] = []
        if any(errors):
            if not _is_right(action, errors, twin):
                wrong = [f"{errors}"]
            ends["fault" if is_fault else "refused"] += 1
        try:
            if any(errors):
                world.recover(action)
                twin.fail(action)
            else:
                assert not is_fault, "no error"
                wrong = _differences(world, values, twin.do(action))
                if values.get("was_moved"):
                    twin.do(Do(what="save"))
                if isinstance(action, Attempts) or (
                    isinstance(action, Do) and action.what in ("step", "load", "move")
                ):
                    look = Do(what="look")
                    wrong += _differences(world, world.do(look), twin.do(look))
        except Exception as caught:
            wrong.append("".join(traceback.format_exception(caught)[-3:]))
        found = [text for each in _gather(wrong) for text in each]
        assert not found, f"{where}: {found[:3]}"
    ends["done"] += len(program.actions)
    world.close()
    return ends


def _gather(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def has_fault(action: Action) -> bool:
    each = action.microbatches if isinstance(action, Attempts) else (action,)
    return any(isinstance(one, Microbatch) and one.fault is not None for one in each)


def _is_right(action: Action, errors: Sequence[str], twin: Twin) -> bool:
    """All ranks raise the injected error; or one that is to be expected now."""
    if not all(errors):
        return False
    if has_fault(action) and all("injected" in error for error in errors):
        return True
    whats = {action.what} if isinstance(action, Do) else {"microbatch"}
    if isinstance(action, Attempts):
        whats.add("step")
    return any(
        whats.intersection(each.actions)
        and all(re.search(each.text, error) for error in errors)
        and each.fits(twin)
        for each in REFUSALS
    )


def _differences(world: World, values: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    wrong = []
    limit = world.program.tolerance
    for name, value in values.items():
        if name == "skipped" and value != expected[name]:
            wrong.append(f"skipped: {value}")
        if name == "norm" and name in expected:
            truth = expected[name]
            if not abs(value - truth) <= limit * max(1.0, truth):
                wrong.append(f"norm {value}, not {truth}")
        if name == "parameters":
            wrong += [
                f"{each} is off by {_gap(found, expected[name][each])}"
                for each, found in value.items()
                if not _gap(found, expected[name][each]) < limit
            ]
        if name == "outputs":
            for m, (found, counts) in value.items():
                truth = world.mine(m, expected[name][m], counts)
                if (
                    found.shape != truth.shape
                    or found.dtype != truth.dtype
                    or not _gap(found, truth) < limit
                ):
                    wrong.append(f"output of {m}")
    return wrong


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max()) if one.numel() else 0.0
