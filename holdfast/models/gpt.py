"""A decoder-only transformer, written as if one process held all of it.

Nothing in this file knows about ranks: `parallelize.py` splits the same modules over a tensor axis.
Parameters are initialised one by one from (seed, name), so they are bitwise equal under every
layout.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.models.config import GPTConfig


class Attention(nn.Module):
    """Causal self-attention over the heads that its projections give it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.model_dim, config.model_dim, bias=False)
        self.key = nn.Linear(config.model_dim, config.model_dim, bias=False)
        self.value = nn.Linear(config.model_dim, config.model_dim, bias=False)
        self.out = nn.Linear(config.model_dim, config.model_dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """(rows, positions, model_dim) -> the same shape."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        # The number of heads is read off the projection: a split model sees fewer of them here.
        heads = (*query.shape[:2], query.shape[2] // self.head_dim, self.head_dim)
        query = _rotate(query.view(heads).transpose(1, 2), rotation)
        key = _rotate(key.view(heads).transpose(1, 2), rotation)
        value = value.view(heads).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self._project(mixed.transpose(1, 2).flatten(2))

    def _project(self, mixed: Tensor) -> Tensor:
        projected: Tensor = self.out(mixed)
        return projected


class GatedMLP(nn.Module):
    """SwiGLU: a gate, an up and a down matrix."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.model_dim, config.inner_dim, bias=False)
        self.up = nn.Linear(config.model_dim, config.inner_dim, bias=False)
        self.down = nn.Linear(config.inner_dim, config.model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, positions, model_dim) -> the same shape."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class PlainMLP(nn.Module):
    """GELU between an up and a down matrix."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.model_dim, config.inner_dim, bias=False)
        self.down = nn.Linear(config.inner_dim, config.model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, positions, model_dim) -> the same shape."""
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = _make_norm(config)
        self.attn = Attention(config)
        self.mlp_norm = _make_norm(config)
        self.mlp = GatedMLP(config) if config.mlp == "swiglu" else PlainMLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """(rows, positions, model_dim) -> the same shape."""
        x = x + self.dropout(self.attn(self.attn_norm(x), rotation))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class TiedHead(nn.Module):
    """An output head without a matrix of its own: it is handed the embedding's."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """(rows, positions, model_dim) and (vocab, model_dim) -> (rows, positions, vocab)."""
        return functional.linear(x, weight)


class GPT(nn.Module):
    """The model: embedding, blocks, a last norm, and a head tied to the embedding or not."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.model_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = _make_norm(config)
        self.head: nn.Module = (
            TiedHead()
            if config.tied_head
            else nn.Linear(config.model_dim, config.vocab_size, bias=False)
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Loss per token.

        Args:
            tokens: (rows, positions) int64 token ids.
            targets: the same shape; the id that follows each token.

        Returns:
            (rows, positions) cross entropy in nats, float32 or wider. Under vocabulary parallelism
            a DTensor replicated over the tensor axis.
        """
        logits = self.logits(tokens)
        if logits.dtype in (torch.bfloat16, torch.float16):
            # Autocast leaves such logits; the exponentials of a vocabulary add up badly in them.
            logits = logits.float()
        return functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")

    def logits(self, tokens: Tensor) -> Tensor:
        """(rows, positions) int64 -> (rows, positions, vocab_size)."""
        x: Tensor = self.dropout(self.embed(tokens))
        rotation = _rotation(self.config, num_positions=tokens.shape[1], like=x)
        for block in self.blocks:
            x = block(x, rotation)
        x = self.norm(x)
        out: Tensor = self.head(x, self.embed.weight) if self.config.tied_head else self.head(x)
        return out


def initial_parameter(name: str, *, shape: tuple[int, ...], config: GPTConfig, seed: int) -> Tensor:
    """The whole initial value of one parameter, a function of these arguments only.

    Matrices are normal with deviation 0.02; the two that write into the residual stream are
    divided by sqrt(2 x num_layers), so that the stream's variance does not grow with depth
    (GPT-2's rule). Norm scales are 1 and shifts 0.

    Returns:
        A float32 CPU tensor; one allocation of the full shape.
    """
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    deviation = 0.02
    if name.endswith(("attn.out.weight", "mlp.down.weight")):
        deviation /= math.sqrt(2 * config.num_layers)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape).normal_(std=deviation, generator=generator)


def _make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.model_dim, eps=1e-6)
    return nn.LayerNorm(config.model_dim, eps=1e-6)


def _rotation(config: GPTConfig, *, num_positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, (positions, head_dim / 2) each (Su et al. 2021)."""
    half = torch.arange(0, config.head_dim, 2, device=like.device, dtype=torch.float32)
    frequency = config.rope_base ** (-half / config.head_dim)
    position = torch.arange(num_positions, device=like.device, dtype=torch.float32)
    angle = torch.outer(position, frequency)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of (rows, heads, positions, head_dim) by its angle."""
    cosine, sine = (part.to(x.dtype) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
