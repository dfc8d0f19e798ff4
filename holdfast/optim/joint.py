"""The two messages of a small model's step: what ranks sum travels with gradients and parameters.

A message of some hundred kilobytes takes hardly longer than one of some bytes: to wait for other
ranks is what costs. So if all parameters are in one small bucket, every rank sends its whole
gradient to every other one, with the numbers that decide about the step; each sums the gradients
itself, and so knows the norm. And with the updated shares comes whether the update worked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from holdfast.optim import collectives
from holdfast.optim.buckets import Bucket
from holdfast.optim.joint_message import JointMessage
from holdfast.optim.norms import GradientSums, sums_of_shares
from holdfast.optim.reducer import GradientReducer
from holdfast.optim.shard_groups import ShardGroups
from holdfast.parallel import Layout, ProcessGroups

_MAX_RANKS = 8
"""More would make too many messages: each rank sends one to each other."""
_MAX_NBYTES = 1 << 20
"""Gradients of all ranks together, up to which whole ones are exchanged: each rank holds them."""


class JointSums:
    """The sums of a step that is made in two messages; both are collective.

    Args:
        bucket: of all parameters.
        reducer: has taken the gradients.
        shard_groups: over which communicators.
        groups: of the module.
        num_numbers: in the sum that decides, and in the one after the update.
        finish: checks what the step needs, and takes all gradients; no collective.
    """

    def __init__(
        self,
        bucket: Bucket,
        reducer: GradientReducer,
        *,
        shard_groups: ShardGroups,
        groups: ProcessGroups,
        num_numbers: tuple[int, int],
        finish: Callable[[], None],
    ) -> None:
        self._bucket = bucket
        self._reducer = reducer
        self._index = shard_groups.index
        self._ranks = shard_groups.ranks
        self.take_gradients = finish
        """Take all gradients of the step; ConfigError if they cannot be reduced. Not collective."""
        decide, update = num_numbers
        self._gradients = JointMessage(
            groups, self._ranks, decide, bucket.layout.numel, dtype=bucket.gradient.dtype
        )
        self._shares = JointMessage(
            groups, self._ranks, update, bucket.layout.share, dtype=bucket.values.dtype
        )
        self._padding = [*map(bucket.layout.padding, range(shard_groups.num_shares))]

    @staticmethod
    def fits(buckets: Sequence[Bucket], shard_groups: ShardGroups, layout: Layout) -> bool:
        """Return True if a step of these buckets can be made in two messages; equal on all ranks.

        Not if a group between others sums too, and not if other ranks of the layout have to know.
        """
        groups = (shard_groups.reduce, shard_groups.gather)
        if len(buckets) != 1 or shard_groups.num_shares != layout.world_size:
            return False
        if shard_groups.between is not None or shard_groups.tied is not None:
            return False
        [bucket] = buckets
        nbytes = bucket.gradient.nbytes * shard_groups.num_shares**2
        if not 0 < nbytes <= _MAX_NBYTES or shard_groups.num_shares > _MAX_RANKS:
            return False
        return all(
            group is not None and collectives.sends_directly(bucket.values, group)
            for group in groups
        )

    @property
    def is_usable(self) -> bool:
        """True if the gradients of this step were not asked for before it, and so reduced alone."""
        return not self._reducer.is_apart

    def sum_with_gradients(self, numbers: Sequence[float], *, what: str) -> list[float]:
        """Return the sum of each number over all ranks; their gradients come along.

        Cost: a message of the whole gradient to and from every other rank.
        """
        whole = self._reducer.whole_gradient(self._bucket)
        self._gradients.exchange(numbers, whole, what=what)
        return self._gradients.sum_numbers()

    @torch.no_grad()
    def measure(self, *, count_zeros: bool) -> GradientSums:
        """Sum the gradients that have come, keep this rank's share, and measure all shares."""
        arrived = self._gradients.tensors
        whole = torch.add(arrived[0], arrived[1])
        for each in arrived[2:]:
            whole.add_(each)
        shares = whole.view(len(self._ranks), -1)
        self._reducer.take_reduced(self._bucket, shares, index=self._index)
        return sums_of_shares(
            shares, ranks=self._ranks, padding=self._padding, count_zeros=count_zeros
        )

    def sum_with_parameters(self, numbers: Sequence[float], *, what: str) -> list[float]:
        """Return the sum of each number over all ranks; their updated parameters come along.

        Cost: a message of one share to and from every other rank.
        """
        self._bucket.gather_with(self._shares, numbers, what=what)
        return self._shares.sum_numbers()
