"""Agreement before there is a communicator: ranks compare proposals over the c10d store.

Each rank posts under keys of its own and reads the keys of the ranks that *it* expects, so that two
ranks with different expectations find each other wherever these overlap. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import (
    DeadlineError,
    ErrorRecord,
    GroupError,
    HoldfastError,
    LayoutError,
    joined_error,
)
from holdfast.parallel.groups import _torch
from holdfast.parallel.ranks import shorten_ranks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_decode_failure = msgspec.json.Decoder(ErrorRecord | None).decode
_decode_opening = msgspec.json.Decoder(tuple[str, ErrorRecord | None]).decode


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
    """One agreement of `ranks` on one purpose: the n-th of this rank, for that layout and purpose.

    The number n is counted in the store per rank, so it lives exactly as long as the store, and no
    two agreements share a key.

    Args:
        store: the c10d store that all ranks reach.
        layout_name: together with `purpose`, what the number is counted for.
        purpose: a verb phrase for messages, completed by the layout's name.
        ranks: the global ranks that take part.
        rank: this process's global rank.
        timeout_s: bounds every stage.

    Raises:
        GroupError: The store does not answer.

    Cost: for each stage one write, and one read of a few bytes per rank.
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
        self.ranks = tuple(ranks)
        self.rank = rank
        self.timeout_s = timeout_s
        prefix = f"{layout_name}/{purpose}"
        self._root = _torch.prefix_store("holdfast", store)
        try:
            self.number = int(self._root.add(f"{prefix}/number/{rank}", 1))
            self.what = f"{purpose} layout {layout_name!r} (time {self.number})"
            self._root.set(f"doing/{rank}", self.what)
        except RuntimeError as error:
            raise GroupError(f"The c10d store does not answer rank {rank}: {error}") from error
        self.prefix = f"holdfast/{prefix}/{self.number}"
        self._store = _torch.prefix_store(f"{prefix}/{self.number}", self._root)

    def propose(self, proposal: Proposal, error: Exception | None = None) -> None:
        """Check that every rank proposes the same and none has an error; all ranks raise if not.

        Raises:
            LayoutError: Ranks differ; they are named.
            DeadlineError: Ranks did not arrive; they are named.
            HoldfastError: Some rank came with an `error`; of the class of the first one's.
        """
        failure: Exception | None = None
        try:
            digest = proposal.digest()
            self._store.set(f"text/{self.rank}", proposal.text)
            self._announce(digest, proposal.text)
            own = (digest, ErrorRecord.of(error) if error is not None else None)
            openings = self.exchange("open", msgspec.json.encode(own).decode())
            digests, records = zip(*map(_decode_opening, openings), strict=True)
            self._raise_failures(records, cause=error)
            self._compare(digests)
            self._check_other_proposals(digest)
        except HoldfastError as raised:
            failure = raised
        except RuntimeError as lost:
            failure = self._lost("open", lost)
        if failure is not None:  # every rank that answered sees the same, so nothing to join
            with contextlib.suppress(RuntimeError):
                self._post("agreed", failure)
            raise failure
        self.finish("agreed", None)

    def finish(self, stage: str, error: Exception | None) -> None:
        """Report to all ranks how `stage` went; raise on all of them if it failed on any.

        A rank with an error does not wait for the others: it reports and raises. What they have
        reported by then is in its message.
        """
        if error is not None:
            raise self._joined_with_others(stage, error)
        try:
            reports = self.exchange(stage, "null")
        except DeadlineError as late:  # the reason may be with those who have arrived
            raise self._joined_with_others(stage, late) from late
        self._raise_failures([_decode_failure(report) for report in reports], cause=None)

    def exchange(self, stage: str, value: str) -> list[str]:
        """Every rank's `value`, in the order of `ranks`; DeadlineError naming the missing ranks."""
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
            return [bytes(value).decode() for value in self._store.multi_get(keys)]
        except RuntimeError as error:
            raise self._lost(stage, error) from error

    def _post(self, stage: str, error: Exception) -> None:
        record = ErrorRecord.of(error)
        self._store.set(f"{stage}/{self.rank}", msgspec.json.encode(record).decode())

    def _raise_failures(
        self, records: Sequence[ErrorRecord | None], *, cause: Exception | None
    ) -> None:
        pairs = zip(self.ranks, records, strict=True)
        failed = {rank: record for rank, record in pairs if record is not None}
        if failed:
            raise joined_error(failed, num_ranks=len(self.ranks), phase=self.what) from cause

    def _lost(self, stage: str, error: RuntimeError) -> GroupError:
        return GroupError(
            f"Rank {self.rank} could not {self.what}: the c10d store failed in stage {stage!r}: "
            f"{error}"
        )

    def _joined_with_others(self, stage: str, error: Exception) -> Exception:
        """Post this rank's failure; return it, joined with those that others have posted."""
        try:
            self._post(stage, error)
            keys = [f"{stage}/{rank}" for rank in self.ranks]
            posted = [
                self._store.get(k).decode() if self._store.check([k]) else "null" for k in keys
            ]
        except RuntimeError:
            return error
        records = [_decode_failure(report) for report in posted]
        if sum(record is not None for record in records) == 1:
            return error
        try:
            self._raise_failures(records, cause=error)
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
            f"{list(missing)} did not arrive ({'; '.join(seen)}). Every rank of the layout creates "
            "its groups, in the same order of layouts; layouts that share ranks have names of "
            "their own."
        )

    def _compare(self, digests: Sequence[str]) -> None:
        ranks_by_digest: dict[str, list[int]] = {}
        for rank, digest in zip(self.ranks, digests, strict=True):
            ranks_by_digest.setdefault(digest, []).append(rank)
        if len(ranks_by_digest) == 1:
            return
        sides = sorted(ranks_by_digest.values(), key=lambda r: (-len(r), self.ranks.index(r[0])))
        differing = sorted(rank for side in sides[1:] for rank in side)
        lines = [
            f"ranks {shorten_ranks(side)}: {self._store.get(f'text/{side[0]}').decode()}"
            for side in sides
        ]
        raise LayoutError(
            f"Ranks {differing} disagree with the others, so no rank may {self.what}. "
            + "; ".join(lines)
        )

    def _announce(self, digest: str, text: str) -> None:
        """List a proposal, once per distinct one, for ranks that do not take part in it."""
        if self._store.add(f"is_listed/{digest}", 1) == 1:
            listed = {"digest": digest, "rank": self.rank, "ranks": self.ranks, "text": text}
            number = self._store.add("num_listed", 1)
            self._store.set(f"listed/{number}", json.dumps(listed))

    def _check_other_proposals(self, digest: str) -> None:
        """Check that no rank outside of this agreement proposes something for the ranks inside."""
        for number in range(1, int(self._store.add("num_listed", 0)) + 1):
            listed = json.loads(self._store.get(f"listed/{number}"))
            shared = sorted(set(listed["ranks"]) & set(self.ranks))
            if listed["digest"] != digest and shared:
                raise LayoutError(
                    f"Rank {listed['rank']} disagrees with ranks {shorten_ranks(self.ranks)}, so "
                    f"no rank may {self.what}: it counts on ranks {shorten_ranks(shared)} for "
                    f"{listed['text']}."
                )
