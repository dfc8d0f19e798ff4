"""Compares the orders in which ranks launched collectives since they last compared them.

A communicator pairs launches by their order alone. Where they follow the code of the model, as the
gathers of a fully sharded one do, a branch that one rank takes and another does not pairs different
units: of one size, each rank computes with weights of another unit, and nothing fails. The units of
two models on one communicator meet the same way (`launch_order.py`), and gradients of two sharded
optimizers whose microbatches a rank enters the other way round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import msgspec

from holdfast.decoding import decode_msgpack_as
from holdfast.errors import PlanError, disagreement
from holdfast.parallel.control.control import Control


def pack_orders(orders: Mapping[str, int]) -> bytes:
    """Return what `compare_orders` takes: digests by communicator; empty without any."""
    return msgspec.msgpack.encode(orders) if orders else b""


def first_difference(payloads: Sequence[bytes]) -> str | None:
    """Return the first communicator on which ranks have launched unlike; None if there is none.

    Args:
        payloads: of all ranks, as `pack_orders` makes them.
    """
    digests: dict[str, set[int]] = {}
    # In every microbatch if there are several data axes: once for all ranks of each of them.
    for payload in {*payloads}:
        for key, digest in _unpack(payload).items():
            digests.setdefault(key, set()).add(digest)
    return min((key for key, different in digests.items() if len(different) > 1), default=None)


def compare_orders(
    payloads: Sequence[bytes],
    *,
    launches: Callable[[str], Sequence[str] | None],
    control: Control,
) -> None:
    """Raise PlanError on all ranks if ranks have launched unlike on a communicator of theirs.

    Args:
        payloads: of all ranks, as `pack_orders` makes them.
        launches: returns what this rank has launched on a communicator; None if it does not have
            it.
        control: of all ranks.

    Cost: a collective over `control` if ranks differ.
    """
    key = first_difference(payloads)
    if key is None:
        return
    own = launches(key)
    answers = control.all_gather(json.dumps(own and [*own]).encode(), phase="orders of collectives")
    by_member = {
        rank: json.loads(answer) or []
        for rank, payload, answer in zip(control.ranks, payloads, answers, strict=True)
        if key in _unpack(payload)
    }
    differs = _first_other(by_member)
    raise mixed_orders(differs, ranks=[*by_member])


def mixed_orders(differs: Mapping[int, str] | None, *, ranks: Sequence[int]) -> PlanError:
    """Return the error of ranks whose collectives met those of others.

    Args:
        differs: by rank, what met; None if that is not known any more.
        ranks: that may be concerned.
    """
    if differs is None:
        what = "many launches ago ranks ran other units"
    else:
        what = str(
            disagreement("collectives", "what comes next", [*differs.values()], ranks=[*differs])
        )
    return PlanError(
        f"{what}. Collectives of different units or optimizers met, so ranks computed with weights "
        f"or gradients of another one. All ranks of a data axis run the same units of the same "
        f"models, and microbatches of the same optimizers, in the same order, in forward and "
        f"backward: call a unit also where it has no rows, and use its output in the loss (times "
        f"0, maybe), or make the module around the branch the unit. Call drop_gradients() on all "
        f"ranks, and repeat the step or the evaluation",
        details={"ranks": [*ranks]},
    )


def missing_launch(what: str, *, rank: int, other: int, waits_in: str) -> PlanError:
    """Return the error of ranks that wait for each other in different places.

    Args:
        what: was launched.
        rank: that has launched it.
        other: that has not.
        waits_in: where that one waits for the first, in words.
    """
    return PlanError(
        f"rank {rank} waits in {what}, which rank {other} has not launched; that one waits in "
        f"{waits_in}. All ranks of a data axis run the same units equally often, "
        f"in an evaluation, too: where a rank has no rows left, let it run others and leave out "
        f"what they give, or end on all ranks after as many batches",
        details={"ranks": [rank, other]},
    )


def change_of_some(what: str, *, rank: int, other: int, waits_in: str | None = None) -> PlanError:
    """Return the error of ranks of which some have changed what is trained, or other parameters.

    Args:
        what: was changed.
        rank: that has changed it.
        other: that has not.
        waits_in: where that one waits for the first, in words; None if it changes something else.
    """
    does = f"waits in {waits_in}" if waits_in else "has changed that of others"
    return PlanError(
        f"{what} was changed on rank {rank} and not on rank {other}, which {does}: they would "
        f"reduce different parameters. Freeze and thaw the same ones on all ranks of a data axis, "
        f"between the same two forwards. Call drop_gradients() on all ranks, and repeat the step",
        details={"ranks": [rank, other]},
    )


def _unpack(payload: bytes) -> dict[str, int]:
    return decode_msgpack_as(payload, dict[str, int]) if payload else {}


def _first_other(launches: Mapping[int, Sequence[str]]) -> dict[int, str] | None:
    """Return, by rank, the first launch that is not the same on all ranks; None if all are."""
    for row in zip_longest(*launches.values(), fillvalue="nothing"):
        if len({*row}) > 1:
            return dict(zip(launches, row, strict=True))
    return None
