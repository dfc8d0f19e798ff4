"""The plans of one checkpointer: made with all ranks, and used again while nothing changes.

A save goes through it in this order: `flatten` takes this rank's state apart, `lookup` returns the
plan at hand for it, and if the ranks do not all hold the same one, `plan_together` makes a new one.

The first save of a later run finds the plan next to the checkpoints (`kept_plans.py`): each rank
reads its own share, and only the coordinator makes the plan again, to prove what it has read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from holdfast.arrays.packed_ints import squeeze, unsqueeze
from holdfast.arrays.types import IntArray
from holdfast.checkpoint.plan.claims import (
    ClaimedRows,
    claims_message,
    claims_of,
    decode_claims,
    encode_claims,
    read_claims_messages,
    signature,
)
from holdfast.checkpoint.plan.kept_plans import (
    MAX_NBYTES,
    PLANS_DIR,
    VERSION,
    KeptPlan,
    PlanNotes,
    write_plan,
)
from holdfast.checkpoint.plan.make_plan import RankShare, make_plan
from holdfast.checkpoint.plan.rank_plan import LocalState, RankPlan, rank_plan
from holdfast.collector import collector_paused
from holdfast.decoding import decode_msgpack_as
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.digest import digest128
from holdfast.format.manifest import KINDS_PART, VERSIONS_PART, Envelope
from holdfast.format.stored_copies import CopyPolicy
from holdfast.format.values import Codecs, Node, encode_tree, union_node
from holdfast.parallel import ProcessGroups
from holdfast.state.flatten import LeafCache, flatten_state
from holdfast.state.leaves import FlatState
from holdfast.storage import Storage
from holdfast.storage.reading import is_absence
from holdfast.writer.records import EncodedPlan, encode_plan

_LOG = logging.getLogger("holdfast")

_ShareMessage = tuple[str, int, int, int, RankShare]
"""Plan digest, total bytes, bytes of copies, number of tensors, share."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The answer that no plan can be used again, with the reason."""

    reason: str


class Planner:
    """Makes and keeps the plans of one checkpointer.

    It keeps one plan for each kind of save (with all replicas compared or not), and of the state
    that was saved last what need not be worked out again.

    Args:
        storage: where the claims of the last plan are kept, in `.plans/`.
        groups: whose layout is planned for.
        codecs: for values of types that are registered.
        block_nbytes: bytes per digest.
        copies: what is stored more than once.
        envelope: of the data files.
    """

    def __init__(
        self,
        storage: Storage,
        groups: ProcessGroups,
        *,
        codecs: Codecs,
        block_nbytes: int,
        copies: CopyPolicy | None = None,
        envelope: Envelope = "safetensors",
    ) -> None:
        self._storage = storage
        self._groups = groups
        self._codecs = codecs
        self._block_nbytes = block_nbytes
        self._copies = copies
        self._envelope = envelope
        # What a signature covers besides the claims: layout, bytes per digest, policy of copies,
        # envelope.
        self._choices = [groups.layout.digest(), str(block_nbytes)]
        if copies is not None and copies.axes:
            self._choices += [*copies.axes, f"{copies.max_fraction:g}"]
            if copies.max_nbytes is not None:
                self._choices.append(f"{copies.max_nbytes} bytes")
        if envelope != "safetensors":
            self._choices.append(envelope)
        self._leaves = LeafCache()
        self._last: LocalState | None = None
        self._plans: dict[bool, RankPlan] = {}
        self._looked: set[bool] = set()
        # Of the plans that this run has made and no file holds, by the plan's digest.
        self._not_kept: dict[str, PlanNotes] = {}
        self._kept: dict[bool, str] = {}

    def flatten(self, state: Mapping[str, object]) -> LocalState:
        """Take the state on this rank apart.

        If every leaf claims what it did in the save before, its table and signature are used again.

        Cost: no collectives, no tensor bytes copied; about 3 µs a tensor if nothing changed.
        """
        with collector_paused():
            flat = flatten_state(
                state,
                layout=self._groups.layout,
                rank=self._groups.rank,
                codecs=self._codecs,
                cache=self._leaves,
            )
            values = msgspec.json.encode({**flat.nodes, **_noted(flat)})
            # Nothing is encoded and hashed again if the structure is the same, as in most saves.
            if self._last is not None and self._last.flat.structure is flat.structure:
                self._last = replace(self._last, flat=flat, values=values)
                return self._last
            table, rows = claims_of(flat)
        encoded = encode_claims(table)
        self._last = LocalState(
            flat=flat,
            table=table,
            rows=rows,
            held=_whole_ones(flat, rows),
            encoded=encoded,
            names=digest128(table.names),
            signature=signature(encoded, choices=self._choices),
            values=values,
        )
        return self._last

    def lookup(self, local: LocalState, *, compare_all: bool) -> RankPlan | Rejected:
        """This rank's plan for its state, as it is now; all ranks must agree on it before its use.

        Before the first save of a kind the claims kept by an earlier run are looked at. A rejection
        of these is logged (logger `holdfast`, info).
        Cost: no collectives; the first time reads of one small file and O(rows of this rank) work;
        on the coordinator of all of it, and O(rows of all ranks).
        """
        plan = self._plans.get(compare_all)
        if plan is not None:
            same = plan.signature == local.signature
            return plan if same else Rejected("the structure of the state has changed")
        if compare_all in self._looked:
            return Rejected("no plan was made yet")
        # Before reading: a file that cannot be read must not be tried again with each save.
        self._looked.add(compare_all)
        path = self.path(compare_all=compare_all)
        try:
            result = self._plan_again(path, local, compare_all)
        except (HoldfastError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, StorageError) and is_absence(error):
                return Rejected("no plan is kept")
            # Anything may be in the file. It may never cost more than a plan, let alone the save.
            result = Rejected(f"it cannot be read: {error}")
        if isinstance(result, Rejected):
            _LOG.info("the plan in %s is not used: %s", path, result.reason)
        else:
            self._plans[compare_all] = result
            self._kept[compare_all] = result.plan_digest
        return result

    def plan_together(
        self, local: LocalState, *, names: Sequence[str], compare_all: bool
    ) -> tuple[RankPlan, PlanNotes | None]:
        """Make a plan with all ranks: the coordinator proves their claims and assigns writers.

        Args:
            local: this rank's state.
            names: digest of every rank's names, from the proposals: each distinct one is sent once.
            compare_all: whether declared replicas are compared by content, too.

        Returns:
            The rank's plan, and on the coordinator what it was made of.

        Raises:
            PlanError: on all ranks, naming key, box and ranks.

        Cost: collective; one gather of the claims, one scatter of the shares, O(rows) vector work
        on the coordinator.
        """
        control = self._groups.control
        # Of the ranks with equal names the first one sends them; all know that from the proposals.
        sends_names = list(names).index(local.names) == control.index
        message = claims_message(local.encoded, local.table.names if sends_names else None)
        gathered = control.gather(message, phase="save: tables")
        notes: PlanNotes | None = None
        commit: EncodedPlan | None = None
        if gathered is not None:
            commit, notes = self.plan_from_claims(gathered, compare_all=compare_all)
        # Only the share is sent: the plan of all ranks is as large as all shares together.
        shares = None if notes is None else [*notes.shares]
        share = control.scatter(shares, phase="save: shares")
        own = self._own_plan(local, share, compare_all=compare_all, commit=commit, kept="")
        return own, notes

    def add(self, plan: RankPlan, notes: PlanNotes | None) -> None:
        """Keep a plan that all ranks have made; the coordinator passes what it was made of.

        A plan of the other kind stays in use if it is of the same structure.
        """
        same = {k: p for k, p in self._plans.items() if p.signature == plan.signature}
        self._plans = same | {plan.compare_all: plan}
        # What an earlier run has kept already need not be written again.
        if notes is not None and self._kept.get(plan.compare_all) != plan.plan_digest:
            self._not_kept[plan.plan_digest] = notes

    def clear(self) -> None:
        """Forget all plans: after a failure they are made again."""
        self._plans, self._not_kept = {}, {}

    def forget(self) -> None:
        """Forget all plans, and let go of the state that was saved last."""
        self.clear()
        self._last, self._leaves = None, LeafCache()

    def keep(self, plan: RankPlan) -> None:
        """Leave a plan for later runs, unless that is done; called when a checkpoint is committed.

        Another thread may have forgotten the plan since.
        """
        notes = self._not_kept.pop(plan.plan_digest, None)
        if notes is None:
            return
        self._kept[plan.compare_all] = plan.plan_digest
        write_plan(self._storage, self.path(compare_all=plan.compare_all), notes.encode()[0])

    def path(self, *, compare_all: bool) -> str:
        """One file for each layout, its options and the kind of save."""
        words = [*self._choices, "all" if compare_all else "undeclared", str(VERSION)]
        return f"{PLANS_DIR}/{digest128(chr(0).join(words).encode())}.msgpack"

    def _plan_again(self, path: str, local: LocalState, compare_all: bool) -> RankPlan | Rejected:
        """Return the plan of an earlier run, or why it does not fit this rank."""
        control = self._groups.control
        kept = KeptPlan(self._storage, path, num_ranks=control.size)
        if not kept.is_of(control.index, local.encoded):
            return Rejected(f"what rank {control.rank} holds has changed")
        commit: EncodedPlan | None = None
        if control.is_coordinator:
            claims = kept.claims()
            # What is read may unpack to much more than a rank would ever have sent.
            read_claims_messages(claims, control.ranks, max_nbytes=MAX_NBYTES)
            commit, notes = self.plan_from_claims(claims, compare_all=compare_all)
            if not kept.is_made_of(notes):
                return Rejected("it is not the plan of its claims")
        share = kept.share(control.index)
        return self._own_plan(
            local, share, compare_all=compare_all, commit=commit, kept=kept.digest
        )

    def plan_from_claims(
        self, messages: Sequence[bytes], *, compare_all: bool
    ) -> tuple[EncodedPlan, PlanNotes]:
        """Return the plan of all ranks, and what it was made of and is sent, from their claims.

        Raises:
            PlanError: naming key, box and ranks.

        Cost: O(rows of all ranks) vector work.
        """
        ranks, layout = self._groups.control.ranks, self._groups.layout
        encoded_claims, names = read_claims_messages(messages, ranks)
        # Of the ranks' own signatures, in order: it changes if any rank's structure does.
        signatures = [signature(data, choices=self._choices) for data in encoded_claims]
        plan, shares = make_plan(
            [
                decode_claims(data, rank=rank, names=names)
                for data, rank in zip(encoded_claims, ranks, strict=True)
            ],
            ranks=ranks,
            coordinates=tuple(layout.coordinates(rank) for rank in ranks),
            compare_all=compare_all,
            signature=digest128("\0".join(signatures).encode()),
            block_nbytes=self._block_nbytes,
            copies=self._copies,
            envelope=self._envelope,
        )
        commit = encode_plan(plan)
        facts = (commit.digest, plan.total_nbytes, plan.copies_nbytes, len(plan.keys))
        sent = [squeeze(msgspec.msgpack.encode((*facts, share))) for share in shares]
        return commit, PlanNotes(claims=messages, encoded=encoded_claims, shares=sent)

    def _own_plan(
        self,
        local: LocalState,
        message: bytes,
        *,
        compare_all: bool,
        commit: EncodedPlan | None,
        kept: str,
    ) -> RankPlan:
        """Return the plan of a rank, from its share."""
        digest, total_nbytes, copies_nbytes, num_tensors, share = decode_msgpack_as(
            unsqueeze(message, max_nbytes=MAX_NBYTES) if kept else unsqueeze(message),
            _ShareMessage,
        )
        return rank_plan(
            local,
            share,
            plan_digest=digest,
            compare_all=compare_all,
            total_nbytes=total_nbytes,
            copies_nbytes=copies_nbytes,
            num_tensors=num_tensors,
            commit=commit,
            kept=kept,
            envelope=self._envelope,
        )


def _whole_ones(flat: FlatState, rows: ClaimedRows) -> IntArray:
    """Return for each row of the claims the position of its tensor; -1 if it is a part of it."""
    positions = {key: i for i, key in enumerate(flat.keys)}
    return np.array(
        [-1 if flat.leaves[key].locals else positions[key] for key, _ in rows], dtype=np.int64
    )


def _noted(flat: FlatState) -> dict[str, Node]:
    """Return the trees of versions and of classes; ranks may have other objects of one part.

    Two of one path may be of different classes: both are noted.
    """
    trees: dict[str, dict[str, Node]] = {
        VERSIONS_PART: {part: encode_tree(each) for part, each in flat.versions.items()},
        KINDS_PART: {
            part: {path: union_node({name: True}) for path, name in each.items()}
            for part, each in flat.kinds.items()
        },
    }
    return {
        name: union_node({part: union_node(each) for part, each in by_part.items()})
        for name, by_part in trees.items()
        if by_part
    }
