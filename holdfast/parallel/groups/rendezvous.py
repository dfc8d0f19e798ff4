"""Agreement before there is a communicator: ranks compare notes over the c10d store.

Each rank posts under keys of its own and reads the keys of the ranks *it* believes in, so that two
different beliefs meet wherever they overlap. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING

from holdfast.errors import DeadlineError, GroupError, HoldfastError, LayoutError
from holdfast.parallel.control.outcome import Outcome, raise_failures
from holdfast.parallel.groups import _torch
from holdfast.parallel.ranks import shorten_ranks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What one rank wants to create with the others."""

    text: str
    """One line for messages, shown where ranks disagree."""
    content: str
    """Everything that has to be equal."""

    def digest(self) -> str:
        """16 hex digits over text and content."""
        return blake2b(f"{self.text}\n{self.content}".encode(), digest_size=8).hexdigest()


class Rendezvous:
    """One meeting of `ranks` for one purpose: the n-th of this rank, for that layout and purpose.

    The number n is counted in the store per rank, so it lives exactly as long as the store, and no
    two meetings share a key. Cost of a stage: one write, and one read of a few bytes per rank.
    """

    def __init__(
        self,
        store: Store,
        *,
        layout_name: str,
        purpose: str,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
    ) -> None:
        """Take the next number; raises GroupError if the store does not answer."""
        self.ranks = tuple(ranks)
        self.rank = rank
        self.timeout_s = timeout_s
        room = f"{layout_name}/{purpose}"
        self._root = _torch.prefix_store("holdfast", store)
        try:
            self.number = int(self._root.add(f"{room}/number/{rank}", 1))
            self.what = f"{purpose} layout {layout_name!r} (time {self.number})"
            self._root.set(f"doing/{rank}", self.what)
        except RuntimeError as error:
            raise GroupError(f"The c10d store does not answer rank {rank}: {error}") from error
        self.prefix = f"holdfast/{room}/{self.number}"
        self._store = _torch.prefix_store(f"{room}/{self.number}", self._root)

    def propose(self, proposal: Proposal, error: Exception | None = None) -> None:
        """Check that every rank proposes the same and none has an error; all ranks raise if not.

        Raises LayoutError naming the ranks that differ, the first failing rank's error if one came
        with an `error`, DeadlineError naming who did not come.
        """
        failure: Exception | None = None
        try:
            digest = proposal.digest()
            self._store.set(f"text/{self.rank}", proposal.text)
            self._join_camp(digest, proposal.text)
            opening = {"digest": digest, "outcome": Outcome.of(error).to_json()}
            answers = [json.loads(a) for a in self._exchange("open", json.dumps(opening))]
            outcomes = [Outcome.from_json(answer["outcome"]) for answer in answers]
            raise_failures(outcomes, ranks=self.ranks, phase=self.what, cause=error)
            self._compare([answer["digest"] for answer in answers])
            self._check_camps(digest)
        except HoldfastError as raised:
            failure = raised
        except RuntimeError as lost:
            failure = self._lost("open", lost)
        if failure is not None:  # every rank that answered sees the same, so nothing to join
            with contextlib.suppress(RuntimeError):
                self._store.set(f"settled/{self.rank}", Outcome.of(failure).to_json())
            raise failure
        self.conclude("settled", None)

    def conclude(self, stage: str, error: Exception | None) -> None:
        """Tell all ranks how `stage` went; raise on all of them if it failed on any.

        A rank with an error does not wait for the others: it tells them, and raises. What they
        have said by then is in its message.
        """
        report = Outcome.of(error).to_json()
        if error is not None:
            raise self._with_others(stage, report, error)
        try:
            answers = self._exchange(stage, report)
        except DeadlineError as late:  # the reason may be with those who have come
            raise self._with_others(stage, Outcome.of(late).to_json(), late) from late
        outcomes = [Outcome.from_json(answer) for answer in answers]
        raise_failures(outcomes, ranks=self.ranks, phase=self.what, cause=None)

    def share(self, stage: str, value: str) -> list[str]:
        """Every rank's `value`, in the order of `ranks`; DeadlineError naming who did not come."""
        return self._exchange(stage, value)

    def _exchange(self, stage: str, value: str) -> list[str]:
        keys = [f"{stage}/{rank}" for rank in self.ranks]
        try:
            self._store.set(f"{stage}/{self.rank}", value)
            try:
                self._store.wait(keys, timedelta(seconds=self.timeout_s))
            except RuntimeError:
                missing = [
                    rank
                    for rank, key in zip(self.ranks, keys, strict=True)
                    if not self._store.check([key])
                ]
                if missing:
                    raise DeadlineError(self._absent(missing, stage)) from None
            return [bytes(answer).decode() for answer in self._store.multi_get(keys)]
        except RuntimeError as error:
            raise self._lost(stage, error) from error

    def _lost(self, stage: str, error: RuntimeError) -> GroupError:
        return GroupError(
            f"Rank {self.rank} could not {self.what}: the c10d store failed in stage {stage!r}: "
            f"{error}"
        )

    def _with_others(self, stage: str, report: str, error: Exception) -> Exception:
        """Post this rank's failure; return it, joined with the failures that others have posted."""
        outcomes = []
        try:
            self._store.set(f"{stage}/{self.rank}", report)
            for rank in self.ranks:
                key = f"{stage}/{rank}"
                said = self._store.get(key).decode() if self._store.check([key]) else ""
                outcomes.append(Outcome.from_json(said))
        except RuntimeError:
            return error
        if sum(bool(outcome.kind) for outcome in outcomes) == 1:
            return error
        try:
            raise_failures(outcomes, ranks=self.ranks, phase=self.what, cause=error)
        except HoldfastError as joined:
            return joined
        return error

    def _absent(self, missing: Sequence[int], stage: str) -> str:
        seen = []
        for rank in missing[:8]:
            key = f"doing/{rank}"
            there = self._root.get(key).decode() if self._root.check([key]) else "never seen"
            seen.append(f"rank {rank}: {there}")
        return (
            f"Rank {self.rank} waited {self.timeout_s:g} s to {self.what}, stage {stage!r}: ranks "
            f"{list(missing)} did not come ({'; '.join(seen)}). Every rank of the layout creates "
            "its groups, in the same order of layouts; layouts that share ranks have names of "
            "their own."
        )

    def _compare(self, digests: Sequence[str]) -> None:
        camps: dict[str, list[int]] = {}
        for rank, digest in zip(self.ranks, digests, strict=True):
            camps.setdefault(digest, []).append(rank)
        if len(camps) == 1:
            return
        ordered = sorted(camps.values(), key=lambda camp: (-len(camp), self.ranks.index(camp[0])))
        differing = sorted(rank for camp in ordered[1:] for rank in camp)
        lines = [
            f"ranks {shorten_ranks(camp)}: {self._store.get(f'text/{camp[0]}').decode()}"
            for camp in ordered
        ]
        raise LayoutError(
            f"Ranks {differing} disagree with the others, so no rank may {self.what}. "
            + "; ".join(lines)
        )

    def _join_camp(self, digest: str, text: str) -> None:
        """Announce a proposal, once per distinct one, to ranks that do not know of this one."""
        if self._store.add(f"camp/{digest}", 1) == 1:
            camp = {"digest": digest, "rank": self.rank, "ranks": self.ranks, "text": text}
            self._store.set(f"camps/{self._store.add('camps', 1)}", json.dumps(camp))

    def _check_camps(self, digest: str) -> None:
        """Check that no rank outside of this meeting proposes something for the ranks inside."""
        for number in range(1, int(self._store.add("camps", 0)) + 1):
            camp = json.loads(self._store.get(f"camps/{number}"))
            shared = sorted(set(camp["ranks"]) & set(self.ranks))
            if camp["digest"] != digest and shared:
                raise LayoutError(
                    f"Rank {camp['rank']} disagrees with ranks {shorten_ranks(self.ranks)}, so no "
                    f"rank may {self.what}: it counts on ranks {shorten_ranks(shared)} for "
                    f"{camp['text']}."
                )
