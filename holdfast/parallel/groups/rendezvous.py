"""Agreement before there is a communicator: ranks compare proposals over the c10d store.

A rank makes a fixed number of requests for each stage, however many ranks there are. It posts an
entry under its own key, adds itself to the ranks that have arrived and to those that propose the
same, and waits for one key, the verdict. The last to arrive compares the two counts and sets the
verdict. Entries are read only if something is wrong, by the one rank that reports it: the last to
arrive if ranks disagree or failed, the first whose time is over if ranks are missing. The first
verdict counts for all ranks.

Ranks meet under the list of ranks that they expect. The first to arrive under a list announces it.
So two lists that share ranks are noticed at once, not at the deadline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from holdfast.decoding import decode_json_as
from holdfast.errors import (
    DeadlineError,
    ErrorRecord,
    GroupError,
    HoldfastError,
    LayoutError,
    joined_error,
    named_ranks,
    shorten_ranks,
)
from holdfast.parallel.bounded_store import BoundedStore

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_REPORT_WAIT_S = 3.0
"""Time that a late rank gives the one that reports who is missing."""
_EXPLAIN_S = 4.5
"""Time in which a rank must have learnt from the store who is missing, or who reports it."""
_MAX_SHOWN = 8
"""Missing ranks, or differing proposals, that a message describes one by one."""


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """The entry that one rank posts at a stage."""

    digest: str = ""
    text: str = ""
    error: ErrorRecord | None = None


class _Announced(msgspec.Struct, frozen=True, array_like=True):
    """A list of ranks that some rank counts on."""

    rank: int
    ranks: tuple[int, ...]
    text: str
    meeting: str
    """The prefix of the keys under which those ranks meet."""


_encode = msgspec.json.encode
_Verdict = ErrorRecord | None


def _decode_verdict(data: bytes) -> _Verdict:
    verdict: _Verdict = decode_json_as(data, _Verdict)
    return verdict


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
        scope: separates agreements that do not concern each other: the number is counted in it.

    Raises:
        GroupError: The store does not answer.

    Cost: two requests, and five for each stage, however many ranks there are. A stage that fails
    costs one rank a request per rank.
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
        scope: str = "",
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.timeout_s = timeout_s
        # Counted in the store and not here: a process that starts again while the store lives must
        # not meet under keys that have a verdict already.
        prefix = "/".join(filter(None, (layout_name, purpose, scope)))
        self._root = BoundedStore.of(store, limit_s=timeout_s).prefixed("holdfast")
        try:
            self.number = int(self._root.add(f"{prefix}/number/{rank}", 1))
            self.what = f"{purpose} layout {layout_name!r} (time {self.number})"
            self._root.set(f"doing/{rank}", self.what)
        except RuntimeError as error:
            raise GroupError(f"The c10d store does not answer rank {rank}: {error}") from error
        self.prefix = f"holdfast/{prefix}/{self.number}"
        self._store = self._root.prefixed(f"{prefix}/{self.number}")
        self._meeting = blake2b(str(self.ranks).encode(), digest_size=8).hexdigest()

    def propose(self, text: str, *, content: str, error: Exception | None = None) -> None:
        """Check that every rank proposes the same and none has an error; all ranks raise if not.

        Args:
            text: what this rank proposes, in one line, shown if ranks disagree.
            content: everything else that must be equal.
            error: why this rank cannot continue; None if it can.

        Raises:
            LayoutError: Ranks differ; they are named.
            DeadlineError: Ranks did not arrive; they are named.
            HoldfastError: Some rank came with an `error`; of the class of the first one's.
        """
        record = None if error is None else ErrorRecord.of(error)
        digest = blake2b(f"{text}\n{content}".encode(), digest_size=8).hexdigest()
        verdict = self._meet("open", _Entry(digest, text, record))
        if verdict is not None:
            raise verdict.to_error() from error

    def finish(self, stage: str, error: Exception | None, *, report: str = "") -> None:
        """Report to all ranks how `stage` went; raise on all of them if it failed on any.

        A rank with an error does not wait for the others: it reports and raises.

        Args:
            stage: its name, unique in the agreement.
            error: why this rank cannot continue; None if it can.
            report: text that other ranks may read with `report_of` afterwards.

        Raises:
            DeadlineError: Ranks did not arrive; they are named.
            HoldfastError: Some rank came with an `error`; of the class of the first one's.
        """
        record = None if error is None else ErrorRecord.of(error)
        verdict = self._meet(stage, _Entry("", report, record), is_waiting=error is None)
        if verdict is not None:
            raise verdict.to_error() from error
        if error is not None:
            raise error

    def report_of(self, rank: int, stage: str) -> str:
        """Return what a rank reported at a stage that is over."""
        with self._asking(stage):
            return self._entries(stage, [rank])[rank].text

    def tally(self, name: str, amount: int) -> int:
        """Add to a number that all ranks share, and return the sum."""
        with self._asking(name):
            return int(self._store.add(self._key("tally", name), amount))

    @contextlib.contextmanager
    def _asking(self, stage: str) -> Iterator[None]:
        """Raise GroupError if a request to the store fails."""
        try:
            yield
        except RuntimeError as error:
            raise GroupError(
                f"Rank {self.rank} could not {self.what}: the c10d store failed in stage "
                f"{stage!r}: {error}"
            ) from error

    def _meet(self, stage: str, entry: _Entry, *, is_waiting: bool = True) -> _Verdict:
        """Take part in a stage; return why it failed, the same on all ranks that waited for it.

        A rank that does not wait learns only of a failure that is known already.
        """
        verdict = self._key(stage, "verdict")
        with self._asking(stage):
            # Entry, count, arrival, in this order: the last to arrive finds all entries and the
            # whole count.
            self._store.set(self._key(stage, self.rank), _encode(entry).decode())
            if entry.error is None:
                self._store.add(self._key(stage, "same", entry.digest), 1)
            place = self._store.add(self._key(stage, "arrived"), 1)
            if place == 1 and stage == "open":
                self._announce(entry.text)
            if place == len(self.ranks):
                # Names this rank, should it not get any further.
                self._store.set(self._key(stage, "last"), str(self.rank))
                return self._decide(stage, self._judge(stage, entry))
            if not is_waiting and not self._store.check([verdict]):
                return None
            try:
                self._store.wait([verdict], timedelta(seconds=self.timeout_s))
            except RuntimeError:
                with self._root.within(_EXPLAIN_S), self._store.within(_EXPLAIN_S):
                    return self._give_up(stage, verdict)
            return _decode_verdict(self._store.get(verdict))

    def _key(self, stage: str, *names: object) -> str:
        """Return a key of one rank, or of what all ranks share, at a stage."""
        return "/".join([self._meeting, stage, *map(str, names)])

    def _decide(self, stage: str, failure: HoldfastError | None, meeting: str = "") -> _Verdict:
        """Set the verdict of a stage, unless there is one; return the one that counts."""
        record = None
        if failure is not None:  # in full: `ErrorRecord.of` would cut off a long list of ranks
            record = msgspec.structs.replace(ErrorRecord.of(failure), message=str(failure))
        key = f"{meeting or self._meeting}/{stage}/verdict"
        # The last to arrive and a rank whose time is over may decide at once: only the first
        # verdict is stored, and both return it.
        return _decode_verdict(self._store.compare_set(key, "", _encode(record).decode()))

    def _judge(self, stage: str, entry: _Entry) -> HoldfastError | None:
        """Return why ranks that have all arrived cannot continue together; None if they can."""
        if self._store.add(self._key(stage, "same", entry.digest), 0) == len(self.ranks):
            return self._overlap(entry.text) if stage == "open" else None
        entries = self._entries(stage, self.ranks)
        failed = {rank: e.error for rank, e in entries.items() if e.error is not None}
        if failed:
            return joined_error(failed, num_ranks=len(self.ranks), phase=self.what)
        return self._disagreement(entries)

    def _entries(self, stage: str, ranks: Sequence[int]) -> dict[int, _Entry]:
        """Return the entries of ranks that have arrived."""
        values = self._store.multi_get([self._key(stage, rank) for rank in ranks]) if ranks else []
        return {
            rank: decode_json_as(bytes(value), _Entry)
            for rank, value in zip(ranks, values, strict=True)
        }

    def _disagreement(self, entries: dict[int, _Entry]) -> LayoutError:
        """Return the error that lists who proposes what."""
        ranks_by_digest: dict[str, list[int]] = {}
        for rank, entry in entries.items():
            ranks_by_digest.setdefault(entry.digest, []).append(rank)
        sides = sorted(ranks_by_digest.values(), key=lambda r: (-len(r), self.ranks.index(r[0])))
        differing = sorted(rank for side in sides[1:] for rank in side)
        lines = [f"ranks {shorten_ranks(r)}: {entries[r[0]].text}" for r in sides[:_MAX_SHOWN]]
        return LayoutError(
            f"Ranks {differing} disagree with the others, so no rank may {self.what}. "
            + "; ".join(lines),
            details={"odd_ranks": differing},
        )

    def _give_up(self, stage: str, verdict: str) -> _Verdict:
        """Return the verdict on a stage that took too long: the first late rank decides it."""
        if self._store.add(self._key(stage, "late"), 1) > 1:
            try:
                self._store.wait([verdict], timedelta(seconds=_REPORT_WAIT_S))
                return _decode_verdict(self._store.get(verdict))
            except RuntimeError:
                pass  # the rank that should report is gone, too: look here
        missing = [rank for rank in self.ranks if not self._store.check([self._key(stage, rank)])]
        entries = self._entries(stage, [rank for rank in self.ranks if rank not in {*missing}])
        late = DeadlineError(self._absent(missing, stage), details={"missing_ranks": missing})
        failed = {rank: e.error for rank, e in entries.items() if e.error is not None}
        if not failed:
            return self._decide(stage, late)
        # The reason may be with those who have arrived.
        failed.setdefault(self.rank, ErrorRecord.of(late))
        in_order = {rank: failed[rank] for rank in self.ranks if rank in failed}
        return self._decide(
            stage, joined_error(in_order, num_ranks=len(self.ranks), phase=self.what)
        )

    def _absent(self, missing: Sequence[int], stage: str) -> str:
        """Return who is missing at a stage, and what each of them was last seen doing."""
        waited = f"Rank {self.rank} waited {self.timeout_s:g} s to {self.what}, stage {stage!r}: "
        if not missing:
            last = self._key(stage, "last")
            who = (
                f"rank {self._store.get(last).decode()}" if self._store.check([last]) else "a rank"
            )
            return (
                f"{waited}all ranks arrived, but {who}, the last of them, did not continue. Look "
                "at what happened there first."
            )
        seen = []
        for rank in missing[:_MAX_SHOWN]:
            key = f"doing/{rank}"
            there = self._root.get(key).decode() if self._root.check([key]) else "never seen"
            seen.append(f"rank {rank}: {there}")
        return (
            f"{waited}ranks {list(missing)} did not arrive ({'; '.join(seen)}). Every rank of a "
            "layout must create its groups, with layouts in the same order; layouts that share "
            "ranks need different names."
        )

    def _announce(self, text: str) -> None:
        """Announce this list of ranks; end the agreement of a list that shares ranks with it."""
        own = _Announced(self.rank, self.ranks, text, self._meeting)
        number = self._store.add("num_announced", 1)
        self._store.set(f"announced/{number}", _encode(own).decode())
        failure = self._overlap(text)
        if failure is not None:
            self._decide("open", failure)

    def _overlap(self, text: str) -> LayoutError | None:
        """Return why this list of ranks contradicts another; end the other's agreement, too."""
        own = _Announced(self.rank, self.ranks, text, self._meeting)
        for number in range(1, int(self._store.add("num_announced", 0)) + 1):
            key = f"announced/{number}"
            try:
                self._store.wait([key], timedelta(seconds=self.timeout_s))
            except RuntimeError as error:
                raise DeadlineError(
                    f"Rank {self.rank} waited {self.timeout_s:g} s to {self.what}: rank number "
                    f"{number} of those that announce their lists of ranks did not continue, or "
                    f"the store does not answer ({error})"
                ) from error
            other = decode_json_as(self._store.get(key), _Announced)
            shared = sorted({*self.ranks} & {*other.ranks})
            if other.meeting == self._meeting or not shared:
                continue
            odd, rest, named = _odd_list(own, other)
            failure = LayoutError(
                f"Ranks {named} disagree with ranks {shorten_ranks(rest.ranks)}, so no rank may "
                f"{self.what}: {_counts(named)} on ranks {shorten_ranks(shared)} for {odd.text}; "
                f"they count on each other for {rest.text}."
            )
            self._decide("open", failure, other.meeting)
            return failure
        return None


def _odd_list(one: _Announced, other: _Announced) -> tuple[_Announced, _Announced, list[int]]:
    """Return the odd one of two lists, the other, and ranks that only the odd one has.

    Each list ends the other's agreement, maybe at the same time, so both must choose the same: by
    what is in the lists, not by who looks.
    """
    sides = []
    for odd, rest in ((one, other), (other, one)):
        only = sorted({*odd.ranks} - {*rest.ranks})
        sides.append((len(only), only, odd.ranks, odd, rest))
    usable = [side for side in sides if side[1]] or sides
    _, only, _, odd, rest = min(usable, key=lambda side: side[:3])
    return odd, rest, only or [odd.rank]


def _counts(ranks: Sequence[int]) -> str:
    """Return these ranks as the subject of a sentence, with its verb."""
    return f"{named_ranks(ranks)} {'counts' if len(ranks) == 1 else 'count'}"
