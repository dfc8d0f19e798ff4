"""Plans that are used again: those of this run, and the one that an earlier run has kept.

What is kept next to the checkpoints is not a plan but the claims that it was made from. The first
save of a later run compares this rank's entry with its own claims and makes the plan again from
all of them, on each rank and without a collective. The plan is used where all ranks come to the
same one. Then every rank's claims were proven to be its own, by that rank, and the plan is what
planning together would give: a file that is stale, or was tampered with, costs a plan and no more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from holdfast.arrays.packed_ints import MAX_NBYTES, squeeze, unsqueeze
from holdfast.checkpoint.plan.claims import read_claims_messages
from holdfast.checkpoint.plan.rank_plan import (
    LocalState,
    RankPlan,
    choices,
    plan_from_claims,
    rank_plan,
)
from holdfast.errors import HoldfastError
from holdfast.format.digest import digest128
from holdfast.format.stored_copies import CopyPolicy
from holdfast.parallel import ProcessGroups
from holdfast.storage import Storage
from holdfast.writer.records import seal, unseal

PLANS_DIR = ".plans"
_VERSION = 4
_MAX_FILES = 16
_STALE_S = 60.0
_LOG = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class Rejected:
    """There is no plan to use again, and why not."""

    reason: str


class PlanCache:
    """The plans of one checkpointer, one for each kind of save: with all replicas compared or not.

    Args:
        storage: where the claims of the last plan are kept, in `.plans/`.
        groups: whose layout is planned for.
        block_nbytes: bytes per digest.
        copies: what is stored more than once.
    """

    def __init__(
        self,
        storage: Storage,
        groups: ProcessGroups,
        *,
        block_nbytes: int,
        copies: CopyPolicy | None = None,
    ) -> None:
        self._storage = storage
        self._groups = groups
        self._block_nbytes = block_nbytes
        self._copies = copies
        self._plans: dict[bool, RankPlan] = {}
        self._looked: set[bool] = set()
        self.not_kept: dict[str, list[bytes]] = {}
        """The claims of plans that this run has made and no file holds, by the plan's digest."""
        self._kept: dict[bool, str] = {}

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

    def add(self, plan: RankPlan, claims: list[bytes] | None) -> None:
        """A plan that all ranks have made; on the coordinator with the claims to keep for it.

        A plan of the other kind goes on being used where it is of the same structure.
        """
        same = {k: p for k, p in self._plans.items() if p.signature == plan.signature}
        self._plans = same | {plan.compare_all: plan}
        # What an earlier run has kept already need not be written again.
        if claims is not None and self._kept.get(plan.compare_all) != plan.plan_digest:
            self.not_kept[plan.plan_digest] = claims

    def clear(self) -> None:
        """Forget all plans: after a failure they are made again."""
        self._plans, self.not_kept = {}, {}

    def keep(self, plan: RankPlan) -> None:
        """Leave a plan of `not_kept` for later runs, in place of the last one of its kind.

        Called when a checkpoint is committed. At most 16 files are kept. A failure is logged, and
        costs a later run a plan.

        Cost: one small file, compressed.
        """
        claims = self.not_kept.pop(plan.plan_digest)
        path = self._path(plan.compare_all)
        self._kept[plan.compare_all] = plan.plan_digest
        try:
            data = squeeze(seal(msgspec.msgpack.encode((_VERSION, claims))))
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
        options = choices(self._groups, self._block_nbytes, self._copies)
        words = [*options, "all" if compare_all else "undeclared", str(_VERSION)]
        return f"{PLANS_DIR}/{digest128(chr(0).join(words).encode())}.msgpack"

    def _plan_again(self, path: str, local: LocalState, compare_all: bool) -> RankPlan | Rejected:
        """The plan from the claims of an earlier run, or why it does not fit this rank."""
        control = self._groups.control
        # Looked at before it is read, since a file of any size may be there.
        if self._storage.size(path) > MAX_NBYTES:
            return Rejected("it is larger than any plan")
        data = unsqueeze(self._storage.read(path))
        version, claims = unseal(data, tuple[int, list[bytes]], where=path)
        if version != _VERSION:
            return Rejected(f"it is of version {version}, this is version {_VERSION}")
        if len(claims) != control.size:
            return Rejected(f"it is of {len(claims)} ranks, these are {control.size}")
        encoded, names = read_claims_messages(claims, control.ranks)
        # Each rank compares its own entry. All entries are proven once the ranks agree on the
        # digest of the plan, which is made from all of them.
        if encoded[control.index] != local.encoded or names.get(local.names) != local.table.names:
            return Rejected(f"what rank {control.rank} holds has changed")
        commit, shares = plan_from_claims(
            claims,
            groups=self._groups,
            block_nbytes=self._block_nbytes,
            compare_all=compare_all,
            copies=self._copies,
        )
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
