"""The plans of one checkpointer: made with all ranks, and used again while nothing changes.

A save goes through it in this order: `flatten` takes this rank's state apart, `lookup` returns the
plan at hand for it, and if the ranks do not all hold the same one, `plan_together` makes a new one.

What is kept next to the checkpoints is not a plan but the claims that it was made from. The first
save of a later run compares this rank's entry with its own claims and makes the plan again from
all of them, on each rank and without a collective. The plan is used if all ranks come to the same
one. Then every rank's claims were proven to be its own, by that rank, and the plan is what
planning together would give: a file that is stale, or was tampered with, costs a plan and no more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from holdfast.arrays.packed_ints import squeeze, unsqueeze
from holdfast.checkpoint.plan.claims import (
    claims_message,
    claims_of,
    decode_claims,
    encode_claims,
    read_claims_messages,
    signature,
)
from holdfast.checkpoint.plan.make_plan import RankShare, make_plan
from holdfast.checkpoint.plan.rank_plan import LocalState, RankPlan, rank_plan
from holdfast.errors import HoldfastError
from holdfast.format.digest import digest128
from holdfast.format.stored_copies import CopyPolicy
from holdfast.format.values import Codecs
from holdfast.parallel import ProcessGroups
from holdfast.state.flatten import LeafCache, collector_paused, flatten_state
from holdfast.storage import Storage
from holdfast.writer.records import EncodedPlan, encode_plan, seal, unseal

PLANS_DIR = ".plans"
_VERSION = 4
_MAX_FILES = 16
_STALE_S = 60.0
_MAX_NBYTES = 1 << 26
"""Of a kept plan, and of what is compressed in it; typically below 10 bytes a row."""
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
    """

    def __init__(
        self,
        storage: Storage,
        groups: ProcessGroups,
        *,
        codecs: Codecs,
        block_nbytes: int,
        copies: CopyPolicy | None = None,
    ) -> None:
        self._storage = storage
        self._groups = groups
        self._codecs = codecs
        self._block_nbytes = block_nbytes
        self._copies = copies
        # What a signature covers besides the claims: layout, bytes per digest, policy of copies.
        self._choices = [groups.layout.digest(), str(block_nbytes)]
        if copies is not None and copies.axes:
            self._choices += [*copies.axes, f"{copies.max_fraction:g}"]
        self._leaves = LeafCache()
        self._last: LocalState | None = None
        self._plans: dict[bool, RankPlan] = {}
        self._looked: set[bool] = set()
        self.not_kept: dict[str, list[bytes]] = {}
        """The claims of plans that this run has made and no file holds, by the plan's digest."""
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
            values = msgspec.json.encode(flat.nodes)
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
        Cost: no collectives; the first time one small file read, O(rows) vector work.
        """
        plan = self._plans.get(compare_all)
        if plan is not None:
            same = plan.signature == local.signature
            return plan if same else Rejected("the structure of the state has changed")
        if compare_all in self._looked:
            return Rejected("no plan was made yet")
        # Before reading: a file that cannot be read must not be tried again with each save.
        self._looked.add(compare_all)
        path = self._path(compare_all)
        try:
            if not self._storage.exists(path):
                return Rejected("no plan is kept")
            result = self._plan_again(path, local, compare_all)
        except (HoldfastError, ArithmeticError, LookupError, TypeError, ValueError) as error:
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
    ) -> tuple[RankPlan, list[bytes] | None]:
        """Make a plan with all ranks: the coordinator proves their claims and assigns writers.

        Args:
            local: this rank's state.
            names: digest of every rank's names, from the proposals: each distinct one is sent once.
            compare_all: whether declared replicas are compared by content, too.

        Returns:
            The rank's plan, and on the coordinator the claims that it was made from.

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
        messages: list[bytes] | None = None
        commit: EncodedPlan | None = None
        if gathered is not None:
            commit, shares = self._plan_from_claims(gathered, compare_all=compare_all)
            plan = commit.plan
            facts = (commit.digest, plan.total_nbytes, plan.copies_nbytes, len(plan.keys))
            messages = [squeeze(msgspec.msgpack.encode((*facts, share))) for share in shares]
        # Only the share is sent: the plan of all ranks is as large as all shares together.
        data = unsqueeze(control.scatter(messages, phase="save: shares"))
        digest, total_nbytes, copies_nbytes, num_tensors, share = msgspec.msgpack.decode(
            data, type=_ShareMessage
        )
        own = rank_plan(
            local,
            share,
            plan_digest=digest,
            compare_all=compare_all,
            total_nbytes=total_nbytes,
            copies_nbytes=copies_nbytes,
            num_tensors=num_tensors,
            commit=commit,
        )
        return own, gathered

    def add(self, plan: RankPlan, claims: list[bytes] | None) -> None:
        """Keep a plan that all ranks have made; the coordinator passes the claims to store, too.

        A plan of the other kind stays in use if it is of the same structure.
        """
        same = {k: p for k, p in self._plans.items() if p.signature == plan.signature}
        self._plans = same | {plan.compare_all: plan}
        # What an earlier run has kept already need not be written again.
        if claims is not None and self._kept.get(plan.compare_all) != plan.plan_digest:
            self.not_kept[plan.plan_digest] = claims

    def clear(self) -> None:
        """Forget all plans: after a failure they are made again."""
        self._plans, self.not_kept = {}, {}

    def forget(self) -> None:
        """Forget all plans, and let go of the state that was saved last."""
        self.clear()
        self._last, self._leaves = None, LeafCache()

    def keep(self, plan: RankPlan) -> None:
        """Leave a plan of `not_kept` for later runs, in place of the last one of its kind.

        Called when a checkpoint is committed. At most 16 files are kept. A failure is logged, and
        costs a later run a plan.

        Cost: one small file, compressed.
        """
        claims = self.not_kept.pop(plan.plan_digest)
        path = self._path(plan.compare_all)
        self._kept[plan.compare_all] = plan.plan_digest
        data = seal(msgspec.msgpack.encode((_VERSION, claims)))
        if len(data) > _MAX_NBYTES:
            _LOG.info("the plan is not kept: it has %d bytes, more than would be read", len(data))
            return
        try:
            data = squeeze(data)
            # Sealed, and only a help: it need not be durable.
            self._storage.make_dir(PLANS_DIR, durable=False)
            self._storage.replace_file(path, data, durable=False)
            others = [f"{PLANS_DIR}/{name}" for name in self._storage.list(PLANS_DIR)]
            # Files of other layouts stay useful to runs that return to them, hence by age and not
            # all.
            by_age = sorted((self._storage.age_s(each), each) for each in others if each != path)
            # From 2, as the file just written is the first and is not in the list.
            for number, (age_s, each) in enumerate(by_age, start=2):
                unnamed = each.startswith(f"{PLANS_DIR}/.tmp-") and age_s > _STALE_S
                if unnamed or number > _MAX_FILES:
                    self._storage.remove_tree(each)
        except HoldfastError as error:
            _LOG.warning("the plan was not kept: %s", error)

    def _path(self, compare_all: bool) -> str:
        """One file for each layout, its options and the kind of save."""
        words = [*self._choices, "all" if compare_all else "undeclared", str(_VERSION)]
        return f"{PLANS_DIR}/{digest128(chr(0).join(words).encode())}.msgpack"

    def _plan_again(self, path: str, local: LocalState, compare_all: bool) -> RankPlan | Rejected:
        """The plan from the claims of an earlier run, or why it does not fit this rank."""
        control = self._groups.control
        # Looked at before it is read, since a file of any size may be there.
        if self._storage.size(path) > _MAX_NBYTES:
            return Rejected("it is larger than any plan that is kept")
        data = unsqueeze(self._storage.read(path), max_nbytes=_MAX_NBYTES)
        version, claims = unseal(data, tuple[int, list[bytes]], where=path)
        if version != _VERSION:
            return Rejected(f"it is of version {version}, this is version {_VERSION}")
        if len(claims) != control.size:
            return Rejected(f"it is of {len(claims)} ranks, these are {control.size}")
        encoded, names = read_claims_messages(claims, control.ranks, max_nbytes=_MAX_NBYTES)
        # Each rank compares its own entry. All entries are proven once the ranks agree on the
        # digest of the plan, which is made from all of them.
        if encoded[control.index] != local.encoded or names.get(local.names) != local.table.names:
            return Rejected(f"what rank {control.rank} holds has changed")
        commit, shares = self._plan_from_claims(claims, compare_all=compare_all)
        return rank_plan(
            local,
            shares[control.index],
            plan_digest=commit.digest,
            compare_all=compare_all,
            total_nbytes=commit.plan.total_nbytes,
            copies_nbytes=commit.plan.copies_nbytes,
            num_tensors=len(commit.plan.keys),
            commit=commit if control.is_coordinator else None,
        )

    def _plan_from_claims(
        self, messages: Sequence[bytes], *, compare_all: bool
    ) -> tuple[EncodedPlan, list[RankShare]]:
        """Return the plan of all ranks and the share of each, from their claims.

        It is equal on every rank.

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
        )
        return encode_plan(plan), shares
