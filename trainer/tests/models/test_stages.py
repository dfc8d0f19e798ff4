"""Which layers a stage has: every layer once, under its own number, whatever the split (K4)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast_trainer.models.config import GPTConfig
from holdfast_trainer.models.gpt import GPT
from holdfast_trainer.models.stages import Pipeline, ScheduleName, split_layers
from tests.drawn import drawn

INTERLEAVED: tuple[ScheduleName, ...] = ("interleaved", "looped-bfs", "zero-bubble")


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Pipeline, int, int]:
    """A pipeline, its number of layers and its number of ranks."""
    pp = draw(st.integers(2, 6))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zbv", "dualpipev", *INTERLEAVED]))
    per_rank = draw(st.integers(1, 4)) if schedule in INTERLEAVED else 1
    per_rank = 2 if schedule in ("zbv", "dualpipev") else per_rank
    num_stages = pp * per_rank
    if draw(st.booleans()):
        sizes = draw(st.lists(st.integers(1, 5), min_size=num_stages, max_size=num_stages))
        num_layers = sum(sizes)
    else:
        sizes, num_layers = [], draw(st.integers(num_stages, 4 * num_stages))
    pipeline = Pipeline(schedule=schedule, stages_per_rank=per_rank, stage_layers=tuple(sizes))
    return pipeline, num_layers, pp


@given(pipelines())
def test_stages_cover_the_layers_once_and_in_order(case: tuple[Pipeline, int, int]) -> None:
    pipeline, num_layers, pp = case
    stages = pipeline.stages(num_layers=num_layers, pp=pp)
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    assert [stage.is_first for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.is_last for stage in stages] == [False] * (len(stages) - 1) + [True]
    if pipeline.stage_layers:
        assert [len(stage.layers) for stage in stages] == list(pipeline.stage_layers)
    else:
        assert max(len(s.layers) for s in stages) - min(len(s.layers) for s in stages) <= 1
    owners = [pipeline.owner(stage.index, pp=pp) for stage in stages]
    assert sorted(owners) == sorted(list(range(pp)) * pipeline.stages_per_rank)
    assert owners[0] == 0
    assert owners[-1] == (0 if pipeline.is_v_shaped else pp - 1)


@drawn(quick=12, slow=30, case=pipelines(), tied=st.booleans())
def test_parameters_of_all_ranks_are_those_of_the_whole_model(
    case: tuple[Pipeline, int, int], tied: bool
) -> None:
    pipeline, num_layers, pp = case
    config = GPTConfig(num_layers=num_layers, model_dim=4, num_heads=1, tied_head=tied)
    stages = pipeline.stages(num_layers=num_layers, pp=pp)
    seen: list[str] = []
    with torch.device("meta"):
        for rank in range(pp):
            own = [stage for stage in stages if pipeline.owner(stage.index, pp=pp) == rank]
            seen += [name for name, _ in GPT(config, stages=own).named_parameters()]
        whole = [name for name, _ in GPT(config).named_parameters()]
    # A tied embedding is on the first and on the last rank; nothing else is anywhere twice.
    twice = ["embed.weight"] if tied and not pipeline.is_v_shaped else []
    assert sorted(seen) == sorted(whole + twice)


@pytest.mark.parametrize(
    ("pipeline", "num_layers"),
    [
        (Pipeline(stage_layers=(2, 1)), 4),
        (Pipeline(stage_layers=(4, 0)), 4),
        (Pipeline(stage_layers=(1, 1, 2)), 4),
        (Pipeline(), 1),
        (Pipeline(schedule="zbv"), 8),
        (Pipeline(schedule="gpipe", stages_per_rank=2), 8),
    ],
)
def test_what_does_not_make_stages_is_refused(pipeline: Pipeline, num_layers: int) -> None:
    with pytest.raises(ConfigError, match=r"--stage|--pp-schedule|--num-layers"):
        pipeline.stages(num_layers=num_layers, pp=2)


def test_a_model_that_is_not_cut_is_one_stage() -> None:
    (stage,) = Pipeline(schedule="zbv").stages(num_layers=5, pp=1)
    assert stage.is_first
    assert stage.is_last
    assert stage.layers == range(5)
    assert split_layers(5, num_stages=2) == [range(3), range(3, 5)]
