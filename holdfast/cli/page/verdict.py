"""What the records of a checkpoint and its run let one judge, in plain sentences.

A sentence is stated only where the records support it, and what they cannot tell is stated, too: a
page without a log must not look like one of a run whose saves are fast.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from holdfast.cli.page.html import Html, element, esc, paragraph
from holdfast.cli.page.run_events import RunEvent, RunLog
from holdfast.cli.page.timeline import in_seconds, save_seconds, waited, work, write_rate
from holdfast.cli.support.holders import SavedPlacement
from holdfast.cli.support.locality import RankLocality, num_copies
from holdfast.cli.support.messages import in_ranges
from holdfast.errors import counted, in_bytes
from holdfast.format.manifest import Manifest
from holdfast.format.rank_events import LoadEvent, SaveEvent

_NUM_EARLIER, _MIN_EARLIER = 10, 3
"""Saves that the newest one is compared with: at most, and at least."""
_SLOWER, _SLOWER_S = 1.5, 0.1
"""A save is slower if it takes so many times the median of the earlier ones, and so much more."""

_STRAGGLES = 2.0
"""A rank straggles if its longest phase takes so many times the median, and `_SLOWER_S` more."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence: something to look at, a fact, or what cannot be known here."""

    kind: Literal["look", "fact", "unknown"]
    text: str


def judge(
    saved: SavedPlacement, ranks: Sequence[RankLocality], log: RunLog, *, planned_nbytes: int
) -> list[Finding]:
    """Return all findings: first what to look at, last what is not known."""
    judged = [
        *_where_bytes_lie(ranks),
        *_copies(saved),
        *_saves(log, saved.manifest),
        *_loads(log, saved, planned_nbytes),
    ]
    if log.num_unreadable:
        what = counted(log.num_unreadable, "line")
        judged.append(Finding("look", f"{what} of the log cannot be read; what they had is missing "
                                     "from the numbers of saves and loads."))  # fmt: skip
    return sorted(judged, key=lambda each: ("look", "fact", "unknown").index(each.kind))


def verdict_section(findings: Sequence[Finding]) -> Html:
    """The verdict in a line, and the findings that it rests on."""
    num = {kind: sum(each.kind == kind for each in findings) for kind in ("look", "unknown")}
    if num["look"]:
        words = f"{counted(num['look'], 'thing')} to look at."
    elif num["unknown"]:
        words = "Nothing that is known here asks for a closer look."
    else:
        words = "Nothing here asks for a closer look."
    if num["unknown"]:
        words += f" {counted(num['unknown'], 'thing')} cannot be judged."
    words += " Only records were read: `holdfast verify` checks the data."
    prefix = {"look": "Look: ", "unknown": "Not known: ", "fact": ""}
    items = []
    for each in findings:
        start = element("strong", esc(prefix[each.kind])) if prefix[each.kind] else Html("")
        items.append(element("li", start, esc(each.text), class_=each.kind))
    return Html(
        paragraph(words, class_="verdict")
        + element("ul", *items, class_="findings", aria_label="What the records show")
    )


def _where_bytes_lie(ranks: Sequence[RankLocality]) -> Iterator[Finding]:
    """Say how much of what ranks need is in their own files, and how many files they open."""
    needed = {each.rank: each.own_nbytes + each.other_nbytes for each in ranks}
    total = sum(needed.values())
    if not total:
        yield Finding("fact", "No rank needs tensor data under the saved layout.")
        return
    own = 100 * sum(each.own_nbytes for each in ranks) / total
    shares = {
        each.rank: 100 * each.own_nbytes / needed[each.rank] for each in ranks if needed[each.rank]
    }
    least = min(shares, key=lambda rank: shares[rank])
    differs = round(shares[least]) != round(max(shares.values()))
    worst = f" (least: rank {least} with {shares[least]:.0f} %)" if differs else ""
    opens = sorted({each.num_files for each in ranks})
    files = counted(opens[0], "file") if len(opens) == 1 else f"{opens[0]}-{opens[-1]} files"
    yield Finding(
        "fact",
        f"Under the saved layout {own:.0f} % of the bytes that ranks need are in their own "
        f"files{worst}; each rank opens {files}.",
    )


def _copies(saved: SavedPlacement) -> Iterator[Finding]:
    """Say what is stored more than once, and what that costs."""
    totals = saved.manifest.totals
    extra = totals.stored_nbytes - totals.nbytes
    if not totals.num_tensors:
        return
    if not extra:
        yield Finding(
            "fact", "Every tensor is stored once: a damaged chunk has no copy to replace it."
        )
        return
    _, most = num_copies(saved)
    twice = int((most > 1).sum())
    yield Finding(
        "fact",
        f"{twice:,} of {counted(totals.num_tensors, 'tensor')} are stored more than once, up to "
        f"{int(most.max())} times; the copies cost {in_bytes(extra)}, "
        f"{100 * extra / max(totals.nbytes, 1):.3g} % on top.",
    )


def _saves(log: RunLog, manifest: Manifest) -> Iterator[Finding]:
    """Judge the newest save of the log: who was slowest, and whether saves got slower."""
    if not log.saves:
        yield Finding("unknown", "no save is in a log here, so this page cannot judge how long "
                                 "saves take or which rank is slow.")  # fmt: skip
        return
    if all(save.step != manifest.step for save in log.saves):
        yield Finding("unknown", f"the log has no save of step {manifest.step}, which is shown; "
                                 "what is stated of saves is of others.")  # fmt: skip
    newest = log.saves[-1]
    yield from _missing(newest, "save")
    yield from _pace(log.saves, newest)
    slowest = max(newest.ranks, key=lambda rank: sum(work(rank).values()))
    phases = work(slowest)
    if not phases:
        yield Finding("unknown", f"the log of the save of step {newest.step} has no phase that "
                                 "tells a slow rank.")  # fmt: skip
        return
    phase = max(phases, key=lambda name: phases[name])
    median = statistics.median_low([work(rank).get(phase, 0.0) for rank in newest.ranks])
    speed = write_rate(slowest)
    is_straggler = phases[phase] > _STRAGGLES * median and phases[phase] - median > _SLOWER_S
    yield Finding(
        "look" if is_straggler else "fact",
        f"In the save of step {newest.step} rank {slowest.rank} worked longest, "
        f"{in_seconds(sum(phases.values()))}: most of it in {phase}, "
        f"{in_seconds(phases[phase])} (the median of {len(newest.ranks):,} ranks is "
        f"{in_seconds(median)})" + (f"; it wrote {speed}." if speed else "."),
    )


def _pace(saves: Sequence[RunEvent[SaveEvent]], newest: RunEvent[SaveEvent]) -> Iterator[Finding]:
    """Compare what ranks waited for the newest save with the earlier ones of its kind."""
    is_async = "stall" in newest.ranks[0].phases
    kind = "asynchronous" if is_async else "synchronous"
    seconds = save_seconds(newest)
    who = max(newest.ranks, key=waited).rank
    text = (
        f"For the newest save, of step {newest.step} ({kind}), ranks waited up to "
        f"{in_seconds(seconds)} (rank {who})"
    )
    # A save that plans is slower by its plan; other numbers of ranks are another job.
    earlier = [
        save_seconds(save)
        for save in saves[:-1]
        if ("stall" in save.ranks[0].phases) == is_async
        and len(save.ranks) == len(newest.ranks)
        and not any(rank.planned for rank in save.ranks)
    ][-_NUM_EARLIER:]
    if any(rank.planned for rank in newest.ranks):
        yield Finding("fact", f"{text}; it made a plan, which saves of the same structure reuse.")
    elif len(earlier) < _MIN_EARLIER:
        yield Finding("fact", f"{text}.")
        yield Finding("unknown", f"too few earlier {kind} saves are logged to tell whether saves "
                                 "got slower.")  # fmt: skip
    else:
        median = statistics.median(earlier)
        is_slower = seconds > _SLOWER * median and seconds - median > _SLOWER_S
        ratio = f"{seconds / median:.2g} times" if median > 0 else "against"
        yield Finding(
            "look" if is_slower else "fact",
            f"{text}, {ratio} the median of the {len(earlier)} before it, {in_seconds(median)}"
            + (": saves got slower." if is_slower else "."),
        )


def _loads(log: RunLog, saved: SavedPlacement, planned_nbytes: int) -> Iterator[Finding]:
    """Judge the newest load of the log: whether it read more than planned, or than needed."""
    if not log.loads:
        yield Finding("unknown", "no load is in a log here, so this page cannot judge what loads "
                                 "read; what it has of reads is planned.")  # fmt: skip
        return
    load = log.loads[-1]
    yield from _missing(load, "load")
    read = sum(sum(rank.nbytes_by_file.values()) for rank in load.ranks)
    text = (
        f"The newest load, of step {load.step} on {counted(len(load.ranks), 'rank')}, read "
        f"{in_bytes(read)} in {in_seconds(max(rank.seconds for rank in load.ranks))}"
    )
    if _is_as_planned(load, saved):
        if read > planned_nbytes:
            yield Finding("look", f"{text}, more than the {in_bytes(planned_nbytes)} planned under "
                                  "the saved layout.")  # fmt: skip
        else:
            yield Finding("fact", f"{text}; planned under the saved layout are "
                                  f"{in_bytes(planned_nbytes)}.")  # fmt: skip
        return
    needed = sum(rank.nbytes_needed for rank in load.ranks)
    if needed:
        yield Finding("fact", f"{text}, {read / needed:.3g} times the {in_bytes(needed)} that its "
                              "ranks needed.")  # fmt: skip
    else:
        yield Finding("fact", f"{text}.")
    yield Finding("unknown", "it was not of this checkpoint under its saved layout, so that no "
                             "plan is here to compare it with.")  # fmt: skip


def _is_as_planned(load: RunEvent[LoadEvent], saved: SavedPlacement) -> bool:
    """Return True if all ranks of the saved layout loaded this checkpoint."""
    manifest = saved.manifest
    if load.step != manifest.step or len(manifest.layouts) != 1:
        return False
    try:
        created = datetime.fromisoformat(manifest.created)
    except ValueError:
        return False
    if load.began < (created if created.tzinfo else created.replace(tzinfo=UTC)).timestamp():
        return False  # of an earlier save of this step
    axes = {axis: size for axis, size in manifest.layouts[0].axes.items() if size > 1}
    same = all(load.axes.get(axis, 1) == axes.get(axis, 1) for axis in {*axes, *load.axes})
    return same and [rank.rank for rank in load.ranks] == saved.ranks


def _missing(event: RunEvent[SaveEvent] | RunEvent[LoadEvent], what: str) -> Iterator[Finding]:
    """Say which ranks of a save or load have no line in the log."""
    num_ranks = math.prod(max(event.axes.get(axis, 1), 1) for axis in ("tp", "cp", "dp", "pp"))
    if num_ranks > len(event.ranks):
        known = in_ranges(rank.rank for rank in event.ranks)
        yield Finding(
            "look",
            f"The log of the newest {what}, of step {event.step}, has {len(event.ranks):,} of "
            f"{num_ranks:,} ranks ({known}): the others may be slower.",
        )
