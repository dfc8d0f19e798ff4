"""The commit: from done-records on storage to a checkpoint with its final name.

Plan, data files and done-records are on storage. So a commit needs no other process of the save.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from holdfast.arrays.types import IntArray, WordArray
from holdfast.collector import collector_paused
from holdfast.decoding import convert_as, decode_json_as
from holdfast.errors import (
    CorruptionError,
    DriftError,
    HoldfastError,
    PlanError,
    StorageError,
    shorten_ranks,
    some_sentences,
)
from holdfast.format.checkpoint_files import CheckpointFiles
from holdfast.format.digest import digest128
from holdfast.format.envelopes.torch_dist import MetadataMemo, extra_files
from holdfast.format.fingerprint import Partial, combine
from holdfast.format.index import ChunkIndex, encode_index, validate_index
from holdfast.format.manifest import (
    KINDS_PART,
    VERSIONS_PART,
    ExtraInfo,
    FileInfo,
    IndexInfo,
    Manifest,
    TensorInfo,
    Totals,
    decode_metadata,
    decode_versions,
    encode_manifest,
)
from holdfast.format.names import (
    INDEX,
    LATEST,
    MANIFEST,
    data_file,
    point_to_newest,
    step_dir,
)
from holdfast.format.stored_copies import find_copies
from holdfast.format.summaries import annotate
from holdfast.format.values import Node, merge_nodes
from holdfast.format.verifier import verify_source
from holdfast.format.versions import Records, known_save_id, retire, retire_replaced, save_id_of
from holdfast.storage import Storage
from holdfast.storage.reading import (
    file_stamp,
    for_each,
    held_with_name,
    in_threads,
    is_durable_at_once,
    requests_of,
    sizes_below,
)
from holdfast.writer.outcomes import is_committed, is_discarded
from holdfast.writer.records import (
    DONE_DIR,
    CommitPlan,
    DoneRecord,
    EncodedPlan,
    PlanMemo,
    SaveHeader,
    done_file,
    read_sealed,
)

_LOG = logging.getLogger("holdfast")


def commit_save(
    storage: Storage,
    directory: str,
    *,
    plan: EncodedPlan,
    header: SaveHeader,
    sizes: Mapping[str, int] | None = None,
    own: DoneRecord | None = None,
    others: Sequence[DoneRecord] = (),
    before: Counter[str] | None = None,
    is_repair: bool = False,
) -> None:
    """Check that every planned byte is accounted for, then give the checkpoint its name.

    A failure after the rename (of the pointer, or of removing the replaced version) is logged as a
    warning, and the next save or repair makes up for it. A replaced version is kept under another
    name while it is read.

    Args:
        storage: Root of the checkpoints.
        directory: Directory of the save in progress, with the done-records of all ranks.
        plan: Plan of all ranks; every record states its digest.
        header: Header of the save.
        sizes: Sizes of the files in the directory as a look at it has shown, where one look shows
            all of them.
        own: The done-record of this process, which need not be read back.
        others: Those of all other ranks, if they are at hand.
        before: The storage's requests before this process's share of the save; None for a repair,
            which does not know them.
        is_repair: The save's processes are gone. Its files may be copies, made while they were
            written: each that is not the very file that its rank wrote is read, and compared with
            the digests.

    Raises:
        PlanError: Values or replicas differ between ranks; the message names key and ranks.
        CorruptionError: A record does not belong to this save, or a copy is damaged.
        StorageError: The storage failed. In all these cases the previous checkpoint is untouched,
            except in one that the message names: the rename was made, could not be made durable and
            could not be undone.

    Cost: O(rows) vector work, two small files, five syncs and two for the pointer.
    """
    # Phase 1: prove that all bytes are there and complete the directory.
    try:
        done = _complete(storage, directory, plan, header, sizes, own, others, is_repair)
    except StorageError:
        if storage.exists(directory) or not is_committed(
            storage, step=header.step, save_id=header.save_id
        ):
            raise
        # Otherwise a repair took this save for abandoned and has finished it.
    else:
        # Phase 2: give it its name. From here on the checkpoint exists.
        requests: Counter[str] = Counter()
        if before is not None:
            for record in done.records:
                requests += Counter(record.requests if record is not own else {})
            requests += requests_of(storage) - before
        annotate(
            storage, directory, done.manifest, requests=requests, held=done.held, aside=done.aside
        )
        replaces = header.replaces if is_repair else None
        publish(
            storage,
            directory,
            Publication(header.step, header.save_id, header.overwrite, replaces=replaces),
        )
    # Phase 3: the pointer, for people and other tools only: a failure is not one of the save.
    try:
        point_to_newest(storage, committed=header.step)
    except HoldfastError as error:
        _LOG.warning(
            "step %d is committed, but %s cannot be replaced: %s; the next save or `holdfast "
            "repair` will replace it",
            header.step,
            storage.describe(LATEST),
            error,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Completed:
    """A complete checkpoint that lacks only its name.

    Args:
        manifest: Of it.
        records: Of all ranks.
        held: Small files that come with the name, where a name can hold some; else None.
        aside: Paths of the notes of the save that are to be gone with its present name.
    """

    manifest: Manifest
    records: list[DoneRecord]
    held: dict[str, bytes] | None
    aside: list[str]


def _complete(
    storage: Storage,
    directory: str,
    plan: EncodedPlan,
    header: SaveHeader,
    sizes: Mapping[str, int] | None,
    own: DoneRecord | None,
    others: Sequence[DoneRecord],
    is_repair: bool,
) -> _Completed:
    """Make the directory a complete, durable checkpoint that lacks only its name."""
    if sizes is None:
        sizes = sizes_below(storage, directory)
    # On a disk every record is read back: what counts is what is there.
    known: dict[int, DoneRecord] = {}
    if own is not None and sizes is not None:
        known = {each.position: each for each in (*others, own)}
    # First, prove that the records of all ranks fit the plan; assemble index and manifest.
    try:
        with collector_paused():
            records = for_each(
                storage,
                lambda position: (
                    known.get(position) or read_done(storage, directory, position, plan, header)
                ),
                range(len(plan.plan.ranks)),
            )
            for each in others:
                where = f"the done-record of rank {plan.plan.ranks[each.position]}"
                _require_fit(each, each.position, plan, header, where=where)
            index_bytes, manifest, extras = assemble(plan.plan, records, header, memo=plan.memo)
            manifest_bytes = encode_manifest(manifest, texts=plan.memo.texts)
    except HoldfastError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"{storage.describe(directory)}: the plan and the records do not fit each other: "
            f"{error!r}; save again"
        ) from error
    # Second, compare the sizes of the data files with what their writers reported.
    _compare_sizes(storage, directory, manifest, sizes)
    if is_repair:
        files = CheckpointFiles(
            storage, directory, records=Records(manifest_bytes, index_bytes), manifest=manifest
        )
        _prove_copies(files, records)
    # Third, write index and manifest, and what other programs begin with.
    present = storage.list(directory) if sizes is None else [*sizes]
    for name in (*extras, INDEX, MANIFEST):
        if name in present:  # of an earlier, killed commit
            storage.remove_tree(f"{directory}/{name}", durable=False)
    _write_synced(storage, directory, extras)
    held = held_with_name(storage, {INDEX: index_bytes, MANIFEST: manifest_bytes})
    if not held:
        for name, data in ((INDEX, index_bytes), (MANIFEST, manifest_bytes)):
            _write_synced(storage, directory, {name: data})
    # Fourth, remove the notes of the save, which a reader would report as stray files.
    aside: list[str] = []
    if sizes is None:
        unnamed = [name for name in present if name.startswith((".tmp-", ".trash-"))]
        for name in ("plan", DONE_DIR, *unnamed):  # the latter are of an earlier, killed commit
            storage.remove_tree(f"{directory}/{name}", durable=False)
    else:
        # Where a look shows all files, the name knows of them, and they go with it.
        kept = {*manifest.file_sizes, *extras, INDEX, MANIFEST}
        aside = [name for name in present if name not in kept]
    # Fifth, sync the names inside. The rename must not be durable before them: after a crash, a
    # directory with its final name would lack files.
    if plan.plan.writers:
        storage.sync_dir(f"{directory}/data")
    storage.sync_dir(directory)
    return _Completed(manifest=manifest, records=records, held=held, aside=aside)


def _compare_sizes(
    storage: Storage, directory: str, manifest: Manifest, sizes: Mapping[str, int] | None
) -> None:
    """Raise StorageError unless every data file has the size that its writer reported."""
    if sizes is not None and any(sizes.get(info.name) != info.nbytes for info in manifest.files):
        # A listing of many pages may have shown a record, and not yet the file before it.
        sizes = None
    names = [info.name for info in manifest.files]
    for info, nbytes in zip(
        manifest.files,
        for_each(storage, lambda name: storage.size(f"{directory}/{name}"), names)
        if sizes is None
        else [sizes.get(name, 0) for name in names],
        strict=True,
    ):
        if nbytes != info.nbytes:
            raise StorageError(
                f"{storage.describe(f'{directory}/{info.name}')} has {nbytes} bytes, its writer "
                f"(rank {info.writer}) reported {info.nbytes}; save again"
            )


def _prove_copies(files: CheckpointFiles, records: Iterable[DoneRecord]) -> None:
    """Raise CorruptionError if a data file is a copy that lacks some of what its rank wrote.

    A run that was copied while it saved may have a data file from before its end, of full size,
    and the record of its end.

    Cost: a look at each file; all bytes of those that are copies.
    """
    storage = files.storage
    for record in records:
        if record.file is None or record.stamp is None:
            continue
        path = f"{files.directory}/{record.file}"
        if file_stamp(storage, path) == record.stamp:
            continue
        with closing(storage.open(path)) as source:
            damages = verify_source(files, record.file, source)
        if damages:
            raise CorruptionError(
                f"{storage.describe(path)} is a copy from before its writer had ended, or "
                f"damaged: {damages[0]}; copy the run again, or save again"
            )


def _write_synced(storage: Storage, directory: str, files: Mapping[str, bytes]) -> None:
    """Write small files and sync their bytes, those of several at the same time.

    Their names are synced with the directory: no process looks for one before the directory has
    its own.
    """
    with ExitStack() as stack:
        sinks = []
        for name, data in files.items():
            path = f"{directory}/{name}"
            sink = stack.enter_context(storage.create(path, nbytes=len(data)))
            sink.write_at(0, memoryview(data))
            sinks.append(sink)
        in_threads(lambda sink: sink.sync(), sinks, at_once=len(sinks), name="sync")


def assemble(
    plan: CommitPlan,
    records: list[DoneRecord],
    header: SaveHeader,
    *,
    memo: PlanMemo | None = None,
) -> tuple[bytes, Manifest, dict[str, bytes]]:
    """Build index and manifest from the records and prove them against the plan.

    Args:
        plan: Plan of all ranks.
        records: Records of all ranks, in the order of the plan.
        header: Header of the save.
        memo: What saves by this plan have in common.

    Returns:
        The index, the manifest, and by name the files for other programs, which are in it.

    Raises:
        PlanError, CorruptionError: See `commit_save`.

    Cost: linear in rows and ranks.
    """
    memo = PlanMemo() if memo is None else memo
    planned = plan.row_nbytes
    numbers = range(len(plan.writers))
    files = [data_file(number, envelope=plan.envelope) for number in numbers]
    index = build_index(plan, records, files, planned=planned)
    compare_checks(plan, records)
    parts = _merge_values(plan, records, memo)
    index_bytes = encode_index(index)
    tensors = _tensors(plan, records, memo)
    manifest = _build_manifest(plan, header, records, files, index, index_bytes, parts, tensors)
    # Of all that the proof looks at, the plan leaves only this open: the places of the chunks, and
    # the sizes of the files. (It looks at the number of digests, not at what they are.)
    facts = (
        [records[position].starts for position in plan.writers],
        [(file.nbytes, file.header_nbytes) for file in manifest.files],
    )
    if memo.proven != facts:
        validate_index(index, manifest)
        memo.proven = facts
    _compare_copies(index, manifest, header)
    extras: dict[str, bytes] = {}
    if plan.envelope == "torch_dist":
        extras = _extra_files(index, manifest, memo.metadata)
        infos = [
            ExtraInfo(name=name, nbytes=len(data), digest=digest128(data))
            for name, data in extras.items()
        ]
        manifest = msgspec.structs.replace(manifest, extras=infos)
    return index_bytes, manifest, extras


def _extra_files(index: ChunkIndex, manifest: Manifest, memo: MetadataMemo) -> dict[str, bytes]:
    """Make the files for PyTorch and Megatron; log what they cannot have."""
    made = extra_files(
        index, manifest.tensors, manifest.parts, [file.name for file in manifest.files], memo
    )
    if made.notes:
        _LOG.info(
            "step %d, as PyTorch and Megatron read it: %s", manifest.step, "; ".join(made.notes)
        )
    return made.files


class Publication(NamedTuple):
    """What `publish` makes of a complete directory: one version of a step.

    Args:
        step: The step.
        save_id: Of the version.
        overwrite: True if it may replace another one.
        verb: "save" or "copy": what messages advise.
        replaces: Save id of the only one that it may replace; None for any.
    """

    step: int
    save_id: str
    overwrite: bool
    verb: str = "save"
    replaces: str | None = None

    @property
    def final(self) -> str:
        """The name that the directory gets."""
        return step_dir(self.step)


def publish(storage: Storage, directory: str, new: Publication) -> None:
    """Make the rename that commits; an old checkpoint of the step lives until then."""
    final = new.final
    if new.replaces is not None:
        there = known_save_id(storage, final)
        if there not in (None, new.replaces, new.save_id):
            raise StorageError(
                f"{storage.describe(final)} was saved again, as {there}, while save {new.save_id} "
                f"was being finished; the next repair removes that one"
            )
    if new.overwrite and storage.exists(final) and _replace(storage, directory, new):
        return
    try:
        storage.rename_dir(directory, final)
    except StorageError as error:
        if _is_published(storage, new, is_durable=_was_not_made(error)):
            return
        _take_back(storage, directory, new, error)
        if storage.exists(final):
            raise StorageError(
                f"{storage.describe(final)} exists already; to replace it, {new.verb} with "
                f"overwrite=True"
            ) from error
        raise


def _replace(storage: Storage, directory: str, new: Publication) -> bool:
    """Exchange the new version with the old one, and retire the old one.

    Returns False if the old version has disappeared and a plain rename is due.
    """
    try:
        storage.exchange_dir(directory, new.final)
    except StorageError as error:
        was_made = not _was_not_made(error)
        is_gone = is_discarded(storage, directory)
        if not (was_made or is_gone or storage.exists(new.final)):
            return False
        # Where the old version is gone, a repair has made the new name durable and removed it.
        if not _is_published(storage, new, is_durable=is_gone or not was_made):
            if was_made:
                _take_back(storage, directory, new, error)
            raise
    try:
        retire(storage, directory, new.step)
        retire_replaced(storage)
    except StorageError as error:
        if storage.exists(directory):  # otherwise a repair has removed it in the meantime
            _LOG.warning(
                "step %d is committed, but the version that it replaced cannot be removed: %s; "
                "`holdfast repair` will remove it",
                new.step,
                error,
            )
    return True


def _is_published(storage: Storage, new: Publication, *, is_durable: bool) -> bool:
    """Return True if a new version is committed, although this process could not rename it.

    Either a repair took this save for abandoned and has finished it; or the answer was lost, and
    what can be seen is durable. Undoing it then would take the place from a version that another
    save has put there since.
    """
    if save_id_of(storage, new.final) != new.save_id:
        return False
    return is_durable_at_once(storage) or (
        is_durable and is_committed(storage, step=new.step, save_id=new.save_id)
    )


def _was_not_made(error: StorageError) -> bool:
    """Return True if a failed rename changed nothing: the source was gone or the name taken.

    A sync that fails after the rename has other causes.
    """
    return isinstance(error.__cause__, FileNotFoundError | FileExistsError)


def _take_back(storage: Storage, directory: str, new: Publication, cause: StorageError) -> None:
    """Undo a rename that was made but not made durable; StorageError if it cannot be undone.

    Does nothing if the new version is not at its final name. A save that fails must not show its
    checkpoint: after a crash of the machine it might be gone again.
    """
    final = new.final
    try:
        if known_save_id(storage, final) != new.save_id:
            return
        with suppress(StorageError):
            if storage.exists(directory):
                storage.exchange_dir(directory, final)
            else:
                storage.rename_dir(final, directory)
        if known_save_id(storage, final) != new.save_id:
            return
    except StorageError as unknown:
        raise StorageError(
            f"{storage.describe(final)}: it cannot be known now whether the new version is in "
            f"place, which may be lost if the machine stops: {cause}; {unknown}. Check the "
            f"storage, then {new.verb} again",
            details=unknown.details,
        ) from cause
    raise StorageError(
        f"{storage.describe(final)}: the new version is in place and complete, but it may be "
        f"lost if the machine stops: {cause}. It can be loaded; check the storage, then "
        f"{new.verb} again"
    ) from cause


def read_done(
    storage: Storage, directory: str, position: int, plan: EncodedPlan, header: SaveHeader
) -> DoneRecord:
    """Read the done-record of one rank; it must belong to this save and plan.

    Raises:
        StorageError: It is not there, with a FileNotFoundError as cause; or cannot be read.
        CorruptionError, PlanError: It is damaged, or of another save or plan.
    """
    path = f"{directory}/{done_file(position)}"
    record = read_sealed(storage, path, DoneRecord)
    _require_fit(record, position, plan, header, where=storage.describe(path))
    return record


def _require_fit(
    record: DoneRecord, position: int, plan: EncodedPlan, header: SaveHeader, *, where: str
) -> None:
    """Raise unless a done-record is that of a rank in this save under this plan."""
    rank = plan.plan.ranks[position]
    if record.position != position or record.save_id != header.save_id:
        raise CorruptionError(
            f"{where} is the record of save {record.save_id}, position {record.position}; "
            f"save {header.save_id}, position {position} (rank {rank}) is needed"
        )
    if record.plan_digest != plan.digest:
        raise PlanError(
            f"{where}: rank {rank} wrote under plan {record.plan_digest}, the commit has plan "
            f"{plan.digest}"
        )


def build_index(
    plan: CommitPlan, records: list[DoneRecord], files: list[str], *, planned: IntArray
) -> ChunkIndex:
    """Build the index; PlanError if a rank did not write what was planned."""
    bounds = np.searchsorted(plan.row_file, np.arange(len(files) + 1))
    if (np.diff(plan.row_file) < 0).any() or bounds[0] != 0 or bounds[-1] != len(planned):
        raise PlanError("the rows of the plan are not in the order of its files")
    num_blocks = -(-planned // plan.block_nbytes)
    digest_ptr = np.concatenate([[0], np.cumsum(num_blocks)]).astype(np.int64)
    written = [records[position] for position in plan.writers]
    for number, record in enumerate(written):
        first, stop = int(bounds[number]), int(bounds[number + 1])
        where = f"rank {plan.ranks[record.position]}, {files[number]}"
        if record.file != files[number]:
            raise PlanError(f"{where}: the rank reports file {record.file} instead")
        if record.row_nbytes != planned[first:stop].tobytes():
            raise PlanError(_first_difference(plan, first, planned[first:stop], record, where))
        if len(record.starts) != len(record.row_nbytes):
            raise PlanError(f"{where}: its record lacks the places of chunks")
        pointers = digest_ptr[first : stop + 1] - digest_ptr[first]
        if record.digest_ptr != pointers.tobytes() or len(record.digests) != 8 * int(pointers[-1]):
            raise PlanError(f"{where}: its record lacks block digests")
    writers = set(plan.writers)
    for position, record in enumerate(records):
        if position not in writers and record.file is not None:
            raise PlanError(
                f"rank {plan.ranks[position]} wrote {record.file}, which was not planned"
            )
    return ChunkIndex(
        tensor=plan.row_tensor,
        file=plan.row_file,
        offset=plan.row_offset,
        extent=plan.row_extent,
        start=np.frombuffer(b"".join(record.starts for record in written), dtype=np.int64),
        nbytes=planned,
        copy=plan.row_copy,
        holders=plan.row_holders,
        holder_ptr=plan.holder_ptr,
        holder=plan.holder,
        digest_ptr=digest_ptr,
        digest=np.frombuffer(b"".join(record.digests for record in written), dtype=np.uint64),
    )


def _first_difference(
    plan: CommitPlan, first: int, planned: IntArray, record: DoneRecord, where: str
) -> str:
    """Describe the first chunk of a file whose length is not the planned one."""
    written = np.frombuffer(record.row_nbytes, dtype=np.int64)
    if len(planned) != len(written):
        return f"{where}: {len(planned)} chunks were planned, {len(written)} were written"
    row = int(np.flatnonzero(planned != written)[0])
    key = plan.keys[int(plan.row_tensor[first + row])]
    return f"{where}: {key} was planned with {planned[row]} bytes and written with {written[row]}"


def compare_checks(plan: CommitPlan, records: list[DoneRecord]) -> None:
    """Prove that boxes held by several ranks without a declaration have equal bytes on all."""
    if len(plan.check_group) == 0:
        return
    num_planned = np.bincount(plan.check_position, minlength=len(records)).tolist()
    for rank, record, num in zip(plan.ranks, records, num_planned, strict=True):
        if len(record.checks) != 8 * num:
            raise PlanError(
                f"rank {rank} has the digests of {len(record.checks) // 8} replicated boxes, {num} "
                f"were planned"
            )
    reported = np.zeros(len(plan.check_group), dtype=np.uint64)
    # Each rank reports its digests in plan order: sorted by rank, stably, they fit end to end.
    by_rank = np.argsort(plan.check_position, kind="stable")
    reported[by_rank] = np.frombuffer(b"".join(r.checks for r in records), dtype=np.uint64)
    order = np.argsort(plan.check_group, kind="stable")
    group = plan.check_group[order]
    first = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    low = np.minimum.reduceat(reported[order], first)
    high = np.maximum.reduceat(reported[order], first)
    bad = np.flatnonzero(low != high)
    if len(bad) == 0:
        return
    groups = np.split(order, first[1:])
    drifts = [_holders(plan, reported, groups[b]) for b in bad.tolist()]
    sentences = [f"{key}: {describe_drift(holders)}" for key, holders in drifts]
    keys = list(dict.fromkeys(key for key, _ in drifts))
    raise DriftError(
        f"{some_sentences(sentences, most=5)}. Several ranks hold these tensors under one key, and "
        f"nothing declares them different. Either a rank has computed or kept wrong values, or "
        f"they are not meant to be equal: then give each its own key, declare the shards with a "
        f"DTensor or Sharded(...), or store what is each rank's own (a metric) as PerRank(...)"
        f"{_about_statistics(keys)}",
        details={
            "odd_ranks": {rank for _, holders in drifts for rank in odd_ranks(holders)},
            "keys": keys,
        },
    )


_STATISTICS = ("running_mean", "running_var")


def _about_statistics(keys: Sequence[str]) -> str:
    """Return what else to do if all these tensors are statistics of BatchNorm; else nothing."""
    if not all(key.rpartition(".")[2] in _STATISTICS for key in keys):
        return ""
    return (
        ". Of a model in DistributedDataParallel, which gives the first rank's statistics to all, "
        "save ModuleState(model, buffers='first_rank'); or use SyncBatchNorm"
    )


def _compare_copies(index: ChunkIndex, manifest: Manifest, header: SaveHeader) -> None:
    """Prove that copies of a box have equal bytes; DriftError or, by `on_drift`, a warning."""
    if manifest.totals.stored_nbytes == manifest.totals.nbytes:
        return
    copies = find_copies(index)
    drift = copies.drift(index, manifest)
    if not drift:
        return
    if header.on_drift == "warn":
        _LOG.warning("step %d is stored with copies that differ: %s", header.step, drift)
        return
    tensors = index.tensor[copies.row[copies.ptr[:-1][copies.differs]]]
    raise DriftError(
        f"{drift}. Ranks that hold one tensor must hold the same bytes: find out which rank's "
        f"memory is wrong (save(check_replicas=True) names the odd one), or give each its own key; "
        f'on_drift="warn" stores them as they are',
        details={"keys": list(dict.fromkeys(manifest.tensors[t].key for t in tensors.tolist()))},
    )


def _holders(plan: CommitPlan, reported: WordArray, rows: IntArray) -> tuple[str, list[list[int]]]:
    """Return the key of one box, and for each content the ranks that hold it."""
    by_content: dict[int, list[int]] = defaultdict(list)
    for row in rows.tolist():
        by_content[int(reported[row])].append(plan.ranks[int(plan.check_position[row])])
    return plan.keys[int(plan.check_tensor[rows[0]])], list(by_content.values())


def _merge_values(plan: CommitPlan, records: list[DoneRecord], memo: PlanMemo) -> dict[str, Node]:
    """Merge the trees of all ranks into one, part by part; of identical bytes one is decoded."""
    parts: dict[bytes, dict[str, bytes]] = {}
    # Ranks whose random streams differ have other bytes, and yet most parts in common.
    distinct: dict[bytes, bytes] = {}
    supplied: dict[str, list[tuple[str, bytes]]] = {}
    for position, record in enumerate(records):
        label = f"rank {plan.ranks[position]}"
        if record.values not in parts:
            own = parts[record.values] = {}
            for name, raw in _decode(record.values, dict[str, msgspec.Raw], label).items():
                data = bytes(raw)
                own[name] = distinct.setdefault(data, data)
        for name, data in parts[record.values].items():
            supplied.setdefault(name, []).append((label, data))
    nodes: dict[bytes, Node] = {}

    def merge(name: str) -> Node:
        having: list[tuple[str, Node]] = []
        for label, data in supplied[name]:
            if data not in nodes:
                nodes[data] = _decode(data, Any, label)
            having.append((label, nodes[data]))
        return merge_nodes(having, path=name)

    return {name: memo.part(name, supplied[name], partial(merge, name)) for name in supplied}


def _decode(data: bytes, kind: Any, label: str) -> Any:
    """Decode values of one rank; CorruptionError if they are not JSON."""
    try:
        return decode_json_as(data, kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptionError(f"{label}: its values cannot be decoded: {error}") from error


def _metadata(header: SaveHeader) -> dict[str, Any]:
    """Return the caller's metadata of a save; CorruptionError if it cannot be decoded."""
    try:
        return decode_metadata(msgspec.json.decode(header.metadata)) if header.metadata else {}
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"the save's metadata cannot be decoded: {error}") from error


def _build_manifest(
    plan: CommitPlan,
    header: SaveHeader,
    records: list[DoneRecord],
    files: list[str],
    index: ChunkIndex,
    index_bytes: bytes,
    parts: dict[str, Node],
    tensors: list[TensorInfo],
) -> Manifest:
    """Build the manifest of a complete save."""
    nbytes = np.asarray(index.nbytes, dtype=np.int64)
    primary = np.asarray(index.copy) == 0
    noted = parts.pop(VERSIONS_PART, None)
    kinds = parts.pop(KINDS_PART, None)
    return Manifest(
        step=header.step,
        save_id=header.save_id,
        created=header.created,
        holdfast=header.holdfast,
        torch=header.torch,
        layouts=list(plan.layouts),
        placements=list(plan.placements),
        signature=plan.signature,
        block_nbytes=plan.block_nbytes,
        tensors=tensors,
        parts=parts,
        metadata=_metadata(header),
        versions=None if noted is None else decode_versions(noted),
        kinds=None if kinds is None else _kinds(kinds),
        files=[
            FileInfo(
                name=files[number],
                nbytes=records[position].nbytes,
                header_nbytes=records[position].header_nbytes,
                header_digest=records[position].header_digest,
                writer=plan.ranks[position],
                coordinate=plan.coordinates[position],
                envelope=plan.envelope,
            )
            for number, position in enumerate(plan.writers)
        ],
        index=IndexInfo(
            nbytes=len(index_bytes), digest=digest128(index_bytes), num_rows=len(plan.row_tensor)
        ),
        totals=Totals(
            num_tensors=len(plan.keys),
            nbytes=int(nbytes[primary].sum()),
            stored_nbytes=int(nbytes.sum()),
        ),
    )


def _kinds(merged: Node) -> dict[str, dict[str, list[str]]]:
    """Return the classes of objects from the tree in which all ranks have entered theirs."""
    by_part = convert_as(merged, dict[str, dict[str, dict[str, bool]]])
    return {
        part: {path: [*names] for path, names in by_path.items()}
        for part, by_path in by_part.items()
    }


def _tensors(plan: CommitPlan, records: list[DoneRecord], memo: PlanMemo) -> list[TensorInfo]:
    """Describe the tensors of the plan, with fingerprints if the writers have them."""
    if not any(record.lanes for record in records):
        return memo.tensors(partial(_described, plan, [None] * len(plan.keys)))
    return _described(plan, _fingerprints(plan, records))


def _described(plan: CommitPlan, fingerprints: Sequence[str | None]) -> list[TensorInfo]:
    columns = (plan.keys, plan.dtypes, plan.shapes, plan.tensor_layouts, plan.tensor_placements)
    return [
        TensorInfo(key=key, dtype=dtype, shape=[*shape], layout=layout, placement=placement,
                   fingerprint=fingerprint)
        for key, dtype, shape, layout, placement, fingerprint in zip(
            *columns, fingerprints, strict=True
        )
    ]  # fmt: skip


def _fingerprints(plan: CommitPlan, records: list[DoneRecord]) -> list[str | None]:
    """Return the fingerprint of each tensor from the writers' shares."""
    written = [records[position] for position in plan.writers]
    num_rows = np.bincount(plan.row_file, minlength=len(written)).tolist()
    for record, num in zip(written, num_rows, strict=True):
        if len(record.lanes) != 16 * num:
            rank = plan.ranks[record.position]
            raise PlanError(f"rank {rank}: {num} chunks, {len(record.lanes) // 16} fingerprints")
    lanes = np.frombuffer(b"".join(record.lanes for record in written), dtype=np.uint64)
    shares: list[list[Partial]] = [[] for _ in plan.keys]
    numel = plan.row_extent.prod(axis=1, dtype=np.int64)
    for row in np.flatnonzero(plan.row_copy == 0).tolist():
        pair = (int(lanes[2 * row]), int(lanes[2 * row + 1]))
        shares[plan.row_tensor[row]].append(Partial(lanes=pair, numel=int(numel[row])))
    return [
        combine(partials, dtype=dtype, shape=shape)
        for partials, dtype, shape in zip(shares, plan.dtypes, plan.shapes, strict=True)
    ]


def odd_ranks(holders: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks that do not hold what most ranks hold; empty without a majority.

    Args:
        holders: For each content, the ranks that hold it.
    """
    most, *others = sorted(holders, key=len, reverse=True)
    if not others or len(most) == len(others[0]):
        return []
    return sorted(rank for ranks in others for rank in ranks)


def describe_drift(holders: Sequence[Sequence[int]]) -> str:
    """Describe which ranks hold which content of one box; `holders` as for `odd_ranks`.

    The odd ranks come first, because a long message is cut off.
    """
    named = shorten_ranks(odd_ranks(holders), most=None)
    odd = f" (odd ones by majority: [{named}])" if named else ""
    lists = [shorten_ranks(sorted(e), most=None) for e in sorted(holders, key=len, reverse=True)]
    return f"different bytes{odd} on {' | '.join(f'ranks {each}' for each in lists)}"
