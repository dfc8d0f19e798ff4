"""Stages of the GPT: checkpoints of any split of its layers load under other ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer, Layout, ProcessGroups
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.storage import PosixStorage
from holdfast_trainer.models.config import GPTConfig
from holdfast_trainer.models.gpt import GPT
from holdfast_trainer.models.stages import Pipeline
from tests.checkpoint.common import full
from tests.harness import RankContext, run_ranks

STRIDES = (1, 4)
"""How far before a split, in the list of all, are those whose checkpoints it loads at once."""

Way = tuple[int, Pipeline]
"""Pipeline ranks, and how the layers are cut over them."""


def config(num_layers: int) -> GPTConfig:
    return GPTConfig(
        num_layers=num_layers, model_dim=8, num_heads=2, vocab_size=16, mixers="sa", feeds="de",
        num_experts=2, expert_dim=4, state_dim=2, tied_head=False,
    )  # fmt: skip


def ways(num_layers: int) -> list[Way]:
    """Even, random and interleaved splits over one to four ranks."""
    generator = random.Random(num_layers)
    found: list[Way] = [(1, Pipeline())]
    for pp in (2, 3, 4):
        if pp > num_layers:
            continue
        found.append((pp, Pipeline()))
        ends = sorted(generator.sample(range(1, num_layers), pp - 1))
        sizes = [b - a for a, b in zip([0, *ends], [*ends, num_layers], strict=True)]
        found.append((pp, Pipeline(stage_layers=tuple(sizes))))
    if num_layers >= 5:
        interleaved = (2, 1, 1, num_layers - 4)
        found.append(
            (2, Pipeline(schedule="interleaved", stages_per_rank=2, stage_layers=interleaved))
        )
        found.append((2, Pipeline(schedule="zbv", stages_per_rank=2)))
    return found


def layout_of(pp: int) -> Layout:
    ranks = range(3) if pp == 3 else range(4)
    return Layout(pp=pp, dp={1: 4, 2: 2, 3: 1, 4: 1}[pp], ranks=ranks, name=f"pp{pp}")


def model_of(way: Way, num_layers: int, index: int) -> GPT:
    pp, pipeline = way
    stages = pipeline.stages(num_layers=num_layers, pp=pp)
    own = [stage for stage in stages if pipeline.owner(stage.index, pp=pp) == index]
    return GPT(config(num_layers), stages=own)


def every_split(
    context: RankContext, root: str, counts: tuple[int, ...], strides: tuple[int, ...]
) -> int:
    """Save under each split, load some others under each; the number of parameters compared."""
    compared = 0
    for num_layers in counts:
        cases = ways(num_layers)
        for saving in (True, False):
            for number, way in enumerate(cases):
                layout = layout_of(way[0])
                if context.rank not in layout.ranks:
                    continue
                with ProcessGroups.create(layout) as groups:
                    model = model_of(way, num_layers, groups.index("pp"))
                    checkpointer = Checkpointer(f"{root}/{num_layers}", groups=groups)
                    if saving:
                        fill(model, true=True)
                        checkpointer.save(number, {"model": model})
                        continue
                    for step in {(number - stride) % len(cases) for stride in strides}:
                        fill(model, true=False)
                        checkpointer.load({"model": model}, step=step)
                        for name, parameter in model.named_parameters():
                            truth = full(name, tuple(parameter.shape))
                            assert torch.equal(parameter, truth), (way, cases[step], name)
                            compared += 1
            torch.distributed.barrier()
    return compared


def fill(model: GPT, *, true: bool) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float("nan"))
            if true:
                parameter.copy_(full(name, tuple(parameter.shape)))


@pytest.mark.parametrize("strides", [STRIDES, pytest.param((*range(9),), marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_gpt_is_whole_under_every_split(tmp_path: Path, strides: tuple[int, ...]) -> None:
    arguments = str(tmp_path), (5,), strides
    assert all(run_ranks(4, every_split, *arguments, timeout_s=200).results)
    for num_layers in (5,):
        names = {f"model.{name}" for name, _ in GPT(config(num_layers)).named_parameters()}
        storage = PosixStorage(tmp_path / f"{num_layers}")
        for number in range(len(ways(num_layers))):
            with Snapshot.open(storage, step_dir(number)) as snapshot:
                assert {info.key for info in snapshot.manifest.tensors} == names
