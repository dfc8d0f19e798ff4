"""A checkpoint copied to another place, byte for byte, and committed there as a save is.

The files are streamed into the directory of a save in progress. Every byte is compared with its
digest on the way, so damage is not copied. Then the directory gets its name in one step. A copy
that was interrupted is continued: its directory has the manifest's digest in its name, and files
that are whole in it are not sent again.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import xxhash

from holdfast.errors import ConfigError, CorruptionError, StorageError
from holdfast.format.checkpoint_files import CheckpointFiles
from holdfast.format.digest import digest128
from holdfast.format.index import gaps
from holdfast.format.manifest import ExtraInfo, FileInfo, Manifest
from holdfast.format.names import (
    DATA_DIR,
    INDEX,
    MANIFEST,
    is_file_with,
    point_to_newest,
    saving_dir,
    step_dir,
)
from holdfast.format.summaries import annotate
from holdfast.format.verifier import names_in, verify_snapshot, verify_source
from holdfast.format.versions import (
    Identity,
    announce_copy,
    copiers_of,
    join_path,
    pin_version,
    retire,
)
from holdfast.retention.removal import prove_sound
from holdfast.storage import Source, Storage
from holdfast.storage.reading import for_each, is_locked
from holdfast.storage.unnamed import STARTING_S
from holdfast.writer.commit import Publication, publish
from holdfast.writer.job import heartbeat
from holdfast.writer.records import silent_s

_PIECE_NBYTES = 8 << 20
_READS_AHEAD = 6
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_ALIVE_S = 10.0
OnProgress = Callable[[int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What a copy did.

    Args:
        step: The checkpoint's step.
        nbytes: Bytes of the checkpoint.
        nbytes_sent: Bytes written now; less than `nbytes` if an earlier copy was continued.
        was_there: The place had this very version already, and nothing was written.
    """

    step: int
    nbytes: int
    nbytes_sent: int
    was_there: bool = False


def copy_checkpoint(
    source: Storage,
    directory: str,
    target: Storage,
    *,
    overwrite: bool = False,
    verify: bool = False,
    on_progress: OnProgress = lambda nbytes: None,
) -> CopyReport:
    """Copy one checkpoint; it exists at the target as a whole, or not at all.

    Args:
        source: Where it is; the caller has a lease on it.
        directory: Its name there.
        target: The root that it is copied to, which is made if it does not exist.
        overwrite: Replace another version of the step.
        verify: Read every byte back before it gets its name.
        on_progress: Called with bytes that are there, as they come.

    Raises:
        ConfigError: The target has another version of the step, or a damaged one and `overwrite` is
            not given; or another process copies this one.
        CorruptionError: The source is damaged, or what was written does not read back as it.
        StorageError: As its message says. What is there already serves the next try.

    Cost: reads the source once and writes it once; reads the target once more with `verify`. Of a
        version that is there already the records and the sizes of files are looked at, or with
        `verify` all bytes. Memory for 6 pieces of 8 MiB, and for what an upload keeps.
    """
    with CheckpointFiles.open(source, directory) as files:
        manifest = files.manifest
        final = step_dir(manifest.step)
        target.make_dir("")
        nbytes = len(files.records.manifest) + manifest.index.nbytes
        nbytes += sum(manifest.file_sizes.values())
        identity = Identity.of(files.records.manifest)
        damage = ""
        if target.exists(final):
            what = "another version"
            if identity.is_of(target, final):
                # Another tool may have copied it, and have been killed with half of its files.
                damage = _damage(target, final, verify=verify)
                if not damage:
                    return CopyReport(
                        step=manifest.step, nbytes=nbytes, nbytes_sent=0, was_there=True
                    )
                what = f"this version, damaged: {damage}"
            if not overwrite:
                raise ConfigError(
                    f"{target.describe(final)} exists already, and is {what}; to replace it, add "
                    f"--overwrite"
                )
        place = saving_dir(manifest.step, f"copy_{digest128(files.records.manifest)[:24]}")
        if owner := _owner_of(target, place, manifest):
            raise ConfigError(
                f"{target.describe(place)}: {owner} copies this checkpoint there, or did until "
                f"some seconds ago: wait for it, or try again in {_ALIVE_S:.0f} s"
            )
        # The version of the records: another one may have its name by now.
        version = pin_version(source, directory, identity)
        with ExitStack() as stack:
            held, held_directory = stack.enter_context(version)
            # Before the directory: a process that finds that finds this, too, while the copy works.
            stack.enter_context(announce_copy(target, final, save_id=manifest.save_id))
            target.make_dir(place, durable=False)
            stack.enter_context(heartbeat(target, place, position=0))
            sent = _Copy(files, held, held_directory, target, place, on_progress).run()
            if verify and (damages := verify_snapshot(target, place)):
                target.remove_tree(place)
                raise CorruptionError(
                    f"{target.describe(place)} does not read back as it was written: {damages[0]}; "
                    f"it was removed, copy again"
                )
            annotate(target, place, manifest)
            # Not without damage: another tool may have copied all of it meanwhile.
            if damage and identity.is_of(target, final):
                # Of no more use. It has the save id of the copy, so that nothing would
                # tell whether the exchange with it was made.
                retire(target, final, manifest.step)
            new = Publication(manifest.step, manifest.save_id, overwrite, verb="copy")
            publish(target, place, new)
    with suppress(StorageError):  # for people only; a repair corrects it
        point_to_newest(target)
    return CopyReport(step=manifest.step, nbytes=nbytes, nbytes_sent=sent)


def _owner_of(target: Storage, place: str, manifest: Manifest) -> str:
    """Describe the process that may be copying a version to `place`; empty if none does."""
    if not target.exists(place):
        return ""
    owners = copiers_of(target, step_dir(manifest.step), save_id=manifest.save_id)
    if not owners:
        return ""
    # Where the kernel knows that no process works on it, it is continued at once.
    alive_s = STARTING_S if is_locked(target, place) is False else _ALIVE_S
    return owners[0] if silent_s(target, place) < alive_s else ""


def _damage(storage: Storage, directory: str, *, verify: bool) -> str:
    """Return what is wrong with a checkpoint; empty for nothing. Reads its data if asked to."""
    if verify:
        return str(next(iter(verify_snapshot(storage, directory)), ""))
    return prove_sound(storage, directory) or ""


class _Copy:
    """The files of one checkpoint on their way to a directory of the target."""

    def __init__(
        self,
        files: CheckpointFiles,
        held: Storage,
        directory: str,
        target: Storage,
        place: str,
        on_progress: OnProgress,
    ) -> None:
        self._files, self._held, self._directory = files, held, directory
        self._target, self._place = target, place
        self._on_progress = on_progress
        largest = max((file.nbytes for file in files.manifest.files), default=0)
        num = max(1, min(_READS_AHEAD, -(-largest // _PIECE_NBYTES)))
        # Pages, so that a sink can write past the page cache.
        self._memory = [memoryview(mmap.mmap(-1, _PIECE_NBYTES, _PRIVATE)) for _ in range(num)]

    def run(self) -> int:
        """Bring every file there, the manifest last; return the bytes that were sent."""
        target, place, manifest = self._target, self._place, self._files.manifest
        target.make_dir(f"{place}/data", durable=False)
        present = for_each(
            target, lambda file: target.exists(f"{place}/{file.name}"), manifest.files
        )
        sent = 0
        for number, (file, is_there) in enumerate(zip(manifest.files, present, strict=True)):
            if is_there and self._is_whole(file):
                self._on_progress(file.nbytes)
                continue
            if is_there:
                target.remove_tree(f"{place}/{file.name}", durable=False)
            self._send(number, file)
            sent += file.nbytes
        for name in self._others():
            self._put(name, self._held.read(join_path(self._directory, name)))
        records = self._files.records
        small = [(extra.name, self._extra(extra)) for extra in manifest.extras]
        small += [(INDEX, records.index), (MANIFEST, records.manifest)]
        for name, data in small:
            sent += self._put(name, data)
            self._on_progress(len(data))
        # The rename must not be durable before the names inside: see `commit_save`.
        if manifest.files:
            target.sync_dir(f"{place}/data")
        target.sync_dir(place)
        return sent

    def _put(self, name: str, data: bytes) -> int:
        """Write a small file unless it is there; return the bytes that were sent."""
        target, path = self._target, f"{self._place}/{name}"
        if target.exists(path):
            # In a bucket another copy may have made this directory a checkpoint just now: what is
            # whole is never taken away, for an instant neither.
            if is_file_with(target, path, data):
                return 0
            target.remove_tree(path, durable=False)
        with target.create(path, nbytes=len(data)) as sink:
            sink.write_at(0, memoryview(data))
            sink.sync()
        return len(data)

    def _others(self) -> list[str]:
        """Return the files of other programs that are there, of which no digest is known."""
        manifest = self._files.manifest
        others = manifest.other_files - {DATA_DIR, INDEX, MANIFEST, *manifest.file_sizes}
        return sorted(others.intersection(names_in(self._held, self._directory) if others else ()))

    def _extra(self, extra: ExtraInfo) -> bytes:
        """Return a file for other programs; CorruptionError if it is damaged."""
        path = join_path(self._directory, extra.name)
        data = self._held.read(path)
        if digest128(data) != extra.digest:
            raise CorruptionError(
                f"{self._held.describe(path)}: damaged: it does not have the digest of the "
                f"manifest; the copy is not finished"
            )
        return data

    def _is_whole(self, file: FileInfo) -> bool:
        """Return True if an earlier copy has sent all of a file."""
        path = f"{self._place}/{file.name}"
        if self._target.size(path) != file.nbytes:
            return False
        with closing(self._target.open(path)) as source:
            return not verify_source(self._files, file.name, source)

    def _send(self, number: int, file: FileInfo) -> None:
        """Stream one file, and compare its blocks with their digests."""
        check = _PassingCheck(self._files, number)
        path = join_path(self._directory, file.name)
        with (
            closing(self._held.open(path)) as source,
            self._target.create(f"{self._place}/{file.name}", nbytes=file.nbytes) as sink,
        ):
            if source.nbytes != file.nbytes:
                raise CorruptionError(
                    f"{self._held.describe(path)} has {source.nbytes} bytes, the manifest states "
                    f"{file.nbytes}"
                )
            for start, data in _pieces(source, file.nbytes, self._memory):
                check.update(start, data)
                sink.write_at(start, data)
                self._on_progress(len(data))
            check.finish()
            sink.sync()


def _pieces(
    source: Source, nbytes: int, memory: Sequence[memoryview]
) -> Iterator[tuple[int, memoryview]]:
    """Yield the pieces of a file in order, while the next ones are being read.

    Args:
        source: The file.
        nbytes: Its size.
        memory: Of the pieces, each valid until the next is asked for: memory that is used again is
            not new to the kernel.
    """
    starts = deque(range(0, nbytes, _PIECE_NBYTES))
    reads: deque[tuple[int, memoryview, Future[None]]] = deque()
    free = list(memory)
    with ThreadPoolExecutor(len(memory), "holdfast-copy") as pool:
        while starts or reads:
            while starts and free:
                start, whole = starts.popleft(), free.pop()
                piece = whole[: min(_PIECE_NBYTES, nbytes - start)]
                reads.append((start, whole, pool.submit(source.readinto, piece, start=start)))
            start, whole, read = reads.popleft()
            read.result()
            yield start, whole[: min(_PIECE_NBYTES, nbytes - start)]
            free.append(whole)


class _PassingCheck:
    """Compares one data file with the records, as the file passes from its start."""

    def __init__(self, files: CheckpointFiles, number: int) -> None:
        index, block = files.index, files.manifest.block_nbytes
        self._place = files.storage.describe(files.directory)
        self._file = files.manifest.files[number]
        rows = np.flatnonzero(index.file == number)
        starts, sizes = index.start[rows], index.nbytes[rows]
        columns = (rows.tolist(), starts.tolist(), sizes.tolist())
        # All of the file: each block with its digest, and what is around the payloads without one.
        ranges: list[tuple[int, int, int | None]] = [
            (start + at, start + min(at + block, nbytes), int(digest))
            for row, start, nbytes in zip(*columns, strict=True)
            for at, digest in zip(range(0, nbytes, block), index.digests(row), strict=True)
        ]
        around = gaps(starts, sizes, file_nbytes=self._file.nbytes)
        ranges += [(begin, end, None) for begin, end in around]
        self._ranges = deque(sorted(ranges, key=lambda each: each[0]))
        self._block, self._around = xxhash.xxh3_64(), xxhash.xxh3_128()

    def update(self, start: int, data: memoryview) -> None:
        """Hash the next piece; CorruptionError that names the byte of a block that is damaged."""
        end = start + len(data)
        while self._ranges:
            first, stop, digest = self._ranges[0]
            if first >= end:
                return
            part = data[max(first - start, 0) : stop - start]
            (self._around if digest is None else self._block).update(part)
            if stop > end:
                return
            if digest is not None:
                if self._block.intdigest() != digest:
                    self._refuse(f"the {stop - first} bytes from byte {first}", "index")
                self._block.reset()
            self._ranges.popleft()

    def finish(self) -> None:
        """Raise CorruptionError if the bytes around the payloads, as the header, are damaged."""
        if self._around.hexdigest() != self._file.header_digest:
            self._refuse("the header or other bytes around its chunks", "manifest")

    def _refuse(self, what: str, record: str) -> NoReturn:
        raise CorruptionError(
            f"{self._place}: {self._file.name}: damaged: {what} do not have the digest of the "
            f"{record}; nothing of it was copied"
        )
