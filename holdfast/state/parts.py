"""Parts: whatever a user puts into a state, behind one small protocol.

The parts of several modules are one state, too (`module_parts`): their names begin with the
module's, as in `vision.model`, `vision.optimizer`, `language.model`. Keys do not say where a module
was, so it loads on other ranks, under another layout, next to other modules.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from holdfast.errors import ConfigError, MismatchError, counted
from holdfast.format.values import is_like_a_tag, is_unicode
from holdfast.parallel import Layout, ModuleGroups
from holdfast.parallel.control.guard import Guard
from holdfast.state.arrival import ask_back, differences, listed, recorded, same_containers
from holdfast.state.data_positions import (
    refuse_other_shares,
    set_epochs,
    with_measures,
    without_measures,
)
from holdfast.state.kinds import Noted, names_of, objects_in, other_kinds
from holdfast.state.markers import AppliesLater, FromPart, OnLayout
from holdfast.state.module_state import ModuleState
from holdfast.state.optimizer_protocol import PartitionedOptimizer
from holdfast.state.optimizer_state import OptimizerState, is_optimizer_node
from holdfast.state.rng import RNG, refuse_shared_streams
from holdfast.state.schedules import follow_groups, values_by_group
from holdfast.state.stored import PlacedTemplates, StoredPart
from holdfast.state.unfinished import unfinished_on


@runtime_checkable
class Part(Protocol):
    """Something that can be saved and restored as a tree."""

    def tree(self) -> object:
        """Return what to save: containers, values, tensors, markers. It must not copy tensors."""

    def template(self, stored: StoredPart) -> object:
        """Return what to load into: tensors are filled in place, `Stored()` takes what there is.

        Args:
            stored: What the checkpoint has of the part.
        """

    def restore(self, tree: object) -> None:
        """Take what was loaded.

        Args:
            tree: The template's tree, filled.
        """


@runtime_checkable
class Stateful(Protocol):
    """Anything with torch's pair of methods: schedulers, data loaders, a user's own classes."""

    def state_dict(self) -> dict[str, object]:
        """Return the object's state."""

    def load_state_dict(self, state_dict: dict[str, object]) -> object:
        """Take a state."""


class OptionalPart(Part):
    """A part that a checkpoint may lack: a load without it succeeds and leaves the part as it is.

    For objects that watch over a run and are not trained. `LoadReport.missing` names the part if it
    is not stored.
    """

    @property
    @abstractmethod
    def has_entry(self) -> bool:
        """True if it is saved now; otherwise it is as if the state did not have it."""

    @property
    def is_loaded(self) -> bool:
        """True if it takes its entry at a load, even while it saves none."""
        return self.has_entry


class StatefulPart:
    """An object with `state_dict` and `load_state_dict`: it is given everything that is stored.

    Tensors are whole and new, unless the object's current state has a DTensor or a marker of
    the same global shape at the same path: those are the targets, and keep their placement.

    A load asks the object for its state again, which must be what it was given.

    Args:
        value: The object.
        applies_later: Whether it is declared to apply its state only later: then it is not asked.
    """

    def __init__(self, value: Stateful, *, applies_later: bool = False) -> None:
        self.owner = value
        self._stored: StoredPart | None = None
        self.applies_later = applies_later
        self.missing: list[str] = []
        """Paths that the object has and the checkpoint lacks, as the load allows."""
        self._name = ""
        self._built: dict[str, list[object]] = {}
        """What schedules had for each parameter group before the load."""
        self._noted: Noted | None = None

    def tree(self) -> object:
        """Return the object's state dict."""
        return with_measures(self.owner, self.owner.state_dict())

    def template(self, stored: StoredPart) -> object:
        """Whatever is stored, placed as it is now; a per-rank state dict requests its own."""
        refuse_other_shares(self.owner, stored)
        self._noted = stored.kinds
        self._name, self._built = stored.name, values_by_group(self.owner, stored.name)
        current: object = self.owner.state_dict()
        self._stored = stored
        return PlacedTemplates(in_place=True).template(current, stored)

    def restore(self, tree: object) -> None:
        """Pass the tree to the object, and ask for it again.

        Raises:
            MismatchError: By path, what the object does not state as it was given.
        """
        stored, self._stored = self._stored, None
        set_epochs(self.owner, tree)
        tree = without_measures(tree)
        if self.applies_later or stored is None:
            self.owner.load_state_dict(tree)  # type: ignore[arg-type]
            return
        kind, where, codecs = type(self.owner).__name__, stored.name, stored.codecs
        expected = recorded(tree, codecs=codecs)
        again = same_containers(tree)
        self.owner.load_state_dict(tree)  # type: ignore[arg-type]
        answer = ask_back(
            expected, self.owner.state_dict, where=where, owner=f"the {kind}", codecs=codecs
        )
        self.missing = [
            each.path for each in answer.wrong if each.is_surplus and stored.may_miss(each.path)
        ]
        wrong = [each for each in answer.wrong if each.path not in self.missing]
        if wrong:
            raise MismatchError(
                f"{kind}.load_state_dict() did not take what was stored "
                f"({counted(len(wrong), 'entry')}): {listed(wrong)}; build "
                f"the object as the saved run did, or mend its load_state_dict, so that "
                f"state_dict() after a load states what was loaded. An object that applies its "
                f"state only later, such as a data loader, is declared: "
                f"AppliesLater(obj). What is new in the object may keep its value: "
                f"allow_missing=[patterns]"
            )
        if answer.is_changed_by_reading:
            # The questions have moved it on: what it was given is the last word.
            if list(differences(expected, recorded(again, codecs=codecs), where, owner=kind)):
                raise MismatchError(
                    f"{where}: {kind}.state_dict() writes to the tensors that it was given, so "
                    f"that reading its state changes it; let state_dict only read"
                )
            self.owner.load_state_dict(again)

    def follow(self, optimizers: Iterable[OptimizerState]) -> None:
        """Let a schedule have the values of the groups that the load has found in an optimizer."""
        if not self.applies_later:
            for each in optimizers:
                follow_groups(self.owner, self._name, each.groups_loaded, self._built)

    def kinds(self) -> dict[str, str]:
        """Return the classes of the object and of what is known inside of it, by path."""
        return names_of(objects_in(self.owner))

    def other_kinds(self) -> dict[str, str]:
        """Return, by path, what is of another class than the one that was saved, in words."""
        return other_kinds(self.kinds(), self._noted, self._name)

    def unfinished_work(self) -> str | None:
        """Return what the object has not finished."""
        return unfinished_on(self.owner)


class TreePart:
    """A plain tree: returned by the load as it was saved, its tensors filled in place."""

    def __init__(self, value: object) -> None:
        self._value = value

    @property
    def is_empty(self) -> bool:
        """True for a dict without entries."""
        return isinstance(self._value, Mapping) and not self._value

    def tree(self) -> object:
        """Return the tree itself."""
        return self._value

    def template(self, stored: object) -> object:
        """Return the tree itself."""
        del stored
        return self._value

    def restore(self, tree: object) -> None:
        """Nothing: the loaded tree is in the report."""


class StateEntry(NamedTuple):
    """An entry of a state without its markers."""

    layout: Layout
    """Where the part lives."""
    source: str | None
    """The path at which a load finds it (`FromPart`); None for its own name."""
    value: object


def entries_of(
    state: Mapping[str, object], layout: Layout, *, of_load: bool = False
) -> dict[str, StateEntry]:
    """Return the entries of a state, but for optional parts with nothing to save, or to load.

    Args:
        state: Of this rank.
        layout: Of the entries that name none of their own.
        of_load: True for a load.

    Raises:
        ConfigError: A name can be no part's, markers contradict each other, or two entries have
            random streams in common.
    """
    entries: dict[str, StateEntry] = {}
    for name, marked in state.items():
        _check_part_name(name)
        entry = _unmarked(marked, name, layout)
        if entry.source is not None and not of_load:
            raise ConfigError(
                f"state part '{name}': FromPart says where a load finds a part; save the value "
                f"itself"
            )
        if not is_left_out(entry.value, of_load=of_load):
            entries[name] = entry
    refuse_shared_streams({name: entry.value for name, entry in entries.items()})
    return entries


def _unmarked(value: object, name: str, layout: Layout) -> StateEntry:
    """Return an entry without its markers; ConfigError if they contradict each other."""
    source: str | None = None
    while isinstance(value, OnLayout | FromPart):
        if isinstance(value, OnLayout):
            layout, value = value.own_layout, value.value
        elif source is None:
            source, value = value.path, value.value
        else:
            raise ConfigError(f"state part '{name}': FromPart inside of a FromPart; give one path")
    return StateEntry(layout, source, value)


def is_last(value: object) -> bool:
    """Return True if a part has to be flattened, and restored, after all others.

    Random streams do: other parts may draw from them while they are flattened or restored.
    """
    return isinstance(value, RNG)


def is_left_out(value: object, *, of_load: bool = False) -> bool:
    """Return True if a part is an optional one with nothing to save now, or to load."""
    if not isinstance(value, OptionalPart):
        return False
    return not (value.is_loaded if of_load else value.has_entry)


def _check_part_name(name: object) -> None:
    """Raise ConfigError unless the name of a part can start keys."""
    if not isinstance(name, str) or not name or is_like_a_tag(name) or name != name.strip():
        raise ConfigError(
            f"state part name {name!r}: a part's name must be a non-empty string that does not "
            f"start with '$', nor start or end with a space"
        )
    if not name.isascii() and not is_unicode(name):
        raise ConfigError(f"state part name {name!r}: it has a lone surrogate, which is not text")


def part_of(name: str, value: object) -> Part:
    """Return the part for a state's entry; raise ConfigError if names would be lost."""
    if type(value) is dict:
        return TreePart(value)  # the most frequent: to ask for a protocol takes far longer
    if isinstance(value, type):
        raise ConfigError(f"state part '{name}': {value!r} is a class; pass an object of it")
    if isinstance(value, nn.Module):
        return ModuleState(value)
    if isinstance(value, torch.optim.Optimizer | PartitionedOptimizer):
        raise ConfigError(
            f"state part '{name}' is a bare optimizer, whose state is numbered, not named; pass "
            f"OptimizerState(optimizer, model)"
        )
    if isinstance(value, AppliesLater):
        if isinstance(value.value, Part) or not isinstance(value.value, Stateful):
            raise ConfigError(
                f"state part '{name}': AppliesLater takes an object with state_dict and "
                f"load_state_dict, got a {type(value.value).__name__}"
            )
        return StatefulPart(value.value, applies_later=True)
    if isinstance(value, Part):
        return value
    if isinstance(value, Stateful):
        return StatefulPart(value)
    return TreePart(value)


def applied_later(name: str, part: Part) -> tuple[str, ...]:
    """Return the paths of a part whose owner applies its state only later."""
    if isinstance(part, StatefulPart):
        return (name,) if part.applies_later else ()
    return (
        tuple(f"{name}.{entry}" for entry in part.applied_later)
        if isinstance(part, ModuleState)
        else ()
    )


def is_closed(part: Part, node: object) -> bool:
    """Return True if stored entries that the part did not ask for are 'unexpected'.

    A module or an optimizer asks for each of its entries. A plain tree or a stateful object is
    given everything that is stored, so nothing of it can be passed over; but an empty dict in the
    place of an optimizer (of a module that has been frozen since) takes nothing of its state.
    """
    if isinstance(part, TreePart):
        return part.is_empty and is_optimizer_node(node)
    return not isinstance(part, StatefulPart)


def module_parts(
    groups: ModuleGroups,
    modules: Mapping[str, Mapping[str, object]],
    *,
    without: Collection[str] = (),
) -> dict[str, object]:
    """Return the state of the modules that this rank has, as parts for a `Checkpointer`.

        parts = module_parts(groups, {"vision": {"model": encoder, "optimizer": {}}})
        checkpointer.save(step, {**parts, "progress": progress})

    The checkpointer runs on `groups.union`, which spans all modules. Each part gets the name
    `<module>.<part>` and its module's layout (`OnLayout`), so that nothing of it depends on which
    ranks the module is on or on what rank 0 has. What belongs to no module (progress, a schedule
    for all) is put next to them by its own name, equal on all ranks.

    Args:
        groups: the modules and where they are.
        modules: for each module of this rank its parts by name; whatever a state may hold.
        without: modules that are left out on purpose, on every rank: for a load that does not
            want them, or a save that does not keep them.

    Called by all ranks.

    Raises:
        ConfigError: On all ranks: a module of some rank is missing there and not in `without`, or
            is there and in `without`; a part's name is empty; two modules of a rank have a random
            stream in common, as with an `RNG()` each (`ModuleRNG` gives each its own).
        LayoutError, GroupError: On all ranks: a module does not exist, or is not on that rank.

    Cost: one small agreement; nothing is read.
    """
    make = partial(_make_parts, groups, modules, without)
    return Guard[dict[str, object]](groups.control, "module parts").run(make)


def _make_parts(
    groups: ModuleGroups,
    modules: Mapping[str, Mapping[str, object]],
    without: Collection[str],
) -> dict[str, object]:
    """Return the parts of this rank's modules; raise for what is wrong here."""
    for module in (*without, *modules):
        groups.layouts[module]  # LayoutError names those that there are
    for module in modules:
        groups[module]  # GroupError says where it is
        if module in without:
            raise ConfigError(f"module '{module}' is given, and listed in without=: choose one")
    forgotten = [name for name in groups.modules if name not in modules and name not in without]
    if forgotten:
        raise ConfigError(
            f"rank {groups.rank} has module '{forgotten[0]}', whose state is not given: it would "
            f"be lost. Give it, or leave it out on all ranks with without=['{forgotten[0]}']"
        )
    parts: dict[str, OnLayout] = {}
    for module, named in modules.items():
        for part, value in named.items():
            if not isinstance(part, str) or not part:
                raise ConfigError(f"module '{module}': a part needs a name, got {part!r}")
            parts[f"{module}.{part}"] = OnLayout(groups[module], value)
    refuse_shared_streams({name: part.value for name, part in parts.items()}, are_modules=True)
    return dict(parts)
