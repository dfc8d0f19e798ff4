"""One rank's model and optimizer, held in one way."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from holdfast import Checkpointer, ConfigError, OptimizerState, ProcessGroups
from holdfast.checkpoint import PendingSave
from holdfast.fsdp import ShardedModel, fully_shard_model
from holdfast.optim import (
    ChainedOptimizer,
    LossScaler,
    ReducedOptimizer,
    ShardedOptimizer,
    StepOutcome,
)
from tests.campaign.actions import (
    OWN_STEPS,
    Action,
    AddGroup,
    ClearState,
    Detour,
    DetourKind,
    Drop,
    Evaluate,
    Fault,
    Form,
    Freeze,
    Hook,
    Load,
    Look,
    Microbatch,
    Move,
    ReloadOptimizer,
    Save,
    Schedule,
    Set,
    Step,
    Swap,
    Thaw,
    Toggle,
    TwiceBackward,
    Write,
    WriteGradients,
)
from tests.campaign.models import (
    ROWS,
    WIDTH,
    Block,
    Case,
    Generated,
    Leaf,
    Normed,
    Specialists,
    Wide,
    generate,
)
from tests.campaign.programs import OPTIMIZERS, Program, Way

STALE = re.compile(r"were changed \(a step, a load\) while")
HOOKED = re.compile(r"a hook was registered at a parameter .* after fully_shard_model")
IN_BUCKETS = re.compile(r"its gradient is in the sharded optimizer's buckets")
THAWED = re.compile(r"was frozen when optimizer")


def is_hooked(action: Action, text: str) -> bool:
    """Return True if an error is about a hook, which has to go."""
    pattern = IN_BUCKETS if isinstance(action, Microbatch) else HOOKED
    return bool(pattern.search(text) or HOOKED.search(text))


def rows_of(step: int, *, index: int, shares: int, parts: int) -> list[Tensor]:
    """Return the microbatches of one share of a step's rows."""
    mine = (torch.arange(ROWS) + step * ROWS).reshape(-1, shares)[:, index]
    return list(torch.split(mine, len(mine) // parts))


def param_groups(
    parameters: list[nn.Parameter], *, settings: Mapping[str, Any], has_tensor_rates: bool = False
) -> list[dict[str, Any]]:
    """Return matrices and the rest as two groups, of which only the first decays."""
    decays = "weight_decay" in settings
    matrices = [p for p in parameters if p.ndim >= 2]
    rest = [p for p in parameters if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}]
    if rest:
        groups.append({"params": rest, **({"weight_decay": 0.0} if decays else {})})
    for group in groups if has_tensor_rates else ():
        group["lr"] = torch.tensor(settings["lr"], dtype=torch.float64)
    return groups


class Trouble(Exception):
    """An error of a kernel, a hook or a loss."""

    def __init__(self) -> None:
        super().__init__("injected")


class Interrupt(KeyboardInterrupt):
    """Comes at any time, and leaves at once."""

    def __init__(self) -> None:
        super().__init__("injected")


INJECTED = (Trouble, Interrupt)
_STEP_MODES: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


Values = Mapping[str, Any]
"""What an action returns: numbers, a tensor, or tensors by name."""


class Trained:
    """One rank's model and optimizer, held in one way.

    `root` is where this way saves; `before` where the way before has saved, if there was one.
    """

    def __init__(
        self,
        program: Program,
        way: Way,
        groups: ProcessGroups,
        *,
        root: Path,
        before: Path | None = None,
        values: int | None = None,
    ) -> None:
        self.program, self.way, self.groups = program, way, groups
        case = generate(program.seed, program.traits, values=values)
        self.model = case.model
        late = late_parameters(case.model) if way.has_late else {}
        freeze(late)
        self._experts = _placed(case, way, groups)
        self._late = dict(zip(late_parameters(case.model), late.values(), strict=False))
        self.sharded: ShardedModel | None = None
        self._stepped: Any = None
        """The optimizer of a sharded model, or several by name."""
        self.optimizer: Any = self._optimizer(case)
        self._trainable = {p: p.requires_grad for p in self.model.parameters()}
        self._checkpointer = Checkpointer(root, groups=groups)
        self._before = before
        self._num_saves = 0
        self._pending: PendingSave | None = None
        self._hooks = Hooks(self.model)
        self._scheduler = scheduler_of(self._inner, way)
        self._scaler = LossScaler(initial=64.0, growth_interval=2) if way.has_scaler else None
        self._own_factor = 1.0
        """Of settings, on this rank and not on all."""
        self._buffers: dict[str, Tensor] = {}
        """Copies from before the action."""

    def do(self, action: Action) -> Values:
        """Do what an action says."""
        self._buffers = buffers_of(self.model)
        match action:
            case Microbatch():
                return self._run_microbatch(action)
            case Step():
                return self._step(action)
            case Look():
                return {"parameters": self.whole(), "buffers": buffers_of(self.model)}
            case Evaluate():
                return {"output": evaluate(self.model, action.mode)}
            case Write():
                write(self.model, action)
            case Swap():
                save = self._save if action.saves else None
                return {"output": evaluate_average(self.model, save=save)}
            case Detour():
                return {"output": evaluate_otherwise(self.model, action)}
            case Freeze() | Thaw():
                set_trainable(self.model, action, at_start=self._trainable, late=self._late)
            case Save():
                self._save(is_async=action.is_async, is_lazy=action.is_lazy)
            case Load():
                self._load(is_of_before=action.is_of_before, is_first=action.is_first)
            case Drop():
                self._drop(action.how, to_zeros=action.to_zeros)
            case WriteGradients():
                scale = 1.0 if self._scaler is None else self._scaler.scale
                write_gradients(self.model, action, scale=scale)
            case Hook():
                self._hooks.register(action)
            case ReloadOptimizer():
                reload(self._inner)
            case ClearState():
                self._inner.state.clear()
            case AddGroup():
                first = self._inner.inners[0] if self.way.has_two else self._inner
                add_group(first, self._late, at_start=self._trainable)
            case Set():
                if action.ranks is None or self._index in action.ranks:
                    change_settings(self.optimizer, action.factor)
                    self._own_factor = 1.0 if action.ranks is None else action.factor
            case Toggle():
                toggle(self.model, action)
            case Schedule():
                step_schedule(self._scheduler)
            case Move():
                move(self.model)
        return {}

    def recover(self, action: Action, text: str) -> None:
        """Do what the documentation says after an error that has this text."""
        for name, buffer in self.model.named_buffers():  # the forwards that failed wrote to some
            buffer.copy_(self._buffers[name])
        has_forgotten = isinstance(action, Step) and action.mode not in OWN_STEPS
        if not has_forgotten and not isinstance(action, Save | Load):
            self._drop("drop_gradients")
        if isinstance(action, Swap) and STALE.search(text):  # half of it is done
            self._load()
        if THAWED.search(text):
            set_trainable(self.model, Thaw(), at_start=self._trainable, late=self._late)
        if is_hooked(action, text):
            self._hooks.remove()
        if isinstance(action, Step):
            change_settings(self.optimizer, 1 / self._own_factor)
            self._own_factor = 1.0

    def state(self) -> dict[str, object]:
        """Return what is saved and loaded."""
        optimizer = {"optimizer": OptimizerState(self._inner, self.model)}
        schedule = {"schedule": self._scheduler} if self.way.keeps_schedule else {}
        return {**schedule, "model": self.model, **optimizer}

    @torch.no_grad()
    def whole(self) -> dict[str, Tensor]:
        """Return each parameter as one plain tensor; collective."""
        if isinstance(self.optimizer, ShardedOptimizer | ChainedOptimizer):
            self.optimizer.synchronize()
        return {name: full(p) for name, p in self.model.named_parameters()}

    def close(self) -> None:
        """Take the hooks of the optimizer off the model."""
        self._wait()
        self._checkpointer.close()
        if isinstance(self.optimizer, ShardedOptimizer | ChainedOptimizer):
            self.optimizer.close()

    # ---- inside ----

    @property
    def _index(self) -> int:
        """Of this rank in the layout."""
        return self.groups.layout.ranks.index(self.groups.rank)

    @property
    def _inner(self) -> Any:
        optimizer = self.optimizer
        return optimizer.optimizer if isinstance(optimizer, ReducedOptimizer) else optimizer

    def _run_microbatch(self, action: Microbatch) -> Values:
        groups = self.groups
        index, shares = groups.index("dp_cp"), groups.size("dp_cp")
        rows = rows_of(action.step, index=index, shares=shares, parts=action.num_parts)[action.part]
        failing = action.failing
        fails = failing is None or self._index in failing
        fault = action.fault if fails else None
        injected = INJECTED[action.step % 2]
        with self._microbatch(is_last=action.is_last):
            if action.does == "nothing" or self._index in action.idle:
                return {}
            with (
                _fault_of(self.model, fault, action.block, injected),
                torch.set_grad_enabled(action.does != "no_grad"),
            ):
                found = forwards(self.model, [rows], action)
                if fault == "before backward":
                    raise injected
                if action.form == "evaluated":
                    evaluate(self.model, "no_grad")
                if action.form == "cleared":
                    self._drop("optimizer.zero_grad")
                if action.does == "all":
                    for loss in found.totals():
                        scaled = loss if self._scaler is None else self._scaler.scale_loss(loss)
                        if isinstance(action, TwiceBackward):
                            scaled.backward(retain_graph=True)
                        scaled.backward(create_graph=action.form == "graph")
            if fault is not None:
                raise injected
        scale = 1.0 if self._scaler is None or action.form != "input" else self._scaler.scale
        gradient = found.input_gradients()[0]
        return {
            "loss": found.losses()[0],
            "input gradient": None if gradient is None else gradient / scale**2,
        }

    def _microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        if not self.way.has_contexts:
            return nullcontext()
        entered: AbstractContextManager[None] = (self.sharded or self.optimizer).microbatch(
            is_last=is_last
        )
        return entered

    def _step(self, action: Step) -> Values:
        options: dict[str, Any] = {
            "max_norm": action.max_norm,
            "count_zeros": True,
            "scaler": self._scaler,
            "is_finite": self._index not in action.bad,
        }
        if action.mode in OWN_STEPS:
            self._step_alone(action)
            return {}
        step = self.optimizer.step
        if self.sharded is not None:
            step = partial(self.sharded.step, self._stepped)
        if action.mode == "closure":
            options["closure"] = partial(self._run_microbatch, closure_of(action))
        with _STEP_MODES.get(action.mode, nullcontext)():
            outcome = step(**options)
        assert isinstance(outcome, StepOutcome)
        return {
            "norm": outcome.norm,
            "num_zeros": outcome.num_zeros,
            "clipped": outcome.clipped,
            "skipped": outcome.skipped,
        }

    def _step_alone(self, action: Step) -> None:
        """Step with the torch optimizers of a sharded model, as a loop without Holdfast does."""
        each = self._stepped.values() if self.way.has_two else [self._stepped]
        for number, optimizer in enumerate(each):
            if action.mode == "own closure" and number == 0:
                optimizer.step(partial(self._run_microbatch, closure_of(action)))
            else:
                optimizer.step()
        self._drop("optimizer.zero_grad")

    def _save(self, *, is_async: bool = False, is_lazy: bool = False) -> None:
        self._wait()
        if is_async:
            stage: Any = "lazily" if is_lazy else "at once"
            number = self._num_saves + 1
            self._pending = self._checkpointer.save_async(number, self.state(), stage=stage)
        else:
            self._checkpointer.save(self._num_saves + 1, self.state())
        self._num_saves += 1

    def _wait(self) -> None:
        """Wait for the save in flight."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _load(self, *, is_of_before: bool = False, is_first: bool = False) -> None:
        self._wait()
        # What was frozen when it was saved and is trained now starts fresh, as in one process.
        allowed = {"allow_missing": ("optimizer.state.*",)}
        if is_of_before:
            assert self._before is not None
            with Checkpointer(self._before, groups=self.groups) as checkpointer:
                checkpointer.load(self.state(), **allowed)
        else:
            self._checkpointer.load(self.state(), step=1 if is_first else None, **allowed)

    def _drop(self, how: str, *, to_zeros: bool = False) -> None:
        if how == "model.zero_grad":
            self.model.zero_grad(set_to_none=not to_zeros)
        elif how == "optimizer.zero_grad":
            self._inner.zero_grad(set_to_none=not to_zeros)
        else:
            (self.sharded or self.optimizer).drop_gradients()

    def _optimizer(self, case: Case) -> Any:
        way, groups, model = self.way, self.groups, self.model
        make = OPTIMIZERS[self.program.optimizer]
        grouped = partial(
            param_groups, settings=make.keywords, has_tensor_rates=way.has_tensor_rates
        )
        if way.kind == "fsdp":
            self.sharded = fully_shard_model(
                model,
                groups,
                units=case.units,
                experts=case.experts if self._experts is not None else (),
                **way.options,
            )
            # Sharding has replaced them.
            late = late_parameters(model)
            self._late = dict(zip(late, self._late.values(), strict=False))
            members = [p for p in model.parameters() if p not in self._late]
            divided = grouped(members)
            if not way.has_two:
                self._stepped = make(divided)
                return self._stepped
            self._stepped = {f"of group {i}": make([group]) for i, group in enumerate(divided)}
            return self.sharded.stepper(self._stepped).optimizer
        experts = self._experts or set()
        dense = [p for p in model.parameters() if p not in experts]
        special = [p for p in model.parameters() if p in experts]
        members = [p for p in (*dense, *special) if p not in self._late]
        divided = grouped(members)
        if way.kind == "plain":
            if not way.has_two:
                return ReducedOptimizer(make(divided), groups, reduce=self._reduce)
            return ChainedOptimizer(
                {
                    f"of group {i}": ReducedOptimizer(
                        make([group]),
                        groups,
                        reduce=partial(self._reduce, group["params"]),
                        name=f"of group {i}",
                    )
                    for i, group in enumerate(divided)
                }
            )

        def sharded(name: str, over: str, divided: list[dict[str, Any]]) -> ShardedOptimizer:
            if groups.layout.replicas > 1:
                over += "_intra"
            if groups.size(over) > 1 and not groups.has(f"{over}_ag"):
                groups.clone(over, purpose=f"{over}_ag")
            return ShardedOptimizer(
                model,
                divided,
                make=make,
                groups=groups,
                over=over,
                divisor=groups.size("dp_cp"),
                # The trial of an optimizer is the matter of test_elementwise.
                elementwise=True,
                name=name,
                **way.options,
            )

        if way.kind == "zero":
            if not way.has_two:
                return sharded("optimizer", "dp_cp", divided)
            return ChainedOptimizer(
                {
                    f"of group {i}": sharded(f"of group {i}", "dp_cp", [group])
                    for i, group in enumerate(divided)
                }
            )
        parts = {"dense": sharded("dense", "dp_cp", grouped(dense))}
        if special:
            divided = grouped(special)
            parts["expert"] = sharded("expert", "expt_dp", divided)
        return ChainedOptimizer(parts)

    @torch.no_grad()
    def _reduce(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        """Average gradients over data ranks, as a user's own loop does; without some, of all."""
        for p in self.model.parameters() if parameters is None else parameters:
            # Also of what is frozen: it may have a gradient from before.
            name = "expt_dp" if self._experts and p in self._experts else "dp_cp"
            if self.groups.size(name) > 1:
                has = torch.tensor(float(p.grad is not None))
                dist.all_reduce(has, group=self.groups.group(name))
                if not has:
                    continue
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                summed = torch.view_as_real(local) if local.is_complex() else local
                summed = summed.contiguous().clone()
                dist.all_reduce(summed, group=self.groups.group(name))
                local.copy_(torch.view_as_complex(summed) if local.is_complex() else summed)
            if p.grad is not None:
                p.grad.div_(self.groups.size("dp_cp"))


@contextlib.contextmanager
def _fault_of(
    model: Generated, fault: Fault | None, block: int, injected: type[BaseException]
) -> Iterator[None]:
    """Raise in the forward, or in the backward, of a module."""

    def fail(*_: Any) -> Any:
        raise injected

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        del module, args
        if fault == "in forward":
            raise injected
        if fault == "in recompute":
            if is_in_backward():
                raise injected
        elif output.requires_grad:
            output.register_hook(fail)

    if fault not in ("in forward", "in backward", "in recompute"):
        yield
        return
    faulty = _block(model, block)
    before, faulty.recomputed = faulty.recomputed, faulty.recomputed or fault == "in recompute"
    handle = faulty.parts[0].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
        faulty.recomputed = before


def is_in_backward() -> bool:
    """Return True in a forward that a backward makes, to compute activations again."""
    return torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]


# ---- actions that a twin does alike ----


class Forwards:
    """Losses of the forwards of a microbatch, by share of the rows; before their backward."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.by_share: list[list[Tensor]] = []
        """Losses of each forward, by share."""
        self.probes: list[Tensor] = []
        """Of each share, if the input has a gradient."""
        self._saliencies: list[float] = []

    def add(self, losses: list[Tensor]) -> None:
        """Add one forward."""
        self.by_share.append(losses)

    def note_saliencies(self) -> None:
        """Take the gradients of the input alone."""
        gradients = torch.autograd.grad(self._whole(), self.probes, retain_graph=True)
        self._saliencies = [float(g.double().square().sum()) for g in gradients]

    def add_penalties(self, weights: list[float]) -> None:
        """Add the squares of the gradients of the input to the losses."""
        gradients = torch.autograd.grad(self._whole(), self.probes, create_graph=True)
        for share, (g, weight) in enumerate(zip(gradients, weights, strict=True)):
            loss = self.by_share[0][share]
            self.by_share[0][share] = loss + (g * weight).square().sum() / weight

    def _whole(self) -> Tensor:
        return torch.stack([loss for losses in self.by_share for loss in losses]).sum()

    def totals(self) -> list[Tensor]:
        """Return the losses that have a backward, in turn."""
        if self.form != "in turns":
            return [self._whole()]
        return [torch.stack(losses).sum() for losses in self.by_share]

    def losses(self) -> list[float]:
        """Return the loss of each share."""
        return [
            float(torch.stack(losses).sum().detach()) for losses in zip(*self.by_share, strict=True)
        ]

    def input_gradients(self) -> list[float | None]:
        """Return sums of squares of the gradients of the input, by share."""
        if self._saliencies:
            return [*self._saliencies]
        if self.form != "input":
            return [None for _ in self.by_share[0]]
        return [
            0.0 if probe.grad is None else float(probe.grad.double().square().sum())
            for probe in self.probes
        ]


def forwards(model: Generated, shares: list[Tensor], action: Microbatch) -> Forwards:
    """Run the forwards of a microbatch for some shares of its rows."""
    found = Forwards(action.form)
    lengths = [len(rows) * action.num_parts for rows in shares]
    is_split = action.form in ("halves", "in turns")
    for first in range(2) if is_split else (None,):
        pieces = [rows if first is None else rows[first::2] for rows in shares]
        probe = None
        if action.form in ("input", "saliency", "penalty"):
            found.probes = [
                torch.zeros(len(rows), WIDTH, dtype=model.traits.dtype, requires_grad=True)
                for rows in pieces
            ]
            probe = torch.cat(found.probes)
        out = model(torch.cat(pieces), probe).split([*map(len, pieces)])
        found.add([each.sum() / n for each, n in zip(out, lengths, strict=True)])
    if action.form == "saliency":
        found.note_saliencies()
    if action.form == "penalty":
        found.add_penalties([float(n) for n in lengths])
    return found


def closure_of(action: Step) -> Microbatch:
    """Return the microbatch that the closure of a step makes."""
    return Microbatch(step=action.rows, part=0, num_parts=1, is_last=True)


def late_parameters(model: Generated) -> dict[nn.Parameter, bool]:
    """Return the parameters of the second block alone, each with True if it is to be trained."""
    others = {model.table, *model.blocks[0].parameters()}
    return {p: p.requires_grad for p in model.blocks[1].parameters() if p not in others}


def freeze(parameters: Iterable[nn.Parameter]) -> None:
    """Stop training some parameters."""
    for p in parameters:
        p.requires_grad_(False)


def add_group(
    optimizer: torch.optim.Optimizer,
    late: dict[nn.Parameter, bool],
    *,
    at_start: dict[nn.Parameter, bool],
) -> None:
    """Train parameters that an optimizer was built without; no second time."""
    if late:
        for p, is_trained in late.items():
            p.requires_grad_(is_trained)
        optimizer.add_param_group({"params": [*late]})
        at_start |= late
        late.clear()


def evaluate(model: Generated, mode: str) -> Tensor:
    """Return the losses of some rows, without gradients."""
    if mode in ("copy", "trained copy"):
        model = copy.deepcopy(model)
    if mode == "trained copy":
        _train_alone(model)
    if mode == "average":
        averaged = AveragedModel(model, avg_fn=lambda old, new, _: (old + new) / 2)
        averaged.update_parameters(model)
        averaged.update_parameters(model)
        model = averaged.module
    if mode == "generation":
        model.eval()
    with torch.inference_mode() if mode == "inference_mode" else torch.no_grad():
        lengths = (2, 4, 6) if mode == "generation" else (6,)
        output = [model(torch.arange(length)) for length in lengths][-1]
    model.train()
    return output.clone()


def _train_alone(model: Generated) -> None:
    """Make a step of plain gradient descent, as with a copy that is tried out."""
    loss = model(torch.arange(6)).mean()
    if loss.requires_grad:
        loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


class _Halved(nn.Module):
    """A parametrization."""

    def forward(self, value: Tensor) -> Tensor:
        return value * 0.5


def evaluate_otherwise(model: Generated, action: Detour) -> Tensor:
    """Evaluate with half of a parameter in its place, which then has the parameter again."""
    block = _block(model, action.block)
    leaf: Any = block.parts[0]
    if action.how == "functional":
        before = leaf.up
        halved = {f"blocks.{action.block}.parts.0.up": before.detach() * 0.5}
        try:
            with torch.no_grad():
                output: Tensor = functional_call(model, halved, (torch.arange(6),))
        finally:  # torch does not put back what is of a module at two places
            leaf._parameters["up"] = before
        return output.clone()
    if action.how == "dtype":
        return evaluate_wider(model)
    places = [*leaf._parameters]
    try:
        with _in_place(block, leaf, action.how):
            return evaluate(model, "no_grad")
    finally:
        for name in places:  # a parametrization has moved it to the end
            leaf._parameters[name] = leaf._parameters.pop(name)


def evaluate_wider(model: Generated) -> Tensor:
    """Evaluate in float64, if the parameters have one dtype to which they go back as they were."""
    dtypes = {p.dtype for p in model.parameters()}
    before = evaluate(model, "no_grad")  # a first forward in float64 would be for good
    if dtypes != {torch.float32}:
        return before
    model.double()
    try:
        return evaluate(model, "no_grad")
    finally:
        model.float()


@contextlib.contextmanager
def _in_place(block: Block, leaf: Any, how: DetourKind) -> Iterator[None]:
    before = leaf.up
    try:
        if how == "parametrization":
            parametrize.register_parametrization(leaf, "up", _Halved())
        elif how == "data":
            data = before.data
            before.data = data * 0.5
        elif how == "assignment":
            leaf.up = nn.Parameter(before.detach() * 0.5)
        else:
            other = copy.deepcopy(leaf)
            with torch.no_grad():
                other.up.mul_(0.5)
            block.parts[0] = other
        yield
    finally:
        if how == "parametrization":
            parametrize.remove_parametrizations(leaf, "up", leave_parametrized=False)
        elif how == "data":
            before.data = data
        elif how == "assignment":
            leaf.up = before
        else:
            block.parts[0] = leaf


@torch.no_grad()
def evaluate_average(model: Generated, *, save: Callable[[], object] | None) -> Tensor:
    """Evaluate averaged parameters, as a moving average is: copied in, maybe saved, and back."""
    parameters = list(model.parameters())
    others = [p.detach().clone().mul_(0.9) for p in parameters]

    def swap() -> None:
        for p, other in zip(parameters, others, strict=True):
            kept = p.detach().clone()
            p.copy_(other)
            other.copy_(kept)

    swap()
    output = evaluate(model, "no_grad")
    if save is not None:
        save()
    swap()
    return output


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all buffers."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict without what hooks have added, which no module takes."""
    return {n: v for n, v in model.state_dict().items() if isinstance(v, Tensor)}


@torch.no_grad()
def write(model: Generated, action: Write) -> None:
    """Multiply parameters, as users do."""
    target = model if action.block is None else _block(model, action.block)
    if action.how == "load_state_dict":
        written = {*target.parameters()}
        names = {n for n, p in model.named_parameters(remove_duplicate=False) if p in written}
        model.load_state_dict(
            {n: v * action.factor if n in names else v for n, v in tensors_of(model).items()}
        )
        return
    if action.how == "foreach":  # of one kind each, as torch takes them
        kinds: dict[object, list[Tensor]] = {}
        for p in target.parameters():
            mesh = p.device_mesh if isinstance(p, DTensor) else None
            kinds.setdefault((mesh, p.dtype), []).append(p)
        for alike in kinds.values():
            torch._foreach_mul_(alike, action.factor)
        return
    for p in target.parameters():
        if action.how == "mask":
            # Not by 0: a row of zeros has no direction, and a weight norm makes it NaN.
            p.mul_(torch.where(p.abs() > 0.1, 1.0, 0.125))
        else:
            (p.data if action.how == "data" else p).mul_(action.factor)


def set_trainable(
    model: Generated,
    action: Freeze | Thaw,
    *,
    at_start: Mapping[nn.Parameter, bool],
    late: Mapping[nn.Parameter, bool],
) -> None:
    """Freeze a block, or thaw it, but for parameters that no optimizer has yet."""
    if action.block is None:
        for p, trained in at_start.items():
            p.requires_grad_(trained)
        return
    parameters = [*_block(model, action.block).parameters()]
    if action.number is not None:
        parameters = [parameters[action.number % len(parameters)]]
    for p in parameters:
        if p not in late:
            p.requires_grad_(isinstance(action, Thaw))


@torch.no_grad()
def write_gradients(model: Generated, action: WriteGradients, *, scale: float) -> None:
    """Change gradients by hand; a warning that they are elsewhere is as good as a refusal."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            parameters = [*_block(model, action.block).parameters()]
            if action.how in ("clip norm", "clip value"):
                clip(parameters, action.how, scale=scale)
                return
            for p in parameters:
                if action.how == "none":
                    p.grad = None
                elif p.grad is not None:
                    p.grad.mul_(0.5)
        except RuntimeWarning as warning:
            raise ConfigError(str(warning)) from warning


def clip(parameters: list[nn.Parameter], how: str, *, scale: float) -> None:
    """Clip each gradient as torch does, which joins none of several meshes; they are scaled."""
    for p in parameters:
        if p.grad is not None:
            if how == "clip norm":
                nn.utils.clip_grad_norm_([p], 0.01 * scale)
            elif not p.is_complex():
                nn.utils.clip_grad_value_([p], 0.005 * scale)


class Hooks:
    """Hooks of a user's, registered at any time."""

    def __init__(self, model: Generated) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self.at_gradients = False
        """True if there are some at parameters."""
        self.after: list[nn.Parameter] = []
        """Those whose gradients are halved whenever something was added to them."""

    def register(self, action: Hook) -> None:
        """Register a hook; a frozen parameter takes none."""
        part = _block(self._model, action.block).parts[0]
        trained = [p for p in part.parameters() if p.requires_grad]
        if action.how == "output":
            self._handles.append(part.register_forward_hook(_halve_output))
        elif action.how == "module gradient":
            self._handles.append(part.register_full_backward_hook(_halve_input_gradients))
        elif trained:
            self.at_gradients = True
            if action.how == "gradient":
                self._handles.append(trained[0].register_hook(_halve))
            else:
                untyped: Any = trained[0]
                self.after.append(trained[0])
                handle = untyped.register_post_accumulate_grad_hook(_halve_gradient)
                self._handles.append(handle)

    def remove(self) -> None:
        """Remove all of them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.after.clear()
        self.at_gradients = False


def _halve_gradient(parameter: nn.Parameter) -> None:
    gradient = parameter.grad
    assert gradient is not None
    gradient.mul_(0.5)


def _halve(value: Tensor) -> Tensor:
    return value * 0.5


def _halve_input_gradients(module: nn.Module, gradients: Any, _: Any) -> Any:
    del module
    return tuple(None if each is None else each * 0.5 for each in gradients)


def _halve_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    del module, args
    return output * 0.5


def change_settings(optimizer: Any, factor: float) -> None:
    """Change what parameter groups state, as schedules do."""
    inner = optimizer.optimizer if isinstance(optimizer, ReducedOptimizer) else optimizer
    for group in inner.param_groups:
        group["lr"] *= factor
        group["weight_decay"] *= factor


def reload(optimizer: torch.optim.Optimizer) -> None:
    """Load a copy of the state that an optimizer has, as it would come from a file."""
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def scheduler_of(optimizer: Any, way: Way) -> Any:
    """Return the scheduler of a way; by default it multiplies the rates that there are."""
    if way.schedule == "plateau":
        return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    if way.schedule == "one cycle":  # sets momenta, too
        group = optimizer.param_groups[0]
        cycles = bool(group.get("momentum") or group.get("betas"))
        return lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.05, total_steps=40, pct_start=0.1, cycle_momentum=cycles
        )
    exponential = lr_scheduler.ExponentialLR(optimizer, gamma=0.7)
    if way.schedule == "chained":
        warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
        return lr_scheduler.ChainedScheduler([warmup, exponential])
    return exponential


def step_schedule(scheduler: Any) -> None:
    """Step a scheduler, which may want a metric: one that does not improve."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def move(model: nn.Module) -> None:
    """Copy all parameters and buffers to other memory."""
    untyped: Any = model
    untyped._apply(torch.clone)


def toggle(model: Generated, action: Toggle) -> None:
    """Turn activation checkpointing on or off."""
    block = _block(model, action.block)
    block.recomputed = not block.recomputed


def _block(model: Generated, number: int) -> Block:
    block = model.blocks[number]
    assert isinstance(block, Block)
    return block


# ---- placements ----


def full(value: Tensor) -> Tensor:
    """Return a copy of the whole tensor; collective for a DTensor."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _placed(case: Case, way: Way, groups: ProcessGroups) -> set[nn.Parameter] | None:
    """Split layers over tp and specialists over ep, as users' plans do; the experts, if any are."""
    layout = groups.layout
    is_hybrid = layout.replicas > 1
    data = ("dp_cp_inter", "dp_cp_intra") if is_hybrid else ("dp_cp",)
    expert_data = ("expt_dp_inter", "expt_dp_intra") if is_hybrid else ("expt_dp",)
    if layout.tp > 1:
        mesh = groups.mesh(*data, "tp")["tp"]
        for module in case.model.modules():
            if isinstance(module, Wide):
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(module, mesh, plan, src_data_rank=None)
    mixes = {m.mix for m in case.model.modules() if isinstance(m, Specialists)}
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    if way.is_declared and layout.world_size > 1:
        split = {m.up for m in case.model.modules() if isinstance(m, Leaf)}
        uncut = {
            p for m in case.model.modules() if isinstance(m, Wide | Normed) for p in m.parameters()
        }
        mesh = groups.mesh(*data, "tp")
        for p in case.model.parameters():
            if p not in mixes and p not in uncut:
                cut = Shard(0) if case.model.traits.is_odd and p in split else Replicate()
                replaced[p] = _distributed(p, mesh, [*[Replicate()] * len(data), cut])
    are_experts = {
        "fsdp": layout.ep > 1 or layout.tp == 1,
        "plain": layout.ep > 1,
        "chained": True,
        "zero": False,
    }[way.kind]
    is_split = are_experts and layout.ep * layout.expt_tp > 1
    if layout.world_size > 1 and (is_split or way.kind == "chained"):
        mesh = groups.mesh(*expert_data, "ep", "expt_tp")
        placed: list[Placement] = [Shard(0), Replicate()]
        if layout.expt_tp > 1 and WIDTH % layout.expt_tp == 0:
            placed[1] = Shard(1)
        if way.kind == "chained":
            placed = [*[Replicate()] * len(expert_data), *placed]
        elif layout.expt_tp > 1:
            mesh = mesh["ep", "expt_tp"]
        else:
            mesh, placed = mesh["ep"], placed[:1]
        replaced |= {p: _distributed(p, mesh, placed) for p in mixes}
    _replace(case, replaced)
    if not are_experts:
        return None
    found = set()
    for module in case.model.modules():
        if isinstance(module, Specialists):
            module.share = 1 / layout.tp
            found.add(module.mix)
    return found


def _distributed(p: nn.Parameter, mesh: Any, placed: list[Placement]) -> nn.Parameter:
    value = distribute_tensor(p.detach(), mesh, placed, src_data_rank=None)
    return nn.Parameter(value, requires_grad=p.requires_grad)


def _replace(case: Case, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
    """Put parameters in the places of others; ties and declarations follow."""
    for module, name, p in list(_places(case.model)):
        if p in replaced:
            setattr(module, name, replaced[p])
    case.experts[:] = [
        replaced.get(each, each) if isinstance(each, nn.Parameter) else each
        for each in case.experts
    ]


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, name, p
