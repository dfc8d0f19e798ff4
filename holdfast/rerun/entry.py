"""A machine as a part of the state: an entry that every checkpoint may lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from holdfast.errors import ConfigError, CorruptionError
from holdfast.format.values import Codecs
from holdfast.parallel import ProcessGroups
from holdfast.parallel.layout import DENSE_AXES
from holdfast.rerun.context import FaultRecord, Head, RecordSlot, pick_records, read_record
from holdfast.rerun.injection import ErrorInjector
from holdfast.rerun.replay import ReplayableBatches
from holdfast.rerun.rules import Learned
from holdfast.rerun.states import Event, Mode, State, next_state
from holdfast.rerun.statistics import DeterminismStatistics
from holdfast.state import OptionalPart, Stored, StoredPart
from holdfast.state.coordinates import PerRankRequest, PerRankSource, PickedPerRank
from holdfast.state.markers import PerRank

_RECORD = "record"


class MachineEntry(OptionalPart):
    """What of a machine is in a checkpoint: one tensor of bytes for each rank.

    Its key and shape are the same whether or not a fault is pending. A disabled machine stores
    nothing. A load neither refuses a checkpoint without the entry nor one of another layout: what
    rules have learned is then taken from a rank of the same pipeline stage, and a pending fault is
    dropped with one message.
    """

    _codecs: Codecs

    def __init__(
        self,
        groups: ProcessGroups,
        *,
        mode: Mode,
        injector: ErrorInjector | None,
        note: Callable[[str], None],
    ) -> None:
        self.groups = groups
        self.mode = mode
        self.state = State.NOT_RUNNING_YET
        """Where the machine is."""
        self.fault: FaultRecord | None = None
        """The pending fault, as this rank knows it."""
        self.learned = Learned()
        self.statistics = DeterminismStatistics()
        self._injector = injector
        self._note = note
        self._kept = b""
        """Of a pending fault, see `KeptData`."""
        self._judged: set[str] = set()
        """Faults whose verdict is known, by id."""
        self._is_left = False
        """Whether the step of the fault is skipped, and its kept batches are to be taken."""
        self._slot = RecordSlot()
        self._batches: object = None
        self._is_own_layout = True

    @property
    def has_entry(self) -> bool:
        """Whether it is saved and loaded: not while it is disabled."""
        return self.mode is not Mode.DISABLED

    def tree(self) -> object:
        """This rank's record."""
        head = Head(
            learned=self.learned.state_dict(),
            injector=None if self._injector is None else self._injector.state_dict(),
            statistics=self.statistics.state_dict(),
            fault=self.fault,
        )
        batches = self._batches

        def reserve() -> int:
            return 2 * batches.kept_nbytes if isinstance(batches, ReplayableBatches) else 0

        record = self._slot.fill(head, self._kept, reserve=reserve)
        return PerRank({_RECORD: record}, axes=DENSE_AXES, missing="keep", surplus="drop")

    def template(self, stored: StoredPart) -> object:
        """The record of this rank, or those that another layout can learn from."""
        del stored
        return PickedPerRank(
            Stored(), axes=DENSE_AXES, missing="keep", surplus="drop", pick=self._pick
        )

    def restore(self, tree: object) -> None:
        """Take what was loaded; see the class."""
        if not isinstance(tree, Mapping):
            return
        try:
            records = {label: read_record(each[_RECORD]) for label, each in tree.items()}
            self._forget_fault()
            if not self._is_own_layout:
                self._take_learned(records)
                return
            ((head, kept),) = records.values()
            self.learned.load_state_dict(head.learned)
            self.statistics.load_state_dict(head.statistics)
            if self._injector is not None and head.injector is not None:
                self._injector.load_state_dict(head.injector)
        except (CorruptionError, KeyError, TypeError, ValueError, AttributeError) as error:
            self._say(
                f"the machine's entry in the checkpoint cannot be read, and is left: "
                f"{type(error).__name__}: {error}"
            )
            return
        if head.fault is None:
            return
        if self.mode is not Mode.VALIDATE_RESULTS:
            self._say(
                f"the checkpoint holds a pending fault of step {head.fault.step}; in mode "
                f"{self.mode.value} it is dropped"
            )
            return
        self.fault, self._kept = head.fault, kept
        self._enter(Event.LOADED)

    def _pick(self, request: PerRankRequest) -> PerRankSource:
        """Which records this rank reads, and whether they are of its own layout."""
        source, self._is_own_layout = pick_records(request)
        return source

    def _take_learned(self, records: Mapping[str, tuple[Head, bytes]]) -> None:
        """Take what other coordinates have learned, and drop the fault."""
        learned: dict[str, Any] = {}
        for head, _ in records.values():
            learned = head.learned | learned
        self.learned.load_state_dict(learned)
        faults = [head.fault for head, _ in records.values() if head.fault is not None]
        if faults:
            text = (
                f"the checkpoint holds a pending fault of step {faults[0].step} under another "
                f"layout, where its ranks do not exist: it is dropped, and the run goes on"
            )
            if faults[0].has_batches:
                text += (
                    " (a source of batches that was saved behind those of the step goes on there; "
                    "one that counts finished steps begins with them)"
                )
            self._say(text)

    def _replay_kept(self, fault: FaultRecord, data: bytes, batches: object) -> KeptData:
        """What is kept of a fault; `batches` begins with those of its step from now on.

        Raises:
            ConfigError: they are none that can be replayed.
        """
        if fault.has_batches and not isinstance(batches, ReplayableBatches):
            raise ConfigError(
                f"step {fault.step}: the checkpoint holds a pending fault and the batches of its "
                f"step, which have to be used again, but `attempts` was given "
                f"{kind_of(batches)}: give it machine.replayable(iterator)"
            )
        kept = msgspec.msgpack.decode(data, type=KeptData)
        if isinstance(batches, ReplayableBatches) and fault.has_batches:
            batches.decode_kept(kept.batches)
        return kept

    def _forget_fault(self) -> None:
        """Go back to between steps, whatever was pending."""
        self.state, self.fault, self._kept = State.NOT_RUNNING_YET, None, b""
        self._is_left = False

    def _enter(self, event: Event) -> None:
        """Go to the state that follows."""
        self.state = next_state(self.state, event)

    def _say(self, text: str) -> None:
        """One line for the person, on one rank."""
        if self.groups.control.is_coordinator:
            self._note(text)


class KeptData(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What is kept with a pending fault, in the forms of `holdfast.rerun.replay`.

    Args:
        values: the suspect values, in the order of `FaultRecord.suspects`.
        batches: those of the step; empty where the loop takes none from the machine.
        replayed: what `Replayed.encode` returns, of the start of the step.
    """

    values: bytes
    batches: bytes
    replayed: bytes = b""


def kind_of(batches: object) -> str:
    """What a caller has given for batches."""
    return "no batches" if batches is None else f"a {type(batches).__name__}"
