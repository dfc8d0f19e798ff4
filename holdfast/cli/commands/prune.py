"""`holdfast prune ROOT`: remove old checkpoints by a policy. Imports no torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, cast

from holdfast.cli.support.arguments import POSITIONAL
from holdfast.cli.support.messages import exit_code
from holdfast.cli.support.steps import open_steps
from holdfast.cli.support.tables import Listing, make_console, print_json
from holdfast.errors import ConfigError, counted, in_bytes
from holdfast.policies.keep import (
    AnyOf,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    KeepTagged,
    KeepWithin,
)
from holdfast.retention.removal import (
    Candidate,
    RetentionPlan,
    RetentionResult,
    apply_retention,
    plan_retention,
)
from holdfast.storage import shown
from holdfast.writer.leftovers import Leftover, give_up

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_COUNT = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """Remove checkpoints that no --keep… option keeps; the newest sound one always stays.

    With --after, the newest sound one up to that step does.
    """

    root: Annotated[Path, POSITIONAL]
    """The directory that holds the checkpoints."""

    keep_last: int | None = None
    """Keep this many of the newest steps."""

    keep_every: int | None = None
    """Keep the steps that are multiples of this number."""

    keep_within: str | None = None
    """Keep what was saved within this time: 90s, 30m, 12h, 7d, 2w."""

    keep_best: tuple[str, ...] = ()
    """Keep the best by a stored number: path:min:N or path:max:N, such as progress.loss:min:3."""

    keep_tagged: bool = False
    """Keep steps that have a tag (see `holdfast tag`)."""

    after: int | None = None
    """Remove the steps above this one, which a run that has gone back gives up, and saves of such
    steps that were left unfinished. Without a --keep… option all others stay."""

    dry_run: bool = False
    """Only say what would be done."""

    yes: bool = False
    """Do not ask."""

    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, slots=True)
class _KeepAll(KeepPolicy):
    """Keep every step that is not given up."""

    after: int

    def keep(self, candidates: Sequence[Candidate], *, now: datetime) -> dict[int, str]:
        return {each.step: f"not above step {self.after}" for each in candidates}


def run(args: Args) -> int:
    """Print what stays and goes, ask, remove; 2 if something could not be removed, 1 for damage."""
    policy = _policy(args)
    storage = open_steps(args.root, verb="prune")
    plan = plan_retention(storage, policy, after=args.after)
    saves: list[Leftover] = []
    if args.after is not None and plan.newest is not None:  # else they may be all that there is
        saves = give_up(storage, after=args.after, dry_run=True)
    if not args.json:
        _print_plan(shown(args.root), plan, saves)
    result = RetentionResult(is_damaged=plan.is_damaged)
    if (plan.remove or _num_removed(saves)) and not args.dry_run:
        if not _may_remove(args, plan, saves):
            print("nothing was removed")
            return exit_code(is_damaged=plan.is_damaged, has_failed=plan.has_unknown)
        if args.after is not None and saves:  # first: a load at this moment would commit them
            saves = give_up(storage, after=args.after)
        result = apply_retention(storage, plan)
        result.is_damaged |= plan.is_damaged
    if args.json:
        print_json(_as_json(args, plan, result, saves))
    elif not args.dry_run:
        _print_result(plan, result, saves)
    is_stuck = plan.has_unknown or any(save.fate == "kept" for save in saves)
    return exit_code(
        is_damaged=result.is_damaged or any(save.is_damaged for save in saves),
        has_failed=bool(result.failed or result.pointer_problem or is_stuck),
    )


def _policy(args: Args) -> KeepPolicy:
    """Return what the `--keep…` options keep; ConfigError without any."""
    policies: list[KeepPolicy] = []
    for flag, number in (("--keep-last", args.keep_last), ("--keep-every", args.keep_every)):
        if number is not None and number < 1:
            raise ConfigError(f"{flag} is {number}; set it to a whole number of 1 or more")
    if args.keep_last is not None:
        policies.append(KeepLast(args.keep_last))
    if args.keep_every is not None:
        policies.append(KeepEvery(args.keep_every))
    if args.keep_within is not None:
        policies.append(KeepWithin(_seconds(args.keep_within)))
    policies += [_best(text) for text in args.keep_best]
    if args.keep_tagged:
        policies.append(KeepTagged())
    if args.after is not None and args.after < 0:
        raise ConfigError(f"--after is {args.after}; set it to a step, 0 or more")
    if not policies and args.after is not None:
        policies.append(_KeepAll(args.after))
    if not policies:
        raise ConfigError(
            "say what to keep: --keep-last N, --keep-every M, --keep-within 7d, "
            "--keep-best progress.loss:min:3, --keep-tagged; or what to give up: --after STEP"
        )
    return AnyOf(tuple(policies))


def _seconds(text: str) -> float:
    """The length of a time like 7d."""
    match = _TIME.fullmatch(text)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not seconds > 0:
        raise ConfigError(
            f"--keep-within {text!r} is not a positive time; write 90s, 30m, 12h, 7d or 2w"
        )
    return seconds


def _best(text: str) -> KeepBest:
    """The policy of one `--keep-best`."""
    metric, *rest = text.split(":")
    mode = rest[0] if rest else ""
    number = rest[1] if len(rest) == 2 else "1"
    if not metric or mode not in ("min", "max") or len(rest) > 2 or not _COUNT.fullmatch(number):
        raise ConfigError(
            f"--keep-best {text!r} is not of the form path:min:N or path:max:N, "
            "such as progress.loss:min:3"
        )
    return KeepBest(metric, int(number), cast(Literal["min", "max"], mode))


def _may_remove(args: Args, plan: RetentionPlan, saves: Sequence[Leftover]) -> bool:
    """Return True to continue: `--yes`, or the answer of the person at the terminal."""
    if args.yes:
        return True
    what = _counted(len(plan.remove), saves)
    if args.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        why = "--json does not ask" if args.json else "there is no terminal to ask on"
        raise ConfigError(
            f"nothing was removed: {what} would be removed, but {why}; add --yes to remove, "
            f"--dry-run to look"
        )
    nbytes = in_bytes(sum(removal.stored_nbytes for removal in plan.remove))
    try:
        answer = input(f"remove {what}, {nbytes}? [y/N] ")
    except EOFError:  # Ctrl-D
        print()
        return False
    return answer.strip().lower() in ("y", "yes")


def _num_removed(saves: Sequence[Leftover]) -> int:
    """Return how many unfinished saves were removed, or would be."""
    return sum(save.fate == "removed" for save in saves)


def _counted(num_checkpoints: int, saves: Sequence[Leftover]) -> str:
    """Return how much was removed, or would be, in words."""
    num_saves = _num_removed(saves)
    also = f" and {counted(num_saves, 'unfinished save')}" if num_saves else ""
    return counted(num_checkpoints, "checkpoint") + also


def _print_plan(root: str, plan: RetentionPlan, saves: Sequence[Leftover]) -> None:
    """Print what stays and what goes, and why."""
    console = make_console()
    if not plan.keep and not plan.remove and not plan.spared and not saves:
        console.print(f"no committed checkpoint in {root}", soft_wrap=True)
        return
    table = Listing([("step", "right"), ("", ""), ("why", ""), ("size", "right")])
    removals = {removal.step: removal for removal in plan.remove}
    for step in sorted({*plan.keep, *removals}):
        if step in removals:
            tags = removals[step].tags
            why = "no policy keeps it" if tags else ""
            if plan.gives_up(step):
                why = f"above step {plan.after}"
            why += f", though tagged {', '.join(tags)}" if tags else ""
            size = in_bytes(removals[step].stored_nbytes)
            table.add_row(f"{step}", "goes", why, size, style="yellow")
        else:
            table.add_row(f"{step}", "stays", plan.keep[step], "")
    for save in saves:
        goes = save.fate == "removed"
        word, style = ("goes", "yellow") if goes else ("left alone", "dim")
        table.add_row(f"{save.step}", word, f"an unfinished save; {save.why}", "", style=style)
    for name, why in sorted(plan.spared.items()):
        table.add_row(name, "left alone", why, "", style="dim")
    console.print(table)


def _print_result(plan: RetentionPlan, result: RetentionResult, saves: Sequence[Leftover]) -> None:
    """Print what was removed, and what was not, and why."""
    console = make_console()
    sizes = {removal.step: removal.stored_nbytes for removal in plan.remove}
    for step, why in result.spared.items():
        console.print(f"step {step} was left: {why}")
    for step, why in result.failed.items():
        console.print(f"step {step} could not be removed: {why}", style="red")
    if result.pointer_problem is not None:
        console.print(f"pointer file: {result.pointer_problem}", style="red")
    for save in saves:
        if save.fate == "kept":
            console.print(f"{save.name} could not be removed: {save.why}", style="red")
        elif save.fate == "alive":
            console.print(f"step {save.step} is being saved ({save.why}): prune again then")
    freed = in_bytes(sum(sizes[step] for step in result.removed))
    console.print(f"removed {_counted(len(result.removed), saves)}, {freed}")


def _as_json(
    args: Args, plan: RetentionPlan, result: RetentionResult, saves: Sequence[Leftover]
) -> dict[str, object]:
    """The document of `--json`."""
    return {
        "root": shown(args.root),
        "dry_run": args.dry_run,
        "newest_sound": plan.newest,
        "keep": {str(step): why for step, why in plan.keep.items()},
        "remove": [
            {"step": removal.step, "stored_nbytes": removal.stored_nbytes, "tags": removal.tags}
            for removal in plan.remove
        ],
        "left_alone": dict(plan.spared),
        "removed": result.removed,
        "spared": {str(step): why for step, why in result.spared.items()},
        "failed": {str(step): why for step, why in result.failed.items()},
        "pointer_problem": result.pointer_problem,
        "unfinished_saves": [asdict(save) for save in saves],
    }
