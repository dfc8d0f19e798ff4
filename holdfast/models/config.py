"""Sizes of the reference models, and which layouts they can be split over. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import ConfigError
from holdfast.parallel.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes and choices of a GPT; two equal configs make models with equal parameter names."""

    vocab_size: int = 256
    """Number of token ids; 256 is one per byte."""
    num_layers: int = 4
    """Number of transformer blocks."""
    model_dim: int = 128
    """Width of the residual stream; a multiple of `num_heads`."""
    num_heads: int = 4
    """Number of attention heads; the tensor axis must divide it."""
    mlp_dim: int = 0
    """Inner width of the MLP; 0 means 4 x model_dim (GELU) or about 8/3 x model_dim (SwiGLU)."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """Kind of MLP: gated (three matrices) or plain (two)."""
    norm: Literal["rms", "layer"] = "rms"
    """Kind of normalisation: RMSNorm (a scale) or LayerNorm (a scale and a shift)."""
    tied_head: bool = True
    """Whether the output head uses the embedding's matrix instead of one of its own."""
    rope_base: float = 10000.0
    """Base of the rotary position frequencies."""
    dropout: float = 0.0
    """Probability of dropping an element of the embedding and of each block's two outputs."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "model_dim", "num_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{_flag(name)} is {getattr(self, name)}; it must be at least 1: "
                    f"set {_flag(name)} to a positive number"
                )
        if self.model_dim % (2 * self.num_heads):
            raise ConfigError(
                f"--model-dim {self.model_dim} with --num-heads {self.num_heads}: each head needs "
                f"an even whole width; set --model-dim to a multiple of {2 * self.num_heads}"
            )
        if self.mlp_dim < 0:
            raise ConfigError(f"--mlp-dim is {self.mlp_dim}; set a positive width, or 0 for usual")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"--dropout is {self.dropout}; set a probability in [0, 1)")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.model_dim // self.num_heads

    @property
    def inner_dim(self) -> int:
        """Inner width of the MLP that is really used; a multiple of 64 where it is chosen here."""
        if self.mlp_dim:
            return self.mlp_dim
        if self.mlp == "gelu":
            return 4 * self.model_dim
        return 64 * math.ceil(8 * self.model_dim / 3 / 64)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_layout(config: GPTConfig, *, layout: Layout) -> None:
    """Refuse, naming the flag and the fix, a layout that this model is not written for."""
    refused = {
        "pp": "split over pipeline stages",
        "cp": "split over the positions of a sequence",
        "ep": "made of experts",
    }
    for axis, what in refused.items():
        if layout.size(axis) != 1:
            raise ConfigError(
                f"--{axis} {layout.size(axis)}: the reference model is not {what} "
                f"in this version: set --{axis} 1"
            )
    tp = layout.size("tp")
    if layout.size("expt_tp") != tp:
        raise ConfigError(
            f"--expt-tp {layout.size('expt_tp')}: the reference model is not made of experts "
            f"in this version: leave --expt-tp out"
        )
    if config.num_heads % tp:
        raise ConfigError(
            f"--tp {tp} does not divide --num-heads {config.num_heads}: "
            f"set --num-heads to a multiple of {tp}, or another --tp"
        )
    if config.inner_dim % tp:
        raise ConfigError(
            f"--tp {tp} does not divide the MLP's inner width {config.inner_dim}: "
            f"set --mlp-dim to a multiple of {tp}, or another --tp"
        )
