"""A second opinion within the step: another data replica runs what was bad twice.

Data replicas hold equal parameters. So each one runs the step of the replica before it, with that
one's batches, random streams and buffers, and its values are compared with those that were bad. On
devices that have none in common with the first ones that is a rerun elsewhere, without a restart.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from holdfast.decoding import convert_as
from holdfast.errors import ConfigError
from holdfast.format.values import Codecs
from holdfast.rerun.attempt import Call, RecheckedValue, Suspect
from holdfast.rerun.other_modules import broadcast_buffers
from holdfast.rerun.packing import pack_tree, unpack_tree
from holdfast.rerun.places import device_keys
from holdfast.rerun.replay import ReplayableBatches
from holdfast.rerun.replayed import Replayed
from holdfast.rerun.rules import Learned
from holdfast.rerun.team import Team
from holdfast.rerun.training_state import TrainingState


class SecondOpinion:
    """Exchanges the step of this rank for that of the same rank in the data replica before.

    Args:
        team: the ranks.
        replayed: random streams, buffers, hooks.
        state: the parameters, which are equal.
        learned: what rules have learned.
        codecs: of batches.
    """

    def __init__(
        self,
        team: Team,
        *,
        replayed: Replayed,
        state: TrainingState,
        learned: Learned,
        codecs: Codecs,
    ) -> None:
        self._team = team
        self._replayed = replayed
        self._state = state
        self._learned = learned
        self._codecs = codecs
        self._own_learned: Mapping[str, object] = {}

    def can_tell(self, bad: list[RecheckedValue]) -> bool:
        """Return True if another replica has devices of its own for one of some values."""
        if not self._team.partners:
            return False
        return any(
            not device_keys(each.first_fed_by)
            & device_keys(self._team.with_partners(each.first_fed_by))
            for each in bad
        )

    def exchange(
        self, step: int, batches: object, suspects: Mapping[Call, Suspect]
    ) -> tuple[dict[Call, Suspect] | None, str]:
        """Set everything up to run the step of the replica before. Collective.

        Args:
            step: its number.
            batches: the iterator of the step, at its start.
            suspects: this rank's values that were bad twice.

        Returns:
            The other rank's bad values; or None, and why it cannot be done.
        """
        payload, why = b"", ""
        try:
            payload = self._packed(batches, suspects)
        except ConfigError as error:
            why = str(error)
        received, why = self._team.send_to_partners(payload, why=why, step=step)
        if why:
            return None, why
        tree = unpack_tree(received)
        assert isinstance(batches, ReplayableBatches)
        self._team.together(
            lambda: self._replayed.borrow(tree["replayed"], codecs=self._codecs), step=step
        )
        # Behind what may fail: only a step that is asked for gives these back.
        batches.borrow(tree["batches"])
        self._own_learned = self._learned.state_dict()
        self._learned.load_state_dict(tree["learned"])
        others = convert_as(tree["suspects"], list[Suspect])
        return {each.call: each for each in others}, ""

    def end(self, batches: object) -> None:
        """Take this rank's own step back; random streams and buffers are restored as well."""
        assert isinstance(batches, ReplayableBatches)
        batches.give_back()
        self._replayed.restore()
        self._learned.load_state_dict(self._own_learned)

    def _packed(self, batches: object, suspects: Mapping[Call, Suspect]) -> bytes:
        """Return this rank's step as bytes; ConfigError if it cannot be sent."""
        if not self._state.is_known:
            raise ConfigError(
                "whether replicas hold equal parameters is not known without "
                "replayed=Replayed(modules=[model])"
            )
        if not isinstance(batches, ReplayableBatches):
            raise ConfigError("its batches do not come from machine.replayable(iterator)")
        return pack_tree(
            {
                "batches": batches.kept(),
                # What a forward takes from the first replica, it has from there here, too.
                "replayed": self._replayed.lent(codecs=self._codecs, without=broadcast_buffers()),
                "suspects": msgspec.to_builtins([*suspects.values()]),
                "learned": self._learned.state_dict(),
            }
        )
