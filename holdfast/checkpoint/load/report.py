"""What a load reports: what does not fit, what it fell back from, what was loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from holdfast.checkpoint.reports import FellBack, LoadReport
from holdfast.errors import MismatchError
from holdfast.format.reader import Snapshot
from holdfast.state.match.result import MatchResult

MAX_NAMED = 10
"""How many names a message lists."""


def make_report(snapshot: Snapshot, result: MatchResult, **fields: Any) -> LoadReport:
    """The report of a load; `fields` are those that only the caller knows."""
    return LoadReport(
        loaded=tuple(entry.path for entry in result.tensors),
        missing=tuple(sorted({*result.missing, *result.allowed, *result.fresh})),
        fresh=tuple(result.fresh),
        cast=tuple(result.cast),
        kept=tuple(result.kept),
        metadata=snapshot.manifest.metadata,
        nbytes_read=snapshot.stats.nbytes_read,
        num_opens=snapshot.stats.opens,
        replaced=tuple(snapshot.stats.fallbacks),
        **fields,
    )


def warn_of_kept(result: MatchResult, rank: int) -> None:
    """Say once that values of this rank's coordinates are not stored and stay as they are."""
    if result.kept:
        logging.getLogger("holdfast").warning(
            "rank %s: the checkpoint has nothing for this rank's coordinates in %s; what the rank "
            "has stays",
            rank,
            shorten_list(sorted(result.kept)),
        )


def describe_fallbacks(failed: Sequence[FellBack]) -> str:
    """Which checkpoints were damaged, and how."""
    return "; ".join(f"step {each.step} is damaged: {each.why}" for each in failed)


def raise_mismatch(result: MatchResult, snapshot: Snapshot) -> None:
    """Raise MismatchError with everything that does not fit and what to do; nothing if all fits."""
    sentences = []
    if result.missing:
        sentences.append(
            f"the checkpoint lacks {len(result.missing)} entries that the state asks for: "
            f"{shorten_list(result.missing)} (allow_missing=[patterns] lets them be)"
        )
        if any(path.endswith("]") for path in result.missing):
            sentences[-1] += (
                "; a value per rank may have a policy for coordinates that are not stored: "
                "PerRank(..., missing='keep'), or merge=callable"
            )
    if result.mismatched:
        sentences.append(
            f"{len(result.mismatched)} entries do not fit: {shorten_list(result.mismatched)}"
        )
    if result.unagreed:
        sentences.append(
            f"{len(result.unagreed)} entries would start fresh: {shorten_list(result.unagreed)} "
            f"(allow_missing=[patterns] agrees to that, as in {_patterns(result.unagreed)})"
        )
    if sentences:
        raise MismatchError(f"step {snapshot.manifest.step}: " + "; ".join(sentences))


def _patterns(unagreed: Sequence[str]) -> str:
    """What `allow_missing` could be for these entries."""
    return str([f"{each.split(' (')[0]}*" for each in unagreed[:MAX_NAMED]])


def shorten_list(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:MAX_NAMED])
    rest = len(names) - MAX_NAMED
    return shown if rest <= 0 else f"{shown} and {rest} more"
