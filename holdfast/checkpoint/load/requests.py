"""The requests of a load: each rank's message, all boxes as columns, and joint checks.

Every rank checks the same messages in the same way, so all of them raise or none does.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.packed_ints import PackedBoxes, pack_boxes, squeeze, unpack_boxes, unsqueeze
from holdfast.decoding import decode_msgpack_as
from holdfast.errors import CorruptionError, MismatchError, shorten_ranks, some_of
from holdfast.format.values import Codecs, Node, is_per_rank, is_plain_dict, walk
from holdfast.parallel import Layout
from holdfast.state.coordinates import ConsistencyCheck, matches
from holdfast.state.matcher import MatchResult, PerRankUse
from holdfast.state.parts import Part
from holdfast.state.stored import StoredPart, leaf_paths

MAX_NAMED = 10
"""Names that a message lists at most."""


class TakenLabels(NamedTuple):
    """The part that one rank loads of one stored value per coordinate.

    Args:
        source: The stored part, or the branch of one (`FromPart`), that it is loaded from.
        number: Which of the values per coordinate there it is, in stored order.
        path: Its path in the state.
        labels: Labels of the coordinates whose values are loaded.
        may_drop: Whether the values of other coordinates may be left out.
    """

    source: str
    number: int
    path: str
    labels: tuple[str, ...]
    may_drop: bool


@dataclass(slots=True, kw_only=True)
class PartRequest:
    """One part of the state on this rank, and what is stored for it.

    Args:
        name: Its name in the state.
        source: Where it is stored: its name, or the path of a `FromPart`.
        scope: See `Matcher.move_to`.
        layout: The layout it lives on.
        part: How to load it.
        is_closed: Whether stored entries that it does not request are unexpected.
        has_left: Whether it leaves some as the caller has agreed, although it is not closed.
        node: The stored tree.
        template: Its tree with targets in place of tensors.
    """

    name: str
    source: str
    scope: str
    layout: Layout
    part: Part
    is_closed: bool
    has_left: bool = False
    node: Any
    template: object

    @property
    def takes_all(self) -> bool:
        """Whether nothing that is stored for it can be unexpected."""
        return not (self.is_closed or self.has_left)


class LoadRequest(msgspec.Struct, frozen=True, array_like=True):
    """The request of one rank, sent to all ranks.

    Args:
        used: By stored part (or path of one's branch, see `FromPart`) a bit for each stored entry,
            1 if the rank requests it; None for a part of which it loads everything.
        boxes: See `encode_boxes`; empty if nothing is exchanged.
        taken: What it takes of values per coordinate.
        checks: What has to be equal on several ranks after the load.
        fits: False if the rank cannot load what is stored.
        leaves, drops: Patterns of what it agrees to leave, and of values per coordinate that it
            agrees to lose: all ranks decide alike, before any writes to a target.
    """

    used: dict[str, bytes | None]
    boxes: bytes
    taken: list[TakenLabels] = []
    checks: list[ConsistencyCheck] = []
    fits: bool = True
    leaves: Sequence[str] = ()
    drops: Sequence[str] = ()


def encode_boxes(boxes: BoxTable) -> bytes:
    """Boxes in few bytes: packed columns, compressed; some bytes a box."""
    return squeeze(msgspec.msgpack.encode(pack_boxes(boxes)))


def decode_boxes(data: bytes) -> BoxTable:
    """Inverse of `encode_boxes`; CorruptionError for anything else."""
    try:
        return unpack_boxes(decode_msgpack_as(unsqueeze(data), PackedBoxes))
    except ValueError as error:
        raise CorruptionError("the request of another rank arrived damaged") from error


def paths_of_sources(parts: Sequence[PartRequest], codecs: Codecs) -> dict[str, list[str]]:
    """Return the leaf paths of what parts are loaded from, where their names are the same.

    Not of those that take everything that is stored: they have no unexpected entries.
    """
    return {
        each.source: leaf_paths(each.node, each.source, codecs)
        for each in parts
        if not each.takes_all and each.name == each.source
    }


def encode_request(
    parts: Sequence[PartRequest],
    result: MatchResult,
    codecs: Codecs,
    *,
    known: Mapping[str, list[str]],
    boxes: BoxTable | None,
    leaves: Sequence[str],
    drops: Sequence[str],
) -> bytes:
    """Return this rank's request as a message: see `LoadRequest`.

    Args:
        parts: The parts of its state.
        result: How they match.
        codecs: The user's types.
        known: As `paths_of_sources` returns it.
        boxes: The boxes that it requests; None if no other rank needs to know them.
        leaves, drops: As in `LoadRequest`.
    """
    used: dict[str, bytes | None] = {}
    by_source: dict[str, list[np.ndarray]] = {}
    for each in parts:
        if not each.takes_all:
            is_known = each.name == each.source
            paths = known[each.source] if is_known else leaf_paths(each.node, each.name, codecs)
            touched = map(result.touched.__contains__, paths)
            bits = np.fromiter(touched, dtype=np.bool_, count=len(paths))
            by_source.setdefault(each.source, []).append(bits)
        else:
            used[each.source] = None
    # Several parts may be loaded from one source: an entry is used if one of them uses it.
    for source, columns in by_source.items():
        packed = np.packbits(np.logical_or.reduce(columns)).tobytes()
        used.setdefault(source, zlib.compress(packed, 1))
    return msgspec.msgpack.encode(
        LoadRequest(
            used=used,
            boxes=b"" if boxes is None else encode_boxes(boxes),
            taken=taken_of(
                result.per_rank_uses, {each.name: (each.source, each.node) for each in parts}
            ),
            checks=result.checks,
            fits=result.fits,
            leaves=leaves,
            drops=drops,
        )
    )


def find_unexpected(
    parts: Mapping[str, Node],
    requests: Sequence[LoadRequest],
    codecs: Codecs,
    *,
    known: Mapping[str, list[str]],
) -> tuple[list[str], list[str]]:
    """Stored entries that no rank requests, of parts of which no rank takes everything.

    `known` is what `paths_of_sources` returns for this rank's parts.

    Returns:
        All of them; and those that not every rank that requests their part agrees to leave.

    Ranks may request different parts (modules on their own layouts) and different entries
    (pipeline stages): an entry is unexpected if none of them requests it. Example, a part with
    four entries, on three ranks:

        rank    used
        0       1 1 0 0
        1       0 0 1 0
        2       (does not request the part)
        all     1 1 1 0    the last entry is unexpected
    """
    unexpected: list[str] = []
    refused: list[str] = []
    # A source that is not a part is a branch of one, given with `FromPart`.
    branches = {source for request in requests for source in request.used} - parts.keys()
    for source in (*parts, *sorted(branches)):
        used = [request.used[source] for request in requests if source in request.used]
        if not used or any(bits is None for bits in used):
            continue
        paths = known.get(source)
        if paths is None:
            paths = leaf_paths(StoredPart(parts, {}).part_or_below(source), source, codecs)
        touched = np.zeros(len(paths), dtype=np.uint8)
        # Equal ones once: on a thousand ranks most are.
        for bits in {bits for bits in used if bits is not None}:
            packed = np.frombuffer(zlib.decompress(bits), dtype=np.uint8)
            touched |= np.unpackbits(packed, count=len(paths))
        left = [paths[i] for i in np.flatnonzero(touched == 0).tolist()]
        unexpected += left
        refused += not_left(left, [each for each in requests if source in each.used])
    return unexpected, refused


def not_left(paths: Sequence[str], requests: Sequence[LoadRequest]) -> list[str]:
    """Return the paths that not all of these ranks agree to leave."""
    agreed = {tuple(each.leaves) for each in requests}
    return [path for path in paths if not all(matches(path, patterns) for patterns in agreed)]


def patterns_of(ignore: bool | Sequence[str]) -> Sequence[str]:
    """Return what a caller has agreed to leave as patterns."""
    return ("*",) if ignore is True else () if ignore is False else ignore


def refuse_needed(parts: Mapping[str, Node], requests: Sequence[LoadRequest]) -> None:
    """Raise MismatchError if a part says that it must not be left out, and no rank requests it.

    An optional part says so by a text `needed` in the value of a rank. All ranks may agree to
    leave it, by its name.
    """
    requested = {source for request in requests for source in request.used}
    for name, node in parts.items():
        if name in requested or not is_per_rank(node) or not not_left([name], requests):
            continue
        for value in node["v"].values():
            needed = value.get("needed") if is_plain_dict(value) else None
            if isinstance(needed, str) and needed:
                raise MismatchError(
                    f"the state has no part '{name}', but the one in the checkpoint is needed: "
                    f"{needed}. Put the object into the state that has saved it (a disabled one "
                    f"will do), or pass ignore_unexpected=['{name}'] to lose this"
                )


def taken_of(
    uses: Sequence[PerRankUse], nodes: Mapping[str, tuple[str, Node]]
) -> list[TakenLabels]:
    """The uses of one rank in a form that other ranks understand.

    Args:
        uses: What the matcher met.
        nodes: Of the parts it requests, by name: the source and the tree that is stored there.
    """
    # Other ranks do not know the names of nodes: they are numbered in stored order, which is equal
    # on all ranks because they decode the same manifest.
    if not uses:
        return []
    numbers = {
        id(node): (source, number)
        for name, (source, tree) in nodes.items()
        if any(use.path.startswith(name) for use in uses)  # other parts may be large
        for number, node in enumerate(_per_rank_nodes(tree))
    }
    return [TakenLabels(*numbers[id(use.node)], use.path, use.labels, use.may_drop) for use in uses]


def find_dropped(parts: Mapping[str, Node], requests: Sequence[LoadRequest]) -> list[str]:
    """Return the paths of stored coordinates that no rank loads.

    MismatchError if not all ranks that take other ones allow it.
    """
    taken = [labels for request in requests for labels in request.taken]
    allowed = {tuple(request.drops) for request in requests if request.taken}
    stored = StoredPart(parts, {})
    sources = dict.fromkeys(each.source for each in taken)
    nodes = {source: _per_rank_nodes(stored.part_or_below(source)) for source in sources}
    # A value counts as lost only if it is lost on all ranks together, and by the node: a part and
    # a branch of it may both be sources.
    by_node: dict[int, list[TakenLabels]] = {}
    for each in taken:
        by_node.setdefault(id(nodes[each.source][each.number]), []).append(each)
    dropped: list[str] = []
    refused: dict[str, list[str]] = {}
    for uses in by_node.values():
        claimed = {label for use in uses for label in use.labels}
        may_drop = all(use.may_drop for use in uses)
        path = uses[0].path
        for label in nodes[uses[0].source][uses[0].number]["v"]:
            if label in claimed:
                continue
            whole = f"{path}[{label}]"
            if may_drop or all(matches(whole, patterns) for patterns in allowed):
                dropped.append(whole)
            else:
                refused.setdefault(path, []).append(label)
    if refused:
        shown = "; ".join(
            f"{path}: {len(labels)} ({some_of(labels)})" for path, labels in refused.items()
        )
        raise MismatchError(
            f"the checkpoint holds values of coordinates that no rank of this layout takes: "
            f"{shown}. Make one value of all: PerRank(..., merge=callable); or let them go: "
            f"PerRank(..., surplus='drop'), or allow_dropped=[patterns] of this load"
        )
    return dropped


def check_consistency(
    ranks: Sequence[int], checks: Sequence[Sequence[ConsistencyCheck]], *, warn: bool
) -> None:
    """Raise MismatchError if ranks that share a value would have different ones after the load.

    Args:
        ranks: All ranks of the load.
        checks: What each of them must have equal with others.
        warn: Whether this rank logs differences that may be meant.
    """
    by_label: dict[tuple[str, str], list[tuple[int, ConsistencyCheck]]] = {}
    for rank, own in zip(ranks, checks, strict=True):
        for check in own:
            by_label.setdefault((check.what, check.label), []).append((rank, check))
    # By certainty: an error if sharing is declared, a warning if it is only likely.
    sentences: dict[bool, list[str]] = {True: [], False: []}
    for (what, label), held in by_label.items():
        if len({check.digest for _, check in held}) > 1:
            shown = shorten_ranks([rank for rank, _ in held])
            along = held[0][1].along
            is_certain = any(check.is_certain for _, check in held)
            sentences[is_certain].append(f"{what} along {along} (ranks {shown}, {label})")
    if sentences[True]:
        raise MismatchError(
            f"{len(sentences[True])} random streams are shared by ranks that would have different "
            f"ones after this load: {some_of(sentences[True])}. The checkpoint has none for "
            f"some of these ranks, which keep what they have: seed it alike on them before the "
            f"load, or declare streams that differ: RNG(shared=())"
        )
    if sentences[False] and warn:
        logging.getLogger("holdfast").warning(
            "%s random streams differ between ranks that may have to draw alike: %s; if they do, "
            "seed them alike and declare it: RNG(shared=(axis,)); if not, RNG(shared=())",
            len(sentences[False]),
            some_of(sentences[False]),
        )


def _per_rank_nodes(tree: Any) -> list[dict[str, Any]]:
    """Every value per coordinate under a node, in stored order, an outer one before its inner."""
    return [node for node in walk(tree) if is_per_rank(node)]
