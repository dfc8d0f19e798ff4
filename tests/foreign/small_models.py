"""Tiny models for the proofs of presets: of Transformers, and in plain torch.

The decoders in plain torch read parameters by the names and in the layout of Megatron-Core (its
`Attention.get_query_key_value_tensors` and `MLP`), or of the first Llama release (rotary positions
on neighbouring pairs).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from holdfast.foreign.catalog import Catalog
from holdfast.foreign.name_map_presets import load_preset
from tests.foreign.name_map_oracle import assert_equal, catalog_of, model_of

VOCAB, WIDTH, HEADS, INNER, LAYERS, EXPERTS = 40, 32, 4, 48, 3, 4
HEAD_DIM = WIDTH // HEADS
EPS, BASE = 1e-6, 10000.0
State = Mapping[str, Tensor]


def tokens() -> Tensor:
    """Two rows of nine tokens."""
    return torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(5))


def randomise(model: torch.nn.Module, seed: int = 1) -> Any:
    """Every parameter from a normal distribution, so that none is like another; float64."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3, generator=generator)
    return model


def llama(kv_heads: int = HEADS, *, tied: bool = False, bias: bool = False) -> Any:
    """A random Llama of Transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=kv_heads, rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": BASE}, tie_word_embeddings=tied,
        attention_bias=bias, mlp_bias=bias,
    )  # fmt: skip
    return randomise(LlamaForCausalLM(config))


def mixtral(kv_heads: int = HEADS) -> Any:
    """A random Mixtral of Transformers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=kv_heads, rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": BASE}, num_local_experts=EXPERTS,
        num_experts_per_tok=2, sliding_window=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("eager")  # the grouped kernel lacks float64
    return randomise(model)


def of_family(family: str, kv_heads: int = 2) -> Any:
    """A random model of a family of Transformers."""
    import transformers

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": BASE}
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads, "rms_norm_eps": EPS, "rope_parameters": rope,
        "tie_word_embeddings": False, "pad_token_id": 0,
    }  # fmt: skip
    moe = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
    wide = {"head_dim": 2 * HEAD_DIM}
    gemma = {
        "head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM, "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    every_layer = {"layer_types": ["full_attention"] * LAYERS}
    latent = {
        "num_key_value_heads": HEADS, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": INNER,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    }  # fmt: skip
    name, own = {
        "mistral": ("Mistral", {"sliding_window": None, **wide}),
        "qwen2": ("Qwen2", {}),
        "qwen3": ("Qwen3", wide),
        "qwen3-moe": ("Qwen3Moe", {**wide, **moe, "norm_topk_prob": True}),
        "stablelm": ("StableLm", {
            "layer_norm_eps": EPS, "use_qkv_bias": True, "hidden_dropout": 0.0,
            "rope_parameters": {**rope, "partial_rotary_factor": 0.25},
        }),
        "phi3": ("Phi3", {
            "sliding_window": None, "resid_pdrop": 0.0,
            "rope_parameters": {**rope, "partial_rotary_factor": 1.0},
        }),
        "gemma": ("Gemma", gemma),
        "gemma2": ("Gemma2", {**gemma, **every_layer, "attn_logit_softcapping": None,
            "final_logit_softcapping": None}),
        "gemma3": ("Gemma3", {**gemma, **every_layer,
            "rope_parameters": {"full_attention": rope, "sliding_attention": rope}}),
        "deepseek-v2": ("DeepseekV2", {**latent, "q_lora_rank": None, "topk_method": "greedy",
            "n_group": None, "topk_group": None}),
        "deepseek-v3": ("DeepseekV3", {**latent, "q_lora_rank": 20, "n_group": 2, "topk_group": 1,
            "norm_topk_prob": True}),
        "gpt-neox": ("GPTNeoX", {
            "layer_norm_eps": EPS, "use_parallel_residual": False, "hidden_act": "gelu",
            "rope_parameters": {**rope, "partial_rotary_factor": 0.25},
        }),
        "gpt2": ("GPT2", {"n_inner": INNER, "n_positions": 64, "layer_norm_epsilon": EPS,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    }[family]  # fmt: skip
    kind = {"Gemma3": "Gemma3Text"}.get(name, name)
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **own})
    head = {"GPT2": "LMHeadModel"}.get(name, "ForCausalLM")
    model = getattr(transformers, f"{name}{head}")(config)
    if family == "qwen3-moe" or family.startswith("deepseek"):
        model.set_experts_implementation("eager")  # the grouped kernel lacks float64
    return randomise(model)


def logits_of(model: Any) -> Tensor:
    """The logits of a model of Transformers."""
    with torch.no_grad():
        logits: Tensor = model(tokens()).logits
        return logits


def catalog_of_state(root: Path, state: State, *, dtype: torch.dtype = torch.float64) -> Catalog:
    """A catalog of a state dict; bf16 by its codes."""
    if dtype == torch.bfloat16:
        codes = {
            name: value.to(dtype).view(torch.int16).numpy().view(np.uint16)
            for name, value in state.items()
        }
        return catalog_of(root, codes, dtype="BF16")
    return catalog_of(root, {name: value.detach().numpy() for name, value in state.items()})


def state_of(catalog: Catalog) -> dict[str, Tensor]:
    """The tensors of a catalog as a state dict."""
    return {name: torch.from_numpy(array) for name, array in model_of(catalog).items()}


def megatron_logits(state: State, kv_heads: int, *, is_gemma: bool = False) -> Tensor:
    """What Megatron-Core computes of a state with its names: TE spec, and experts one by one.

    Gemma: norms are stored less one (`layernorm_zero_centered_gamma`), embeddings are scaled, the
    gate is a GELU, and there are norms after attention and MLP, and of queries and keys, where the
    state has them.
    """
    if is_gemma:
        ends = ("layernorm.weight", "layer_norm_weight")
        state = {name: v + 1 if name.endswith(ends) else v for name, v in state.items()}
    gate_of = partial(functional.gelu, approximate="tanh") if is_gemma else functional.silu
    x = state["embedding.word_embeddings.weight"][tokens()] * (WIDTH**0.5 if is_gemma else 1)
    for layer in range(LAYERS):
        own = _below(state, f"decoder.layers.{layer}.")
        normed = _norm(x, own["self_attention.linear_qkv.layer_norm_weight"])
        mixed = functional.linear(
            normed, own["self_attention.linear_qkv.weight"],
            own.get("self_attention.linear_qkv.bias"),
        )  # fmt: skip
        # [rows, positions, groups, queries of the group then its key then its value]
        per_group = HEADS // kv_heads
        grouped = mixed.view(*mixed.shape[:2], kv_heads, (per_group + 2) * HEAD_DIM)
        query, key, value = grouped.split([per_group * HEAD_DIM, HEAD_DIM, HEAD_DIM], dim=3)
        query = query.reshape(*mixed.shape[:2], HEADS, HEAD_DIM)
        query = _maybe_norm(query, own.get("self_attention.q_layernorm.weight"))
        key = _maybe_norm(key, own.get("self_attention.k_layernorm.weight"))
        attended = functional.linear(
            _attend(query, key, value, pairs_apart=True),
            own["self_attention.linear_proj.weight"], own.get("self_attention.linear_proj.bias"),
        )  # fmt: skip
        x = x + _maybe_norm(attended, own.get("self_attention.linear_proj.post_layernorm.weight"))
        if "mlp.router.weight" in own:
            x = x + _megatron_experts(_norm(x, own["pre_mlp_layernorm.weight"]), own)
        else:
            normed = _norm(x, own["mlp.linear_fc1.layer_norm_weight"])
            fed = _megatron_mlp(normed, _below(own, "mlp."), gate_of)
            x = x + _maybe_norm(fed, own.get("mlp.linear_fc2.post_layernorm.weight"))
    x = _norm(x, state["decoder.final_layernorm.weight"])
    head = state.get("output_layer.weight", state["embedding.word_embeddings.weight"])
    return functional.linear(x, head)


def meta_logits(state: State, kv_heads: int) -> Tensor:
    """What the first release of Llama computes: complex rotations of neighbouring pairs."""
    x = state["tok_embeddings.weight"][tokens()]
    for layer in range(LAYERS):
        own = _below(state, f"layers.{layer}.")
        normed = _norm(x, own["attention_norm.weight"])
        query, key, value = (
            functional.linear(normed, own[f"attention.w{which}.weight"]).view(
                *x.shape[:2], -1, HEAD_DIM
            )
            for which in "qkv"
        )
        attended = _attend(query, key, value, pairs_apart=False)
        x = x + functional.linear(attended, own["attention.wo.weight"])
        normed = _norm(x, own["ffn_norm.weight"])
        gate = functional.linear(normed, own["feed_forward.w1.weight"])
        up = functional.linear(normed, own["feed_forward.w3.weight"])
        x = x + functional.linear(functional.silu(gate) * up, own["feed_forward.w2.weight"])
    return functional.linear(_norm(x, state["norm.weight"]), state["output.weight"])


def _below(state: State, prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def _maybe_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else _norm(x, weight)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, pairs_apart: bool) -> Tensor:
    """Causal attention of (rows, positions, heads, head_dim), positions rotated.

    The pairs that are rotated are half a head apart, or neighbours.
    """
    frequency = BASE ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    angle = torch.outer(torch.arange(query.shape[1]).double(), frequency)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None, :]

    def rotated(x: Tensor) -> Tensor:
        if pairs_apart:
            first, second = x.chunk(2, dim=-1)
            turned = torch.complex(first.contiguous(), second.contiguous()) * turn
            return torch.cat([turned.real, turned.imag], dim=-1)
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        return torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2)

    times = query.shape[2] // key.shape[2]
    heads = [rotated(query), rotated(key).repeat_interleave(times, 2)]
    heads.append(value.repeat_interleave(times, 2))
    query, key, value = (each.transpose(1, 2) for each in heads)
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


def _megatron_mlp(x: Tensor, own: State, gate_of: Any = functional.silu) -> Tensor:
    both = functional.linear(x, own["linear_fc1.weight"], own.get("linear_fc1.bias"))
    gate, up = both.chunk(2, dim=-1)
    return functional.linear(
        gate_of(gate) * up, own["linear_fc2.weight"], own.get("linear_fc2.bias")
    )


def _megatron_experts(x: Tensor, own: State) -> Tensor:
    best = functional.linear(x, own["mlp.router.weight"]).topk(2, dim=-1)
    weights = torch.zeros(*x.shape[:2], EXPERTS, dtype=x.dtype)
    weights = weights.scatter(2, best.indices, best.values.softmax(-1))
    outputs = [
        _megatron_mlp(x, _below(own, f"mlp.experts.local_experts.{expert}."))
        for expert in range(EXPERTS)
    ]
    return (torch.stack(outputs, dim=-1) * weights[:, :, None, :]).sum(-1)


# ---- through presets ----


def mapped(root: Path, state: Any, *names: str, num_heads: int | None = HEADS) -> Any:
    """A state through presets; the way back gives the same bits."""
    catalog = catalog_of_state(root, state)
    before = model_of(catalog)
    maps = [load_preset(name) for name in names]
    for name_map in maps:
        catalog = apply(name_map, catalog, num_heads)
    result = state_of(catalog)
    for name_map in reversed(maps):
        catalog = apply(name_map.inverse(), catalog, num_heads)
    assert_equal(model_of(catalog), before)
    return result


def apply(name_map: Any, catalog: Any, num_heads: int | None) -> Any:
    given = {"num_heads": num_heads} if "num_heads" in name_map.variables else {}
    return name_map.apply(catalog, variables=given).catalog


def own_state(model: Any) -> dict[str, Any]:
    """The state of a model without the second name of a tied head, as it is saved."""
    state = dict(model.state_dict())
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        del state["lm_head.weight"]
    return state


def assert_close(one: Any, two: Any, *, atol: float = 2e-6) -> None:
    """Equal but for rounding: norms and angles of Transformers are float32 in any model."""
    torch.testing.assert_close(one, two, rtol=0, atol=atol)
