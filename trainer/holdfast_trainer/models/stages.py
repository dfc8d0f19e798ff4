"""Which layers a pipeline stage has, and which stages a rank. Pure arithmetic, torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import ConfigError

ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"
]
Variant = Literal["gather", "ring"]
"""How attention works over a context axis: keys and values gathered, or passed around a ring."""
_TORCH_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_ONE_STAGE = ("gpipe", "1f1b")
_V_SHAPED = ("zbv", "dualpipev")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run of consecutive layers; the first stage embeds, the last has the norm and the head."""

    index: int = 0
    num_stages: int = 1
    layers: range

    @property
    def is_first(self) -> bool:
        """Return True if its input are the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Return True if its output are the losses."""
        return self.index == self.num_stages - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How a model is split over the pipeline axis, and in which order microbatches run."""

    schedule: ScheduleName = "1f1b"
    """1f1b and gpipe take one stage per rank; zbv and dualpipev two, in the shape of a V."""
    stages_per_rank: int = 1
    """Stages of each rank, for the schedules that interleave several."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage, first to last; empty: as even as they come."""

    @property
    def torch_name(self) -> str:
        """Return the schedule's name in `torch.distributed.pipelining.schedules`."""
        return _TORCH_NAMES[self.schedule]

    @property
    def takes_one_stage(self) -> bool:
        """Return True if each rank has exactly one stage."""
        return self.schedule in _ONE_STAGE

    @property
    def is_v_shaped(self) -> bool:
        """Return True if the first rank has the first and the last stage."""
        return self.schedule in _V_SHAPED

    def stages(self, *, num_layers: int, pp: int) -> tuple[Stage, ...]:
        """All stages of the model, in order; one if `pp` is 1.

        Raises:
            ConfigError: the schedule does not take that many stages per rank, or the layers do
                not make that many stages.
        """
        if pp == 1:
            return (Stage(layers=range(num_layers)),)
        _check_schedule(self)
        num_stages = pp * self.stages_per_rank
        cuts = split_layers(num_layers, num_stages=num_stages, sizes=self.stage_layers)
        return tuple(
            Stage(index=index, num_stages=num_stages, layers=layers)
            for index, layers in enumerate(cuts)
        )

    def owner(self, stage: int, *, pp: int) -> int:
        """Position in the `pp` group of the rank that has a stage."""
        # A V of 2 ranks: stages 0 1 go down the ranks, stages 2 3 come back up (rank 1, then 0).
        turn, index = divmod(stage, pp)
        return pp - 1 - index if self.is_v_shaped and turn % 2 else index


def split_layers(num_layers: int, *, num_stages: int, sizes: Sequence[int] = ()) -> list[range]:
    """Consecutive runs of layers, one for each stage.

    Args:
        num_layers: of the model.
        num_stages: how many runs.
        sizes: their lengths; empty: equal ones, the first ones longer by one if there is a rest.

    Raises:
        ConfigError: a stage would be empty, or the sizes do not add up.
    """
    if not sizes:
        if num_stages > num_layers:
            raise ConfigError(
                f"--num-layers {num_layers} cannot make {num_stages} pipeline stages of at least "
                f"one layer: lower --pp or --stages-per-rank, or raise --num-layers"
            )
        short, longer = divmod(num_layers, num_stages)
        sizes = [short + (index < longer) for index in range(num_stages)]
    if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes) < 1:
        raise ConfigError(
            f"--stage-layers {' '.join(map(str, sizes))}: {num_stages} stages (--pp x "
            f"--stages-per-rank) need {num_stages} positive numbers that add up to --num-layers "
            f"{num_layers}"
        )
    starts = [sum(sizes[:index]) for index in range(num_stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _check_schedule(pipeline: Pipeline) -> None:
    """Refuse a number of stages per rank that the schedule does not take."""
    name, count = pipeline.schedule, pipeline.stages_per_rank
    if pipeline.takes_one_stage and count != 1:
        raise ConfigError(
            f"--stages-per-rank {count} with --pp-schedule {name}: it runs one stage per rank; "
            f"use interleaved, looped-bfs or zero-bubble"
        )
    if pipeline.is_v_shaped and count != 2:
        raise ConfigError(f"--pp-schedule {name} runs two stages per rank: --stages-per-rank 2")
    if count < 1:
        raise ConfigError(f"--stages-per-rank is {count}; set it to 1 or more")
