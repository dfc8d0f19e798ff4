"""One load: find, match, read, verify, restore; it succeeds or fails on all ranks together."""

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
from holdfast.checkpoint.load.executor import LoadExecutor
from holdfast.checkpoint.load.finding import Finder
from holdfast.checkpoint.load.per_rank import check_claims, find_dropped, taken_of
from holdfast.checkpoint.load.report import (
    MAX_NAMED,
    describe_fallbacks,
    make_report,
    raise_mismatch,
    shorten_list,
    warn_of_kept,
)
from holdfast.checkpoint.load.requests import (
    LoadRequest,
    decode_boxes,
    encode_boxes,
    requested_boxes,
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
from holdfast.state.markers import FromPart, OnLayout, Stored
from holdfast.state.match.matcher import Matcher
from holdfast.state.match.result import MatchResult
from holdfast.state.match.stored import StoredPart, leaf_paths
from holdfast.state.parts import Part, TreePart, check_part_name, is_closed, is_last, part_of
from holdfast.storage import Storage

_MAX_CANDIDATES = 10_000


@dataclass(slots=True, kw_only=True)
class PartRequest:
    """One part of the state on this rank, and what is stored for it.

    Args:
        name: Its name in the state.
        source: Where it is stored: its name, or the path of a `FromPart`.
        scope: See `Matcher.move_to`.
        part: How to load it.
        template: Its tree with targets in place of tensors.
        node: The stored tree.
        layout: The layout it lives on.
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
                with ExitStack() as leases:
                    return self._load(state, step, options, leases, set())
            return self._load_newest_good(state, options)

    def was_replaced(self, error: BaseException) -> bool:
        """After a failure of all ranks: whether the checkpoint has been replaced meanwhile.

        Then the load starts again. A reader without a lease (on a storage that it cannot write to)
        is not waited for when a step is saved again.

        Cost: one collective if a checkpoint had been found.
        """
        return isinstance(error, CorruptionError | StorageError) and self._finder.was_replaced()

    def _load_newest_good(
        self, state: Mapping[str, object] | None, options: LoadOptions
    ) -> LoadReport:
        """Load the newest checkpoint that is good; all ranks try the same ones in the same order.

        What a damaged one wrote to targets is overwritten by the good one; a good one that would
        leave such a target as it is counts as damaged.
        """
        written: set[str] = set()
        failed: list[FellBack] = []
        first: HoldfastError | None = None

        def attempt(step: int) -> LoadReport:
            with ExitStack() as leases:
                return self._load(state, step, options, leases, written)

        for _ in range(_MAX_CANDIDATES):
            failed_steps = [each.step for each in failed]
            step, present = self._finder.candidate(
                failed_steps, options.max_fallbacks, _settings(None, options)
            )
            failed = [each for each in failed if each.step in present]
            if step is None:
                break
            try:
                # Under a guard of its own, so that all ranks try the next one, or none does.
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
                raise MismatchError(f"{error} ({describe_fallbacks(failed)})") from error
            if failed and self._groups.control.is_coordinator:
                logging.getLogger("holdfast").warning(
                    "loaded step %s instead of a newer one: %s", step, describe_fallbacks(failed)
                )
            return replace(report, fell_back=tuple(failed))
        kind = type(first) if first is not None else StorageError
        raise kind(f"no checkpoint could be loaded: {describe_fallbacks(failed)}") from first

    def _load(
        self,
        state: Mapping[str, object] | None,
        step: int | None,
        options: LoadOptions,
        leases: ExitStack,
        written: set[str],
    ) -> LoadReport:
        """Load one checkpoint.

        Args:
            state: What to load into; None for all that is stored.
            step: None for the newest.
            options: See `LoadOptions`.
            leases: Gets the lease that keeps retention from removing the checkpoint.
            written: Paths of the caller's targets that damaged checkpoints wrote to on this rank;
                this one's are added if it is damaged.
        """
        start = time.perf_counter()
        chosen, records = self._finder.find(step, leases, _settings(step, options))
        directory = step_dir(chosen)
        matched: tuple[Snapshot, Matcher, list[PartRequest]] | None = None
        payload = b""
        error: Exception | None = None
        try:
            # One rank proves the chunk table for all: that takes a second for a million rows.
            proven = not self._groups.control.is_coordinator
            snapshot = Snapshot.from_records(
                self._storage, directory, records=records, proven=proven
            )
            if state is None:
                state = dict.fromkeys(snapshot.manifest.parts, Stored(all_ranks=True))
            matcher, parts = self._match(snapshot, state, options)
            matched = snapshot, matcher, parts
            raise_mismatch(matcher.result, snapshot)
            _refuse_left_over(written, matcher.result, chosen)
            payload = _encode_request(snapshot, parts, matcher.result, self._codecs)
        except Exception as caught:
            error = caught
        payloads = self._groups.control.agree(error, phase="load: match", payload=payload)
        if matched is None or state is None:
            raise MismatchError(f"{directory}: nothing could be matched")
        snapshot, matcher, parts = matched
        with snapshot:
            requests = [msgspec.msgpack.decode(data, type=LoadRequest) for data in payloads]
            unexpected = self._find_unexpected(snapshot, requests, options)
            dropped = self._check_coordinates(snapshot, requests, options)
            executor, job = self._fill(snapshot, requests, matcher.result, options, written)
            values = self._restore(matcher, parts)
            warn_of_kept(matcher.result, self._groups.rank)
            return make_report(
                snapshot,
                matcher.result,
                step=chosen,
                path=self._storage.describe(directory),
                unexpected=tuple(unexpected),
                dropped=(*dropped, *matcher.result.dropped),
                not_requested=_not_requested(snapshot, state, parts),
                values=values,
                nbytes_needed=executor.nbytes_needed,
                nbytes_received=executor.nbytes_received,
                job=job,
                seconds=time.perf_counter() - start,
            )

    def _match(
        self, snapshot: Snapshot, state: Mapping[str, object], options: LoadOptions
    ) -> tuple[Matcher, list[PartRequest]]:
        """Match the state with what is stored; no target is written."""
        tensors = {info.key: (info.dtype, tuple(info.shape)) for info in snapshot.manifest.tensors}
        matcher = Matcher(
            tensors=tensors,
            layout=self._groups.layout,
            rank=self._groups.rank,
            codecs=self._codecs,
            allow_missing=options.allow_missing,
            cast=options.cast,
        )
        parts: list[PartRequest] = []
        stored = StoredPart(snapshot.manifest.parts, tensors)
        for name, value in state.items():
            check_part_name(name)
            layout, source, value = _unwrap(value, name, self._groups.layout)
            scope = name if source is not None else ""
            matcher.move_to(layout, scope=scope)
            part = part_of(name, value)
            node = stored.part_or_below(name if source is None else source)
            if node is None and not stored.has_part_or_below(source or name):
                result = matcher.result
                paths = result.allowed if matcher.may_miss(name) else result.missing
                paths.append(name if source is None else f"{name} (from {source})")
                continue
            try:
                template = part.template(StoredPart(node, tensors, name))
            except Exception as error:
                if not isinstance(error, HoldfastError):
                    error.add_note(f"state part '{name}'")
                raise
            matcher.match_part(template, node, name, closed=is_closed(part))
            parts.append(
                PartRequest(
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
        result.tensors = without_ties(result.tensors)
        result.mismatched += shared_memory([*result.tensors, *without_ties(result.cleared)])
        return matcher, parts

    def _find_unexpected(
        self, snapshot: Snapshot, requests: Sequence[LoadRequest], options: LoadOptions
    ) -> list[str]:
        """Stored entries of closed parts that no rank requests; an error unless allowed.

        Ranks may request different parts (modules on their own layouts) and different entries
        (pipeline stages): an entry is unexpected if none of them requests it. Example, a part with
        four entries, on three ranks:

            rank    used
            0       1 1 0 0
            1       0 0 1 0
            2       (does not request the part)
            all     1 1 1 0    the last entry is unexpected
        """
        unexpected = []
        parts = snapshot.manifest.parts
        branches = {source for request in requests for source in request.used} - parts.keys()
        for source in (*parts, *sorted(branches)):
            used = [request.used[source] for request in requests if source in request.used]
            if not used or any(bits is None for bits in used):
                continue
            paths = leaf_paths(StoredPart(parts, {}).part_or_below(source), source, self._codecs)
            touched = np.zeros(len(paths), dtype=np.uint8)
            # Equal ones once: on a thousand ranks most are.
            for bits in {bits for bits in used if bits is not None}:
                packed = np.frombuffer(zlib.decompress(bits), dtype=np.uint8)
                touched |= np.unpackbits(packed, count=len(paths))
            unexpected += [paths[i] for i in np.flatnonzero(touched == 0).tolist()]
        if unexpected and not options.ignore_unexpected:
            raise MismatchError(
                f"the checkpoint holds {len(unexpected)} entries that the state does not ask for: "
                f"{shorten_list(unexpected)}; pass ignore_unexpected=True to leave them"
            )
        return unexpected

    def _check_coordinates(
        self, snapshot: Snapshot, requests: Sequence[LoadRequest], options: LoadOptions
    ) -> list[str]:
        """What no rank takes of the values per coordinate; an error where that is not allowed."""
        control = self._groups.control
        claims = [request.claims for request in requests]
        check_claims(control.ranks, claims, warn=control.is_coordinator)
        taken = [labels for request in requests for labels in request.taken]
        return find_dropped(snapshot.manifest.parts, taken, allow=options.allow_dropped)

    def _fill(
        self,
        snapshot: Snapshot,
        requests: Sequence[LoadRequest],
        result: MatchResult,
        options: LoadOptions,
        written: set[str],
    ) -> tuple[LoadExecutor, JobReading]:
        """Fill every target; if one rank meets damage, all ranks raise."""
        control = self._groups.control
        executor: LoadExecutor | None = None
        error: Exception | None = None
        try:
            # Ranks that request the same boxes send equal bytes, which are decoded once.
            tables = {data: decode_boxes(data) for data in {each.boxes for each in requests}}
            executor = LoadExecutor(
                snapshot,
                control,
                result.tensors,
                boxes=[tables[each.boxes] for each in requests],
                hosts=[each.host for each in requests],
                verify=options.verify,
                exchange=options.exchange,
            )
        except Exception as caught:
            error = caught
        control.agree(error, phase="load: plan")
        if executor is None:
            raise CorruptionError("the load could not be planned")
        try:
            job = executor.run()
        except HoldfastError as caught:
            touched = executor.touched()
            # Memory made for this load alone is not the caller's.
            written |= set(touched) - {each.path for each in result.tensors if each.is_fresh}
            raise type(caught)(
                f"{caught}. Targets already written on this rank: "
                f"{shorten_list(touched) or 'none'}; load again from a good checkpoint before "
                f"using them"
            ) from caught
        if snapshot.stats.fallbacks:
            logging.getLogger("holdfast").warning(
                "rank %s: %s damaged or missing copies were replaced by good ones: %s",
                self._groups.rank,
                len(snapshot.stats.fallbacks),
                "; ".join(snapshot.stats.fallbacks[:MAX_NAMED]),
            )
        return executor, job

    def _restore(self, matcher: Matcher, parts: Sequence[PartRequest]) -> dict[str, object]:
        """Restore the parts from the loaded trees, after every byte on every rank was good.

        What fails here on one rank fails the load on all, at its end.
        """
        values: dict[str, object] = {}
        trees: list[object] = []
        for each in parts:
            matcher.move_to(each.layout, scope=each.scope)
            closed = is_closed(each.part)
            trees.append(matcher.build(each.template, each.node, each.name, closed=closed))
        # Random streams last: other parts may draw from them while they are restored.
        built = zip(parts, trees, strict=True)
        for each, tree in sorted(built, key=lambda pair: is_last(pair[0].part)):
            try:
                each.part.restore(tree)
            except Exception as error:
                if not isinstance(error, HoldfastError):
                    error.add_note(f"state part '{each.name}'")
                raise
            if isinstance(each.part, TreePart):
                values[each.name] = tree
        return values


def _refuse_left_over(written: set[str], result: MatchResult, step: int) -> None:
    """CorruptionError if a load of this step would leave a target that was written as it is."""
    left = sorted(written - {each.path for each in result.tensors})
    if left:
        raise CorruptionError(
            f"step {step} lacks {len(left)} entries that a damaged newer checkpoint has "
            f"already written to: {shorten_list(left)}; load step {step} into a fresh state"
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
    snapshot: Snapshot, state: Mapping[str, object], requests: Sequence[PartRequest]
) -> tuple[str, ...]:
    """Parts of the checkpoint of which the state requests nothing."""
    parts = snapshot.manifest.parts
    stored = StoredPart(parts, {})
    requested = set(state) | {stored.name_in(request.source) for request in requests}
    return tuple(sorted(set(parts) - requested))


def _settings(step: int | None, options: LoadOptions) -> dict[str, object]:
    """What all ranks must request alike."""
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


def _encode_request(
    snapshot: Snapshot, parts: Sequence[PartRequest], result: MatchResult, codecs: Codecs
) -> bytes:
    """What this rank requests, as a message: see `LoadRequest`."""
    used: dict[str, bytes | None] = {}
    by_source: dict[str, list[np.ndarray]] = {}
    for each in parts:
        if is_closed(each.part):
            paths = leaf_paths(each.node, each.name, codecs)
            touched = map(result.touched.__contains__, paths)
            bits = np.fromiter(touched, dtype=np.bool_, count=len(paths))
            by_source.setdefault(each.source, []).append(bits)
        else:
            used[each.source] = None
    # Several parts may be loaded from one source: an entry is used if one of them uses it.
    for source, columns in by_source.items():
        packed = np.packbits(np.logical_or.reduce(columns)).tobytes()
        used.setdefault(source, zlib.compress(packed, 1))
    nodes = {each.name: each.node for each in parts}
    return msgspec.msgpack.encode(
        LoadRequest(
            used=used,
            boxes=encode_boxes(requested_boxes(result.tensors, snapshot.manifest)),
            host=socket.gethostname(),
            taken=taken_of(result.per_rank_uses, nodes),
            claims=result.checks,
        )
    )
