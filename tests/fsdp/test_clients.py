"""Models as other code bases write them, sharded: trained, saved and loaded as the bare ones."""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from holdfast import Checkpointer, Layout, OptimizerState, ProcessGroups
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.fsdp import ShardedModel, fully_shard_model
from holdfast.storage import PosixStorage
from tests.fsdp.common import STRATEGIES, difference, full, sgd
from tests.fsdp.llama import Llama, split_over_tp
from tests.harness import RankContext, run_ranks

STEPS = 2
BATCH, TIME = 8, 6
VOCABULARY = 29


@dataclass(frozen=True, kw_only=True)
class Client:
    """A model of another code base, and how its users would declare it."""

    make: Callable[[], nn.Module]
    units: Callable[[Any], list[nn.Module]]
    experts: Callable[[Any], list[nn.Module]] = lambda model: []
    split: Callable[[Any, ProcessGroups], None] | None = None
    """Its own tensor or expert parallelism."""
    layouts: tuple[dict[str, Any], ...] = ({"dp": 4}, {"dp": 4, "replicas": 2})


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=TIME,
            bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        )
    )  # fmt: skip


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, vocab_size=VOCABULARY,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config._experts_implementation = "eager"  # the grouped kernels are for accelerators
    return MixtralForCausalLM(config)


def split_over_ep(model: Any, groups: ProcessGroups) -> None:
    """Experts over ep; each layer gathers them for its use, and gradients go back to their rank."""
    mesh = groups.mesh("expt_dp", "ep")["ep"]
    for layer in model.model.layers:
        experts = layer.mlp.experts
        whole_one = copy.deepcopy(experts).to("meta")
        for name, value in list(experts.named_parameters()):
            part = distribute_tensor(value.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(part))
        experts.forward = functools.partial(compute_whole, experts, whole_one)


def compute_whole(experts: nn.Module, whole_one: nn.Module, *args: Tensor) -> Tensor:
    gathered = {
        name: value.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        for name, value in cast("Any", experts.named_parameters())
    }
    return cast("Tensor", torch.func.functional_call(whole_one, gathered, args))


CLIENTS: dict[str, Client] = {
    "llama": Client(
        make=Llama,
        units=lambda model: list(model.layers),
        split=split_over_tp,
        layouts=({"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 4, "replicas": 2}),
    ),
    "gpt2": Client(make=gpt2, units=lambda model: list(model.transformer.h)),
    "mixtral": Client(
        make=mixtral,
        units=lambda model: list(model.model.layers),
        experts=lambda model: [layer.mlp.experts for layer in model.model.layers],
        split=split_over_ep,
        layouts=({"dp": 4}, {"dp": 4, "ep": 2}),
    ),
}


def build(client: Client, *, seed: int) -> nn.Module:
    """The model with values that depend on the seed alone."""
    model = client.make()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.train()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    out = model(tokens)
    scores = out if isinstance(out, Tensor) else out.logits
    wanted = tokens.roll(-1, dims=1)
    return nn.functional.cross_entropy(scores.float().flatten(0, 1), wanted.flatten())


def tokens_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (BATCH, TIME), generator=generator)


def truth(client: Client) -> nn.Module:
    """Trained by one process on whole batches."""
    model = build(client, seed=1)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        loss_of(model, tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def sharded(client: Client, groups: ProcessGroups, *, seed: int, strategy: str) -> ShardedModel:
    model = build(client, seed=seed)
    if groups.layout.tp * groups.layout.ep > 1:
        assert client.split is not None
        client.split(model, groups)
    return fully_shard_model(
        model,
        groups,
        experts=client.experts(model),
        units=client.units(model),
        strategy=cast("Any", strategy),
    )


def train(held: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    groups = held.groups
    for step in range(STEPS):
        mine = tokens_of(step).chunk(groups.size("dp_cp"))[groups.index("dp_cp")]
        parts = mine.chunk(2)
        for number, part in enumerate(parts):
            with held.microbatch(is_last=number == len(parts) - 1):
                (loss_of(held.model, part) / len(parts)).backward()
        held.step(optimizer)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, foreach=False)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {"model": model, "optimizer": OptimizerState(optimizer, model)}


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and momenta."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = full(parameter)
        for entry, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                found[f"{name}/{entry}"] = full(value)
    return found


def keys(root: str, step: int) -> set[str]:
    with Snapshot.open(PosixStorage(Path(root)), step_dir(step)) as snapshot:
        return {info.key for info in snapshot.manifest.tensors}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], where: object) -> None:
    assert found.keys() == expected.keys(), where
    for name, value in found.items():
        assert torch.equal(value, expected[name]), (where, name)


Cases = list[tuple[int, int]]
"""Numbers of a client's layout and of a strategy."""


def in_turn(name: str, num_strategies: int) -> Cases:
    """Return each layout of a client and each strategy at least once."""
    num_layouts = len(CLIENTS[name].layouts)
    count = max(num_layouts, num_strategies)
    return [(number % num_layouts, number % num_strategies) for number in range(count)]


def trained_and_kept(
    context: RankContext, root: str, name: str, strategies: tuple[str, ...], cases: Cases
) -> dict[str, float]:
    """Train in each case, save, load under the next strategy and into the bare model."""
    client = CLIENTS[name]
    expected = truth(client)
    found: dict[str, float] = {}
    steps = itertools.count()
    for number, sizes in enumerate(client.layouts):
        with ProcessGroups.create(Layout(**sizes)) as groups:
            checkpointer = Checkpointer(f"{root}/{number}", groups=groups)
            for index in [index for layout, index in cases if layout == number]:
                strategy = strategies[index]
                case = f"{name} {sizes} {strategy}"
                held = sharded(client, groups, seed=1, strategy=strategy)
                plain = sgd(held.model.parameters())
                train(held, plain)
                found[case] = difference(held.model, expected)
                optimizer = make_optimizer(held.model)
                train(held, optimizer)
                kept = whole(held.model, optimizer)
                step = next(steps)
                checkpointer.save(step, state_of(held.model, optimizer))
                another = strategies[(index + 1) % len(strategies)]
                other = sharded(client, groups, seed=2, strategy=another)
                fresh = make_optimizer(other.model)
                checkpointer.load(state_of(other.model, fresh), step=step)
                same(whole(other.model, fresh), kept, (case, another))
                if context.rank == step % 4:
                    into_bare(client, f"{root}/{number}", step, kept)
                torch.distributed.barrier()
    return found


def into_bare(client: Client, root: str, step: int, kept: dict[str, Tensor]) -> None:
    """One process loads it into the bare model, which saves the same names."""
    bare = build(client, seed=3)
    optimizer = make_optimizer(bare)
    alone = ProcessGroups.single()
    Checkpointer(root, groups=alone).load(state_of(bare, optimizer), step=step)
    same(whole(bare, optimizer), kept, "bare")
    Checkpointer(f"{root}/bare", groups=alone).save(step, state_of(bare, optimizer))
    assert keys(f"{root}/bare", step) == keys(root, step)


def each_trained_and_kept(
    context: RankContext, root: str, strategies: tuple[str, ...], chosen: dict[str, Cases]
) -> dict[str, float]:
    """Client after client, in ranks that have imported their package once."""
    found: dict[str, float] = {}
    for name, cases in chosen.items():
        found |= trained_and_kept(context, f"{root}/{name}", name, strategies, cases)
    return found


def check_clients(
    tmp_path: Path, strategies: tuple[str, ...], chosen: Mapping[str, Cases | None]
) -> None:
    """Check some cases of clients; for None all, each layout under each strategy."""
    each = {
        name: cases
        or list(itertools.product(range(len(CLIENTS[name].layouts)), range(len(strategies))))
        for name, cases in chosen.items()
    }
    arguments = str(tmp_path), strategies, each
    for found in run_ranks(4, each_trained_and_kept, *arguments, timeout_s=280).results:
        assert len(found) == sum(map(len, each.values()))
        for case, off in found.items():
            assert off < 1e-6, (case, off)


@pytest.mark.slow
def test_a_llama_with_fused_projections(tmp_path: Path) -> None:
    """F14: hooks split and fuse on the way; data with tensor parallelism."""
    check_clients(tmp_path, ("optim_grads_params",), {"llama": [(1, 0)]})


@pytest.mark.slow
def test_a_llama_under_every_strategy(tmp_path: Path) -> None:
    """F14: also in hybrid parallelism; `no_shard` is in the test below."""
    check_clients(tmp_path, STRATEGIES[1:], {"llama": [*in_turn("llama", 2), (2, 2)]})


@pytest.mark.slow
def test_gpt2_and_mixtral_of_transformers(tmp_path: Path) -> None:
    """F2, F14: a head that is the embedding, and experts fused into one tensor for each layer."""
    if importlib.util.find_spec("transformers") is None:  # ranks alone import it
        pytest.skip("transformers is not installed")
    chosen = {"gpt2": in_turn("gpt2", 2), "mixtral": in_turn("mixtral", 2)}
    check_clients(tmp_path, STRATEGIES[::3], chosen)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_on_each_layout_under_every_strategy(tmp_path: Path, name: str) -> None:
    """F2, F14: all pairs."""
    pytest.importorskip("transformers")
    check_clients(tmp_path, STRATEGIES, {name: None})
