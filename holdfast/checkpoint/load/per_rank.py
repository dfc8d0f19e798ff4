"""Values per coordinate, judged over all ranks of a load: what nobody takes, what must be equal.

Every rank judges the same answers in the same way, so all of them raise or none does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.checkpoint.load.report import shorten_list
from holdfast.errors import MismatchError
from holdfast.format.values import Node
from holdfast.parallel.ranks import shorten_ranks
from holdfast.state.coordinates import ConsistencyCheck, matches
from holdfast.state.match.result import PerRankUse


class TakenLabels(NamedTuple):
    """What one rank takes of one stored value per coordinate.

    `part`, `number`: which it is: of the values per coordinate under a part, in stored order.
    `path`: in the state. `labels`: those it takes. `may_drop`: whether it lets the others go.
    """

    part: str
    number: int
    path: str
    labels: tuple[str, ...]
    may_drop: bool


def taken_of(uses: Sequence[PerRankUse], nodes: Mapping[str, Node]) -> list[TakenLabels]:
    """A rank's uses in the form that all ranks understand. `nodes`: of the parts it asks for."""
    if not uses:
        return []
    places = {
        id(node): (part, number)
        for part, tree in nodes.items()
        if any(use.path.startswith(part) for use in uses)  # other parts may be large
        for number, node in enumerate(_per_rank_nodes(tree))
    }
    return [TakenLabels(*places[id(use.node)], use.path, use.labels, use.may_drop) for use in uses]


def find_dropped(
    parts: Mapping[str, Node], taken: Sequence[TakenLabels], *, allow: Sequence[str]
) -> list[str]:
    """Paths of stored coordinates that no rank takes, all with consent; MismatchError without."""
    by_node: dict[tuple[str, int], list[TakenLabels]] = {}
    for each in taken:
        by_node.setdefault((each.part, each.number), []).append(each)
    nodes = {part: _per_rank_nodes(parts[part]) for part in {part for part, _ in by_node}}
    dropped: list[str] = []
    refused: dict[str, list[str]] = {}
    for (part, number), uses in by_node.items():
        claimed = {label for use in uses for label in use.labels}
        may_drop = all(use.may_drop for use in uses)
        path = uses[0].path
        for label in nodes[part][number]["v"]:
            if label in claimed:
                continue
            whole = f"{path}[{label}]"
            if may_drop or matches(whole, allow):
                dropped.append(whole)
            else:
                refused.setdefault(path, []).append(label)
    if refused:
        shown = "; ".join(
            f"{path}: {len(labels)} ({shorten_list(labels)})" for path, labels in refused.items()
        )
        raise MismatchError(
            f"the checkpoint holds values of coordinates that no rank of this layout takes: "
            f"{shown}. Make one value of all: PerRank(..., merge=callable); or let them go: "
            f"PerRank(..., surplus='drop'), or allow_dropped=[patterns] of this load"
        )
    return dropped


def check_claims(
    ranks: Sequence[int], claims: Sequence[Sequence[ConsistencyCheck]], *, warn: bool
) -> None:
    """MismatchError where ranks that share a value would have different ones after the load.

    `claims[i]`: of `ranks[i]`. `warn`: whether this rank logs what is no error.
    """
    found: dict[tuple[str, str], list[tuple[int, ConsistencyCheck]]] = {}
    for rank, own in zip(ranks, claims, strict=True):
        for claim in own:
            found.setdefault((claim.what, claim.label), []).append((rank, claim))
    sentences: dict[bool, list[str]] = {True: [], False: []}
    for (what, label), held in found.items():
        if len({claim.digest for _, claim in held}) > 1:
            shown = shorten_ranks([rank for rank, _ in held])
            along = held[0][1].along
            is_certain = any(claim.is_certain for _, claim in held)
            sentences[is_certain].append(f"{what} along {along} (ranks {shown}, {label})")
    if sentences[True]:
        raise MismatchError(
            f"{len(sentences[True])} random streams are shared by ranks that would have different "
            f"ones after this load: {shorten_list(sentences[True])}. The checkpoint has none for "
            f"some of these ranks, which keep what they have: seed it alike on them before the "
            f"load, or "
            f"declare streams that differ: RNG(shared=())"
        )
    if sentences[False] and warn:
        logging.getLogger("holdfast").warning(
            "%s random streams differ between ranks that may have to draw alike: %s; if they do, "
            "seed them alike and declare it: RNG(shared=(axis,)); if not, RNG(shared=())",
            len(sentences[False]),
            shorten_list(sentences[False]),
        )


def _per_rank_nodes(tree: Any) -> list[dict[str, Any]]:
    """Every value per coordinate under a node, in stored order, an outer one before its inner."""
    found: list[dict[str, Any]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if node.get("$") == "per_rank":
                found.append(node)
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
    return found
