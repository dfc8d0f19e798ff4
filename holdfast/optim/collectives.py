"""The collectives of sharded optimizers, started without waiting for them.

Callers use them through the module (`collectives.all_gather`), so that tests can replace them.

Gloo makes a reduce-scatter from a copy, an all-reduce of the whole and another copy, and gathers
into its own memory first. So on the host each rank sends shares directly to the ranks that need
them, which takes half the bytes of a sum, and no copy.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import starmap
from operator import call
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast._torch import lost_after_s, mark_eager
from holdfast.errors import DeadlineError, GroupError, HoldfastError, exchange_lost

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TAG = 1_886
"""Of the messages made here, to tell them from those that a model sends on the communicator."""

_SMALL_NBYTES = 1 << 16
"""Up to this size an all-reduce sends the whole tensor: the number of waits counts, not bytes."""


Call = tuple[Any, ...]
"""A function in C, and its arguments."""


def uninterrupted(calls: Iterable[Call]) -> list[Any]:
    """Make calls, and return what they return.

    Python looks for signals between two steps of its own code, and here are none: an interrupt
    (`KeyboardInterrupt`) comes before all of the calls or after them.
    """
    return [*starmap(call, calls)]


class Pending(Protocol):
    """A collective that was started: torch's `Work`, or `_Messages`."""

    def wait(self) -> Any:
        """Wait until it is complete."""


class _Messages:
    """Messages between ranks that make up one collective; `finish` is called after the last one.

    If nothing waits for them, they are complete before they are forgotten: gloo would withdraw what
    has not arrived yet, and the next collective's messages would meet these.
    """

    def __init__(self, finish: Callable[[], object] = lambda: None) -> None:
        self._left: deque[Pending] = deque()
        self._finish = finish
        self._pid = os.getpid()

    @mark_eager
    def start(
        self,
        leaving: Sequence[Tensor],
        arriving: Sequence[Tensor],
        group: ProcessGroup,
        *,
        notes: Sequence[Call] = (),
    ) -> None:
        """Start sending to, and receiving from, every other rank of a group, by position in it."""
        others = [i for i in range(len(leaving)) if i != group.rank()]
        # Receives first: gloo holds a message back until the other rank has posted its receive.
        receives: list[Call] = [(group.recv, [arriving[i]], i, _TAG) for i in others]
        sends: list[Call] = [(group.send, [leaving[i]], i, _TAG) for i in others]
        # See `uninterrupted`.
        self._left.extend(filter(None, starmap(call, (*notes, *receives, *sends))))

    @mark_eager
    def wait(self) -> None:
        self._wait_for_messages()
        self._finish()

    def give_up(self) -> None:
        """Wait for none of them any more: other ranks were late in vain."""
        self._left.clear()

    def _wait_for_messages(self) -> None:
        while self._left:
            # First removed: an interrupt is raised after the wait, and gloo knows of no second one.
            self._left.popleft().wait()

    def __del__(self) -> None:
        if self._left and self._pid == os.getpid():  # those of a forked process are its parent's
            with contextlib.suppress(Exception):
                self._wait_for_messages()


def reduce_scatter(
    out: Tensor,
    source: Tensor,
    group: ProcessGroup,
    *,
    keep: Callable[[Pending], None],
    notes: Sequence[Call] = (),
) -> None:
    """Start summing `source` over the group; each rank's share of the sum arrives in `out`.

    Over gloo the sum is made in `wait`, in the order of the group's ranks.

    Args:
        out: takes the share.
        source: this rank's values.
        group: its communicator.
        keep: takes what is to be waited for; a function in C.
        notes: functions in C, with arguments, by which the launch is noted; over gloo no interrupt
            comes between them and the launch.

    Cost: one reduce-scatter of the bytes of `source`; over gloo a message of one share to and from
    each other rank, and memory for all of these but one.
    """
    out, source = _real(out), _real(source)
    if not sends_directly(out, group):
        # renamed in torch 2.13, which warns about the older name
        launch: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        for each, *arguments in notes:
            each(*arguments)
        keep(launch(out, source, group=group, async_op=True))
        return
    index, shares = group.rank(), torch.split(source, out.numel())
    # `out` receives the share of the first other rank: the sum starts with it, so that only the
    # others need memory.
    first = 1 if index == 0 else 0
    arriving = [out if i in (index, first) else torch.empty_like(out) for i in range(len(shares))]
    summed = [shares[i] if i == index else arriving[i] for i in range(len(shares))]

    def add() -> None:
        torch.add(summed[0], summed[1], out=out)
        for share in summed[2:]:
            out.add_(share)

    messages = _Messages(add)
    messages.start(shares, arriving, group, notes=[*notes, (keep, messages)])


def all_gather(out: Tensor, share: Tensor, group: ProcessGroup) -> Pending:
    """Start filling `out` with every rank's share; `share` is this rank's part of `out`.

    Cost: one all-gather of the bytes of `out`; over gloo a message of one share to and from each
    other rank.
    """
    out, share = _real(out), _real(share)
    if not sends_directly(out, group):
        launch: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work: Pending = launch(out, share, group=group, async_op=True)
        return work
    arriving = torch.split(out, share.numel())
    messages = _Messages()
    messages.start([share] * len(arriving), arriving, group)
    return messages


def all_reduce(tensor: Tensor, group: ProcessGroup) -> Pending:
    """Start summing a tensor over the group, in place.

    Cost: one all-reduce of its bytes; over gloo, if it is small, a message of it to and from each
    other rank.
    """
    if not (sends_directly(tensor, group) and tensor.nbytes <= _SMALL_NBYTES):
        work: Pending | None = dist.all_reduce(_real(tensor), group=group, async_op=True)
        if work is None:
            raise GroupError("this rank is not in the group of an all-reduce")
        return work
    arriving = [torch.empty_like(tensor) for _ in range(group.size())]
    # In the order of the group on every rank: floating-point sums depend on it, in their last bits.
    summed = [tensor if i == group.rank() else each for i, each in enumerate(arriving)]
    messages = _Messages(lambda: tensor.copy_(torch.stack(summed).sum(dim=0)))
    messages.start([tensor] * len(arriving), arriving, group)
    return messages


def sends_directly(tensor: Tensor, group: ProcessGroup) -> bool:
    """Return True if collectives of a tensor on a group are messages between its ranks."""
    return tensor.device.type == "cpu" and dist.get_backend(group) == "gloo"


def _real(tensor: Tensor) -> Tensor:
    """Return a flat tensor as real numbers, two for a complex one: backends sum only these."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def wait(work: Pending, what: str) -> None:
    """Wait for a collective; raise DeadlineError that names it, `what`, if it fails or is late."""
    started = time.monotonic()
    try:
        work.wait()
    except HoldfastError:
        raise
    except RuntimeError as error:
        raise _lost(error, what, waited_s=time.monotonic() - started) from error


def give_up(work: Pending) -> None:
    """Let nothing wait for a collective any more, not even the end of the process."""
    if isinstance(work, _Messages):
        work.give_up()


def lost_to_others(
    error: BaseException, what: str = "a collective of the microbatch"
) -> DeadlineError | None:
    """Return the error of a collective that other ranks did not complete; None for any other.

    Forward and backward have collectives of torch and of the model, which fail with the backend's
    own text, and on each rank alone. An error that names ranks is known on all of them already.
    """
    if isinstance(error, HoldfastError):
        if not error.details.keys().isdisjoint(("missing_ranks", "failed_ranks")):
            return None
        return error if isinstance(error, DeadlineError) else None
    if lost_after_s(error) is None:
        return None
    return _lost(error, what)


def _lost(error: BaseException, what: str, *, waited_s: float = 0.0) -> DeadlineError:
    """Return the error for a collective that other ranks did not complete."""
    # A backend counts from the launch, which may have been long before the wait.
    return exchange_lost(what, error, waited_s=max(waited_s, lost_after_s(error) or 0.0))


def count_ranks(flags: Sequence[bool], group: ProcessGroup | None, *, what: str) -> list[int]:
    """Return, for each flag, on how many ranks of the group it is set; None is this rank alone.

    Args:
        flags: as many on every rank, with the same meaning.
        group: the ranks that share what the flags are about.
        what: names the exchange in an error.

    Cost: one all-reduce of a number per flag.
    """
    if group is None or not flags:
        return [int(flag) for flag in flags]
    counts = torch.tensor(flags, dtype=torch.float32, device=flag_device(group))
    wait(all_reduce(counts, group), what)
    return [int(count) for count in counts.tolist()]


def flag_device(group: ProcessGroup) -> torch.device:
    """Return the device on which a group takes small tensors: NCCL takes none on the host."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
