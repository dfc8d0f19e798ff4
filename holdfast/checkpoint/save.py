"""One save, start to end: signature, plan, stage, write, commit; every rank ends the same way."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
import numpy as np
import torch

import holdfast
from holdfast.checkpoint.plan import Assignment, make_plan
from holdfast.checkpoint.report import SaveReport
from holdfast.checkpoint.stage import Arena, Staging, content_digest, prepare_staging, stage
from holdfast.checkpoint.table import ChunkTable, chunk_table, decode_table, encode_table, signature
from holdfast.errors import PlanError, StorageError
from holdfast.format.digest import digest128
from holdfast.format.image import ImageEntry, chunk_name, layout_image
from holdfast.format.manifest import LayoutInfo
from holdfast.format.names import data_file, saving_dir, step_dir
from holdfast.format.values import Codecs
from holdfast.parallel import Layout, ProcessGroups
from holdfast.state.flatten import flatten_state
from holdfast.state.leaves import FlatState
from holdfast.state.torch_dtypes import TORCH_TO_NAME
from holdfast.storage import Storage
from holdfast.writer.commit import Committed, commit_save, discard_save
from holdfast.writer.job import prepare_directory
from holdfast.writer.records import CommitPlan, SaveHeader, column, encode_plan
from holdfast.writer.write import WriteJob, write_share

_DEADLINE_S = 600.0
"""How long a save may take from the start of its writing."""


class _Opening(msgspec.Struct, frozen=True, array_like=True):
    """What each rank says at the beginning of a save; small enough for one collective."""

    step: int
    overwrite: bool
    signature: str
    plan_digest: str
    nonce: str


class _Share(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator answers one rank when it has planned."""

    plan_digest: str
    file: int
    rows: bytes
    checks: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """A plan as one rank keeps it between saves.

    `signature`: this rank's structure. `rows`, `checks`: rows of its chunk table to write and to
    vouch for. `staging`: where the rows go in the arena. `commit`: the whole plan, on the
    coordinator only, with its encoded bytes.
    """

    signature: str
    plan_digest: str
    file: int
    rows: tuple[int, ...]
    checks: tuple[int, ...]
    names: tuple[str, ...]
    staging: Staging
    commit: tuple[CommitPlan, bytes] | None


@dataclass(slots=True)
class _Local:
    """This rank's state, taken apart."""

    flat: FlatState
    table: ChunkTable
    sources: list[torch.Tensor]
    keys: list[str]
    encoded: bytes
    signature: str
    values: bytes


@dataclass(slots=True)
class Clock:
    """Seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body under a name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


class Saver:
    """Saves under one set of groups; keeps the arena and the plan in hand between saves."""

    def __init__(
        self, storage: Storage, groups: ProcessGroups, *, codecs: Codecs, block_nbytes: int
    ) -> None:
        self._storage = storage
        self._groups = groups
        self._codecs = codecs
        self._block_nbytes = block_nbytes
        self._arena = Arena()
        self._plan: RankPlan | None = None
        self.num_plans = 0

    def close(self) -> None:
        """Give the arena back."""
        self._plan = None
        self._arena.close()

    def save(self, step: int, state: Mapping[str, object], *, overwrite: bool) -> SaveReport:
        """One synchronous save; see `Checkpointer.save`."""
        clock = Clock()
        with clock.phase("total"):
            with clock.phase("flatten"):
                local, error = self._take_apart(step, state, overwrite)
            with clock.phase("plan"):
                save_id, unchanged = self._open(step, local, overwrite, error)
                if local is None:
                    raise PlanError("the state could not be taken apart")
                plan = self._plan if unchanged else None
                if plan is None:
                    self._plan = None
                    plan = self._make_plan(local)
                    self.num_plans += 1
            directory = saving_dir(step, save_id)
            header = _header(step, save_id, overwrite=overwrite)
            try:
                self._write(plan, local, directory, header, clock)
                with clock.phase("commit"):
                    committed = self._commit(plan, directory, header)
            except BaseException:
                if self._groups.control.is_coordinator:
                    discard_save(self._storage, directory)
                raise
            self._plan = plan
        return SaveReport(
            step=step,
            path=self._storage.describe(committed.directory),
            nbytes=int(plan.staging.row_nbytes.sum()),
            total_nbytes=committed.nbytes,
            num_tensors=committed.num_tensors,
            planned=not unchanged,
            seconds=dict(clock.seconds),
        )

    def _take_apart(
        self, step: int, state: Mapping[str, object], overwrite: bool
    ) -> tuple[_Local | None, BaseException | None]:
        """Flatten on this rank; an exception is returned, to be agreed on."""
        try:
            self._groups.require_complete()
            if self._groups.control.is_coordinator:
                self._check_target(step, overwrite)
            flat = flatten_state(
                state, layout=self._groups.layout, rank=self._groups.rank, codecs=self._codecs
            )
            table, sources = chunk_table(flat)
            keys = list(flat.leaves)
            encoded = encode_table(table)
            layout = self._groups.layout
            return (
                _Local(
                    flat=flat,
                    table=table,
                    sources=sources,
                    keys=[keys[number] for number in table.tensor.tolist()],
                    encoded=encoded,
                    signature=signature(
                        encoded, choices=[layout.digest(), str(self._block_nbytes)]
                    ),
                    values=msgspec.json.encode(flat.nodes),
                ),
                None,
            )
        except Exception as error:
            return None, error

    def _check_target(self, step: int, overwrite: bool) -> None:
        self._storage.make_dir("")
        final = step_dir(step)
        if self._storage.exists(final) and not overwrite:
            raise StorageError(
                f"{self._storage.describe(final)} exists already; to replace it save with "
                f"overwrite=True"
            )

    def _open(
        self, step: int, local: _Local | None, overwrite: bool, error: BaseException | None
    ) -> tuple[str, bool]:
        """Agree that all ranks are at one save; the save's id, and whether no structure changed."""
        control = self._groups.control
        held = self._plan
        same = held is not None and local is not None and held.signature == local.signature
        opening = _Opening(
            step=step,
            overwrite=overwrite,
            signature=local.signature if local is not None else "",
            plan_digest=held.plan_digest if held is not None and same else "",
            nonce=secrets.token_hex(6),
        )
        gathered = control.agree(
            error, phase="save: begin", payload=msgspec.msgpack.encode(opening)
        )
        openings = [msgspec.msgpack.decode(data, type=_Opening) for data in gathered]
        for what in ("step", "overwrite"):
            said = {getattr(o, what) for o in openings}
            if len(said) > 1:
                ranks = {
                    value: [
                        rank
                        for rank, o in zip(control.ranks, openings, strict=True)
                        if getattr(o, what) == value
                    ]
                    for value in said
                }
                raise PlanError(f"save: the ranks disagree on {what}: {ranks}")
        plans = {o.plan_digest for o in openings}
        return openings[0].nonce, len(plans) == 1 and "" not in plans

    def _make_plan(self, local: _Local) -> RankPlan:
        """Gather all tables, prove and elect on the coordinator, take this rank's share."""
        control = self._groups.control
        gathered = control.gather(local.encoded, phase="save: tables")
        shares: list[bytes] | None = None
        commit: tuple[CommitPlan, bytes] | None = None
        error: Exception | None = None
        if gathered is not None:
            try:
                commit, shares = self._plan_all(gathered)
            except Exception as caught:
                error = caught
                shares = [b""] * control.size
        data = control.scatter(shares, phase="save: shares")
        if error is not None or not data:
            control.agree(error, phase="save: plan failed")
            raise PlanError("the coordinator could not plan the save")
        share = msgspec.msgpack.decode(data, type=_Share)
        return self._take_share(local, share, commit)

    def _plan_all(self, tables: Sequence[bytes]) -> tuple[tuple[CommitPlan, bytes], list[bytes]]:
        layout, control = self._groups.layout, self._groups.control
        plan, assignments = make_plan(
            [decode_table(data, rank=r) for data, r in zip(tables, control.ranks, strict=True)],
            ranks=control.ranks,
            coordinates=[
                {**layout.coordinate(r), **layout.expert_coordinate(r)} for r in control.ranks
            ],
            layout=layout_info(layout),
            signature=digest128("".join(digest128(data) for data in tables).encode()),
            block_nbytes=self._block_nbytes,
        )
        encoded = encode_plan(plan)
        digest = digest128(encoded)
        return (plan, encoded), [_encode_share(a, digest) for a in assignments]

    def _take_share(
        self, local: _Local, share: _Share, commit: tuple[CommitPlan, bytes] | None
    ) -> RankPlan:
        rows = tuple(np.frombuffer(share.rows, dtype=np.int64).tolist())
        entries = []
        for row in rows:
            key = local.keys[row]
            source = local.sources[row]
            leaf = local.flat.leaves[key]
            name = chunk_name(
                key,
                offset=local.table.offset[row, : len(leaf.shape)].tolist(),
                shape=tuple(source.shape),
                global_shape=leaf.shape,
            )
            entries.append(
                ImageEntry(name=name, dtype=TORCH_TO_NAME[source.dtype], shape=tuple(source.shape))
            )
        staging = prepare_staging(
            self._arena, layout_image(entries), [local.sources[row] for row in rows]
        )
        return RankPlan(
            signature=local.signature,
            plan_digest=share.plan_digest,
            file=share.file,
            rows=rows,
            checks=tuple(np.frombuffer(share.checks, dtype=np.int64).tolist()),
            names=tuple(entry.name for entry in entries),
            staging=staging,
            commit=commit,
        )

    def _job(
        self,
        plan: RankPlan,
        local: _Local,
        directory: str,
        header: SaveHeader,
        checks: Sequence[int],
    ) -> WriteJob:
        control = self._groups.control
        return WriteJob(
            directory=directory,
            position=control.index,
            rank=control.rank,
            header=header,
            plan_digest=plan.plan_digest,
            block_nbytes=self._block_nbytes,
            file=data_file(plan.file) if plan.file >= 0 else None,
            header_nbytes=len(plan.staging.image.header) if plan.file >= 0 else 0,
            starts=column(plan.staging.starts),
            row_nbytes=column(plan.staging.row_nbytes),
            checks=column(np.array(checks, dtype=np.uint64)),
            values=local.values,
            deadline_s=_DEADLINE_S,
        )

    def _write(
        self, plan: RankPlan, local: _Local, directory: str, header: SaveHeader, clock: Clock
    ) -> None:
        """Stage and write this rank's share; all ranks raise if one cannot."""
        error: Exception | None = None
        try:
            with clock.phase("stage"):
                stage(plan.staging, [local.sources[row] for row in plan.rows], plan.names)
                checks = [content_digest(local.sources[row]) for row in plan.checks]
            with clock.phase("write"):
                job = self._job(plan, local, directory, header, checks)
                prepare_directory(self._storage, job, *(plan.commit or (None, b"")))
                write_share(self._storage, job, plan.staging.view)
        except Exception as caught:
            error = caught
        self._groups.control.agree(error, phase="save: written")

    def _commit(self, plan: RankPlan, directory: str, header: SaveHeader) -> Committed:
        """Commit on the coordinator; every rank learns the outcome."""
        error: Exception | None = None
        payload = b""
        if plan.commit is not None:
            try:
                made = commit_save(
                    self._storage,
                    directory,
                    plan=plan.commit[0],
                    plan_digest=plan.plan_digest,
                    header=header,
                )
                payload = msgspec.msgpack.encode(made)
            except Exception as caught:
                error = caught
        outcomes = self._groups.control.agree(error, phase="save: committed", payload=payload)
        return msgspec.msgpack.decode(outcomes[0], type=Committed)


def layout_info(layout: Layout) -> LayoutInfo:
    """A layout as the manifest keeps it."""
    axes = {
        name: getattr(layout, name)
        for name in ("tp", "cp", "ep", "dp", "pp", "expt_tp", "replicas")
    }
    return LayoutInfo(name=layout.name, axes=axes, order=layout.order, ranks=list(layout.ranks))


def _header(step: int, save_id: str, *, overwrite: bool) -> SaveHeader:
    return SaveHeader(
        step=step,
        save_id=save_id,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        holdfast=holdfast.__version__,
        torch=str(torch.__version__),
        overwrite=overwrite,
    )


def _encode_share(assignment: Assignment, plan_digest: str) -> bytes:
    return msgspec.msgpack.encode(
        _Share(
            plan_digest=plan_digest,
            file=assignment.file,
            rows=assignment.rows.astype(np.int64).tobytes(),
            checks=assignment.checks.astype(np.int64).tobytes(),
        )
    )
