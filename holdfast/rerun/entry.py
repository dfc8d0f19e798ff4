"""The machine's entry in a checkpoint: one for each rank, of plain values and tensors.

    version     of this form
    learned     call -> magnitudes of its accepted values, a tensor of constant length
    injector    the errors that were injected; None without an injector
    statistics  differences between two runs, by call
    fault       the pending fault and everything that its rerun needs, see `PendingFault`; or None
    needed      why a load without a machine would lose something; empty if it would not

Saves without a pending fault have the same leaves from step to step, so that one plan serves them
all. A pending fault adds its own leaves below `fault`: batches have any number and shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from holdfast.errors import ConfigError, CorruptionError
from holdfast.format.values import Codecs
from holdfast.parallel.layout import Layout
from holdfast.rerun.attempt import Call, Suspect
from holdfast.rerun.attribution import ValueRun
from holdfast.rerun.kept_trees import keep_tree, revive_tree
from holdfast.rerun.places import Place
from holdfast.rerun.replay import ReplayableBatches
from holdfast.state.coordinates import PerRankRequest, PerRankSource, coordinate_label, parse_label

_VERSION = 1
_PLAIN = ("call", "occurrence", "why", "fatal", "tolerance", "fed_by", "place", "trials")


class SuspectRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A suspect as it is stored: its value is in the form that `keep_tree` returns."""

    call: str
    occurrence: int
    why: str
    fatal: bool
    tolerance: float
    value: Any
    fed_by: list[Place] = []
    place: Place | None = None
    trials: list[ValueRun] = []

    @classmethod
    def of(cls, call: Call, suspect: Suspect, *, codecs: Codecs) -> SuspectRecord:
        """Return the record of a suspect; `PendingFault.suspects_by_call` is the way back."""
        return cls(
            call=call.name,
            occurrence=call.occurrence,
            why=suspect.why,
            fatal=suspect.fatal,
            tolerance=suspect.tolerance,
            value=keep_tree(suspect.value, path=f"value '{call.name}'", codecs=codecs),
            fed_by=[*suspect.fed_by],
            place=suspect.place,
            trials=[*suspect.trials],
        )

    def tree(self) -> dict[str, Any]:
        """Return the record as a tree that a state can hold; its value may have tensors."""
        plain = {name: msgspec.to_builtins(getattr(self, name)) for name in _PLAIN}
        return plain | {"value": self.value}

    def revived(self, *, here: Place, codecs: Codecs) -> Suspect:
        """Return the suspect with its value.

        Args:
            here: where it was validated, for a record that does not have it.
            codecs: of the value.
        """
        place = self.place or here
        return Suspect(
            value=revive_tree(self.value, path=f"value '{self.call}'", codecs=codecs),
            why=self.why,
            fatal=self.fatal,
            tolerance=self.tolerance,
            fed_by=tuple(self.fed_by) or (place,),
            place=place,
            trials=tuple(self.trials),
        )


class PendingFault(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a fault without a verdict, and everything that its rerun needs.

    Args:
        fault: its id, the same on all ranks.
        step: the number of the step that was bad.
        rank, coordinate, host, device: of the rank that has written this.
        suspects: the values of this rank that were bad twice.
        batches: of the step, see `ReplayableBatches.kept`; None if the loop does not take its
            batches from the machine.
        replayed: random streams and buffers at the start of the step, see `Replayed.kept`.
    """

    fault: str
    step: int
    rank: int
    coordinate: str
    host: str
    device: str
    suspects: list[SuspectRecord]
    batches: list[Any] | None
    replayed: Any

    @property
    def place(self) -> Place:
        """Where the rank that has written this ran."""
        return Place(rank=self.rank, coordinate=self.coordinate, host=self.host, device=self.device)

    def suspects_by_call(
        self, later: Mapping[Call, Sequence[ValueRun]], *, codecs: Codecs
    ) -> dict[Call, Suspect]:
        """Return the suspects with their values revived.

        Args:
            later: trials of starts since the fault was kept, by call.
            codecs: of the values.
        """
        suspects = {}
        for each in self.suspects:
            call = Call(each.call, each.occurrence)
            suspect = each.revived(here=self.place, codecs=codecs)
            trials = (*suspect.trials, *later.get(call, ()))
            suspects[call] = replace(suspect, trials=trials)
        return suspects

    def replay_batches(self, batches: object) -> None:
        """Make `batches` start with the kept ones.

        Raises:
            ConfigError: `batches` cannot replay.
        """
        if self.batches is None:
            return
        if not isinstance(batches, ReplayableBatches):
            raise ConfigError(
                f"step {self.step}: the checkpoint holds a pending fault and the batches of its "
                f"step, which must be used again, but `attempts` was given {kind_of(batches)}; "
                f"pass machine.replayable(iterator)"
            )
        batches.replay_kept(self.batches)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The entry of one rank; its fields are described at the top of this file."""

    version: int = _VERSION
    learned: dict[str, Any] = {}
    injector: dict[str, Any] | None = None
    statistics: dict[str, Any] = {}
    fault: PendingFault | None = None
    needed: str = ""

    def tree(self) -> dict[str, Any]:
        """Return the entry as a tree that a state can hold."""
        tree = msgspec.structs.asdict(self)
        if self.fault is not None:
            tree["fault"] = msgspec.structs.asdict(self.fault) | {
                "suspects": [each.tree() for each in self.fault.suspects]
            }
        return tree

    @classmethod
    def of(cls, tree: object) -> Entry:
        """Return the entry of a tree.

        Raises:
            CorruptionError: the tree is not an entry, or of another version.
        """
        if not isinstance(tree, dict) or tree.get("version") != _VERSION:
            raise CorruptionError("the entry has a form that this version does not know")
        try:
            return msgspec.convert(tree, cls)
        except msgspec.ValidationError as error:
            raise CorruptionError(f"the entry is damaged: {error}") from error


def pick_entries(request: PerRankRequest) -> tuple[PerRankSource, bool]:
    """Return the entries that a rank reads, and True if that is its own one.

    Under another layout a rank reads one entry of each pipeline stage. A pending fault is useless
    there, but what rules have learned is not.
    """
    here = request.here
    if _is_of_layout(request.stored, layout=request.layout, axes=request.axes, path=request.path):
        return PerRankSource(labels=(here,), here=here, is_picked=True), True
    # The first label of each stage by coordinate, so that every rank picks the same ones.
    first: dict[int, tuple[list[int], str]] = {}
    for label in request.stored:
        at = parse_label(label)
        stage = at.get("pp", 0)
        order = [at[axis] for axis in sorted(at) if axis != "pp"], label
        first[stage] = min(first.get(stage, order), order)
    labels = tuple(label for _, (_, label) in sorted(first.items()))
    return PerRankSource(labels=labels, here=here, is_picked=True), False


def _is_of_layout(
    labels: Mapping[str, Any], *, layout: Layout, axes: Sequence[str], path: str
) -> bool:
    """Return True if these are the labels of all ranks of a layout."""
    mine = {coordinate_label(layout, rank, axes, path=path) for rank in layout.ranks}
    return set(labels) == mine


def kind_of(batches: object) -> str:
    """Return in words what a caller has passed as batches."""
    return "no batches" if batches is None else f"a {type(batches).__name__}"
