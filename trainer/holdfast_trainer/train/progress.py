"""How far a run is: a part of its state."""

from __future__ import annotations

from holdfast_trainer.train.data import EpochSampler


class Progress:
    """How far the run is: finished steps and the position in the data."""

    def __init__(self, sampler: EpochSampler, *, allow_other_data: bool = False) -> None:
        self.step = 0
        """Finished optimizer steps."""
        self._sampler = sampler
        self._allow_other_data = allow_other_data

    def advance(self) -> None:
        """A step is finished."""
        self.step += 1
        self._sampler.advance()

    def state_dict(self) -> dict[str, object]:
        """Plain numbers and strings, equal on all ranks."""
        return {"step": self.step, "data": self._sampler.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take a position; MismatchError if it is one in other data."""
        step, data = state["step"], state["data"]
        self._sampler.load_state_dict(data, allow_other=self._allow_other_data)  # type: ignore[arg-type]
        self.step = int(step)  # type: ignore[call-overload]
