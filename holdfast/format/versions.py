"""Versions of one step: open one, read its records, and keep it while it is read.

A step may be saved again; each save is a version, identified by the bytes of its manifest. A reader
pins the directory that it has opened, and each of its ranks proves that it has opened the same
version. A save that replaces a version first gives the final name to the new one. Then it looks for
leases of readers, and keeps the old version under a `.replaced-…` name while it is read. A reader
takes its lease before it opens anything. So either its lease is seen and the version is kept, or
the reader came later and opened the new version. In a bucket, where each lease is two requests, a
load takes one only if it lasts; it starts again if its version goes before.

A lease states who reads a checkpoint or is about to remove it, so that no reader loses its files.
Reader and remover each first write a small file in `.reading/` and then look for the other's. So
if both come at once, at least one sees the other: the reader waits for the remover or gives up, and
the remover gives up. This takes files and listings only, no locks. Each side writes to the
directory before it lists it, which makes the client of a network file system ask its server. A
lease is renewed while its owner lives, and expires later: by the time since the boot if its owner
is on the same host, otherwise by the storage's own clock. Leases are not synced: their owners do
not survive the machine either. A save that replaces a checkpoint takes no lease.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, Protocol, TypeVar

import msgspec

from holdfast.decoding import decode_json_as
from holdfast.errors import CorruptionError, StorageError
from holdfast.format.index import require_index_size
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, Manifest, decode_manifest
from holdfast.format.names import (
    INDEX,
    MANIFEST,
    parse_replaced_dir,
    parse_saving_dir,
    parse_step_dir,
    replaced_dir,
    step_dir,
)
from holdfast.storage import Storage
from holdfast.storage.reading import (
    is_absence,
    is_unknown,
    pause_of,
    read_at_most,
    read_if_there,
    read_tail,
)

LEASES_DIR = ".reading"
DEFAULT_LEASE_S = 600.0
"""Seconds after which a lease that is not renewed has expired."""

_LEASE_NAME = re.compile(r"(iter_[0-9]{7,18})\.(read|remove|copy)-[0-9a-f]{16}", re.ASCII)
_MAX_LEASE_NBYTES = 4096
_RENEWALS_PER_LEASE = 8
_POLL_S = 0.05
_LEAVE_S = 5.0
"""Seconds to wait at the end for the last renewal, and for the removal of what was renewed."""

Kind = Literal["read", "remove", "copy"]
_PEEK_NBYTES = 512
_TAIL_NBYTES = 48  # of a manifest: its last member is the digest of all others
_NUM_LOOKS = 5


class Chosen(Protocol):
    """A checkpoint that was looked for: the storage that holds it, and its directory there."""

    @property
    def storage(self) -> Storage:
        """The storage."""
        ...

    @property
    def directory(self) -> str:
        """The directory."""
        ...


F = TypeVar("F", bound=Chosen)


@dataclass(frozen=True, slots=True)
class Records:
    """The two records of a checkpoint as stored: sufficient to open it without reading them."""

    manifest: bytes
    index: bytes


def read_manifest(
    storage: Storage, directory: str, *, place: str | None = None
) -> tuple[bytes, Manifest]:
    """Read the manifest of a checkpoint: its bytes, and decoded with its digest checked.

    Args:
        storage: has the checkpoint.
        directory: of the checkpoint.
        place: how errors name its manifest; by default where it is.

    Raises:
        StorageError: It is not a committed checkpoint, or cannot be read.
        CorruptionError: The manifest is damaged, or of another step than the directory's name.

    Cost: one read.
    """
    path = join_path(directory, MANIFEST)
    place = place or storage.describe(path)
    data = read_if_there(
        storage,
        path,
        max_nbytes=MAX_MANIFEST_NBYTES,
        too_large=lambda: CorruptionError(
            f"{place} is larger than the limit of {MAX_MANIFEST_NBYTES} bytes"
        ),
    )
    if data is None:
        raise StorageError(
            f"{storage.describe(directory)} is not a committed checkpoint: it has no {MANIFEST}"
        )
    needs_digests: bool = getattr(storage, "has_digests", True)
    manifest = decode_manifest(data, place=place, needs_digests=needs_digests)
    # A run would continue from it as from the step in the name.
    if parse_step_dir(directory) not in (None, manifest.step):
        raise CorruptionError(
            f"{place} is of step {manifest.step}: the directory was renamed; give it back the name "
            f"{step_dir(manifest.step)}"
        )
    return data, manifest


def read_records(storage: Storage, directory: str) -> tuple[Records, Manifest]:
    """Read manifest and index of a checkpoint; only the manifest is proven.

    Args:
        storage: A storage in which the directory is pinned, so that both are of one version.
        directory: Its name there; "" for the root.

    Raises:
        StorageError: It is not a committed checkpoint, or cannot be read.
        CorruptionError: The manifest is damaged, or the index is missing or of another size.
    """
    data, manifest = read_manifest(storage, directory)
    return Records(data, read_index(storage, directory, manifest)), manifest


def read_index(storage: Storage, directory: str, manifest: Manifest) -> bytes:
    """Read the index, as long as the manifest states; its digest is not checked.

    Raises:
        StorageError: It cannot be read.
        CorruptionError: It is missing or of another size.

    Cost: one read.
    """
    path = join_path(directory, INDEX)
    place, nbytes = storage.describe(path), manifest.index.nbytes
    # A file of any size may be there: first, whether it can be the index of this manifest.
    require_index_size(manifest, place=place)

    def wrong_size() -> CorruptionError:
        return CorruptionError(
            f"{place} has {storage.size(path)} bytes, the manifest states {nbytes}"
        )

    data = read_if_there(storage, path, max_nbytes=nbytes, too_large=wrong_size)
    if data is None:
        raise CorruptionError(f"{place} is missing, although the manifest lists it")
    if len(data) != nbytes:
        raise wrong_size()
    return data


def join_path(directory: str, name: str) -> str:
    """Return the path of a checkpoint's file; the directory may be "", the root."""
    return f"{directory}/{name}" if directory else name


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a version: length and last bytes of its manifest, with its digest."""

    nbytes: int
    tail: bytes

    @classmethod
    def of(cls, manifest: bytes) -> Identity:
        """Return the identity of the version with this manifest."""
        return cls(len(manifest), manifest[-_TAIL_NBYTES:])

    def is_of(self, storage: Storage, directory: str) -> bool:
        """Return True if this version is in that directory; one small read.

        Raises:
            StorageError: It cannot be known now.
        """
        path = join_path(directory, MANIFEST)
        try:
            tail = read_tail(storage, path, nbytes=len(self.tail), file_nbytes=self.nbytes)
            return tail == self.tail
        except StorageError as error:
            if is_unknown(error):
                raise
            return False


@contextmanager
def pin_version(
    storage: Storage, directory: str, identity: Identity
) -> Iterator[tuple[Storage, str]]:
    """Pin one version of a checkpoint, replaced or not; give a storage and the directory in it.

    The version is looked up at its final name and among versions that are kept for their readers.

    Raises:
        StorageError: The version is gone: it was replaced or removed; or that cannot be known now.
    """
    # Several looks: an exchange may move the version between the look here and the look there.
    for _ in range(_NUM_LOOKS):
        # Lazily: nearly always it has its name, and a listing may be a request.
        for place in chain((directory,), _asides(storage, directory)):
            with ExitStack() as stack:
                try:
                    view = stack.enter_context(storage.pin(place))
                except StorageError as error:
                    if is_unknown(error):
                        raise
                    continue
                if identity.is_of(view, place):
                    yield view, place
                    return
    raise StorageError(
        f"{storage.describe(directory)} was replaced or removed after its manifest was read: "
        f"read it again"
    )


def _asides(storage: Storage, directory: str) -> Iterator[str]:
    """Yield the directories that may hold a version of a step without its final name."""
    step = parse_step_dir(directory)
    if step is None:
        return
    for name in storage.list(""):
        parsed = parse_saving_dir(name)  # a replaced version has this name for an instant
        if parse_replaced_dir(name) == step or (parsed is not None and parsed[0] == step):
            yield name


def save_id_of(storage: Storage, directory: str) -> str | None:
    """Return the save id at the start of a committed manifest, or None; reads 512 bytes."""
    try:
        return known_save_id(storage, directory)
    except StorageError:
        return None


def known_save_id(storage: Storage, directory: str) -> str | None:
    """Return what `save_id_of` does; StorageError if a manifest is there that cannot be read now.

    Also where the bytes are at fault: an answer that did not come is none, and callers remove what
    another version has replaced.
    """
    path = join_path(directory, MANIFEST)
    try:
        if not hasattr(storage, "read_at_most") and not storage.exists(path):
            return None
        head = read_at_most(storage, path, _PEEK_NBYTES)
    except StorageError as error:
        if is_absence(error):
            return None
        raise
    _, marker, after = head.partition(b'"save_id":"')
    return after.partition(b'"')[0].decode(errors="replace") if marker else None


def retire(storage: Storage, directory: str, step: int) -> str:
    """Remove a version that no longer has its final name, or keep it for its readers.

    The version that has the name now must be durable. Safe to repeat at any time.

    Returns:
        A description of its readers; empty if it was removed.

    Raises:
        StorageError: It can be neither removed nor kept.
    """
    readers = readers_of(storage, step_dir(step), save_id=save_id_of(storage, directory))
    if not readers:
        # Not durable: if a crash brings it back, the next repair removes it again.
        storage.remove_tree(directory, durable=False)
        return ""
    if parse_replaced_dir(directory) is None:
        storage.rename_dir(directory, replaced_dir(step, secrets.token_hex(6)), durable=False)
    return ", ".join(readers)


def retire_replaced(storage: Storage) -> None:
    """Remove replaced versions whose readers are done; those that refuse stay."""
    for name in storage.list(""):
        step = parse_replaced_dir(name)
        if step is not None:
            with suppress(StorageError):
                retire(storage, name, step)


class _LeaseFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a lease's file; `save_id` names the version read, once it is known."""

    host: str
    pid: int
    renewed: float
    life_s: float
    save_id: str | None = None
    origin: str = ""
    """Where `pid` means this process, and since when: see `_origin`."""
    since_boot: float | None = None
    """When it was renewed, in seconds of the host's monotonic clock, which nobody sets."""


@dataclass(slots=True, kw_only=True)
class Lease:
    """A lease of one checkpoint, held by this process."""

    storage: Storage
    directory: str
    path: str = ""
    life_s: float = DEFAULT_LEASE_S
    problem: str | None = None
    """Why the lease could not be taken, for example on read-only storage; None if it is held."""
    save_id: str | None = None
    may_be_there: bool = False
    """A write of its file was tried: one that failed may have happened."""
    view: Storage | None = None
    """Of `lease_chosen`: the storage, with the version pinned that had the name under the lease."""
    _origin: str | None = field(default=None, init=False)

    def set_version(self, save_id: str) -> None:
        """State which version is read, so that no other version is kept for this reader.

        Where a write is a request, only with the next renewal: another version that is replaced
        before is kept until this reader is done.
        """
        self.save_id = save_id
        if self.problem is None and not pause_of(self.storage):
            with suppress(StorageError):
                self.renew()

    def renew(self) -> None:
        """Write the lease's file, or write it again; StorageError if that fails."""
        if self._origin is None:
            self._origin = _origin(os.getpid())
        content = _LeaseFile(
            host=socket.gethostname(),
            pid=os.getpid(),
            renewed=time.time(),
            life_s=self.life_s,
            save_id=self.save_id,
            origin=self._origin,
            since_boot=time.monotonic(),
        )
        data = msgspec.json.encode(content)
        self.may_be_there = True
        try:
            self.storage.replace_file(self.path, data, durable=False)
        except StorageError as error:
            if is_unknown(error):
                raise
            # Nearly always the directory is there: it is made only when the file could not be.
            self.storage.make_dir(LEASES_DIR, durable=False)
            self.storage.replace_file(self.path, data, durable=False)


@contextmanager
def read_lease(
    storage: Storage,
    directory: str,
    *,
    life_s: float = DEFAULT_LEASE_S,
    wait_s: float = 30.0,
    after_s: float = 0.0,
) -> Iterator[Lease]:
    """Keep the checkpoint in `directory` from removal by retention on any machine, in the body.

    Put it around opening and reading; one process of a job is enough. If the lease cannot be
    written, the checkpoint is read without one, and `problem` of the result states why.

    Args:
        storage: The directory of checkpoints.
        directory: The checkpoint's name there; only the name of a step gets a lease.
        life_s: Seconds after which the lease expires if its owner no longer renews it.
        wait_s: Seconds to wait for a process that is about to remove the checkpoint.
        after_s: Seconds of the body before the lease is taken, where a write is a request: a body
            that ends before sends none. For a caller that starts again if the checkpoint is
            removed in that time.

    Raises:
        StorageError: The checkpoint was removed, or may still be removed after `wait_s`.

    Cost: one small file, written again every `life_s / 8` seconds by a thread.
    """
    lease = Lease(storage=storage, directory=directory, life_s=life_s)
    if parse_step_dir(directory) is None:
        lease.problem = f"{directory!r} is not the name of a step"
        yield lease
        return
    # The lease first and the look for removers second: see the text of the module.
    lease.path = _new_path(directory, "read")
    if not pause_of(storage):
        after_s = 0.0
    if not after_s:
        try:
            lease.renew()
        except StorageError as error:
            lease.problem = str(error)
    with ExitStack() as stack:
        if lease.problem is None:
            stack.enter_context(_renewed(lease, first_s=after_s))
        # After its own lease is written: a remover that comes now sees it. Where a look is a
        # request, the next one shows as much: that the checkpoint has its name. A remover takes the
        # name first, looks for leases once more, and gives it back if there is one.
        if not pause_of(storage) or lease.problem is not None:
            _await_removers(storage, directory, wait_s)
        yield lease


@contextmanager
def lease_chosen(choose: Callable[[], F], *, first: F | None = None) -> Iterator[tuple[F, Lease]]:
    """Keep the checkpoint that `choose` returns from removal in the body, as `read_lease` does.

    Retention may remove the newest step between the look and the lease. There is a newer one then,
    so that it is looked for again.

    Args:
        choose: Looks for it.
        first: What a look has just shown.

    Raises:
        StorageError: It was removed each time.
    """
    for left in reversed(range(_NUM_LOOKS)):
        chosen = choose() if first is None or left < _NUM_LOOKS - 1 else first
        with ExitStack() as stack:
            try:
                lease = stack.enter_context(read_lease(chosen.storage, chosen.directory))
            except StorageError:
                if not left:
                    raise
                continue
            lease.view = chosen.storage
            if lease.problem is None:
                with suppress(StorageError):  # it is gone, or cannot be read: as the look will say
                    lease.view = stack.enter_context(chosen.storage.pin(chosen.directory))
            if left and save_id_of(lease.view, chosen.directory) is None:
                continue
            yield chosen, lease
            return


@contextmanager
def repeated(
    action: Callable[[], object],
    *,
    every_s: float,
    name: str,
    first_s: float = 0.0,
    at_end: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """In the body, call `action` every `every_s` seconds in a thread; its errors are ignored.

    The first time after `first_s` seconds, if given. After the last one the thread calls `at_end`,
    whose error is raised here: what it removes is not written again. If the storage keeps both
    waiting for longer than five seconds, the caller goes on meanwhile.
    """
    stop = threading.Event()
    problem: list[BaseException] = []

    def repeat() -> None:
        pause_s = first_s or every_s
        while not stop.wait(pause_s):
            pause_s = every_s
            # Whatever a storage raises: without the next one, others take the caller for dead.
            with suppress(Exception):
                action()
        try:
            at_end()
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_LEAVE_S)
        if thread.is_alive():
            atexit.register(thread.join)  # a request must not outlive the interpreter
        elif problem:
            raise problem[0]


def _renewed(lease: Lease, *, first_s: float = 0.0) -> AbstractContextManager[None]:
    """Renew a lease in the body, the first time after `first_s` seconds if given, and remove it."""
    return repeated(
        lease.renew,
        every_s=lease.life_s / _RENEWALS_PER_LEASE,
        first_s=first_s,
        name="holdfast-lease",
        at_end=lambda: _give_back(lease),
    )


@contextmanager
def announce_removal(
    storage: Storage, directory: str, *, life_s: float = DEFAULT_LEASE_S
) -> Iterator[list[str]]:
    """Announce that a checkpoint is about to be removed; give descriptions of its readers.

    It may be removed in the body, only if the list is empty. Raises StorageError if the
    announcement cannot be written.
    """
    # The announcement first and the look for readers second: see the text of the module.
    path = _new_path(directory, "remove")
    Lease(storage=storage, directory=directory, path=path, life_s=life_s).renew()
    try:
        yield readers_of(storage, directory)
    finally:
        _remove_lease(storage, path)


@contextmanager
def announce_copy(storage: Storage, directory: str, *, save_id: str) -> Iterator[None]:
    """State in the body that this process copies a version to `directory`; see `copiers_of`.

    StorageError if that cannot be written.
    """
    path = _new_path(directory, "copy")
    lease = Lease(storage=storage, directory=directory, path=path, save_id=save_id)
    lease.renew()
    with _renewed(lease):
        yield


def copiers_of(storage: Storage, directory: str, *, save_id: str) -> list[str]:
    """Describe the processes that copy this version to `directory`, or did and may be dead.

    None of them is known to be: by its process id on this host, or by the time since its lease was
    renewed.
    """
    return _owners(storage, directory, "copy", save_id)


def readers_of(storage: Storage, directory: str, *, save_id: str | None = None) -> list[str]:
    """Describe the processes that read a checkpoint now; expired leases are removed.

    With `save_id`, only readers of that version, and those that have not yet stated theirs.
    """
    return _owners(storage, directory, "read", save_id)


def renewed_ago_s(storage: Storage, path: str, *, stamp: float | None) -> float:
    """Return the seconds since a file was last renewed by its owner.

    By the storage's clock or by the owner's (`stamp`, the time in the file), whichever is less. A
    stamp in the future is ignored, so that no clock makes a dead process look alive for long. Where
    the storage itself stamps all files, its clock alone counts: owners' may be hours apart.
    """
    age_s = storage.age_s(path)
    if getattr(storage, "stamps_all", False):
        return age_s
    by_owner_s = time.time() - stamp if stamp is not None else age_s
    return min(age_s, by_owner_s) if by_owner_s >= 0 else age_s


def _origin(pid: int) -> str:
    """Return by what a process is known on this boot and in this namespace of process ids.

    A host's name is not enough: containers on several hosts may share one, each with its own ids.
    Empty if the system does not say.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        started = fields[19] if fields[0] not in "ZX" else "ended"
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {started}"
    except (OSError, IndexError):
        return ""


def _is_dead(lease: _LeaseFile) -> bool:
    """Return True if the owner of a lease ran on this host and does not run any more."""
    if not _is_of_here(lease):
        return False  # its process id means nothing here
    return _origin(lease.pid) != lease.origin and not _is_hidden(lease.pid)


def _is_of_here(lease: _LeaseFile) -> bool:
    """Return True if the owner of a lease has this host, its boot and process ids in common."""
    here, there = _origin(os.getpid()).split(), lease.origin.split()
    return len(here) == 3 and here[:2] == there[:2]


def _lease_age_s(storage: Storage, path: str, lease: _LeaseFile) -> float:
    """Return the seconds since a lease was renewed.

    If its owner is on this host, by the time since the boot: a clock that is set hours ahead makes
    all files look old at once, those of readers that live included.
    """
    if lease.since_boot is not None and _is_of_here(lease):
        return time.monotonic() - lease.since_boot
    return renewed_ago_s(storage, path, stamp=lease.renewed)


def _is_hidden(pid: int) -> bool:
    """Return True if a process runs of which this one may not know more.

    A system may hide the processes of other users altogether (`hidepid=2`).
    """
    if _origin(pid):
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _new_path(directory: str, kind: Kind) -> str:
    return f"{LEASES_DIR}/{directory}.{kind}-{secrets.token_hex(8)}"


def _give_back(lease: Lease) -> None:
    if lease.may_be_there:
        _remove_lease(lease.storage, lease.path)


def _remove_lease(storage: Storage, path: str) -> None:
    with suppress(StorageError):
        storage.remove_tree(path)


def _await_removers(storage: Storage, directory: str, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while removers := _owners(storage, directory, "remove"):
        place = storage.describe(directory)
        if not storage.exists(directory):
            raise StorageError(f"{place} was just removed by {removers[0]}: load another step")
        if time.monotonic() > deadline:
            raise StorageError(
                f"{place} is about to be removed by {removers[0]}: load another step, or "
                f"stop that process and try again after {DEFAULT_LEASE_S:.0f} s"
            )
        time.sleep(_POLL_S)


def _owners(storage: Storage, directory: str, kind: Kind, save_id: str | None = None) -> list[str]:
    """Describe the owners of the leases of one kind that have not expired."""
    if not storage.exists(LEASES_DIR):
        return []
    owners = []
    for name in storage.list(LEASES_DIR):
        match = _LEASE_NAME.fullmatch(name)
        if match is None or match[1] != directory or match[2] != kind:
            continue
        owner = _owner(storage, f"{LEASES_DIR}/{name}", save_id)
        if owner is not None:
            owners.append(owner)
    return owners


def _owner(storage: Storage, path: str, save_id: str | None) -> str | None:
    """Describe the owner of a lease; None if it is gone, expired or of another version."""
    try:
        data = read_at_most(storage, path, _MAX_LEASE_NBYTES)
    except StorageError:
        # By a listing, too: a store that answers a read with 404 may still show the lease.
        if not storage.exists(path) and path.rpartition("/")[2] not in storage.list(LEASES_DIR):
            return None
        raise
    content: _LeaseFile | None = None
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        content = decode_json_as(data, _LeaseFile)
    # A lease that cannot be examined counts as live: wrongly kept files cost space, lost ones data.
    try:
        if content is not None:
            is_expired = _lease_age_s(storage, path, content) >= content.life_s
        else:  # as a power loss leaves it, since it is not synced: a living owner writes it again
            is_expired = storage.age_s(path) >= DEFAULT_LEASE_S
    except StorageError:
        is_expired = not storage.exists(path)
    # What is killed is not waited for, but a reader: other ranks of its job may still read.
    is_dead = content is not None and ".read-" not in path and _is_dead(content)
    if is_expired or is_dead:
        _remove_lease(storage, path)
        return None
    if content is None:
        return f"an unknown process ({storage.describe(path)} cannot be decoded)"
    if None not in (save_id, content.save_id) and content.save_id != save_id:
        return None
    return f"process {content.pid} on {content.host}"
