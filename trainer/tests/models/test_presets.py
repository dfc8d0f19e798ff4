"""Presets of name maps for the reference GPT: equal logits with Transformers, in both directions.

Prevents that weights of a Llama or a Mixtral run in the reference GPT and compute something else.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast import Checkpointer
from holdfast.cli.main import main
from holdfast_trainer.models.config import GPTConfig
from holdfast_trainer.models.gpt import GPT
from holdfast_trainer.models.stages import Stage
from tests.foreign.small_models import (
    BASE,
    EXPERTS,
    HEADS,
    INNER,
    LAYERS,
    VOCAB,
    WIDTH,
    assert_close,
    llama,
    logits_of,
    mapped,
    megatron_logits,
    mixtral,
    own_state,
    randomise,
    tokens,
)

# Looked up, not imported: collecting tests would take a second more in every worker.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def gpt(*, tied: bool = False, experts: bool = False, norm: str = "rms") -> Any:
    """A random reference GPT."""

    config = GPTConfig(
        vocab_size=VOCAB, num_layers=LAYERS, model_dim=WIDTH, num_heads=HEADS, mlp_dim=INNER,
        norm=norm, tied_head=tied, rope_base=BASE, feeds="e" if experts else "d",  # type: ignore[arg-type]
        num_experts=EXPERTS, top_k=2,
    )  # fmt: skip
    return randomise(GPT(config), seed=2)


def own_logits_of(model: Any) -> Tensor:
    """The logits of a reference GPT."""
    with torch.no_grad():
        logits: Tensor = model(tokens(), stage=Stage(layers=range(LAYERS)))[0]
        return logits


def load(model: Any, state: Any) -> Any:
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    if missing:
        model.tie_weights()
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_llama_and_the_reference_gpt_compute_the_same(tied: bool, tmp_path: Path) -> None:
    theirs, ours = llama(tied=tied), gpt(tied=tied)
    assert logits_of(theirs).std() > 0.1
    ours_then = load(gpt(tied=tied), mapped(tmp_path, own_state(theirs), "llama-hf-to-gpt"))
    assert_close(own_logits_of(ours_then), logits_of(theirs))
    state = mapped(tmp_path, ours.state_dict(), "gpt-to-llama-hf")
    assert_close(logits_of(load(theirs, state)), own_logits_of(ours))


def test_a_checkpoint_of_the_reference_gpt_is_exported_and_generates_the_same(
    tmp_path: Path,
) -> None:
    """One command; what Transformers then generates are the most likely tokens of the GPT."""
    from transformers import LlamaForCausalLM

    ours = gpt(tied=True)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(7, {"model": ours})
    llama(tied=True).config.save_pretrained(tmp_path / "config")
    words = ["--to", "huggingface", "--map", "gpt-to-llama-hf"]
    words += ["--config-from", str(tmp_path / "config")]
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "folder"), *words]) == 0
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float64)
    prompt = expected = tokens()[:, :4]
    with torch.no_grad():
        for _ in range(12):
            logits = ours(expected, stage=Stage(layers=range(LAYERS)))[0]
            expected = torch.cat([expected, logits[:, -1:].argmax(-1)], dim=1)
    generated = theirs.generate(
        prompt, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert generated.tolist() == expected.tolist()
    assert len(set(expected[:, 4:].flatten().tolist())) > 4


def test_mixtral_and_the_reference_gpt_compute_the_same(tmp_path: Path) -> None:
    theirs, ours = mixtral(), gpt(experts=True)
    chain = ("mixtral-hf5-to-mixtral-hf", "mixtral-hf-to-gpt")
    ours_then = load(gpt(experts=True), mapped(tmp_path, own_state(theirs), *chain))
    assert_close(own_logits_of(ours_then), logits_of(theirs))
    chain = ("gpt-to-mixtral-hf", "mixtral-hf-to-mixtral-hf5")
    state = mapped(tmp_path, ours.state_dict(), *chain)
    assert_close(logits_of(load(theirs, state)), own_logits_of(ours))


@pytest.mark.parametrize("tied", [False, True])
def test_the_reference_gpt_in_megatrons_form_computes_the_same(tied: bool, tmp_path: Path) -> None:
    model = gpt(tied=tied)
    state = mapped(tmp_path, model.state_dict(), "gpt-to-llama-megatron")
    assert_close(megatron_logits(state, HEADS), own_logits_of(model))


def test_the_reference_gpt_with_experts_in_megatrons_form_computes_the_same(
    tmp_path: Path,
) -> None:
    model = gpt(experts=True)
    chain = ("gpt-to-mixtral-megatron-dist", "megatron-dist-to-megatron-experts")
    state = mapped(tmp_path, model.state_dict(), *chain)
    assert_close(megatron_logits(state, HEADS), own_logits_of(model))
