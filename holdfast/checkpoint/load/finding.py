"""Finding the checkpoint of a load: one step and one version of it, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import msgspec

from holdfast.checkpoint.save.handshake import refuse_disagreement
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.leases import mark_reading
from holdfast.format.names import list_steps, step_dir
from holdfast.format.records import Records, read_records
from holdfast.format.versions import save_id_of
from holdfast.parallel import ProcessGroups
from holdfast.storage import Storage
from holdfast.writer.repair import wait_for_writers

_NUM_TRIES = 8
"""How often a checkpoint is looked for that is replaced or removed meanwhile."""
_MAX_NAMED = 10
_ALIVE_S = 5.0
"""A writer gives a sign of life every two seconds; one silent for so long is gone."""


_FIRST = "load: find"
"""The phase of a load's first collective, whatever it is asked for: so all ranks compare that."""

Candidate = tuple[int | None, list[int]]


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says first: what it was asked for, and a fallback's next candidate."""

    settings: dict[str, object]
    candidate: Candidate = (None, [])


class Finder:
    """Looks for checkpoints under one set of groups: the coordinator looks, all ranks learn."""

    def __init__(self, storage: Storage, groups: ProcessGroups, *, settle_s: float) -> None:
        self._storage = storage
        self._groups = groups
        self._settle_s = settle_s
        self._version: tuple[int, str] | None = None

    def find(
        self, step: int | None, marks: ExitStack, settings: Mapping[str, object]
    ) -> tuple[int, Records]:
        """The step (the newest one for None) and its records; all ranks get the same bytes.

        `settings`: by name, what every rank must ask for alike. Until `marks` is closed, nobody
        removes this version. Raises on all ranks: StorageError where there is no such checkpoint,
        CorruptionError where its records are damaged.
        Cost: two collectives, of which one carries the records.
        """
        error: Exception | None = None
        payload = b""
        found: Records | None = None
        if self._groups.control.is_coordinator:
            try:
                self._groups.require_complete()
                chosen, save_id, found = self._open(step, marks)
                payload = msgspec.msgpack.encode((chosen, save_id, found.manifest, found.index))
            except Exception as caught:
                error = caught
        asked = msgspec.msgpack.encode(_Asked(dict(settings)))
        answers = self._groups.control.agree(error, phase=_FIRST, payload=asked)
        _refuse_other_settings(answers, self._groups.control.ranks)
        data = self._groups.control.broadcast(payload or None, phase="load: records")
        chosen, save_id, manifest, index = msgspec.msgpack.decode(
            data, type=tuple[int, str, bytes, bytes]
        )
        self._version = (chosen, save_id)
        return chosen, found or Records(manifest=manifest, index=index)

    def forget(self) -> None:
        """Begin again: nothing has been found."""
        self._version = None

    def was_replaced(self) -> bool:
        """Whether the version found last has lost its name since; one collective if one was found.

        For all ranks together, after an error that all of them raise, which is the one to raise if
        this cannot be found out.
        """
        if self._version is None:
            return False
        step, save_id = self._version
        answer = b""
        if self._groups.control.is_coordinator:
            try:
                answer = b"%d" % (save_id_of(self._storage, step_dir(step)) != save_id)
            except Exception:  # a storage of the caller's that breaks its contract
                answer = b"0"
        try:
            answers = self._groups.control.agree(None, phase="load: replaced", payload=answer)
        except HoldfastError:  # some rank was interrupted, or cannot go on
            return False
        return answers[0] == b"1"

    def candidate(
        self, failed: Sequence[int], max_fallbacks: int | None, settings: Mapping[str, object]
    ) -> tuple[int | None, list[int]]:
        """The newest step that has not failed, and those of the failed that are still there.

        As the coordinator sees them: a step that retention has removed is no damaged one, and a
        newer one than it is there. None when there is none, or more than `max_fallbacks` have
        failed. One collective.
        """
        error: Exception | None = None
        found: tuple[int | None, list[int]] = (None, [])
        control = self._groups.control
        if control.is_coordinator:
            try:
                if not failed:
                    self._choose(None)
                steps = list_steps(self._storage)
                there = [step for step in failed if step in steps]
                left = [step for step in steps if step not in failed]
                enough = max_fallbacks is not None and len(there) > max_fallbacks
                found = (None if enough else max(left, default=None), there)
            except Exception as caught:
                error = caught
        payload = msgspec.msgpack.encode(_Asked(dict(settings), found))
        answers = control.agree(error, phase=_FIRST, payload=payload)
        _refuse_other_settings(answers, control.ranks)
        return msgspec.msgpack.decode(answers[0], type=_Asked).candidate

    def _open(self, step: int | None, marks: ExitStack) -> tuple[int, str, Records]:
        """Choose a step, mark it as read, and read its records, both of one version.

        What a retention policy removes in between has a newer one beside it: that is looked for.
        """
        for left in reversed(range(_NUM_TRIES)):
            chosen = self._choose(step)
            directory = step_dir(chosen)
            with ExitStack() as stack:
                try:
                    mark = stack.enter_context(mark_reading(self._storage, directory))
                    records = read_records(self._storage, directory)
                except StorageError:
                    if not left or save_id_of(self._storage, directory) is not None:
                        raise
                    continue
                save_id = records.decoded.save_id if records.decoded is not None else ""
                mark.of_version(save_id)
                marks.push(stack.pop_all())
                return chosen, save_id, records
        raise StorageError(f"{self._storage.describe('')}: no checkpoint there stays long enough")

    def _choose(self, step: int | None) -> int:
        where = self._storage.describe("")
        if not self._storage.is_dir(""):
            raise StorageError(f"{where} is not a directory: there is no checkpoint to load")
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


def _refuse_other_settings(answers: Sequence[bytes], ranks: Sequence[int]) -> None:
    """PlanError where the ranks ask for different loads."""
    settings = [msgspec.msgpack.decode(answer, type=_Asked).settings for answer in answers]
    for what in settings[0]:
        given = [each.get(what) for each in settings]
        refuse_disagreement(what, ranks, given, operation="load")
