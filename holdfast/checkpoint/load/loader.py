"""One load, start to end: find, match, read, verify, restore; every rank ends the same way."""

from __future__ import annotations

import logging
import socket
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from holdfast.checkpoint.load.aliasing import shared_memory, without_ties
from holdfast.checkpoint.load.filling import Asked, Filler
from holdfast.checkpoint.load.finding import Finder
from holdfast.checkpoint.load.per_rank import Taken, check_claims, find_dropped, taken_of
from holdfast.checkpoint.load.requests import asked_boxes, decode_boxes, encode_boxes, tensor_shapes
from holdfast.checkpoint.load.verdict import (
    MAX_NAMED,
    given_up,
    make_report,
    raise_mismatch,
    some,
    warn_of_kept,
)
from holdfast.checkpoint.options import LoadOptions
from holdfast.checkpoint.reports import FellBack, JobReading, LoadReport
from holdfast.checkpoint.save.handshake import collector_paused
from holdfast.errors import (
    ConfigError,
    CorruptionError,
    HoldfastError,
    MismatchError,
    StorageError,
)
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.values import Codecs
from holdfast.parallel import Layout, ProcessGroups
from holdfast.parallel.control.guard import Guard
from holdfast.state.coordinates import Claim
from holdfast.state.flatten import check_part_name
from holdfast.state.markers import FromPart, OnLayout, Stored
from holdfast.state.match.matcher import Matcher
from holdfast.state.match.result import MatchResult
from holdfast.state.match.stored import StoredPart
from holdfast.state.match.stored_nodes import leaf_paths
from holdfast.state.parts import Part, TreePart, is_closed, is_last, part_of
from holdfast.storage import Storage

_MAX_CANDIDATES = 10_000


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    """What one rank asks for, for all to know.

    `used`: part, or path of one's branch (`FromPart`) -> a bit for each stored entry, 1 where the
    rank asks for it; None for one of which it takes everything. `boxes`: see `encode_boxes`.
    `host`: the machine it is on. `taken`: of values per coordinate. `claims`: what has to be equal
    on several ranks.
    """

    used: dict[str, bytes | None]
    boxes: bytes
    host: str
    taken: list[Taken] = []
    claims: list[Claim] = []


@dataclass(slots=True, kw_only=True)
class _Request:
    """One part of the request on this rank: what it wants, and what is stored for it.

    `source`: where it is stored: the part's name, or the path of a `FromPart`. `scope`: see
    `Matcher.move_to`.
    """

    name: str
    source: str
    scope: str
    part: Part
    template: object
    node: Any
    layout: Layout


class Loader:
    """Loads under one set of groups."""

    def __init__(
        self, storage: Storage, groups: ProcessGroups, *, codecs: Codecs, settle_s: float
    ) -> None:
        self._storage = storage
        self._groups = groups
        self._codecs = codecs
        self._finder = Finder(storage, groups, settle_s=settle_s)

    def load(
        self, state: Mapping[str, object] | None, *, step: int | None, options: LoadOptions
    ) -> LoadReport:
        """One load; see `Checkpointer.load`. None for the state: all of what is stored."""
        _check_asked(state, step, options)
        self._finder.forget()
        with collector_paused():
            if options.max_fallbacks == 0:
                with ExitStack() as marks:
                    return self._load(state, step, options, marks, Written())
            return self._load_good(state, options)

    def was_replaced(self, error: BaseException) -> bool:
        """After a failure of all ranks: whether the checkpoint has been replaced meanwhile.

        The load is then begun again. Who reads without a mark, on a storage that it cannot write
        to, is not waited for. One collective if a checkpoint had been found.
        """
        return isinstance(error, CorruptionError | StorageError) and self._finder.was_replaced()

    def _load_good(self, state: Mapping[str, object] | None, options: LoadOptions) -> LoadReport:
        """Load the newest checkpoint that is good; all ranks try the same ones in the same order.

        What a damaged one wrote to targets is overwritten by the good one; a good one that would
        leave such a target as it is counts as damaged.
        """
        written = Written()
        failed: list[FellBack] = []
        first: HoldfastError | None = None

        def attempt(step: int) -> LoadReport:
            with ExitStack() as marks:
                return self._load(state, step, options, marks, written)

        for _ in range(_MAX_CANDIDATES):
            gone = [each.step for each in failed]
            step, there = self._finder.candidate(
                gone, options.max_fallbacks, _settings(None, options)
            )
            failed = [each for each in failed if each.step in there]
            if step is None:
                break
            try:
                # Under a guard of its own: all ranks go on to the next one, or none does.
                control, name = self._groups.control, f"load: step {step}"
                guard = Guard[LoadReport](control, name, retry_if=self.was_replaced)
                report = guard.run(partial(attempt, step))
            except (CorruptionError, StorageError) as error:
                first = first or error
                failed.append(FellBack(step=step, why=str(error)))
                continue
            except MismatchError as error:
                if not failed:
                    raise
                raise MismatchError(f"{error} ({given_up(failed)})") from error
            if failed and self._groups.control.is_coordinator:
                logging.getLogger("holdfast").warning(
                    "loaded step %s instead of a newer one: %s",
                    step,
                    "; ".join(each.summary for each in failed),
                )
            return replace(report, fell_back=tuple(failed))
        kind = type(first) if first is not None else StorageError
        raise kind(f"no checkpoint could be loaded: {given_up(failed)}") from first

    def _load(
        self,
        state: Mapping[str, object] | None,
        step: int | None,
        options: LoadOptions,
        marks: ExitStack,
        written: Written,
    ) -> LoadReport:
        """The load itself; `marks` keeps retention away from the checkpoint until it is over."""
        began = time.perf_counter()
        chosen, records = self._finder.find(step, marks, _settings(step, options))
        directory = step_dir(chosen)
        snapshot: Snapshot | None = None
        matcher: Matcher | None = None
        requests: list[_Request] = []
        payload = b""
        error: Exception | None = None
        try:
            snapshot = Snapshot.from_records(
                self._storage,
                directory,
                records=records,
                proven=not self._groups.control.is_coordinator,
            )
            if state is None:
                state = dict.fromkeys(snapshot.manifest.parts, Stored(all_ranks=True))
            matcher, requests = self._match(snapshot, state, options)
            raise_mismatch(matcher.result, snapshot)
            written.refuse_left_over(matcher.result, chosen)
            payload = _asked(snapshot, requests, matcher.result, self._codecs)
        except Exception as caught:
            error = caught
        gathered = self._groups.control.agree(error, phase="load: match", payload=payload)
        if snapshot is None or matcher is None or state is None:
            raise MismatchError(f"{directory}: nothing could be matched")
        with snapshot:
            said = [msgspec.msgpack.decode(data, type=_Asked) for data in gathered]
            unexpected = self._unexpected(snapshot, said, options)
            dropped = self._judge_coordinates(snapshot, said, options)
            filler, job = self._fill(snapshot, said, matcher.result, options, written)
            values = self._restore(matcher, requests)
            warn_of_kept(matcher.result, self._groups.rank)
            return make_report(
                snapshot,
                matcher.result,
                step=chosen,
                path=self._storage.describe(directory),
                unexpected=tuple(unexpected),
                dropped=(*dropped, *matcher.result.dropped),
                not_requested=_not_requested(snapshot, state, requests),
                values=values,
                nbytes_needed=filler.nbytes_needed,
                nbytes_received=filler.nbytes_received,
                job=job,
                seconds=time.perf_counter() - began,
            )

    def _match(
        self, snapshot: Snapshot, state: Mapping[str, object], options: LoadOptions
    ) -> tuple[Matcher, list[_Request]]:
        tensors = {info.key: (info.dtype, tuple(info.shape)) for info in snapshot.manifest.tensors}
        matcher = Matcher(
            tensors=tensors,
            layout=self._groups.layout,
            rank=self._groups.rank,
            codecs=self._codecs,
            allow_missing=options.allow_missing,
            cast=options.cast,
        )
        requests: list[_Request] = []
        stored = StoredPart(snapshot.manifest.parts, tensors)
        for name, value in state.items():
            check_part_name(name)
            layout, source, value = _unwrap(value, name, self._groups.layout)
            scope = name if source is not None else ""
            matcher.move_to(layout, scope=scope)
            part = part_of(name, value)
            node = stored.part_or_below(name if source is None else source)
            if node is None and not stored.has_part_or_below(source or name):
                target = (
                    matcher.result.allowed if matcher.may_miss(name) else matcher.result.missing
                )
                target.append(name if source is None else f"{name} (from {source})")
                continue
            try:
                template = part.template(StoredPart(node, tensors, name))
            except Exception as error:
                if not isinstance(error, HoldfastError):
                    error.add_note(f"state part '{name}'")
                raise
            matcher.match_part(template, node, name, closed=is_closed(part))
            requests.append(
                _Request(
                    name=name,
                    source=source or name,
                    scope=scope,
                    part=part,
                    template=template,
                    node=node,
                    layout=layout,
                )
            )
        result = matcher.result
        result.wanted = without_ties(result.wanted)
        result.mismatched += shared_memory([*result.wanted, *without_ties(result.cleared)])
        return matcher, requests

    def _unexpected(
        self, snapshot: Snapshot, said: Sequence[_Asked], options: LoadOptions
    ) -> list[str]:
        """Stored entries of closed parts that no rank asked for; an error unless allowed.

        Ranks may ask for different parts (modules on their own layouts) and different entries
        (pipeline stages): what counts is what all of them ask for together.
        """
        found = []
        parts = snapshot.manifest.parts
        others = {source for asked in said for source in asked.used} - parts.keys()
        for source in (*parts, *sorted(others)):
            used = [asked.used[source] for asked in said if source in asked.used]
            if not used or any(bits is None for bits in used):
                continue
            paths = leaf_paths(StoredPart(parts, {}).part_or_below(source), source, self._codecs)
            touched = np.zeros(len(paths), dtype=np.uint8)
            for bits in {bits for bits in used if bits is not None}:
                packed = np.frombuffer(zlib.decompress(bits), dtype=np.uint8)
                touched |= np.unpackbits(packed, count=len(paths))
            found += [paths[i] for i in np.flatnonzero(touched == 0).tolist()]
        if found and not options.ignore_unexpected:
            raise MismatchError(
                f"the checkpoint holds {len(found)} entries that the state does not ask for: "
                f"{some(found)}; pass ignore_unexpected=True to leave them"
            )
        return found

    def _judge_coordinates(
        self, snapshot: Snapshot, said: Sequence[_Asked], options: LoadOptions
    ) -> list[str]:
        """What no rank takes of the values per coordinate; an error where that is not allowed."""
        control = self._groups.control
        check_claims(control.ranks, [asked.claims for asked in said], warn=control.is_coordinator)
        taken = [each for asked in said for each in asked.taken]
        return find_dropped(snapshot.manifest.parts, taken, allow=options.allow_dropped)

    def _fill(
        self,
        snapshot: Snapshot,
        said: Sequence[_Asked],
        result: MatchResult,
        options: LoadOptions,
        written: Written,
    ) -> tuple[Filler, JobReading]:
        """Fill every target; if one rank meets damage, all ranks raise."""
        control = self._groups.control
        filler: Filler | None = None
        error: Exception | None = None
        try:
            tables = {data: decode_boxes(data) for data in {asked.boxes for asked in said}}
            filler = Filler(
                snapshot,
                control,
                Asked(
                    boxes=[tables[asked.boxes] for asked in said],
                    hosts=[asked.host for asked in said],
                ),
                result.wanted,
                verify=options.verify,
                exchange=options.exchange,
            )
        except Exception as caught:
            error = caught
        control.agree(error, phase="load: plan")
        if filler is None:
            raise CorruptionError("the load could not be planned")
        try:
            job = filler.run()
        except HoldfastError as caught:
            touched = filler.touched()
            written.add(result, touched)
            raise type(caught)(
                f"{caught}. Targets already written on this rank: {some(touched) or 'none'}; load "
                f"again from a good checkpoint before using them"
            ) from caught
        if snapshot.stats.fallbacks:
            logging.getLogger("holdfast").warning(
                "rank %s: %s damaged or missing copies were replaced by good ones: %s",
                self._groups.rank,
                len(snapshot.stats.fallbacks),
                "; ".join(snapshot.stats.fallbacks[:MAX_NAMED]),
            )
        return filler, job

    def _restore(self, matcher: Matcher, requests: Sequence[_Request]) -> dict[str, object]:
        """Hand the loaded trees to their parts, after every byte on every rank was good.

        What fails here on one rank fails the load on all, at its end.
        """
        values: dict[str, object] = {}
        trees: list[object] = []
        for request in requests:
            matcher.move_to(request.layout, scope=request.scope)
            closed = is_closed(request.part)
            trees.append(matcher.build(request.template, request.node, request.name, closed=closed))
        # Streams after all parts that may draw from them while they are restored.
        built = zip(requests, trees, strict=True)
        for request, tree in sorted(built, key=lambda each: is_last(each[0].part)):
            try:
                request.part.restore(tree)
            except Exception as error:
                if not isinstance(error, HoldfastError):
                    error.add_note(f"state part '{request.name}'")
                raise
            if isinstance(request.part, TreePart):
                values[request.name] = tree
        return values


class Written:
    """Paths of the caller's targets that a damaged checkpoint wrote to, on this rank."""

    def __init__(self) -> None:
        self._paths: set[str] = set()

    def add(self, result: MatchResult, touched: Sequence[str]) -> None:
        """Remember them; memory made for that load alone does not count."""
        self._paths |= set(touched) - {entry.path for entry in result.wanted if entry.is_fresh}

    def refuse_left_over(self, result: MatchResult, step: int) -> None:
        """CorruptionError if a load of this step would leave one of them as it is."""
        left = sorted(self._paths - {entry.path for entry in result.wanted})
        if left:
            raise CorruptionError(
                f"step {step} lacks {len(left)} entries that a damaged newer checkpoint has "
                f"already written to: {some(left)}; load step {step} into a fresh state"
            )


def _unwrap(value: object, name: str, layout: Layout) -> tuple[Layout, str | None, object]:
    """A state's entry without its markers: its layout, the path if one is given, itself."""
    source: str | None = None
    while isinstance(value, OnLayout | FromPart):
        if isinstance(value, OnLayout):
            layout, value = value.own_layout, value.value
        elif source is None:
            source, value = value.path, value.value
        else:
            raise ConfigError(f"state part '{name}': FromPart inside of a FromPart; give one path")
    return layout, source, value


def _not_requested(
    snapshot: Snapshot, state: Mapping[str, object], requests: Sequence[_Request]
) -> tuple[str, ...]:
    """Parts of the checkpoint of which the state asks for nothing."""
    parts = snapshot.manifest.parts
    asked = set(state) | {StoredPart(parts, {}).name_in(request.source) for request in requests}
    return tuple(sorted(set(parts) - asked))


def _settings(step: int | None, options: LoadOptions) -> dict[str, object]:
    """What all ranks have to ask for alike."""
    return {
        "step": step,
        "verify": options.verify,
        "exchange": options.exchange,
        "max_fallbacks": options.max_fallbacks,
    }


def _check_asked(state: object, step: int | None, options: LoadOptions) -> None:
    """ConfigError for a state or a step of a wrong type."""
    if state is not None and not isinstance(state, Mapping):
        raise ConfigError(f"the state must map names to parts, got {type(state).__name__}")
    options.check_step(step)


def _asked(
    snapshot: Snapshot, requests: Sequence[_Request], result: MatchResult, codecs: Codecs
) -> bytes:
    """What this rank asks for: a bit per entry of the parts it wants nothing left of, and boxes."""
    used: dict[str, bytes | None] = {}
    found: dict[str, list[np.ndarray]] = {}
    for request in requests:
        if is_closed(request.part):
            paths = leaf_paths(request.node, request.name, codecs)
            touched = map(result.touched.__contains__, paths)
            bits = np.fromiter(touched, dtype=np.bool_, count=len(paths))
            found.setdefault(request.source, []).append(bits)
        else:
            used[request.source] = None
    for source, each in found.items():  # several requests may take from one place
        packed = np.packbits(np.logical_or.reduce(each)).tobytes()
        used.setdefault(source, zlib.compress(packed, 1))
    boxes = asked_boxes(result.wanted, tensor_shapes(snapshot.manifest))
    nodes = {request.name: request.node for request in requests}
    return msgspec.msgpack.encode(
        _Asked(
            used,
            encode_boxes(boxes),
            socket.gethostname(),
            taken_of(result.uses, nodes),
            result.claims,
        )
    )
