"""Compares what the ranks answered, action by action, with the twin."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from holdfast import HoldfastError, Layout
from tests.campaign.actions import (
    OWN_STEPS,
    Action,
    Detour,
    Drop,
    Evaluate,
    Formed,
    Load,
    Microbatch,
    ReloadOptimizer,
    Save,
    Step,
    Swap,
    TwiceBackward,
    WriteGradients,
)
from tests.campaign.programs import Way
from tests.campaign.twin import Situation, Twin
from tests.campaign.ways import HOOKED, IN_BUCKETS, INJECTED, Values


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an action gave on one rank: values, or an error."""

    values: Values = field(default_factory=dict)
    error: str = ""
    """Class and text."""
    is_clear: bool = True
    """True if the error is the injected one, or one of Holdfast's, or one that it explains."""

    @staticmethod
    def of(error: BaseException, *, after: str = "") -> Answer:
        """Return the answer that is an error, or one in the recovery after an error."""
        notes = getattr(error, "__notes__", [])
        is_clear = (isinstance(error, (HoldfastError, *INJECTED)) or bool(notes)) and not after
        text = " ".join([f"{type(error).__name__}: {error}", *notes])
        if not is_clear:
            text = "".join([after, text, *traceback.format_tb(error.__traceback__)[-2:]])
        return Answer(error=text, is_clear=is_clear)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An error that an action may end in, instead of values."""

    name: str
    actions: tuple[type[Action], ...]
    text: str
    """A regular expression for the error's text."""
    fits: Callable[[Situation], bool]
    """Returns True if the error's cause is there."""


_AFTER_ITS_BUCKET = (
    r"a gradient came after its bucket was reduced.* one backward call in each microbatch"
)
_STALE = r"were changed \(a step, a load\) while"
REFUSALS = (
    Refusal(
        name="no gradient",
        actions=(Step,),
        text=r"no parameter .*got a gradient on any rank",
        fits=lambda now: not now.has_gradients,
    ),
    Refusal(
        name="not reduced",
        actions=(Step,),
        text=r"gradients of the last microbatch are not reduced|is not reduced yet",
        fits=lambda now: now.is_open or now.has_odd_forward,
    ),
    Refusal(
        name="not reduced",
        actions=(Step,),
        text=r"not reduced.*use_reentrant=False",
        fits=lambda now: now.is_reentrant,
    ),
    Refusal(
        name="no backward",
        actions=(Step, Microbatch),
        text=r"forward.*without.*backward|had no backward",
        fits=lambda now: now.has_odd_forward,
    ),
    Refusal(
        name="after the last",
        actions=(Microbatch,),
        text=r"a microbatch after the last one of this step",
        fits=lambda now: now.is_reduced,
    ),
    Refusal(
        name="written in a step",
        actions=(Microbatch, Evaluate, Swap, Detour),
        text=_STALE,
        fits=lambda now: now.is_written,
    ),
    Refusal(
        name="written in a step",
        actions=(Swap,),  # writes, too
        text=_STALE,
        fits=lambda now: now.has_run,
    ),
    Refusal(
        name="not reduced",
        actions=(Detour,),  # "dtype"
        text=r"is not reduced yet, and would not be converted",
        fits=lambda now: now.has_gradients,
    ),
    Refusal(
        name="in buckets",
        actions=(Drop,),
        text=r"forget gradients with zero_grad\(\) of the optimizer",
        fits=lambda now: now.has_gradients or now.is_reduced,
    ),
    Refusal(
        name="in buckets",
        actions=(WriteGradients,),
        text=rf"{IN_BUCKETS.pattern}|is not reduced yet",
        fits=lambda now: now.has_gradients or now.is_reduced,
    ),
    Refusal(
        name="in buckets",
        actions=(Microbatch,),  # its hook reads the gradient
        text=IN_BUCKETS.pattern,
        fits=lambda now: now.is_hooked,
    ),
    Refusal(
        name="in buckets",
        actions=(Drop,),
        text=r"zero_grad\(set_to_none=False\): gradients are in buckets",
        fits=lambda now: True,
    ),
    Refusal(
        name="twice",
        actions=(TwiceBackward, Formed),  # "in turns"
        text=_AFTER_ITS_BUCKET,
        fits=lambda now: True,
    ),
    Refusal(
        name="twice",
        actions=(Microbatch,),  # what is used twice, or tied, and computed again
        text=_AFTER_ITS_BUCKET + ".*use_reentrant=False",
        fits=lambda now: now.is_reentrant,
    ),
    Refusal(
        name="freed",
        actions=(Formed,),  # "penalty"
        text=r"storage of size 0.* In a fully sharded model",
        fits=lambda now: True,
    ),
    Refusal(
        name="replaced",
        actions=(Detour,),
        text=r"parameter '.*' .* since fully_shard_model|a fully sharded model cannot be copied"
        r"|parameter '.*' was converted from .* after the first forward",
        fits=lambda now: True,
    ),
    Refusal(
        name="settings differ",
        actions=(Step,),
        text=r"ranks differ in (lr|weight_decay) of parameter group",
        fits=lambda now: now.is_split,
    ),
    Refusal(
        name="closure",
        actions=(Step,),
        text=r"step\(closure\).*: call backward yourself",
        fits=lambda now: True,
    ),
    Refusal(
        name="no state dict",
        actions=(ReloadOptimizer,),
        text=r"OptimizerState",
        fits=lambda now: True,
    ),
    Refusal(
        name="hooked",
        actions=(Step, Microbatch),
        text=HOOKED.pattern,
        fits=lambda now: now.is_hooked,
    ),
    Refusal(
        name="thawed",
        actions=(Step,),
        text=r"was frozen when optimizer .* was built and (is trained|has a gradient) now",
        fits=lambda now: now.is_thawed or now.was_thawed,
    ),
    Refusal(
        name="other groups",
        actions=(Load,),
        text=r"would start fresh: optimizer\.groups\.\d|has \d parameter groups, the checkpoint",
        fits=lambda now: now.is_regrouped,
    ),
    Refusal(
        name="in a step",
        actions=(Save, Load),
        text=r"gradient|microbatch",
        fits=lambda now: now.has_gradients or now.is_reduced or now.is_open,
    ),
)
"""All that may be refused, each with its cause: everything else has to have values."""


@dataclass(kw_only=True)
class Verdict:
    """What is wrong with a program, and how its actions ended."""

    wrong: list[str] = field(default_factory=list)
    ends: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Numbers of actions by way, action, and "value", "fault" or the name of a refusal."""


def judge(
    twin: Twin, way: Way, answers: Sequence[Sequence[Answer]], *, where: str, verdict: Verdict
) -> None:
    """Compare the answers of all ranks of a way, which are in the order of its layout."""
    layout = Layout(**way.layout)
    data = [layout.group("dp_cp", rank).index(rank) for rank in layout.ranks]
    for number, action in enumerate(way.actions):
        mine = [each[number] for each in answers]
        at = f"{where} {number} {action}"
        raised = [i for i, answer in enumerate(mine) if answer.error]
        injected = _injected(action, num_ranks=len(mine))
        end: str | None = "value"
        if injected is not None and _tells(mine, injected, layout):
            end = "fault"
        elif len(raised) == len(mine):  # before an injected error, too
            end = _refusal(action, mine, twin)
        elif raised or injected is not None or _has_to_raise(action, twin):
            end = None
        if end is None:
            found = {layout.ranks[i]: mine[i].error for i in range(len(mine))}
            verdict.wrong.append(f"{at}: {twin.situation}: {found}")
            return
        if end == "value":
            expected = twin.do(action, way)
            off = [
                f"{at}: {each}"
                for i, answer in enumerate(mine)
                for each in _differences(answer.values, expected, index=data[i])
            ]
            if off:
                verdict.wrong += off[:3]  # the rest follows from the first
                return
        else:
            twin.fail(action, mine[raised[0]].error)
        verdict.ends[way.kind, type(action).__name__, end] += 1


@dataclass(frozen=True, kw_only=True)
class Injected:
    """An injected error: the ranks that cause it, and those that are to raise it."""

    causes: tuple[int, ...]
    raises: tuple[int, ...]


def _injected(action: Action, *, num_ranks: int) -> Injected | None:
    """Return the injected error that an action ends in, if it does: all ranks raise at its end."""
    if not isinstance(action, Microbatch) or action.fault is None:
        return None
    everyone = tuple(range(num_ranks))
    causes = everyone if action.failing is None else action.failing
    return Injected(causes=causes, raises=everyone)


def _tells(answers: Sequence[Answer], injected: Injected, layout: Layout) -> bool:
    """Return True if the right ranks raise, and name the error and, if not their own, the rank."""
    ranks = [layout.ranks[i] for i in injected.causes]
    for i, answer in enumerate(answers):
        if bool(answer.error) != (i in injected.raises):
            return False
        is_own = answer.error.startswith(tuple(f"{each.__name__}:" for each in INJECTED))
        named = "injected" in answer.error and any(
            re.search(rf"\b{rank}\b", answer.error) for rank in ranks
        )
        # A rank that waits for one that has failed leaves, before its own error may come.
        if answer.error and not ((is_own and i in injected.causes) or (answer.is_clear and named)):
            return False
    return True


def _refusal(action: Action, answers: Sequence[Answer], twin: Twin) -> str | None:
    """Return the name of the refusal that all ranks raise, if its cause is there."""
    for refusal in REFUSALS:
        if (
            isinstance(action, refusal.actions)
            and all(a.is_clear and re.search(refusal.text, a.error) for a in answers)
            and refusal.fits(twin.situation_at(action))
        ):
            return refusal.name
    return None


def _has_to_raise(action: Action, twin: Twin) -> bool:
    """Return True for an update without any gradient, or of ranks with other settings."""
    now = twin.situation
    if not isinstance(action, Step) or action.mode in OWN_STEPS:  # torch does nothing then
        return False
    no_gradient = not action.bad and not now.has_gradients
    return no_gradient or now.is_split or action.mode == "closure"


def _differences(found: Values, expected: Values, *, index: int) -> list[str]:
    wrong = []
    for name, value in expected.items():
        if name in ("losses", "input gradients"):
            name, value = {"losses": "loss"}.get(name, "input gradient"), value[index]
        if value is None:
            continue
        mine = found[name]
        if isinstance(value, dict):
            gaps = {n: _gap(mine[n], whole) for n, whole in value.items()}
            off = {n: gap for n, gap in gaps.items() if not gap < 1e-6}
            if off:
                wrong.append(f"{len(off)} of {len(gaps)} {name} are off: {off}")
        elif isinstance(value, Tensor):
            if not _gap(mine, value) < 1e-5:
                wrong.append(f"{name} {mine}, not {value}")
        elif isinstance(value, float):
            if not abs(mine - value) <= 1e-5 * max(1.0, abs(value)):
                wrong.append(f"{name} {mine}, not {value}")
        elif mine != value:
            wrong.append(f"{name} {mine}, not {value}")
    return wrong


def _gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max()) if expected.numel() else 0.0
