"""Presets of name maps: round trips bit by bit, and equal logits in both directions.

Prevents that a converted model runs and computes something else. Models are tiny and random, every
parameter too, so that a tensor in the wrong place changes the logits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from holdfast.errors import ConfigError  # noqa: E402
from holdfast.foreign.name_map_presets import load_preset, preset_names  # noqa: E402
from tests.foreign.name_map_oracle import assert_equal, model_of, read  # noqa: E402
from tests.foreign.small_models import (  # noqa: E402
    EPS,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    INNER,
    LAYERS,
    VOCAB,
    WIDTH,
    apply,
    assert_close,
    catalog_of_state,
    llama,
    logits_of,
    mapped,
    megatron_logits,
    meta_logits,
    mixtral,
    of_family,
    own_state,
    state_of,
    tokens,
)

# Looked up, not imported: collecting tests would take a second more in every worker.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

# ---- Transformers' files ----


@pytest.mark.slow
def test_the_names_of_mixtral_are_those_that_transformers_writes(tmp_path: Path) -> None:
    model = mixtral()
    result = mapped(tmp_path, own_state(model), "mixtral-hf5-to-mixtral-hf")
    assert_equal(
        {name: value.numpy() for name, value in result.items()},
        {name: value.numpy() for name, value in files_of(model, tmp_path / "saved").items()},
    )


@pytest.mark.parametrize("kv_heads", [2, HEADS])
def test_phi3_is_a_llama_with_fused_matrices(kv_heads: int, tmp_path: Path) -> None:
    model = of_family("phi3", kv_heads)
    state = mapped(tmp_path, own_state(model), "phi3-hf-to-llama-hf")
    twin = llama(kv_heads)
    twin.load_state_dict(state)
    assert_close(logits_of(twin), logits_of(model))


def test_the_first_files_of_gpt2_are_those_of_its_module(tmp_path: Path) -> None:
    model = of_family("gpt2")
    state = dict(model.transformer.state_dict())
    state["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    catalog = catalog_of_state(tmp_path, state)
    result = model_of(apply(load_preset("gpt2-hub-to-gpt2-hf"), catalog, HEADS))
    del state["h.0.attn.bias"]
    assert_equal(result, {f"transformer.{name}": value.numpy() for name, value in state.items()})


# ---- Megatron ----


@pytest.mark.parametrize("kv_heads", [1, 2, HEADS])
@pytest.mark.parametrize("form", ["plain", "tied", "biases"])
def test_llama_in_megatrons_form_computes_the_same(
    form: str, kv_heads: int, tmp_path: Path
) -> None:
    model = llama(kv_heads, tied=form == "tied", bias=form == "biases")
    state = mapped(tmp_path, own_state(model), "llama-hf-to-llama-megatron")
    assert_close(megatron_logits(state, kv_heads), logits_of(model))
    assert ("output_layer.weight" in state) == (form != "tied")


@pytest.mark.parametrize("kv_heads", [2, HEADS])
def test_mixtral_in_megatrons_form_computes_the_same(kv_heads: int, tmp_path: Path) -> None:
    model = mixtral(kv_heads)
    chain = ("mixtral-hf5-to-mixtral-hf", "mixtral-hf-to-mixtral-megatron")
    state = mapped(tmp_path, own_state(model), *chain)
    assert_close(megatron_logits(state, kv_heads), logits_of(model))


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
def test_gemma_in_megatrons_form_computes_the_same(family: str, tmp_path: Path) -> None:
    """With norms that are stored less one on both sides, so that no weight is rounded."""
    model = of_family(family)
    name = "llama" if family == "gemma" else "gemma2"
    state = mapped(tmp_path, own_state(model), f"{name}-hf-to-{name}-megatron")
    assert_close(megatron_logits(state, 2, is_gemma=True), logits_of(model), atol=2e-5)


def test_other_forms_of_megatron_have_its_names_and_shapes(tmp_path: Path) -> None:
    dense = own_state(llama(2))
    local = mapped(tmp_path, dense, "llama-hf-to-llama-megatron", "megatron-te-to-megatron-local")
    assert local["decoder.layers.0.input_layernorm.weight"].shape == (WIDTH,)
    assert local["decoder.layers.2.pre_mlp_layernorm.weight"].shape == (WIDTH,)
    dist = mapped(tmp_path, dense, "llama-hf-to-llama-megatron", "megatron-layers-to-megatron-dist")
    assert dist["decoder.layers.self_attention.linear_qkv.weight"].shape == (3, 64, WIDTH)
    assert sorted(name for name in dist if "layers" not in name) == [
        "decoder.final_layernorm.weight", "embedding.word_embeddings.weight", "output_layer.weight",
    ]  # fmt: skip
    sparse = own_state(mixtral(2))
    chain = ("mixtral-hf5-to-mixtral-hf", "mixtral-hf-to-mixtral-megatron")
    grouped = mapped(tmp_path, sparse, *chain, "megatron-experts-to-megatron-grouped")
    for expert in range(EXPERTS):
        name = f"decoder.layers.1.mlp.experts.linear_fc1.weight{expert}"
        assert grouped[name].shape == (2 * INNER, WIDTH)
    both = ("megatron-experts-to-megatron-dist", "megatron-layers-to-megatron-dist")
    dist = mapped(tmp_path, sparse, *chain, *both)
    name = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    assert dist[name].shape == (LAYERS, EXPERTS, WIDTH, INNER)


def test_a_padded_vocabulary_computes_the_same(tmp_path: Path) -> None:
    """Rows of zeros up to a multiple; without them, whatever they hold by then, the same model."""
    model = llama(2)
    state = mapped(tmp_path, own_state(model), "llama-hf-to-llama-megatron")
    variables = {"vocab_size": VOCAB, "vocab_multiple": 48}
    forth = load_preset("megatron-vocab-to-megatron-padded-vocab")
    there = forth.apply(catalog_of_state(tmp_path, state), variables=variables).catalog
    padded = state_of(there)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert padded[name].shape == (-(-VOCAB // 48) * 48, WIDTH)
        assert not padded[name][VOCAB:].any()
        padded[name][VOCAB:] = 9.0
    assert VOCAB % 48
    assert_close(megatron_logits(padded, 2)[..., :VOCAB], logits_of(model))
    trained = catalog_of_state(tmp_path, padded)
    back = forth.inverse().apply(trained, variables=variables).catalog
    assert_equal(model_of(back), {name: value.numpy() for name, value in state.items()})


def test_extra_state_of_megatron_is_dropped_on_the_way_back(tmp_path: Path) -> None:
    state = own_state(llama())
    forth = load_preset("llama-hf-to-llama-megatron")
    catalog = apply(forth, catalog_of_state(tmp_path, state), HEADS)
    part = catalog.parts["model"]
    part["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
    back = load_preset("llama-megatron-to-llama-hf").apply(catalog, variables={"num_heads": HEADS})
    assert sorted(model_of(back.catalog)) == sorted(state)
    assert len(back.report.of_kind("drop")) == 1


# ---- the first release of Llama ----


@pytest.mark.parametrize("kv_heads", [2, HEADS])
def test_llama_with_neighbouring_pairs_computes_the_same(kv_heads: int, tmp_path: Path) -> None:
    model = llama(kv_heads)
    state = mapped(tmp_path, own_state(model), "llama-hf-to-llama-meta")
    assert_close(meta_logits(state, kv_heads), logits_of(model))
    chain = ("llama-meta-to-llama-hf", "llama-hf-to-llama-megatron")
    assert_close(megatron_logits(mapped(tmp_path, state, *chain), kv_heads), logits_of(model))


# ---- all of them ----


def test_bfloat16_goes_the_same_ways(tmp_path: Path) -> None:
    state = own_state(llama(2))
    catalog = catalog_of_state(tmp_path, state, dtype=torch.bfloat16)
    forth = load_preset("llama-hf-to-llama-megatron")
    there = apply(forth, catalog, HEADS)
    assert {tensor.dtype for tensor in there.tensors.values()} == {"BF16"}
    back = apply(forth.inverse(), there, HEADS)
    for key in catalog.tensors:
        assert (read(back, key) == read(catalog, key)).all()


def test_optimizer_state_follows_through_a_preset(tmp_path: Path) -> None:
    """The moments of the fused matrix are those of its parts, in the same places."""
    from tests.foreign.name_map_oracle import catalog_of

    state = {name: value.numpy() for name, value in own_state(llama(2)).items()}
    optimizer = {
        "state": {name: {"exp_avg": value * 2, "step": 5} for name, value in state.items()},
        "groups": [{"lr": 0.1}],
        "membership": dict.fromkeys(state, 0),
        "parameters": {name: {"shape": list(value.shape)} for name, value in state.items()},
    }
    catalog = catalog_of(tmp_path, state, optimizer=optimizer)
    there = apply(load_preset("llama-hf-to-llama-megatron"), catalog, HEADS)
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    moments = read(there, f"optimizer.state.{name}.exp_avg")
    assert (moments == 2 * read(there, f"model.{name}")).all()
    assert there.parts["optimizer"]["state"][name]["step"] == 5


def test_every_preset_has_both_directions() -> None:
    names = preset_names()
    assert len(names) == len(set(names)) >= 44
    for name in names:
        assert load_preset(name).inverse().inverse().describe() == load_preset(name).describe()
    with pytest.raises(ConfigError, match="llama-hf-to-gpt"):
        load_preset("llama-hf-to-nothing")


def test_a_missing_number_of_heads_is_asked_for(tmp_path: Path) -> None:
    catalog = catalog_of_state(tmp_path, own_state(llama()))
    with pytest.raises(ConfigError, match="'num_heads' has no value: pass variables="):
        load_preset("llama-hf-to-llama-megatron").apply(catalog)


# ---- Megatron-Core itself, where it is installed ----


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron-Core in a process group of this process alone, on the CPU."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    # Of dropout, which is 0.
    streams = SimpleNamespace(fork=nullcontext)
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: streams)
    # Of Transformer Engine, whose absence this version does not expect here.
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def megatron_model(kv_heads: int, experts: int | None, family: str) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe: dict[str, Any] = {} if experts is None else {
        "num_moe_experts": experts, "moe_router_topk": 2, "moe_router_pre_softmax": False,
        "moe_ffn_hidden_size": INNER, "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "allgather",
    }  # fmt: skip
    norm = "LayerNorm" if family in ("stablelm", "gpt-neox", "gpt2") else "RMSNorm"
    is_gated = family not in ("gpt-neox", "gpt2")
    gelu = torch.nn.functional.gelu if family == "gpt-neox" else partial(
        torch.nn.functional.gelu, approximate="tanh"
    )  # fmt: skip
    has_head_norms = family.startswith("qwen3")
    if family.startswith("deepseek"):
        return megatron_deepseek(is_v3=family == "deepseek-v3")
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS,
        num_query_groups=kv_heads, ffn_hidden_size=INNER, use_cpu_initialization=True,
        gated_linear_unit=is_gated, add_bias_linear=not is_gated,
        activation_func=torch.nn.functional.silu if is_gated else gelu,
        add_qkv_bias=family in ("qwen2", "stablelm"), qk_layernorm=has_head_norms,
        kv_channels=2 * HEAD_DIM if has_head_norms or family == "mistral" else HEAD_DIM,
        normalization=norm, layernorm_epsilon=EPS, hidden_dropout=0, attention_dropout=0,
        bias_activation_fusion=False, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, **moe,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        normalization=norm, num_experts=experts, qk_layernorm=has_head_norms
    )
    model = GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=64,
        position_embedding_type="learned_absolute" if family == "gpt2" else "rope",
        rotary_percent=0.25 if family in ("stablelm", "gpt-neox") else 1.0,
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    return model.float().eval()


class PlainAttention(torch.nn.Module):
    """Causal attention: Megatron's own of the local spec takes no values of another width."""

    def __init__(self, *args: Any, softmax_scale: float, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        heads = [each.permute(1, 2, 0, 3) for each in (query, key, value)]
        mixed = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, scale=self.scale
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)


def megatron_deepseek(*, is_v3: bool) -> Any:
    """The first layer is dense, the others have experts."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    routing: dict[str, Any] = {
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2, "moe_router_group_topk": 1,
    } if is_v3 else {"moe_router_pre_softmax": True}  # fmt: skip
    config = MLATransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, ffn_hidden_size=INNER,
        use_cpu_initialization=True, gated_linear_unit=True, add_bias_linear=False,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm", layernorm_epsilon=EPS,
        hidden_dropout=0, attention_dropout=0, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
        qk_layernorm=True, multi_latent_attention=True, q_lora_rank=20 if is_v3 else None,
        kv_lora_rank=12, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6, rope_type="rope",
        apply_rope_fusion=False, num_moe_experts=EXPERTS, moe_router_topk=2,
        moe_ffn_hidden_size=INNER, moe_layer_freq=[0, *[1] * (LAYERS - 1)],
        moe_shared_expert_intermediate_size=2 * INNER, moe_router_topk_scaling_factor=1.5,
        moe_aux_loss_coeff=0.0, moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none", **routing,
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PlainAttention
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return model.float().eval()


def files_of(model: Any, folder: Path) -> dict[str, Any]:
    """The state of a model as Transformers writes it."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: value for file in files for name, value in file.items()}


@pytest.mark.slow
@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("family", "kv_heads"),
    [
        ("llama", 2), ("llama", HEADS), ("mixtral", 2), ("mistral", 2), ("qwen2", 2),
        ("qwen3", 2), ("qwen3-moe", 2), ("stablelm", HEADS), ("deepseek-v2", HEADS),
        ("deepseek-v3", HEADS), ("gpt-neox", HEADS), ("gpt2", HEADS),
    ],
)  # fmt: skip
def test_megatron_core_itself_computes_the_same(family: str, kv_heads: int, tmp_path: Path) -> None:
    """Strictly loaded: its names and shapes are those of the preset.

    StableLM and GPT-NeoX turn a quarter of each head. DeepSeek has a dense layer and two with
    experts, and V2 no latent of the queries.
    """
    has_experts = family in ("mixtral", "qwen3-moe")
    made: dict[str, Any] = {"llama": llama, "mixtral": mixtral}
    theirs = made[family](kv_heads) if family in made else of_family(family, kv_heads)
    is_latent = family.startswith("deepseek")
    other = "deepseek" if is_latent else family if family.startswith("gpt") else "llama"
    kind = family if has_experts else other
    sort = "megatron-moe" if has_experts else "megatron-mla" if is_latent else "megatron"
    chain = (f"{kind}-hf-to-{kind}-megatron", f"{sort}-te-to-{sort}-local")
    state = mapped(tmp_path, files_of(theirs, tmp_path / "saved"), *chain)
    model = megatron_model(kv_heads, EXPERTS if has_experts else None, family)
    own = {name for name, value in model.state_dict().items() if value is not None}
    assert {name for name in own if not name.endswith("_extra_state")} == set(state)
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=False)
    rows, length = tokens().shape
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        logits = model(tokens(), torch.arange(length).expand(rows, -1), mask)
    torch.testing.assert_close(logits, logits_of(theirs).float(), rtol=0, atol=2e-4)
