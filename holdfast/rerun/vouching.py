"""Evidence without a NaN: data replicas compute one microbatch twice, and compare digests.

A device that computes wrong but finite values shows in nothing that a rule looks at. Data replicas
hold equal parameters, so two of them make the same gradients of the same microbatch, bit by bit, if
both are sound. Pairs rotate, so that every device is vouched for by every other one in turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch

from holdfast.errors import DriftError
from holdfast.format.values import Codecs
from holdfast.rerun.kept_trees import keep_tree, revive_tree
from holdfast.rerun.packing import pack_tree, unpack_tree
from holdfast.rerun.places import Place, odd_ones
from holdfast.rerun.replayed import Replayed
from holdfast.rerun.team import Team
from holdfast.state.tensor_elements import local_of, tensor_digest

Compute = Callable[[Any], Iterable[torch.Tensor]]
"""Returns the gradients of one microbatch on this rank, before any reduction over replicas."""
_DIGEST_NBYTES = 16


class Vouching:
    """Lets pairs of data replicas compute the same microbatch.

    Args:
        team: the ranks.
        replayed: random streams, buffers and hooks of a run.
        codecs: of batches.
    """

    def __init__(self, team: Team, *, replayed: Replayed, codecs: Codecs) -> None:
        self._team = team
        self._replayed = replayed
        self._codecs = codecs

    def compare(self, step: int, number: int, batch: object, compute: Compute) -> None:
        """Compare the replicas of this round. Collective.

        Args:
            step: for the report.
            number: of the round; it says which replicas are a pair.
            batch: a microbatch of this rank.
            compute: see `Compute`; it leaves parameters as they are.

        Raises:
            DriftError: on all ranks: two replicas made other gradients; the report has it.
        """
        replicas = self._team.replicas
        pairs = pairs_of_round(len(replicas), number)
        if not pairs:
            return
        source_of = {other: one for one, other in pairs}
        digests = self._digests(step, batch, compute, source_of)
        apart = [
            (one, other)
            for one, other in pairs
            if any(
                digests[a] != digests[b]
                for a, b in zip(replicas[one], replicas[other], strict=True)
            )
        ]
        if not apart:
            return
        # Which of the two is wrong, the others know: all compute the same microbatch.
        first = apart[0]
        odd: list[int] = []
        if len(replicas) > 2:
            everyone = {other: first[0] for other in range(len(replicas)) if other != first[0]}
            digests = self._digests(step, batch, compute, everyone)
            odd = odd_ones([tuple(digests[r] for r in replica) for replica in replicas])
        self._report(step, pairs, apart, odd)

    def _digests(
        self, step: int, batch: object, compute: Compute, source_of: dict[int, int]
    ) -> dict[int, bytes]:
        """Return by rank the digest of its gradients of the batch of its source. Collective.

        Args:
            step: for messages.
            batch: of this rank.
            compute: see `compare`.
            source_of: by replica, the one whose batch it computes in place of its own.
        """
        team, replicas = self._team, self._team.replicas
        here = team.here.rank
        mine = next(i for i, replica in enumerate(replicas) if here in replica)
        part = replicas[mine].index(here)
        payload, error = b"", None
        try:  # functions and codecs of the user's run here
            self._replayed.take()
            if mine in source_of.values():
                payload = pack_tree(
                    {
                        "batch": keep_tree(batch, path="batch", codecs=self._codecs),
                        "replayed": self._replayed.lent(codecs=self._codecs),
                    }
                )
        except Exception as reason:
            error = reason
        outgoing = {
            replicas[other][part]: payload for other, one in source_of.items() if one == mine
        }
        source = None if mine not in source_of else replicas[source_of[mine]][part]
        received = team.transfer(outgoing, source, error=error, phase=f"step {step}: vouch")
        digest, failure = b"", None
        try:
            try:
                if received is not None:
                    tree = unpack_tree(received)
                    self._replayed.borrow(tree["replayed"], codecs=self._codecs)
                    batch = revive_tree(tree["batch"], path="batch", codecs=self._codecs)
                digest = _digest_of(compute(batch))
            finally:  # the loop may continue after an error, and not with what was borrowed
                self._replayed.restore()
        except Exception as reason:
            failure = reason
        rows = team.exchange(digest, phase=f"step {step}: gradients", error=failure)
        return {place.rank: row for place, row in zip(team.places, rows, strict=True)}

    def _report(
        self, step: int, pairs: list[tuple[int, int]], apart: list[tuple[int, int]], odd: list[int]
    ) -> None:
        """Record which replicas disagree, and raise DriftError on all ranks."""
        replicas = self._team.replicas
        by_rank = self._team.by_rank

        def places(replica: int) -> list[Place]:
            return [by_rank[rank] for rank in replicas[replica]]

        def described(several: Iterable[tuple[int, int]]) -> list[list[list[dict[str, Any]]]]:
            return [
                [[msgspec.structs.asdict(each) for each in places(replica)] for replica in pair]
                for pair in several
            ]

        ranks = [rank for replica in odd for rank in replicas[replica]]
        named = [by_rank[rank] for rank in ranks]
        between = " and ".join(", ".join(map(str, places(replica))) for replica in apart[0])
        message = (
            f"step {step}: two data replicas make other gradients of one microbatch: {between}"
        )
        if named:
            message += f"; by majority {'; '.join(map(str, named))} computed wrong"
        self._team.record(
            "vouch",
            step=step,
            fault="",
            pairs=described(pairs),
            disagree=described(apart),
            odd=[msgspec.structs.asdict(each) for each in named],
        )
        self._team.say(message)
        raise DriftError(message, details={"odd_ranks": ranks})


def pairs_of_round(number_of_replicas: int, number: int) -> list[tuple[int, int]]:
    """Return the pairs of a round, the lower replica first; each pair comes once in a turn.

    A turn has one round less than there are replicas (as many, if their number is odd, and one of
    them rests in each).
    """
    if number_of_replicas < 2:
        return []
    size = number_of_replicas + number_of_replicas % 2
    # The circle method: the last one stays, all others move on by one place each round.
    ring = [(i + number) % (size - 1) for i in range(size - 1)]
    seats = [*ring, size - 1]
    pairs = [(seats[i], seats[-1 - i]) for i in range(size // 2)]
    return sorted((min(pair), max(pair)) for pair in pairs if max(pair) < number_of_replicas)


def _digest_of(tensors: Iterable[torch.Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
    for tensor in tensors:
        local = local_of(tensor.detach())
        digest.update(f"{local.dtype} {tuple(local.shape)} {tensor_digest(local)} ".encode())
    return digest.digest()
