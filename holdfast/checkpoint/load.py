"""One load, start to end: find, match, read, verify, restore; every rank ends the same way."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from holdfast.checkpoint.report import LoadReport
from holdfast.checkpoint.stage import tensor_bytes
from holdfast.errors import HoldfastError, MismatchError, StorageError
from holdfast.format.names import list_steps, step_dir
from holdfast.format.reader import Records, Snapshot, read_records
from holdfast.format.reading import mark_reading
from holdfast.format.values import Codecs, Node
from holdfast.geometry import Box
from holdfast.parallel import Layout, ProcessGroups
from holdfast.state.flatten import check_part_name
from holdfast.state.leaves import TensorLeaf
from holdfast.state.markers import On
from holdfast.state.match import Matcher, MatchResult, leaf_paths
from holdfast.state.parts import Part, TreePart, is_closed, part_of
from holdfast.state.stored import StoredPart
from holdfast.state.torch_dtypes import torch_dtype
from holdfast.storage import Storage
from holdfast.writer.repair import settle

_MAX_NAMED = 10
_ALIVE_S = 5.0
"""A writer gives a sign of life every two seconds; one silent for so long is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How strict a load is; see `Checkpointer.load`."""

    ignore_unexpected: bool = False
    allow_missing: tuple[str, ...] = ()
    cast: bool = False
    verify: bool = True


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    """What one rank asks for, for all to know."""

    closed: tuple[str, ...]
    touched: bytes


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
        self._settle_s = settle_s
        self._storage = storage
        self._groups = groups
        self._codecs = codecs

    def load(
        self, state: Mapping[str, object], *, step: int | None, options: LoadOptions
    ) -> LoadReport:
        """One load; see `Checkpointer.load`."""
        with ExitStack() as marks:
            return self._load(state, step, options, marks)

    def _load(
        self,
        state: Mapping[str, object],
        step: int | None,
        options: LoadOptions,
        marks: ExitStack,
    ) -> LoadReport:
        """The load itself; `marks` keeps retention away from the checkpoint until it is over."""
        began = time.perf_counter()
        chosen, records = self._find(step, marks)
        directory = step_dir(chosen)
        snapshot: Snapshot | None = None
        matcher: Matcher | None = None
        requests: list[_Request] = []
        paths: list[tuple[str, str]] = []
        error: Exception | None = None
        try:
            snapshot = Snapshot.from_records(
                self._storage,
                directory,
                records=records,
                proven=not self._groups.control.is_coordinator,
            )
            matcher, requests = self._match(snapshot, state, options)
            paths = _stored_paths(snapshot)
            _raise_mismatch(matcher.result, snapshot)
        except Exception as caught:
            error = caught
        payload = b""
        if snapshot is not None and matcher is not None:
            payload = _asked(paths, requests, matcher.result.touched)
        gathered = self._groups.control.agree(error, phase="load: match", payload=payload)
        if snapshot is None or matcher is None:
            raise MismatchError(f"{directory}: nothing could be matched")
        with snapshot:
            unexpected = self._unexpected(paths, gathered, options)
            self._read_all(snapshot, matcher.result, options)
            values = self._restore(matcher, requests)
            result = matcher.result
            return LoadReport(
                step=chosen,
                path=self._storage.describe(directory),
                loaded=tuple(leaf.key for leaves in result.targets.values() for leaf in leaves),
                missing=tuple(sorted(set(result.missing) | set(result.allowed))),
                unexpected=tuple(unexpected),
                cast=tuple(result.cast),
                kept=tuple(result.kept),
                not_requested=tuple(sorted(set(snapshot.manifest.parts) - set(state))),
                values=values,
                nbytes_needed=snapshot.stats.nbytes_needed,
                nbytes_read=snapshot.stats.nbytes_read,
                num_opens=snapshot.stats.opens,
                seconds=time.perf_counter() - began,
            )

    def _find(self, step: int | None, marks: ExitStack) -> tuple[int, Records]:
        """The coordinator reads manifest and index once; all ranks get the same bytes."""
        error: Exception | None = None
        payload = b""
        if self._groups.control.is_coordinator:
            try:
                self._groups.require_complete()
                chosen = self._choose(step)
                try:
                    marks.enter_context(mark_reading(self._storage, step_dir(chosen)))
                except StorageError:
                    # Removed by a retention policy in this very moment: a newer one is there.
                    chosen = self._choose(step)
                    marks.enter_context(mark_reading(self._storage, step_dir(chosen)))
                found = read_records(self._storage, step_dir(chosen))
                payload = msgspec.msgpack.encode((chosen, found.manifest, found.index))
            except Exception as caught:
                error = caught
        self._groups.control.agree(error, phase="load: find")
        data = self._groups.control.broadcast(payload or None, phase="load: records")
        chosen, manifest, index = msgspec.msgpack.decode(data, type=tuple[int, bytes, bytes])
        return chosen, Records(manifest=manifest, index=index)

    def _choose(self, step: int | None) -> int:
        where = self._storage.describe("")
        if not self._storage.is_dir(""):
            raise StorageError(f"{where} is not a directory: there is no checkpoint to load")
        if self._settle_s > 0:
            settle(self._storage, alive_s=_ALIVE_S, timeout_s=self._settle_s)
            self._settle_s = 0.0
        steps = list_steps(self._storage)
        if step is None:
            if not steps:
                raise StorageError(
                    f"{where} holds no committed checkpoint (no iter_… directory with a manifest)"
                )
            return steps[-1]
        if step not in steps:
            have = ", ".join(map(str, steps[-_MAX_NAMED:])) or "none"
            raise StorageError(f"{where} has no committed checkpoint of step {step}; it has {have}")
        return step

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
        self,
        paths: Sequence[tuple[str, str]],
        gathered: Sequence[bytes],
        options: LoadOptions,
    ) -> list[str]:
        """Stored entries of closed parts that no rank asked for; an error unless allowed.

        Ranks may ask for different parts (modules on their own layouts) and different entries
        (pipeline stages): what counts is what all of them ask for together.
        """
        said = [msgspec.msgpack.decode(data, type=_Asked) for data in gathered]
        closed = {name for asked in said for name in asked.closed}
        touched = np.zeros(len(paths), dtype=np.uint8)
        for asked in said:
            bits = np.frombuffer(zlib.decompress(asked.touched), dtype=np.uint8)
            touched |= np.unpackbits(bits, count=len(paths))
        found = [
            path
            for (part, path), bit in zip(paths, touched.tolist(), strict=True)
            if not bit and part in closed
        ]
        if found and not options.ignore_unexpected:
            raise MismatchError(
                f"the checkpoint holds {len(found)} entries that the state does not ask for: "
                f"{_some(found)}; pass ignore_unexpected=True to leave them"
            )
        return found

    def _read_all(self, snapshot: Snapshot, result: MatchResult, options: LoadOptions) -> None:
        """Fill every target; if one rank meets damage, all ranks raise."""
        error: Exception | None = None
        touched: list[str] = []
        own = {
            number
            for number, info in enumerate(snapshot.manifest.files)
            if info.writer == self._groups.rank
        }
        try:
            for key, leaves in result.targets.items():
                for leaf in leaves:
                    touched.append(leaf.key)
                    _read_leaf(snapshot, key, leaf, verify=options.verify, prefer=own)
        except Exception as caught:
            error = _with_touched(caught, touched)
        self._groups.control.agree(error, phase="load: read")

    def _restore(self, matcher: Matcher, requests: Sequence[_Request]) -> dict[str, object]:
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
        self._groups.control.agree(error, phase="load: restore")
        return values


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


def _stored_paths(snapshot: Snapshot) -> list[tuple[str, str]]:
    """(part, path) of every stored entry, the same on all ranks."""
    return [
        (name, path)
        for name, node in snapshot.manifest.parts.items()
        for path in leaf_paths(node, name)
    ]


def _asked(
    paths: Sequence[tuple[str, str]], requests: Sequence[_Request], touched: set[str]
) -> bytes:
    """What this rank asks for: a bit per stored entry, and the parts it wants nothing left of."""
    bits = np.array([path in touched for _, path in paths], dtype=np.bool_)
    return msgspec.msgpack.encode(
        _Asked(
            closed=tuple(r.name for r in requests if is_closed(r.part)),
            touched=zlib.compress(np.packbits(bits).tobytes(), 1),
        )
    )


@torch.no_grad()
def _read_leaf(
    snapshot: Snapshot, key: str, leaf: TensorLeaf, *, verify: bool, prefer: set[int]
) -> None:
    """Read one target's boxes: straight into contiguous host memory, else through a copy."""
    stored = torch_dtype(snapshot.tensor(key).dtype)
    for box, target in zip(leaf.boxes, leaf.locals, strict=True):
        if target.numel() == 0:
            continue
        direct = (
            target.device.type == "cpu" and target.is_contiguous() and target.dtype == stored
            and not target.is_conj() and not target.is_neg()
        )  # fmt: skip
        host = target if direct else torch.empty(box.shape, dtype=stored)
        snapshot.read_box(
            key, Box(box.offset, box.shape), tensor_bytes(host), verify=verify, prefer_files=prefer
        )
        if not direct:
            target.copy_(host)


def _with_touched(error: Exception, touched: Sequence[str]) -> Exception:
    """The same error, saying which targets were already written to."""
    if not isinstance(error, HoldfastError):
        return error
    return type(error)(
        f"{error}. Targets already written on this rank: {_some(touched)}; load again from a good "
        f"checkpoint before using them"
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    rest = len(names) - _MAX_NAMED
    return shown if rest <= 0 else f"{shown} and {rest} more"
