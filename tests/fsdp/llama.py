"""A small Llama as training codebases write it: fused projections, stored apart by hooks."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from holdfast import ProcessGroups

VOCABULARY, WIDTH, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS = 29, 16, 4, 2, 2
HEAD = WIDTH // NUM_HEADS
PARTS = {"wq": NUM_HEADS * HEAD, "wk": NUM_KV_HEADS * HEAD, "wv": NUM_KV_HEADS * HEAD}
"""Rows of the fused projection that belong to queries, keys and values."""


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of (batch, time, heads, size)."""
    half = x.shape[-1] // 2
    speed = 10000.0 ** (-torch.arange(half) / half)
    angle = (torch.arange(x.shape[1])[:, None] * speed)[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class Attention(nn.Module):
    """Grouped queries. In memory one weight `wqkv`; in state dicts `wq`, `wk` and `wv`."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(WIDTH, sum(PARTS.values()), bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_state_dict_post_hook(split_fused)
        self.register_load_state_dict_pre_hook(join_parts)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (
            part.reshape(batch, time, -1, HEAD)
            for part in self.wqkv(x).split(list(PARTS.values()), dim=-1)
        )
        q, k = rotate(q), rotate(k)
        k, v = (each.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=2) for each in (k, v))
        out = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return cast("Tensor", self.wo(out.transpose(1, 2).reshape(batch, time, -1)))


def split_fused(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """The fused weight as three; a sharded one is gathered over its rows for that."""
    fused = state.pop(f"{prefix}wqkv.weight")
    parts = rows_whole(fused).split(list(PARTS.values()))
    for name, part in zip(PARTS, parts, strict=True):
        state[f"{prefix}{name}.weight"] = placed_like(part, fused)


def join_parts(module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
    """The reverse, before a load."""
    names = [f"{prefix}{name}.weight" for name in PARTS]
    if all(name in state for name in names):
        parts = [state.pop(name) for name in names]
        like = cast("Attention", module).wqkv.weight
        state[f"{prefix}wqkv.weight"] = placed_like(torch.cat([rows_whole(p) for p in parts]), like)


def rows_whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def placed_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, on every rank the same, cut as another one is."""
    if not isinstance(like, DTensor):
        return value.contiguous()
    mesh = like.device_mesh
    whole = DTensor.from_local(value.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, like.placements)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.w1 = nn.Linear(WIDTH, 24, bias=False)
        self.w2 = nn.Linear(24, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x)
        return x + cast("Tensor", self.w2(nn.functional.silu(self.w1(h)) * self.w3(h)))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores, (batch, time, vocabulary)."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return cast("Tensor", self.output(self.norm(x)))


def split_over_tp(model: Llama, groups: ProcessGroups) -> None:
    """Feed-forward layers over tp; the fused projection by rows, and gathered after its use."""
    mesh = groups.mesh("dp_cp", "tp")["tp"]
    plan = {
        "w1": ColwiseParallel(),
        "w3": ColwiseParallel(),
        "w2": RowwiseParallel(),
        "attention.wqkv": ColwiseParallel(output_layouts=Replicate()),
        "attention.wo": RowwiseParallel(input_layouts=Replicate()),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan, src_data_rank=None)
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends, src_data_rank=None)
    assert isinstance(cast("Any", model.layers[0]).w1.weight, DTensor)
    assert cast("Any", model.layers[0]).w1.weight.placements == (Shard(0),)
