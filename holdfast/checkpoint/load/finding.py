"""Finding the checkpoint to load: one step and one version of it, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import msgspec

from holdfast.checkpoint.save.handshake import refuse_disagreement
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.names import list_steps, step_dir
from holdfast.format.versions import Records, read_lease, read_records, save_id_of
from holdfast.parallel import ProcessGroups
from holdfast.storage import Storage
from holdfast.writer.repair import wait_for_writers

_NUM_TRIES = 8
"""How often to look for a checkpoint that is replaced or removed meanwhile."""
_MAX_NAMED = 10
_ALIVE_S = 5.0
"""Writers write a heartbeat every two seconds; one without for so long is no longer running."""
_FIRST = "load: find"
"""The phase of the first collective of every load, so that ranks can compare what they load."""

Candidate = tuple[int | None, list[int]]


LoadProposal = tuple[dict[str, object], Candidate]
"""The first message of each rank in a load: by name what all ranks must load alike, and of a
fallback the coordinator's next checkpoint, see `Finder.candidate`."""


class Finder:
    """Finds checkpoints for all ranks: the coordinator looks and broadcasts the result."""

    def __init__(self, storage: Storage, groups: ProcessGroups, *, settle_s: float) -> None:
        self._storage = storage
        self._groups = groups
        self._settle_s = settle_s
        self._version: tuple[int, str] | None = None

    def find(
        self, step: int | None, leases: ExitStack, settings: Mapping[str, object]
    ) -> tuple[int, Records]:
        """The step and its records; all ranks get the same bytes.

        Args:
            step: The step to find; None for the newest.
            leases: Gets a lease on this version, which is not removed until it is closed.
            settings: By name, what every rank must load alike.

        Raises:
            StorageError: On all ranks, where there is no such checkpoint.
            CorruptionError: On all ranks, where its records are damaged.
            PlanError: On all ranks, where their settings differ.

        Cost: two collectives, of which one carries the records.
        """
        error: Exception | None = None
        payload = b""
        opened: Records | None = None
        # One rank looks, so that all load the same step, whatever is saved or removed meanwhile.
        if self._groups.control.is_coordinator:
            try:
                self._groups.require_complete()
                chosen, save_id, opened = self._open(step, leases)
                payload = msgspec.msgpack.encode((chosen, save_id, opened.manifest, opened.index))
            except Exception as caught:
                error = caught
        proposal = msgspec.msgpack.encode((dict(settings), (None, [])))
        proposals = self._groups.control.agree(error, phase=_FIRST, payload=proposal)
        _refuse_other_settings(proposals, self._groups.control.ranks)
        data = self._groups.control.broadcast(payload or None, phase="load: records")
        chosen, save_id, manifest, index = msgspec.msgpack.decode(
            data, type=tuple[int, str, bytes, bytes]
        )
        self._version = (chosen, save_id)
        # The coordinator keeps its decoded manifest.
        return chosen, opened or Records(manifest=manifest, index=index)

    def forget(self) -> None:
        """Start a new load: no version has been found."""
        self._version = None

    def was_replaced(self) -> bool:
        """Whether the version found last has been replaced since.

        For all ranks together, after an error that all of them raise; where this cannot be found
        out, the answer is no, so that they raise that error.

        Cost: one collective if a version had been found.
        """
        if self._version is None:
            return False
        step, save_id = self._version
        report = b""
        if self._groups.control.is_coordinator:
            try:
                report = b"%d" % (save_id_of(self._storage, step_dir(step)) != save_id)
            except Exception:  # a storage of the caller's that breaks its contract
                report = b"0"
        try:
            reports = self._groups.control.agree(None, phase="load: replaced", payload=report)
        except HoldfastError:  # some rank was interrupted, or cannot go on
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
            The newest step that has not failed, None when there is none or too many have failed;
            and the failed steps that are still there. A step that retention has removed meanwhile
            was not damaged, and there is a newer one.

        Cost: one collective.
        """
        error: Exception | None = None
        candidate: Candidate = (None, [])
        control = self._groups.control
        if control.is_coordinator:
            try:
                # The first time, as any load: an empty directory is an error of its own.
                if not failed:
                    self._choose(None)
                steps = list_steps(self._storage)
                present = [step for step in failed if step in steps]
                left = [step for step in steps if step not in failed]
                too_many = max_fallbacks is not None and len(present) > max_fallbacks
                candidate = (None if too_many else max(left, default=None), present)
            except Exception as caught:
                error = caught
        proposal = msgspec.msgpack.encode((dict(settings), candidate))
        proposals = control.agree(error, phase=_FIRST, payload=proposal)
        _refuse_other_settings(proposals, control.ranks)
        of_coordinator: LoadProposal = msgspec.msgpack.decode(proposals[0], type=LoadProposal)
        return of_coordinator[1]

    def _open(self, step: int | None, leases: ExitStack) -> tuple[int, str, Records]:
        """Choose a step, take a lease on it, and read its records, both of one version.

        Where retention removes it in between, there is a newer one: look again.
        """
        for left in reversed(range(_NUM_TRIES)):
            chosen = self._choose(step)
            directory = step_dir(chosen)
            with ExitStack() as stack:
                try:
                    # The lease first, so that what is read cannot be removed.
                    lease = stack.enter_context(read_lease(self._storage, directory))
                    records = read_records(self._storage, directory)
                except StorageError:
                    # Still there: then it is unreadable, and was not removed.
                    if not left or save_id_of(self._storage, directory) is not None:
                        raise
                    continue
                save_id = records.decoded.save_id if records.decoded is not None else ""
                lease.set_version(save_id)
                leases.push(stack.pop_all())
                return chosen, save_id, records
        raise StorageError(f"{self._storage.describe('')}: no checkpoint there stays long enough")

    def _choose(self, step: int | None) -> int:
        where = self._storage.describe("")
        if not self._storage.is_dir(""):
            raise StorageError(f"{where} is not a directory: there is no checkpoint to load")
        # Once per run: what a crashed writer left may be a checkpoint to finish.
        if self._settle_s > 0:
            wait_for_writers(self._storage, alive_s=_ALIVE_S, timeout_s=self._settle_s)
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


def _refuse_other_settings(proposals: Sequence[bytes], ranks: Sequence[int]) -> None:
    """PlanError where the ranks are to load different things."""
    settings = [msgspec.msgpack.decode(data, type=LoadProposal)[0] for data in proposals]
    for name in settings[0]:
        values = [each.get(name) for each in settings]
        refuse_disagreement(name, ranks, values, operation="load")
