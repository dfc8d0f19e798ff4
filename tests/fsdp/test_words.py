"""What torch answers with an error of its own, or breaks by, is said in plain words (F17)."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from holdfast import ConfigError, HoldfastError, Layout, ProcessGroups
from holdfast.fsdp import fully_shard_model
from tests.fsdp.common import STRATEGIES, build, difference, rows_of, sgd, shard, train, truth
from tests.harness import RankContext, run_ranks


class Seldom(nn.Module):
    """Two layers, of which the second runs in `eval()` only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x if self.training else self.second(x)


def said(context: RankContext) -> None:
    expected, _ = truth(sgd, steps=2)
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for wrong in (torch.int32, "bf16", 16):
            with pytest.raises(HoldfastError, match=r"pass a torch\.distributed\.fsdp\.Mixed"):
                shard(build(), groups, precision=wrong)
        for strategy in STRATEGIES:
            net = build()
            sharded = shard(net, groups, strategy=strategy)
            with torch.inference_mode():  # as the first forward
                found = net(rows_of(0)[0])
            assert torch.allclose(found, build()(rows_of(0)[0]), atol=1e-6), strategy
            for _ in range(2):
                with torch.inference_mode():
                    net(rows_of(0)[0])
            train(sharded, sgd(net.parameters()), steps=2)
            assert difference(net, expected) < 1e-6, strategy
            seldom = Seldom()
            alone = copy.deepcopy(seldom.eval())
            sharded = fully_shard_model(
                seldom.train(),
                groups,
                experts=(),
                units=[seldom.first, seldom.second],
                strategy=strategy,
            )
            with sharded.microbatch(is_last=True):
                seldom(torch.ones(2, 6)).sum().backward()
            with torch.inference_mode():  # as the first forward of a unit
                assert torch.equal(seldom.eval()(torch.ones(2, 6)), alone(torch.ones(2, 6)))
            for make_copy in (copy.deepcopy, AveragedModel):
                inside = next(net.layers[0].children())
                for each in (net, net.layers[0], inside, nn.ModuleList([net])):
                    with pytest.raises(ConfigError, match="for a moving average keep"):
                        make_copy(each)
            with pytest.raises(ConfigError, match="cannot be copied"):
                copy.deepcopy(sharded)
            for each in (net, net.layers[0], [net.layers], nn.ModuleList([net])):
                with pytest.raises(ConfigError, match="model cannot be pickled"):
                    torch.save(each, io.BytesIO())
            optimizer = torch.optim.AdamW(net.parameters())
            for tensors in (net.table, net.state_dict(), optimizer):
                with pytest.raises(ConfigError, match=r"Save them with a Checkpointer"):
                    torch.save(tensors, io.BytesIO())
            for module in net.modules():
                with pytest.raises(ConfigError, match="cannot be put into shared memory"):
                    module.share_memory()

            with torch.device("meta"):
                empty = build()
            sharded = shard(empty, groups, strategy=strategy)
            for _ in range(2):
                with pytest.raises(ConfigError, match=r"call materialize\(\)"):
                    empty(rows_of(0)[0])
            sharded.materialize()
            with torch.no_grad():
                for parameter, other in zip(empty.parameters(), build().parameters(), strict=True):
                    rank = groups.index("dp_cp")
                    value: Any = other
                    if strategy != "no_shard":
                        value = torch.chunk(other, 2)[rank] if len(other) > rank else other[:0]
                    parameter.to_local().copy_(value)  # type: ignore[attr-defined]
            train(sharded, sgd(empty.parameters()), steps=2)
            assert difference(empty, expected) < 1e-6, strategy


def test_what_torch_breaks_by_works_or_is_refused_by_name() -> None:
    """F17: before, raw errors, after which no forward worked any more."""
    run_ranks(2, said)


def written(context: RankContext, folder: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    with ProcessGroups.create(Layout(dp=2)) as groups:
        torch.manual_seed(0)
        net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        values = {name: each.clone() for name, each in net.state_dict().items()}
        fully_shard_model(net, groups, experts=(), units=list(net.transformer.h))
        weights = net.state_dict()
        for options in ({}, {"state_dict": weights}):
            with pytest.raises(ConfigError, match=r"save_pretrained\(\.\.\., state_dict=whole\)"):
                net.save_pretrained(f"{folder}/{context.rank}", **options)
        assert not Path(f"{folder}/{context.rank}").exists()
        whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in weights.items()}
        if context.rank == 0:
            net.save_pretrained(f"{folder}/whole", state_dict=whole)
            config = json.loads(Path(f"{folder}/whole/config.json").read_text())
            assert config["architectures"] == ["GPT2LMHeadModel"]
            loaded = transformers.GPT2LMHeadModel.from_pretrained(f"{folder}/whole")
            for name, value in loaded.state_dict().items():
                assert torch.equal(value, values[name]), name


@pytest.mark.slow
def test_weights_in_shards_are_never_written_as_if_whole(tmp_path: Path) -> None:
    """F17: before, a folder with a configuration and no weights, and an error about storage."""
    run_ranks(2, written, str(tmp_path))
