"""Tensors sent between pairs of ranks: all are started, then all are waited for by a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist
from torch import Tensor

from holdfast.errors import DeadlineError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_PROBE_S = 0.001
"""Seconds to wait for a message after the deadline: gloo says only in a wait if it has arrived."""


class Parcel(NamedTuple):
    """A tensor to send to a rank, or to receive from it."""

    tensor: Tensor
    """Contiguous. A tensor without elements is not sent."""
    rank: int
    """The other rank."""
    tag: int = 0
    """Distinguishes the messages between two ranks."""


def exchange(
    leaving: Sequence[Parcel],
    arriving: Sequence[Parcel],
    *,
    get_group: Callable[[], ProcessGroup],
    timeout_s: float,
    what: str,
    giver: str,
    taker: str,
) -> None:
    """Send and receive; on return every tensor has arrived and none is read any more.

    All messages are started before the first wait, so no order of ranks can deadlock. With NCCL
    the messages are one batch on the communicator's stream, and this thread waits for them, too.

    Args:
        leaving: to send. Between two ranks the order of messages is the same at both ends.
        arriving: to receive into.
        get_group: the communicator; called only if there is something to send or receive.
        timeout_s: deadline for all of it together.
        what: the name of the exchange, for messages.
        giver: the module whose ranks send, for messages.
        taker: the module whose ranks receive.

    Raises:
        DeadlineError: Ranks did not answer in time, or their connections broke; they are named.
    """
    operations: list[tuple[Callable[..., dist.Work | None], str, Parcel]] = [
        (dist.irecv, f"from rank {each.rank} ({giver})", each)
        for each in arriving
        if each.tensor.numel()
    ]
    operations += [
        (dist.isend, f"to rank {each.rank} ({taker})", each)
        for each in leaving
        if each.tensor.numel()
    ]
    if not operations:
        return
    group = get_group()
    batch = [
        dist.P2POp(operation, each.tensor, each.rank, group=group, tag=each.tag)
        for operation, _, each in operations
    ]
    deadline = time.monotonic() + timeout_s
    names = [name for _, name, _ in operations]
    try:
        works = dist.batch_isend_irecv(batch)
    except RuntimeError as error:
        raise _late(what, names, error) from error
    _wait(works, names, deadline=deadline, what=what)


def _wait(works: Sequence[dist.Work], names: Sequence[str], *, deadline: float, what: str) -> None:
    """Wait for all messages; raise a DeadlineError that names those which did not complete."""
    for index, work in enumerate(works):
        remaining = deadline - time.monotonic()
        try:
            work.wait(timedelta(seconds=max(remaining, _PROBE_S)))
        except RuntimeError as error:
            if len(works) != len(names):  # NCCL completes a batch as one
                raise _late(what, names, error) from error
            late = [names[index]]
            if time.monotonic() >= deadline:
                rest = zip(names[index + 1 :], works[index + 1 :], strict=True)
                late += [name for name, each in rest if not _has_completed(each)]
            raise _late(what, late, error) from error


def _has_completed(work: dist.Work) -> bool:
    """Return True if a message has completed; give it up otherwise."""
    try:
        work.wait(timedelta(seconds=_PROBE_S))
    except RuntimeError:
        return False
    return True


def _late(what: str, names: Sequence[str], error: Exception) -> DeadlineError:
    """Return the error for messages that did not complete."""
    listed = ", ".join(dict.fromkeys(names))
    return DeadlineError(
        f"{what}: messages {listed} did not complete: {error}. Look at what happened on these "
        f"ranks first; start again from the last checkpoint."
    )
