"""The model in one process, and which layouts it refuses."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import ConfigError
from holdfast.parallel import Layout, ProcessGroups
from holdfast_trainer.models.config import GPTConfig, check_layout
from holdfast_trainer.models.gpt import GPT, initial_parameter
from holdfast_trainer.models.parallelize import ParallelGPT
from holdfast_trainer.models.stages import Stage

CONFIG = GPTConfig(num_layers=2, model_dim=32, num_heads=4)


def build(seed: int = 1, config: GPTConfig = CONFIG) -> ParallelGPT:
    return ParallelGPT(config, groups=ProcessGroups.single(), seed=seed)


def logits(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    whole = Stage(layers=range(model.config.num_layers))
    return model(tokens, stage=whole)[0]


def test_parameters_depend_on_seed_and_name_only() -> None:
    shape = (4, 6)
    draw = initial_parameter("a.weight", shape=shape, config=CONFIG, seed=1)
    torch.manual_seed(99)
    assert torch.equal(draw, initial_parameter("a.weight", shape=shape, config=CONFIG, seed=1))
    assert not torch.equal(draw, initial_parameter("b.weight", shape=shape, config=CONFIG, seed=1))
    assert not torch.equal(draw, initial_parameter("a.weight", shape=shape, config=CONFIG, seed=2))


def test_outputs_into_the_residual_stream_shrink_with_depth() -> None:
    deep = GPTConfig(num_layers=8)
    for name in ("blocks.0.attn.out.weight", "blocks.3.mlp.down.weight"):
        drawn = initial_parameter(name, shape=(256, 256), config=deep, seed=1)
        assert drawn.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    other = initial_parameter("blocks.0.mlp.up.weight", shape=(256, 256), config=deep, seed=1)
    assert other.std().item() == pytest.approx(0.02, rel=0.05)


def test_a_tied_head_has_no_parameter_of_its_own() -> None:
    names = [name for name, _ in build().module.named_parameters()]
    assert "embed.weight" in names
    assert not [name for name in names if name.startswith("head")]
    untied = build(config=GPTConfig(num_layers=1, model_dim=32, num_heads=4, tied_head=False))
    assert "head.weight" in dict(untied.module.named_parameters())


def test_a_token_sees_itself_and_what_came_before_only() -> None:
    module = build().module
    tokens = torch.randint(256, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    with torch.no_grad():
        before, after = logits(module, tokens), logits(module, changed)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.allclose(before[0, 7:], after[0, 7:])


def test_order_of_tokens_matters() -> None:
    # One layer: a second one could tell the order from what the first has mixed causally.
    module = build(config=GPTConfig(num_layers=1, model_dim=32, num_heads=4)).module
    with torch.no_grad():
        one, other = (
            logits(module, torch.tensor([[1, 2, 3]])),
            logits(module, torch.tensor([[2, 1, 3]])),
        )
    assert not torch.allclose(one[0, -1], other[0, -1])


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_an_untrained_model_is_undecided_and_learns(mlp: str, norm: str) -> None:
    sizes = {"num_layers": 2, "model_dim": 32, "num_heads": 4}
    config = GPTConfig(**sizes, mlp=mlp, norm=norm, tied_head=False)
    model = build(config=config)
    rows = torch.arange(33).remainder(7).repeat(2, 1)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        found = model.forward_backward(rows[:, :-1], rows[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.loss.mean().item())
    assert losses[0] == pytest.approx(5.545, abs=0.15)  # log(256)
    assert losses[-1] < 0.3


@pytest.mark.parametrize(
    ("layout", "flag"),
    [
        (Layout(tp=3, dp=1), "--num-heads"),
        (Layout(ep=2, dp=2), "--feeds e"),
        (Layout(tp=2, dp=2, expt_tp=1), "--expt-tp"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_by_name(layout: Layout, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        check_layout(CONFIG, layout=layout)


@pytest.mark.parametrize(
    ("sizes", "layout", "flag"),
    [
        ({"feeds": "e", "num_experts": 6}, Layout(ep=4, dp=4), "--num-experts"),
        ({"feeds": "e", "expert_dim": 6}, Layout(tp=4, dp=1), "--expert-dim"),
        ({"mixers": "s", "state_groups": 2}, Layout(tp=2, cp=2), "--state-groups"),
    ],
)
def test_what_the_axes_cannot_share_is_refused_by_flag(
    sizes: dict[str, object], layout: Layout, flag: str
) -> None:
    with pytest.raises(ConfigError, match=flag):
        check_layout(GPTConfig(num_layers=2, model_dim=32, num_heads=4, **sizes), layout=layout)


def test_an_mlp_that_the_tensor_axis_does_not_divide_is_refused() -> None:
    config = GPTConfig(model_dim=32, num_heads=4, mlp_dim=50)
    check_layout(config, layout=Layout(tp=2))
    with pytest.raises(ConfigError, match="--mlp-dim"):
        check_layout(config, layout=Layout(tp=4))


@pytest.mark.parametrize(
    ("sizes", "flag"),
    [
        ({"model_dim": 100, "num_heads": 3}, "--model-dim"),
        ({"num_layers": 0}, "--num-layers"),
        ({"dropout": 1.0}, "--dropout"),
        ({"mlp_dim": -1}, "--mlp-dim"),
        ({"mixers": "ax"}, "--mixers"),
        ({"feeds": ""}, "--feeds"),
        ({"feeds": "e", "num_experts": 2, "top_k": 3}, "--top-k"),
        ({"mixers": "s", "state_heads": 3}, "--state-heads"),
        ({"mixers": "s", "state_groups": 3}, "--state-groups"),
    ],
)
def test_impossible_sizes_are_refused_by_flag(sizes: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        GPTConfig(**sizes)


def test_names_are_those_of_the_plain_model() -> None:
    with torch.device("meta"):
        plain = GPT(CONFIG)
    assert list(plain.state_dict()) == list(build().module.state_dict())
