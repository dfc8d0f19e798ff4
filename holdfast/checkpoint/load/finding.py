"""Finding the checkpoint to load: one step and one version of it, the same on all ranks."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from holdfast.decoding import decode_msgpack_as
from holdfast.errors import ConfigError, HoldfastError, StorageError, disagreement
from holdfast.format.checkpoint_files import CheckpointFiles, ReadStats
from holdfast.format.names import (
    is_committed,
    linked_steps,
    list_steps,
    newest_step_dir,
    require_root_of_checkpoints,
    step_dir,
    survey_steps,
)
from holdfast.format.versions import Records, read_lease, save_id_of
from holdfast.parallel import ProcessGroups
from holdfast.storage import Storage
from holdfast.storage.reading import pause_of
from holdfast.writer.leftovers import wait_for_writers

HOST_ID = "HOLDFAST_HOST_ID"
"""Environment variable: names the host of a process if the kernel's boot id would be wrong."""

_NUM_TRIES = 8
"""Times to look again for a checkpoint that is replaced or removed meanwhile."""
_UNLEASED_S = 2.0
"""Seconds of a load before it takes a lease in a bucket. One that loses its checkpoint in that time
starts again."""
_MAX_NAMED = 10
_ALIVE_S = 5.0
"""Writers write a heartbeat every two seconds; one that is silent for so long has ended, where the
kernel does not know it at once."""
_FIRST = "load: find"
"""The phase of the first collective of every load, so that ranks can compare what they load."""

_WAITING = b"waiting"
"""What all ranks know while the coordinator waits for writers."""

Candidate = tuple[int | None, list[int]]


LoadProposal = tuple[dict[str, object], str, Candidate]
"""The first message of each rank in a load: by name what all ranks must load alike, its host, and
of a fallback the coordinator's next checkpoint, see `Finder.candidate`."""


class Finder:
    """Finds checkpoints for all ranks: the coordinator looks and broadcasts the result.

    Attributes:
        version: Step and save id of what was found last; None before that. Set it to None before
            each load.
    """

    def __init__(self, storage: Storage, groups: ProcessGroups, *, settle_s: float) -> None:
        self._storage = storage
        self._groups = groups
        self._settle_s = settle_s
        self._is_complete = False
        self._lease_after_s = _UNLEASED_S
        self._host = host_id()
        self.version: tuple[int, str] | None = None
        self._holder: ExitStack | None = None
        self._held: tuple[int, CheckpointFiles] | None = None

    @contextmanager
    def one_version(self) -> Iterator[None]:
        """Let loads in the body find one version; see `Checkpointer.one_version`.

        Raises:
            ConfigError: Within another one.
        """
        if self._holder is not None:
            raise ConfigError("Checkpointer.one_version: the loads of another one are in progress")
        with ExitStack() as holder:
            self._holder = holder
            try:
                yield
            finally:
                self._holder = self._held = None

    def keep(self, step: int, files: CheckpointFiles, stack: ExitStack) -> None:
        """Keep what was loaded for the next load, within `one_version`.

        Args:
            step: The step.
            files: Its files.
            stack: What closes them; it is taken over.
        """
        if self._holder is not None and not self.is_held(files):
            self._holder.push(stack.pop_all())
            self._held = step, files

    def is_held(self, files: CheckpointFiles) -> bool:
        """Return True for the files of an earlier load."""
        return self._held is not None and self._held[1] is files

    def find(
        self, step: int | None, stack: ExitStack, settings: Mapping[str, object]
    ) -> tuple[int, CheckpointFiles, list[str]]:
        """Find a checkpoint and open it: all ranks the same version.

        Args:
            step: The step to find; None for the newest.
            stack: Closes the files and gives the lease back that keeps this version from being
                removed.
            settings: By name, what every rank must load alike.

        Returns:
            The step; its files, whose index the coordinator has yet to prove; and the host of each
            rank, by position.

        Raises:
            StorageError: The checkpoint does not exist.
            CorruptionError: Its records are damaged.
            PlanError: The settings of the ranks differ.
            ConfigError: Loads of one version are in progress, and it is of another step.

        Cost: one collective and one broadcast of the records.
        """
        storage = self._storage
        files: CheckpointFiles | None = None
        opened: list[tuple[int, CheckpointFiles]] = []

        def look(names: Sequence[str] | None) -> tuple[Candidate, bytes]:
            if not self._is_complete:  # once they are, they stay so
                self._groups.require_complete()
                self._is_complete = True
            chosen, files = self._open_again(step) or self._open(step, stack, names)
            opened.append((chosen, files))
            known = chosen, files.manifest.save_id, files.records
            return (None, []), msgspec.msgpack.encode(known)

        proposals, data = self._look(look, settings)
        if opened:
            ((chosen, files),) = opened
            save_id = files.manifest.save_id
        else:
            chosen, save_id, records = decode_msgpack_as(data, tuple[int, str, Records])
        # Before a rank may fail: all of them know by it whether to compare versions then.
        self.version = (chosen, save_id)
        if files is None and self._held is not None:
            held = self._held[1]
            files = held if held.manifest.save_id == save_id else None
        if files is None:
            files = CheckpointFiles.from_records(storage, step_dir(chosen), records=records)
            stack.callback(files.close)
        files.stats = ReadStats()
        return chosen, files, [host for _, host, _ in proposals]

    def wait_for_writers(self, *, most_s: float = math.inf) -> list[str] | None:
        """Wait for writers that outlived an earlier run, and finish what they left complete.

        Once per run, in as many calls as it takes if each waits `most_s`; no collectives. Returns
        the names under the root if a look has just shown them.
        """
        names = None
        if self._settle_s > 0 and self._storage.is_dir(""):
            limit_s = min(self._settle_s, most_s)
            names = wait_for_writers(self._storage, alive_s=_ALIVE_S, timeout_s=limit_s)
            self._settle_s = self._settle_s - limit_s if names is None else 0.0
        return names

    def _look(
        self,
        look: Callable[[Sequence[str] | None], tuple[Candidate, bytes]],
        settings: Mapping[str, object],
    ) -> tuple[list[LoadProposal], bytes]:
        """Have the coordinator look for a checkpoint, so that all ranks load the same one.

        Args:
            look: Given the names under the root, if they are known; returns what the coordinator
                proposes, and what all ranks are to know.
            settings: See `find`.

        Returns:
            The proposals of all ranks, and what they are to know.

        Cost: one collective, and a broadcast if there is something to know; and one more each time
        that the other ranks would give the coordinator up, as it waits for writers.
        """
        control = self._groups.control
        # A lone rank keeps nobody waiting.
        most_s = math.inf if control.size == 1 else control.timeout_s / 2
        while True:
            candidate: Candidate = (None, [])
            data: bytes | None = None
            if control.is_coordinator:
                names = self.wait_for_writers(most_s=most_s)
                if names is None and self._settle_s > 0 and self._storage.is_dir(""):
                    data = _WAITING
                else:
                    candidate, data = look(names)
            proposal = msgspec.msgpack.encode((dict(settings), self._host, candidate))
            # One call for loads with fallbacks and without, so that ranks with both meet here.
            answers, data = control.gather_and_broadcast(proposal, data, phase=_FIRST)
            proposals = _read_proposals(answers, control.ranks)
            if data != _WAITING:
                return proposals, data

    def was_replaced(self) -> bool:
        """Return True if the version found last has been replaced since.

        For all ranks together, after an error that all of them raise; if this cannot be found
        out, the answer is False, so that they raise that error.

        Cost: one collective if a version had been found.
        """
        if self.version is None:
            return False
        step, save_id = self.version
        report = b""
        if self._groups.control.is_coordinator:
            try:
                report = b"%d" % (save_id_of(self._storage, step_dir(step)) != save_id)
                self._lease_after_s = 0.0  # it shall not happen again
            except Exception:  # a storage of the caller's that breaks its contract
                report = b"0"
        try:
            reports = self._groups.control.agree(None, phase="load: replaced", payload=report)
        except HoldfastError:  # some rank was interrupted, or cannot continue
            return False
        return reports[0] == b"1"

    def candidate(
        self, failed: Sequence[int], max_fallbacks: int | None, settings: Mapping[str, object]
    ) -> Candidate:
        """The next step to try after some have failed.

        Args:
            failed: Steps that could not be loaded.
            max_fallbacks: How many damaged ones may be passed over; None for any number.
            settings: See `find`.

        Returns:
            The newest step that has not failed; None if every step has, or if too many have failed;
            and the failed steps that are still there. A step that retention has removed meanwhile
            was not damaged, and there is a newer one. Within `one_version` the step that an earlier
            load has open, and no other one.

        Cost: one collective.
        """
        proposals, _ = self._look(
            lambda names: (self._next_step(failed, max_fallbacks, names), b""), settings
        )
        return proposals[0][2]

    def _next_step(
        self, failed: Sequence[int], max_fallbacks: int | None, names: Sequence[str] | None
    ) -> Candidate:
        """Look for what `candidate` returns."""
        if self._held is not None:
            held = self._held[0]
            return (None if held in failed else held), list(failed)
        # The first time, as any load: an empty directory has its own error.
        if not failed:
            self._choose(None, names)
        steps = list_steps(self._storage)
        present = [step for step in failed if step in steps]
        left = [step for step in steps if step not in failed]
        too_many = max_fallbacks is not None and len(present) > max_fallbacks
        return (None if too_many else max(left, default=None)), present

    def _open_again(self, step: int | None) -> tuple[int, CheckpointFiles] | None:
        """Return what an earlier load has open; None if nothing is."""
        if self._held is not None and step not in (None, self._held[0]):
            raise ConfigError(
                f"a load of step {step}, where Checkpointer.one_version has all loads read the one "
                f"of step {self._held[0]}; load it outside"
            )
        return self._held

    def _open(
        self, step: int | None, leases: ExitStack, names: Sequence[str] | None
    ) -> tuple[int, CheckpointFiles]:
        """Choose a step, take a lease on it, and open it.

        Where retention removes it in between, there is a newer one: look again.
        """
        num_tries = 0
        while True:
            num_tries += 1
            is_first = num_tries == 1
            chosen = self._choose(step, names, may_be_there=is_first)
            directory = step_dir(chosen)
            # Pieces of one version are lost if it is: only a whole load can start again.
            restarts = is_first and self._holder is None
            after_s = self._lease_after_s if restarts else 0.0
            with ExitStack() as stack:
                try:
                    # The lease first, so that what is read cannot be removed.
                    lease = stack.enter_context(
                        read_lease(self._storage, directory, after_s=after_s)
                    )
                    files = CheckpointFiles.open(self._storage, directory, prove=False)
                except StorageError:
                    # Still there: then it is unreadable, and was not removed.
                    if num_tries == _NUM_TRIES or save_id_of(self._storage, directory) is not None:
                        raise
                    continue
                stack.callback(files.close)
                lease.set_version(files.manifest.save_id)
                leases.push(stack.pop_all())
                return chosen, files

    def _choose(
        self, step: int | None, names: Sequence[str] | None, *, may_be_there: bool = False
    ) -> int:
        """Return the step to load, None for the newest; StorageError if no checkpoint exists.

        With `may_be_there`, no look is taken at a step where that is a request: what opens it will
        see whether it is whole.
        """
        storage = self._storage
        if pause_of(storage) and may_be_there:
            if step is not None:
                return step
            newest = newest_step_dir(storage.list("") if names is None else names)
            if newest is not None:
                return newest
        if step is not None and is_committed(storage, step):  # others may be denied
            return step
        try:
            steps, others = survey_steps(storage)
        except StorageError:
            if storage.is_dir(""):
                raise
            where = storage.describe("")
            raise StorageError(
                f"{where} is not a directory, so it has no checkpoint to load"
            ) from None
        if steps and step is None:
            if links := linked_steps(storage, [other for other in others if other > steps[-1]]):
                logging.getLogger("holdfast").warning("step %s is loaded: %s", steps[-1], links)
            return steps[-1]
        if not steps:
            require_root_of_checkpoints(storage)
        where = storage.describe("")
        if step is None:
            links = linked_steps(storage, others)
            raise StorageError(
                f"{where} holds no committed checkpoint (no iter_… directory with a manifest)"
                f"{links and f'; {links}'}"
            )
        have = ", ".join(map(str, steps[-_MAX_NAMED:])) or "none"
        raise StorageError(f"{where} has no committed checkpoint of step {step}; it has {have}")


def host_id() -> str:
    """Return a name of the machine of this process, whose page cache it shares.

    Containers of one machine have different names, but the kernel's boot id in common.
    """
    given = os.environ.get(HOST_ID)
    if given:
        return given
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        with suppress(OSError):
            number = Path(path).read_text().strip()
            return number if "boot_id" in path else f"{socket.gethostname()} {number}"
    return socket.gethostname()


def _read_proposals(answers: Sequence[bytes], ranks: Sequence[int]) -> list[LoadProposal]:
    """Return the proposals of all ranks; raise PlanError if they are to load different things."""
    proposals = [decode_msgpack_as(data, LoadProposal) for data in answers]
    settings = proposals[0][0]
    if any(each != settings for each, _, _ in proposals):
        for name in settings:
            values = [each.get(name) for each, _, _ in proposals]
            if len(set(values)) > 1:
                raise disagreement("load", name, values, ranks=ranks)
    return proposals
