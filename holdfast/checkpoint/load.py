"""One load, start to end: find, match, read, verify, restore; every rank ends the same way."""

from __future__ import annotations

import logging
import socket
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from holdfast.checkpoint.filling import Asked, Filler
from holdfast.checkpoint.finding import NUM_TRIES, Finder
from holdfast.checkpoint.opening import collector_paused
from holdfast.checkpoint.report import FellBack, JobReading, LoadReport
from holdfast.checkpoint.requests import asked_boxes, decode_boxes, encode_boxes, tensor_shapes
from holdfast.errors import CorruptionError, HoldfastError, MismatchError, StorageError
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.values import Codecs, Node
from holdfast.parallel import Layout, ProcessGroups
from holdfast.state.flatten import check_part_name
from holdfast.state.markers import On
from holdfast.state.match import Matcher, MatchResult, leaf_paths
from holdfast.state.parts import Part, TreePart, is_closed, part_of
from holdfast.state.stored import StoredPart
from holdfast.storage import Storage

_MAX_NAMED = 10
_MAX_CANDIDATES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How strict a load is; see `Checkpointer.load`."""

    ignore_unexpected: bool = False
    allow_missing: tuple[str, ...] = ()
    cast: bool = False
    verify: bool = True
    exchange: bool = True
    max_fallbacks: int | None = 0
    """How many older checkpoints may be tried; None for all there are."""


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    """What one rank asks for, for all to know.

    `used`: part -> a bit for each stored entry, 1 where the rank asks for it; None for a part of
    which it takes everything. `boxes`: see `encode_boxes`. `host`: the machine it is on.
    """

    used: dict[str, bytes | None]
    boxes: bytes
    host: str


_COUNTERS = struct.Struct("<4Q")


@dataclass(slots=True, kw_only=True)
class _Request:
    """One part of the request on this rank: what it wants, and what is stored for it."""

    name: str
    part: Part
    template: object
    node: Node
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
        self, state: Mapping[str, object], *, step: int | None, options: LoadOptions
    ) -> LoadReport:
        """One load; see `Checkpointer.load`."""
        with collector_paused():
            if options.max_fallbacks == 0:
                return self._load_steady(state, step, options, Written())
            return self._load_good(state, options)

    def _load_steady(
        self,
        state: Mapping[str, object],
        step: int | None,
        options: LoadOptions,
        written: Written,
    ) -> LoadReport:
        """One load, begun again on all ranks where its checkpoint has gone meanwhile.

        Who reads without a mark (on a storage that it cannot write to) is not waited for.
        """
        for left in reversed(range(NUM_TRIES)):
            self._finder.forget()
            try:
                with ExitStack() as marks:
                    return self._load(state, step, options, marks, written)
            except (CorruptionError, StorageError):
                if not left or not self._finder.was_replaced():
                    raise
        raise StorageError("the load was begun too often")

    def _load_good(self, state: Mapping[str, object], options: LoadOptions) -> LoadReport:
        """Load the newest checkpoint that is good; all ranks try the same ones in the same order.

        What a damaged one wrote to targets is overwritten by the good one; a good one that would
        leave such a target as it is counts as damaged.
        """
        written = Written()
        failed: list[FellBack] = []
        first: HoldfastError | None = None
        for _ in range(_MAX_CANDIDATES):
            step, there = self._finder.candidate(
                [each.step for each in failed], options.max_fallbacks
            )
            failed = [each for each in failed if each.step in there]
            if step is None:
                break
            try:
                report = self._load_steady(state, step, options, written)
            except (CorruptionError, StorageError) as error:
                first = first or error
                failed.append(FellBack(step=step, why=str(error)))
                continue
            except MismatchError as error:
                if not failed:
                    raise
                raise MismatchError(f"{error} ({_given_up(failed)})") from error
            if failed and self._groups.control.is_coordinator:
                logging.getLogger("holdfast").warning(
                    "loaded step %s instead of a newer one: %s", step, _given_up(failed)
                )
            return replace(report, fell_back=tuple(failed))
        kind = type(first) if first is not None else StorageError
        raise kind(f"no checkpoint could be loaded: {_given_up(failed)}") from first

    def _load(
        self,
        state: Mapping[str, object],
        step: int | None,
        options: LoadOptions,
        marks: ExitStack,
        written: Written,
    ) -> LoadReport:
        """The load itself; `marks` keeps retention away from the checkpoint until it is over."""
        began = time.perf_counter()
        chosen, records = self._finder.find(step, marks)
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
            matcher, requests = self._match(snapshot, state, options)
            _raise_mismatch(matcher.result, snapshot)
            written.refuse_left_over(matcher.result, chosen)
            payload = _asked(snapshot, requests, matcher.result)
        except Exception as caught:
            error = caught
        gathered = self._groups.control.agree(error, phase="load: match", payload=payload)
        if snapshot is None or matcher is None:
            raise MismatchError(f"{directory}: nothing could be matched")
        with snapshot:
            said = [msgspec.msgpack.decode(data, type=_Asked) for data in gathered]
            unexpected = self._unexpected(snapshot, said, options)
            filler = self._fill(snapshot, said, matcher.result, options, written)
            values, job = self._restore(matcher, requests, filler, snapshot)
            _warn_of_kept(matcher.result, self._groups.rank)
            return _report(
                snapshot,
                matcher.result,
                step=chosen,
                path=self._storage.describe(directory),
                unexpected=tuple(unexpected),
                not_requested=tuple(sorted(set(snapshot.manifest.parts) - set(state))),
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
        parts = snapshot.manifest.parts
        for name, value in state.items():
            check_part_name(name)
            layout = value.own_layout if isinstance(value, On) else self._groups.layout
            matcher.move_to(layout)
            part = part_of(name, value.value if isinstance(value, On) else value)
            if name not in parts:
                target = (
                    matcher.result.allowed if matcher.may_miss(name) else matcher.result.missing
                )
                target.append(name)
                continue
            node = parts[name]
            template = part.template(StoredPart(node, tensors))
            matcher.match(template, node, name)
            if not is_closed(part):
                matcher.match_rest(template, node, name)
            requests.append(
                _Request(name=name, part=part, template=template, node=node, layout=layout)
            )
        return matcher, requests

    def _unexpected(
        self, snapshot: Snapshot, said: Sequence[_Asked], options: LoadOptions
    ) -> list[str]:
        """Stored entries of closed parts that no rank asked for; an error unless allowed.

        Ranks may ask for different parts (modules on their own layouts) and different entries
        (pipeline stages): what counts is what all of them ask for together.
        """
        found = []
        for part, node in snapshot.manifest.parts.items():
            used = [asked.used[part] for asked in said if part in asked.used]
            if not used or any(bits is None for bits in used):
                continue
            paths = leaf_paths(node, part)
            touched = np.zeros(len(paths), dtype=np.uint8)
            for bits in {bits for bits in used if bits is not None}:
                packed = np.frombuffer(zlib.decompress(bits), dtype=np.uint8)
                touched |= np.unpackbits(packed, count=len(paths))
            found += [paths[i] for i in np.flatnonzero(touched == 0).tolist()]
        if found and not options.ignore_unexpected:
            raise MismatchError(
                f"the checkpoint holds {len(found)} entries that the state does not ask for: "
                f"{_some(found)}; pass ignore_unexpected=True to leave them"
            )
        return found

    def _fill(
        self,
        snapshot: Snapshot,
        said: Sequence[_Asked],
        result: MatchResult,
        options: LoadOptions,
        written: Written,
    ) -> Filler:
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
            filler.run()
        except HoldfastError as caught:
            touched = filler.touched()
            written.add(result, touched)
            raise type(caught)(
                f"{caught}. Targets already written on this rank: {_some(touched) or 'none'}; load "
                f"again from a good checkpoint before using them"
            ) from caught
        if snapshot.stats.fallbacks:
            logging.getLogger("holdfast").warning(
                "rank %s: %s damaged or missing copies were replaced by good ones: %s",
                self._groups.rank,
                len(snapshot.stats.fallbacks),
                "; ".join(snapshot.stats.fallbacks[:_MAX_NAMED]),
            )
        return filler

    def _restore(
        self,
        matcher: Matcher,
        requests: Sequence[_Request],
        filler: Filler,
        snapshot: Snapshot,
    ) -> tuple[dict[str, object], JobReading]:
        """Hand the loaded trees to their parts, after every byte on every rank was good."""
        values: dict[str, object] = {}
        error: Exception | None = None
        try:
            for request in requests:
                matcher.move_to(request.layout)
                tree = matcher.build(
                    request.template, request.node, request.name, closed=is_closed(request.part)
                )
                request.part.restore(tree)
                if isinstance(request.part, TreePart):
                    values[request.name] = tree
        except Exception as caught:
            error = caught
        stats = snapshot.stats
        counted = (filler.nbytes_needed, stats.nbytes_read, filler.nbytes_received, stats.opens)
        told = self._groups.control.agree(
            error, phase="load: restore", payload=_COUNTERS.pack(*counted)
        )
        needed, read, received, opens = zip(*(_COUNTERS.unpack(data) for data in told), strict=True)
        job = JobReading(
            nbytes_unique=filler.nbytes_unique,
            nbytes_needed=sum(needed),
            nbytes_read=sum(read),
            nbytes_received=sum(received),
            num_opens=sum(opens),
            max_nbytes_read=max(read),
        )
        return values, job


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
                f"already written to: {_some(left)}; load step {step} into a fresh state"
            )


def _report(snapshot: Snapshot, result: MatchResult, **told: Any) -> LoadReport:
    """What was loaded, with what the caller has to tell."""
    return LoadReport(
        loaded=tuple(entry.path for entry in result.wanted),
        missing=tuple(sorted(set(result.missing) | set(result.allowed))),
        cast=tuple(result.cast),
        kept=tuple(result.kept),
        nbytes_read=snapshot.stats.nbytes_read,
        num_opens=snapshot.stats.opens,
        replaced=tuple(snapshot.stats.fallbacks),
        **told,
    )


def _warn_of_kept(result: MatchResult, rank: int) -> None:
    """Say once that values of this rank's coordinates are not stored and stay as they are."""
    if result.kept:
        logging.getLogger("holdfast").warning(
            "rank %s: the checkpoint has nothing for this rank's coordinates in %s; what the rank "
            "has stays",
            rank,
            _some(sorted(result.kept)),
        )


def _given_up(failed: Sequence[FellBack]) -> str:
    """In words: which checkpoints were given up, and why."""
    return "; ".join(f"step {each.step} is damaged: {each.why}" for each in failed)


def _raise_mismatch(result: MatchResult, snapshot: Snapshot) -> None:
    sentences = []
    if result.missing:
        sentences.append(
            f"the checkpoint lacks {len(result.missing)} entries that the state asks for: "
            f"{_some(result.missing)} (allow_missing=[patterns] lets them be)"
        )
    if result.mismatched:
        sentences.append(f"{len(result.mismatched)} entries do not fit: {_some(result.mismatched)}")
    if sentences:
        raise MismatchError(f"step {snapshot.manifest.step}: " + "; ".join(sentences))


def _asked(snapshot: Snapshot, requests: Sequence[_Request], result: MatchResult) -> bytes:
    """What this rank asks for: a bit per entry of the parts it wants nothing left of, and boxes."""
    used: dict[str, bytes | None] = {}
    for request in requests:
        if is_closed(request.part):
            paths = leaf_paths(request.node, request.name)
            touched = map(result.touched.__contains__, paths)
            bits = np.fromiter(touched, dtype=np.bool_, count=len(paths))
            used[request.name] = zlib.compress(np.packbits(bits).tobytes(), 1)
        else:
            used[request.name] = None
    boxes = asked_boxes(result.wanted, tensor_shapes(snapshot.manifest))
    return msgspec.msgpack.encode(_Asked(used, encode_boxes(boxes), socket.gethostname()))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    rest = len(names) - _MAX_NAMED
    return shown if rest <= 0 else f"{shown} and {rest} more"
