"""The machine's entry in a checkpoint: one for each rank, of plain values and tensors.

    version     of this form
    learned     call -> magnitudes of its accepted values, a tensor of constant length
    injector    the errors that were injected; None without an injector
    statistics  differences between two runs, by call
    fault       the pending fault and everything that its rerun needs, see `PendingFault`; or None
    needed      why a load without a machine would lose something; empty if it would not
    modules     a digest of where several modules are, which coordinates do not tell; or empty

Saves without a pending fault have the same leaves from step to step, so that one plan serves them
all. A pending fault adds its own leaves below `fault`: batches have any number and shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.decoding import convert_as
from holdfast.errors import ConfigError, CorruptionError
from holdfast.format.values import is_plain_dict
from holdfast.rerun.attempt import Call, Suspect
from holdfast.rerun.attribution import ValueRun
from holdfast.rerun.replay import ReplayableBatches
from holdfast.state.coordinates import PerRankRequest, PerRankSource, coordinate_label, parse_label

_VERSION = 1


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
        experts: how experts were laid out, which coordinates do not tell; None if it is not known.
    """

    fault: str
    step: int
    rank: int
    coordinate: str
    host: str
    device: str
    suspects: list[Suspect]
    batches: list[Any] | None
    replayed: Any
    experts: str | None = None

    def suspects_by_call(self, later: Mapping[Call, Sequence[ValueRun]]) -> dict[Call, Suspect]:
        """Return the suspects, with the trials of starts since the fault was kept.

        Args:
            later: these trials, by call.
        """
        return {
            each.call: msgspec.structs.replace(
                each, trials=(*each.trials, *later.get(each.call, ()))
            )
            for each in self.suspects
        }

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
    modules: str = ""

    def tree(self) -> dict[str, Any]:
        """Return the entry as a tree that a state can hold."""
        tree = msgspec.structs.asdict(self)
        if self.fault is not None:
            tree["fault"] = msgspec.structs.asdict(self.fault) | {
                "suspects": msgspec.to_builtins(self.fault.suspects)
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
            return convert_as(tree, cls)
        except msgspec.ValidationError as error:
            raise CorruptionError(f"the entry is damaged: {error}") from error


def pick_entries(request: PerRankRequest, *, modules: str) -> tuple[PerRankSource, bool]:
    """Return the entries that a rank reads, and True if that is its own one.

    Under another layout, or with modules on other ranks, a rank reads the first entries that
    together have every call. A pending fault is useless there, but what rules have learned is not.

    Args:
        request: of this rank.
        modules: a digest of where several modules are here; empty without them.
    """
    here, layout = request.here, request.layout
    labels_here = {
        coordinate_label(layout, rank, request.axes, path=request.path) for rank in layout.ranks
    }
    is_of_layout = labels_here == set(request.stored)
    if is_of_layout and all(_modules_of(each) == modules for each in request.stored.values()):
        return PerRankSource(labels=(here,), here=here, is_picked=True), True
    # In the order of coordinates, so that every rank picks the same ones.
    known: set[str] = set()
    labels: list[str] = []
    for label in sorted(request.stored, key=lambda each: [*sorted(parse_label(each).items())]):
        calls = _calls_of(request.stored[label])
        if not labels or calls - known:
            labels.append(label)
            known |= calls
    return PerRankSource(labels=tuple(labels), here=here, is_picked=True), False


def _modules_of(node: Any) -> object:
    """Return the digest in a stored entry; any may be damaged, and is then found to be later."""
    return node.get("modules", "") if is_plain_dict(node) else ""


def _calls_of(node: Any) -> set[str]:
    """Return the calls of which the rules of a stored entry have learned something."""
    learned = node.get("learned") if is_plain_dict(node) else None
    if isinstance(learned, dict) and not is_plain_dict(learned):  # of names that would be tags
        learned = dict(learned.get("v", ()))
    return set(learned or ())


def kind_of(batches: object) -> str:
    """Return in words what a caller has passed as batches."""
    return "no batches" if batches is None else f"a {type(batches).__name__}"
