"""Values that were rejected between steps, which no rerun can explain: they are reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.decoding import decode_msgpack_as
from holdfast.errors import some_sentences
from holdfast.rerun.attempt import RejectedValue
from holdfast.rerun.places import Place
from holdfast.rerun.team import Team
from holdfast.rerun.training_state import MAX_NAMED
from holdfast.rerun.values import Value, describe


class Observations:
    """What this rank has rejected between steps, until the ranks meet.

    Args:
        team: the ranks.
    """

    def __init__(self, team: Team) -> None:
        """There is nothing yet."""
        self._team = team
        self._values: list[RejectedValue] = []

    def __bool__(self) -> bool:
        """Return True if there is something to report."""
        return bool(self._values)

    def add(self, name: str, value: Value, why: str, fed_by: Sequence[Place]) -> None:
        """Keep a value, and the reason for its rejection."""
        self._values.append(
            RejectedValue(
                call=name,
                occurrence=0,
                value=describe(value),
                why=why,
                fatal=False,
                fed_by=[*fed_by],
            )
        )

    def take_unreported(self) -> list[str]:
        """Return in words what this rank has rejected and no report has; forget it."""
        values, self._values = self._values, []
        rank = self._team.here.rank
        return [f"'{each.call}' on rank {rank}: {each.why}" for each in values]

    def report(self, *, step: int) -> None:
        """Record what any rank has. Collective."""
        payload = msgspec.msgpack.encode(self._values) if self._values else b""
        rows = self._team.exchange(payload, phase=f"step {step}: observed")
        self._values = []
        values: list[dict[str, Any]] = [
            msgspec.structs.asdict(place) | msgspec.to_builtins(each)
            for place, row in zip(self._team.places, rows, strict=True)
            if row
            for each in decode_msgpack_as(row, list[RejectedValue])
        ]
        if not values:
            return
        self._team.record("observed", step=step, fault="", values=values)
        words = some_sentences(
            [f"'{each['call']}' on rank {each['rank']}: {each['why']}" for each in values],
            most=MAX_NAMED,
        )
        self._team.say(f"before step {step}: {words}: the run continues")
