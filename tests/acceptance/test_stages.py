"""Pipeline stages: global names on disk, every layer in its place under any other split (K4)."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast import Checkpointer, Layout, ProcessGroups
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.storage import PosixStorage
from tests.checkpoint.common import full
from tests.harness import RankContext, run_ranks

Way = tuple[tuple[int, ...], ...]
"""The layers of each pipeline rank."""


class Layer(nn.Module):
    """One layer; odd ones have experts, so that names and shapes differ from layer to layer."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mixer = nn.Linear(8, 8 + index)
        if index % 2:
            self.experts = nn.Parameter(torch.empty(2, 4, 8))


class Stages(nn.Module):
    """The layers of one rank under their global names; its ends are on first and last layer."""

    def __init__(self, layers: tuple[int, ...], *, num_layers: int) -> None:
        super().__init__()
        if 0 in layers:
            self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleDict({str(index): Layer(index) for index in layers})
        if num_layers - 1 in layers:
            self.head = nn.Linear(8, 16, bias=False)


def ways(num_layers: int) -> list[Way]:
    """Even, random, interleaved and V-shaped splits over one to four ranks."""
    generator = random.Random(num_layers)
    layers = tuple(range(num_layers))
    found: list[Way] = [(layers,)]
    for pp in (2, 3, 4):
        if pp > num_layers:
            continue
        even = [num_layers * rank // pp for rank in range(pp + 1)]
        ends = [0, *sorted(generator.sample(range(1, num_layers), pp - 1)), num_layers]
        found += [tuple(layers[a:b] for a, b in pairwise(cut)) for cut in (even, ends)]
    if num_layers >= 5:
        found.append(((0, 1, 3), (2, *range(4, num_layers))))
        third = (num_layers - 1, num_layers - 2)
        found.append(((0, *third), layers[1:-2]))
    return found


def layout_of(pp: int) -> Layout:
    ranks = range(3) if pp == 3 else range(4)
    return Layout(pp=pp, dp={1: 4, 2: 2, 3: 1, 4: 1}[pp], ranks=ranks, name=f"pp{pp}")


def every_split(context: RankContext, root: str, counts: tuple[int, ...]) -> int:
    """Save under each split, load under each other; the number of parameters compared."""
    compared = 0
    for num_layers in counts:
        cases = ways(num_layers)
        for saving in (True, False):
            for number, way in enumerate(cases):
                layout = layout_of(len(way))
                if context.rank not in layout.ranks:
                    continue
                with ProcessGroups.create(layout) as groups:
                    model = Stages(way[groups.index("pp")], num_layers=num_layers)
                    checkpointer = Checkpointer(f"{root}/{num_layers}", groups=groups)
                    if saving:
                        fill(model, true=True)
                        checkpointer.save(number, {"model": model})
                        continue
                    for step in range(len(cases)):
                        fill(model, true=False)
                        checkpointer.load({"model": model}, step=step)
                        for name, parameter in model.named_parameters():
                            truth = full(name, tuple(parameter.shape))
                            assert torch.equal(parameter, truth), (way, cases[step], name)
                            compared += 1
            torch.distributed.barrier()
    return compared


def fill(model: nn.Module, *, true: bool) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float("nan"))
            if true:
                parameter.copy_(full(name, tuple(parameter.shape)))


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param((5,), marks=pytest.mark.slow),
        pytest.param((3, 4, 8), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_every_layer_is_in_its_place_under_every_split(
    tmp_path: Path, counts: tuple[int, ...]
) -> None:
    assert all(run_ranks(4, every_split, str(tmp_path), counts, timeout_s=200).results)
    for num_layers in counts:
        whole = Stages(tuple(range(num_layers)), num_layers=num_layers)
        names = {f"model.{name}" for name, _ in whole.named_parameters()}
        storage = PosixStorage(tmp_path / f"{num_layers}")
        for number in range(len(ways(num_layers))):
            with Snapshot.open(storage, step_dir(number)) as snapshot:
                assert {info.key for info in snapshot.manifest.tensors} == names
