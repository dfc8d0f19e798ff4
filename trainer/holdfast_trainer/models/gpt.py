"""A decoder-only model: attention or state space, then a dense MLP or experts, layer by layer.

Modules are made in their whole shapes and compute with the parameters they are called with:
`parallelize.py` replaces whole parameters by a rank's shards. Parameters are initialised one by one
from (seed, name), so they are bitwise equal under every layout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from holdfast.parallel import ProcessGroups
from holdfast_trainer.models.collectives import Axis
from holdfast_trainer.models.config import IMAGE_TOKEN, GPTConfig
from holdfast_trainer.models.context import causal_attention, positions
from holdfast_trainer.models.moe import MoE
from holdfast_trainer.models.ssm import StateSpace, initial_state_space
from holdfast_trainer.models.stages import Stage, Variant

_INTO_THE_STREAM = ("attn.out.weight", "mlp.down.weight", "ssm.out", "ssm.out.weight", "moe.down")


class Attention(nn.Module):
    """Self-attention over the heads of its projections: causal, or to all that a mask shows.

    Where it is causal positions may be cut over a context axis; see `context.py`.
    """

    def __init__(self, config: GPTConfig, *, context: Axis, variant: Variant) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.context = context
        self.variant: Variant = variant
        self.query = nn.Linear(config.model_dim, config.model_dim, bias=False)
        self.key = nn.Linear(config.model_dim, config.model_dim, bias=False)
        self.value = nn.Linear(config.model_dim, config.model_dim, bias=False)
        self.out = nn.Linear(config.model_dim, config.model_dim, bias=False)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Tensor | None = None
    ) -> Tensor:
        """(rows, positions, model_dim) -> the same shape.

        Args:
            x: what attends to itself.
            rotation: of queries and keys by their positions; None where `x` shows positions.
            mask: (rows, positions) which positions there are: each attends to all of these. None:
                to itself and those before.
        """
        query, key, value = self.query(x), self.key(x), self.value(x)
        # The number of heads is read off the projection: a split model sees fewer of them here.
        heads = (*query.shape[:2], query.shape[2] // self.head_dim, self.head_dim)
        query, key, value = (part.view(heads).transpose(1, 2) for part in (query, key, value))
        if rotation is not None:
            query, key = _rotate(query, rotation), _rotate(key, rotation)
        mixed = (
            causal_attention(query, key, value, axis=self.context, variant=self.variant)
            if mask is None
            else functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask[:, None, None, :]
            )
        )
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    """SwiGLU (gate, up and down matrices), or GELU between an up and a down matrix."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.is_gated = config.mlp == "swiglu"
        if self.is_gated:
            self.gate = nn.Linear(config.model_dim, config.inner_dim, bias=False)
        self.up = nn.Linear(config.model_dim, config.inner_dim, bias=False)
        self.down = nn.Linear(config.inner_dim, config.model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, positions, model_dim) -> the same shape."""
        inner = (
            functional.silu(self.gate(x)) * self.up(x)
            if self.is_gated
            else functional.gelu(self.up(x))
        )
        out: Tensor = self.down(inner)
        return out


class Block(nn.Module):
    """A mixer and a feed, each normalised before and added to the residual stream after."""

    def __init__(
        self, config: GPTConfig, *, layer: int, groups: ProcessGroups, variant: Variant
    ) -> None:
        super().__init__()
        self.mixes_by_state = config.mixer(layer) == "s"
        self.has_experts = config.feed(layer) == "e"
        if self.mixes_by_state:
            self.ssm_norm = make_norm(config)
            self.ssm = StateSpace(config, groups=groups)
        else:
            self.attn_norm = make_norm(config)
            self.attn = Attention(config, context=Axis.of(groups, "cp"), variant=variant)
        if self.has_experts:
            self.moe_norm = make_norm(config)
            self.moe = MoE(config, groups=groups)
        else:
            self.mlp_norm = make_norm(config)
            self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        balance: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(rows, positions, model_dim) and (rows,) -> the same shapes.

        `balance` grows by the balance loss of each row where the layer has experts. `rotation` and
        `mask` are as for `Attention`; a state space takes neither: what it makes of a position
        depends on those before alone.
        """
        if self.mixes_by_state:
            mixed = self.ssm(self.ssm_norm(x))
        else:
            mixed = self.attn(self.attn_norm(x), rotation, mask=mask)
        x = x + self.dropout(mixed)
        if self.has_experts:
            fed, own = self.moe(self.moe_norm(x))
            return x + self.dropout(fed), balance + own
        return x + self.dropout(self.mlp(self.mlp_norm(x))), balance


class TiedHead(nn.Module):
    """An output head without its own matrix: `forward` takes the embedding's."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """(rows, positions, model_dim) and (vocab, model_dim) -> (rows, positions, vocab)."""
        return functional.linear(x, weight)


class GPT(nn.Module):
    """The model, or the layers of it that a rank has.

    Layers are kept by their number in the whole model, so a parameter has one name whatever the
    pipeline. The first stage has the embedding, and so has the last one where the head is tied to
    it.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        groups: ProcessGroups | None = None,
        stages: Sequence[Stage] | None = None,
        variant: Variant = "gather",
    ) -> None:
        """Make the modules, with torch's usual initial values.

        Args:
            config: sizes.
            groups: of the ranks that share the model; absent: it is one process's.
            stages: what this rank has; absent: all of it.
            variant: how attention works over a context axis.
        """
        super().__init__()
        groups = ProcessGroups.single() if groups is None else groups
        stages = (Stage(layers=range(config.num_layers)),) if stages is None else stages
        self.config = config
        self.context = Axis.of(groups, "cp")
        is_first = any(stage.is_first for stage in stages)
        is_last = any(stage.is_last for stage in stages)
        if is_first or (is_last and config.tied_head):
            self.embed = nn.Embedding(config.vocab_size, config.model_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleDict(
            {
                str(layer): Block(config, layer=layer, groups=groups, variant=variant)
                for layer in sorted(layer for stage in stages for layer in stage.layers)
            }
        )
        if is_last:
            self.norm = make_norm(config)
            self.head: nn.Module = (
                TiedHead()
                if config.tied_head
                else nn.Linear(config.model_dim, config.vocab_size, bias=False)
            )

    def forward(
        self,
        x: Tensor,
        balance: Tensor | None = None,
        *,
        stage: Stage,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        images: Tensor | None = None,
        in_hits: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """One stage of the model.

        Args:
            x: (rows, positions) tokens for the first stage, else (rows, positions, model_dim).
            balance: (rows,) balance losses of the stages before; absent for the first.
            stage: which.
            targets: (rows, positions) ids, for the last stage.
            weights: (rows, positions) what the losses per token are multiplied by; absent: 1.
            images: (rows, positions, model_dim), for the first stage: what takes the places of
                `IMAGE_TOKEN`; other positions are not looked at.
            in_hits: whether the last stage returns 1 for each token whose target is the most
                likely one, and else 0, in place of its loss.

        Returns:
            What the next stage takes; of the last stage, the losses per token (cross entropy in
            nats, float32 or wider) and per row, or without targets the logits.
        """
        if balance is None:
            x, balance = self._embed(x, images)
        rotation = _rotation(self.config, context=self.context, like=x)
        for layer in stage.layers:
            x, balance = self.blocks[str(layer)](x, balance, rotation)
        if not stage.is_last:
            return x, balance
        x = self.norm(x)
        logits: Tensor = self.head(x, self.embed.weight) if self.config.tied_head else self.head(x)
        if targets is None:
            return logits, balance
        if logits.dtype in (torch.bfloat16, torch.float16):
            # The sum of a vocabulary's exponentials loses too much in the dtype autocast leaves
            # here.
            logits = logits.float()
        if in_hits:
            if isinstance(logits, DTensor):
                logits = logits.full_tensor()
            return (logits.argmax(dim=-1) == targets).to(logits.dtype), balance
        losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        if weights is None:
            return losses, balance
        return (losses.to_local() if isinstance(losses, DTensor) else losses) * weights, balance

    def _embed(self, tokens: Tensor, images: Tensor | None) -> tuple[Tensor, Tensor]:
        x: Tensor = self.embed(tokens)
        if images is not None:
            x = torch.where((tokens == IMAGE_TOKEN)[..., None], images.to(x.dtype), x)
        x = self.dropout(x)
        dtype = torch.promote_types(torch.float32, x.dtype)
        # A leaf that requires a gradient, which torch's pipeline stages insist on.
        return x, torch.zeros(len(x), dtype=dtype, device=x.device, requires_grad=True)


def initial_parameter(name: str, *, shape: tuple[int, ...], config: GPTConfig, seed: int) -> Tensor:
    """The whole initial value of one parameter, a function of these arguments only.

    Matrices are normal with deviation `init_std`; the two of a block that write into the residual
    stream are divided by sqrt(2 x num_layers), so that the stream's variance does not grow with
    depth (GPT-2's rule). Norm scales are 1 and shifts 0. A state space has rules of its own; see
    there.

    Returns:
        A float32 CPU tensor; one allocation of the full shape.
    """
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    if ".ssm." in name:
        special = initial_state_space(name, shape=shape, generator=generator)
        if special is not None:
            return special
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    deviation = config.init_std
    if name.endswith(_INTO_THE_STREAM):
        deviation /= math.sqrt(2 * config.num_layers)
    return torch.empty(shape).normal_(std=deviation, generator=generator)


def make_norm(config: GPTConfig) -> nn.Module:
    """The norm that a model has before each mixer and feed, and at its end."""
    if config.norm == "rms":
        return nn.RMSNorm(config.model_dim, eps=1e-6)
    return nn.LayerNorm(config.model_dim, eps=1e-6)


def _rotation(config: GPTConfig, *, context: Axis, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, (positions, head_dim / 2) each (Su et al. 2021)."""
    half = torch.arange(0, config.head_dim, 2, device=like.device, dtype=torch.float32)
    frequency = config.rope_base ** (-half / config.head_dim)
    position = positions(like.shape[1] * context.size, axis=context).to(half)
    angle = torch.outer(position, frequency)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of (rows, heads, positions, head_dim) by its angle."""
    cosine, sine = (part.to(x.dtype) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
