"""What a program does between the first forward and the last step, action by action."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Fault = Literal["in forward", "before backward", "in backward", "in recompute", "after backward"]
FAULTS: tuple[Fault, ...] = (
    "in forward",
    "before backward",
    "in backward",
    "in recompute",
    "after backward",
)
Form = Literal[
    "whole", "halves", "in turns", "input", "saliency", "penalty", "evaluated", "cleared"
]
FORMS: tuple[Form, ...] = (
    "halves",
    "in turns",
    "input",
    "saliency",
    "penalty",
    "graph",
    "evaluated",
    "cleared",
)
EvaluationMode = Literal[
    "no_grad", "inference_mode", "generation", "copy", "trained copy", "average"
]
MODES: tuple[EvaluationMode, ...] = ("no_grad", "inference_mode", "generation")
COPIES: tuple[EvaluationMode, ...] = ("copy", "trained copy", "average")
WriteKind = Literal["in place", "data", "load_state_dict", "mask", "foreach"]
WRITES: tuple[WriteKind, ...] = ("in place", "data", "load_state_dict", "mask", "foreach")
DropKind = Literal["drop_gradients", "optimizer.zero_grad", "model.zero_grad"]
DROPS: tuple[DropKind, ...] = ("drop_gradients", "optimizer.zero_grad", "model.zero_grad")
GradientWrite = Literal["halve", "none", "clip norm", "clip value"]
GRADIENT_WRITES: tuple[GradientWrite, ...] = ("halve", "none")
CLIPS: tuple[GradientWrite, ...] = ("clip norm", "clip value")
DetourKind = Literal["parametrization", "assignment", "functional", "module", "data", "dtype"]
DETOURS: tuple[DetourKind, ...] = ("parametrization", "assignment", "functional", "module")
HookKind = Literal["output", "module gradient", "gradient", "after gradient"]
HOOKS: tuple[HookKind, ...] = ("output", "module gradient", "gradient", "after gradient")
StepMode = Literal["", "no_grad", "inference_mode", "closure", "own", "own closure"]
STEP_MODES: tuple[StepMode, ...] = ("no_grad", "inference_mode")
OWN_STEPS: tuple[StepMode, ...] = ("own", "own closure")
FORMS_OF_ONE_GRADIENT = tuple(form for form in FORMS if form not in ("penalty", "graph"))


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Forward and backward on one part of the rows of a step, or less than that."""

    step: int
    part: int
    num_parts: int
    is_last: bool
    does: Literal["all", "forward", "nothing", "no_grad"] = "all"
    form: Form = "whole"
    """What is unusual in forward and backward, for `does="all"`.

    "halves" are two forwards with one backward; "in turns" two forwards, and then two backwards;
    "input" has an input with a gradient; "saliency" takes that alone, before the backward;
    "penalty" makes it a part of the loss; "graph" is a backward whose gradients have a graph
    (`create_graph=True`), as optimizers of second order want it; "evaluated" has a forward without
    gradients, and "cleared" `zero_grad()` of the optimizer, between forward and backward.
    """
    fault: Fault | None = None
    block: int = 0
    """Where the fault is, if it is in forward or backward."""
    failing: tuple[int, ...] | None = None
    """Indices, in the layout, of the ranks that fail; None for all."""
    idle: tuple[int, ...] = ()
    """Indices of the ranks that have no rows for it: they accumulate fewer microbatches."""


@dataclass(frozen=True, kw_only=True)
class TwiceBackward(Microbatch):
    """A microbatch whose loss has two backwards, of which the first keeps the graph."""


@dataclass(frozen=True, kw_only=True)
class Formed(Microbatch):
    """A microbatch of an unusual form."""


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """A forward without gradients, of the same rows on all ranks.

    "generation" is several ones in `eval()`, of more and more rows; "copy" is one of a deep copy,
    which may be trained before; "average" one of torch's `AveragedModel`, which makes a copy, too.
    """

    mode: EvaluationMode


@dataclass(frozen=True, kw_only=True)
class Write:
    """Multiply the parameters of a block, or all of them, by a number; or zero what is small."""

    how: WriteKind
    factor: float
    block: int | None = None


@dataclass(frozen=True, kw_only=True)
class Swap:
    """Exchange all parameters and averaged ones, evaluate, maybe save, and exchange them back."""

    saves: bool = False


@dataclass(frozen=True, kw_only=True)
class Detour:
    """Evaluate while something else is in the place of parameters of a block, and put them back."""

    how: DetourKind
    block: int


@dataclass(frozen=True, kw_only=True)
class Freeze:
    """Stop training a block, or one parameter of it."""

    block: int
    number: int | None = None


@dataclass(frozen=True, kw_only=True)
class Thaw:
    """Train again what was frozen; or a block, or one parameter of it, whatever it was at first."""

    block: int | None = None
    number: int | None = None


@dataclass(frozen=True, kw_only=True)
class Save:
    """Save model and optimizer."""

    is_async: bool = False
    """True if the next save or load waits for it, and not this one."""
    is_lazy: bool = False
    """True if it copies while training goes on."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load what was saved last, or what the way before has left, in another layout maybe."""

    is_of_before: bool = False
    is_first: bool = False
    """True for the first save of this way, whatever was saved since."""


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Forget all gradients: by Holdfast's optimizer or model, torch's optimizer, or the module.

    A sharded optimizer is a torch optimizer, too.
    """

    how: DropKind = "drop_gradients"
    to_zeros: bool = False
    """True for `zero_grad(set_to_none=False)`."""


@dataclass(frozen=True, kw_only=True)
class WriteGradients:
    """Halve the gradients of a block in `.grad`, set them to None, or clip them as torch does."""

    how: GradientWrite
    block: int


@dataclass(frozen=True, kw_only=True)
class Hook:
    """Halve, by a hook registered now, outputs of a block's first part or a gradient of it.

    "module gradient" is that of its input; "after gradient" is called when `.grad` has what was
    added up so far.
    """

    how: HookKind
    block: int


@dataclass(frozen=True, kw_only=True)
class Set:
    """Multiply the learning rate of all parameter groups, and the decay of those that have one."""

    factor: float
    ranks: tuple[int, ...] | None = None
    """Indices, in the layout, of the ranks that do; None for all. The next step has to refuse."""


@dataclass(frozen=True, kw_only=True)
class ReloadOptimizer:
    """Load the state dict of the torch optimizer, which was just taken, into it again."""


@dataclass(frozen=True, kw_only=True)
class ClearState:
    """Let the optimizer start again: `optimizer.state.clear()`."""


@dataclass(frozen=True, kw_only=True)
class AddGroup:
    """Train the parameters that the optimizer was built without, as another group of it."""


@dataclass(frozen=True, kw_only=True)
class Toggle:
    """Let a block keep its activations, or compute them again in the backward, in turns."""

    block: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Step a learning rate scheduler, which loops do more and less often than the optimizer."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """Give all parameters other memory of the same values, as moves between devices do."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Update the parameters; or skip that, as a loss is not finite."""

    max_norm: float
    bad: tuple[int, ...] = ()
    """Indices, in the layout, of the ranks whose losses are not finite."""
    mode: StepMode = ""
    """What is around the call; or how it is made.

    "closure" passes one; "own" is the torch optimizer's step by itself, of a fully sharded model,
    and "own closure" one to which a closure is passed that makes the last microbatch.
    """
    rows: int = 0
    """Number of the step whose rows a closure takes."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Read all parameters."""


Action = (
    Microbatch
    | TwiceBackward
    | Formed
    | Evaluate
    | Write
    | Swap
    | Detour
    | Freeze
    | Thaw
    | Save
    | Load
    | Drop
    | WriteGradients
    | Hook
    | Set
    | ReloadOptimizer
    | ClearState
    | AddGroup
    | Toggle
    | Schedule
    | Move
    | Step
    | Look
)


def regular_actions(
    *, first: int, num_steps: int, num_microbatches: int, max_norm: float
) -> tuple[Action, ...]:
    """Return the actions of a loop in which nothing unusual happens."""
    actions: list[Action] = []
    for step in range(first, first + num_steps):
        actions += _microbatches(step, num_microbatches)
        actions += [Step(max_norm=max_norm), Look()]
    return tuple(actions)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What actions of a way may be."""

    num_ranks: int
    num_failing: int
    """Ranks that may fail while others do not."""
    faults: tuple[Fault, ...] = FAULTS
    forms: tuple[Form, ...] = FORMS
    modes: tuple[EvaluationMode, ...] = MODES
    hooks: tuple[HookKind, ...] = HOOKS
    gradient_writes: tuple[GradientWrite, ...] = GRADIENT_WRITES
    detours: tuple[DetourKind, ...] = DETOURS
    step_modes: tuple[StepMode, ...] = STEP_MODES
    num_idle: int = 0
    """Ranks that may have no rows for a microbatch."""
    may_move: bool = True
    """True if parameters may have other memory later."""
    has_before: bool = False
    """True if another way has left a checkpoint."""
    has_late: bool = False
    """True if the optimizer is built without some of the parameters."""


def draw_actions(chance: random.Random, limits: Limits) -> tuple[Action, ...]:
    """Draw the actions of some steps, each with something unusual in it."""
    actions: list[Action] = []
    for step in range(chance.choice((2, 2, 3))):
        actions += [_between(chance, limits) for _ in range(chance.choice((0, 1, 1, 2)))]
        actions += _draw_step(chance, step, limits)
    actions += [Look()]
    if _may_need_save(actions):
        actions.insert(0, Save())
    return tuple(actions)


def _draw_step(chance: random.Random, step: int, limits: Limits) -> Iterator[Action]:
    kind = chance.choice(
        (
            "fault",
            "fault",
            "forward",
            "nothing",
            "never last",
            "late",
            "inside",
            "inside",
            "twice",
            "no_grad",
            "formed",
            "formed",
            "uneven",
            "",
        )
    )
    microbatches = _microbatches(step, chance.choice((1, 2, 2, 3)))
    odd = chance.randrange(len(microbatches))
    for number, each in enumerate(microbatches):
        if kind == "fault" and number == odd:
            failed = _fault(chance, each, limits)
            yield failed
            if failed.failing is not None and each.is_last:
                break  # the other ranks notice it in `step`
            if each.is_last or chance.random() < 0.5:
                return  # the rest of the step is given up
        elif kind in ("forward", "nothing", "no_grad") and number == odd:
            yield replace(each, does=kind)
        elif kind == "uneven" and number == odd and limits.num_idle:
            idle = chance.sample(range(limits.num_ranks), chance.randint(1, limits.num_idle))
            yield replace(each, idle=tuple(sorted(idle)))
        elif kind == "twice" and number == odd:
            yield TwiceBackward(**vars(each))
        elif kind == "formed" and number == odd:
            yield Formed(**{**vars(each), "form": chance.choice(limits.forms)})
        elif kind == "never last":
            yield replace(each, is_last=False)
        else:
            yield each
        if number == odd and (kind == "inside" or (kind == "forward" and chance.random() < 0.5)):
            yield from (_inside(chance, limits) for _ in range(chance.choice((1, 1, 2))))
    if kind == "late":
        yield replace(microbatches[-1], is_last=chance.random() < 0.5)
    mode: StepMode = chance.choice(limits.step_modes) if chance.random() < 0.2 else ""
    # Torch's own step looks at no other rank.
    if limits.num_ranks > 1 and chance.random() < 0.05 and mode not in OWN_STEPS:
        count = chance.randint(1, limits.num_ranks - 1)
        yield Set(factor=2.0, ranks=tuple(sorted(chance.sample(range(limits.num_ranks), count))))
    is_bad = chance.random() < 0.15
    yield Step(
        max_norm=chance.choice((0.0, 0.1, 0.1, 1e6)),
        bad=(chance.randrange(limits.num_ranks),) if is_bad else (),
        mode=mode,
        rows=step,
    )
    if chance.random() < 0.1:
        yield Step(max_norm=0.0)  # without any gradient


def _microbatches(step: int, count: int) -> list[Microbatch]:
    return [
        Microbatch(step=step, part=part, num_parts=count, is_last=part == count - 1)
        for part in range(count)
    ]


def _fault(chance: random.Random, microbatch: Microbatch, limits: Limits) -> Microbatch:
    failing = None
    count = limits.num_failing
    if count and chance.random() < 0.6:
        failing = tuple(sorted(chance.sample(range(count + 1), chance.randint(1, count))))
    fault = chance.choice(limits.faults)
    return replace(microbatch, fault=fault, block=chance.randrange(2), failing=failing)


def _between(chance: random.Random, limits: Limits) -> Action:
    """Draw what is done between two steps."""
    kinds = ("evaluate", "write", "write", "swap", "freeze", "thaw", "save", "load", "set", "hook")
    kinds = (*kinds, "schedule", "schedule", "move", "reload", "detour", "clear state")
    kind = chance.choice((*kinds, *["add group"] * 3) if limits.has_late else kinds)
    if kind == "add group":
        return AddGroup()
    if kind == "move":
        return Move() if limits.may_move else Schedule()
    if kind == "swap":
        return Swap(saves=chance.random() < 0.5)
    if kind == "hook":
        return Hook(how=chance.choice(limits.hooks), block=chance.randrange(2))
    if kind == "freeze":
        return Freeze(block=chance.randrange(2), number=chance.choice((None, *range(8))))
    if kind == "thaw":
        if chance.random() < 0.25:
            return Thaw(block=chance.randrange(2), number=chance.choice((None, *range(8))))
        return Thaw()
    return _anywhere(chance, kind, limits)


def _inside(chance: random.Random, limits: Limits) -> Action:
    """Draw what is done between two microbatches, or between the last one and the step."""
    if chance.random() < 0.2:
        number = chance.choice((None, *range(8)))
        return Freeze(block=chance.randrange(2), number=number) if chance.random() < 0.7 else Thaw()
    kinds = ("evaluate", "write", "write", "swap", "save", "load", "drop", "look", "gradients")
    kinds = (*kinds, "gradients", "set", "toggle", "toggle", "schedule", "reload", "detour")
    kinds = (*kinds, "clear state")
    kind = chance.choice(kinds)
    if kind == "gradients":
        how = chance.choice(limits.gradient_writes)
        return WriteGradients(how=how, block=chance.randrange(2))
    return _anywhere(chance, kind, limits)


def _anywhere(chance: random.Random, kind: str, limits: Limits) -> Action:
    if kind == "evaluate":
        return Evaluate(mode=chance.choice(limits.modes))
    if kind == "write":
        return Write(
            how=chance.choice(WRITES),
            factor=chance.choice((0.5, 0.9, -1.1)),
            block=chance.choice((None, 0, 1)),
        )
    if kind == "drop":
        how = chance.choice(DROPS)
        return Drop(how=how, to_zeros=how != "drop_gradients" and chance.random() < 0.4)
    if kind == "save":
        return Save(is_async=chance.random() < 0.6, is_lazy=chance.random() < 0.5)
    if kind == "set":
        return Set(factor=chance.choice((0.5, 2.0)))
    if kind == "schedule":
        return Schedule()
    if kind == "reload":
        return ReloadOptimizer()
    if kind == "clear state":
        return ClearState()
    if kind == "detour":
        return Detour(how=chance.choice(limits.detours), block=chance.randrange(2))
    if kind == "toggle":
        return Toggle(block=chance.randrange(2))
    if kind == "load":
        is_of_before = limits.has_before and chance.random() < 0.7
        return Load(is_of_before=is_of_before, is_first=not is_of_before and chance.random() < 0.4)
    return Swap() if kind == "swap" else Look()


def _may_need_save(actions: list[Action]) -> bool:
    """Return True for a load; or if half of a swap may be refused: then all ranks load, too."""
    return any(
        (inside and isinstance(each, Swap)) or (isinstance(each, Load) and not each.is_of_before)
        for each, inside in _with_places(actions)
    )


def _with_places(actions: list[Action]) -> Iterator[tuple[Action, bool]]:
    """Yield each action, and whether it is between the first forward of a step and its end."""
    inside = False
    for each in actions:
        inside = (inside or isinstance(each, Microbatch)) and not isinstance(each, Step)
        yield each, inside
