"""Sizes of the reference models, and which layouts they can be split over. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import ConfigError
from holdfast.parallel import Layout

_SMALL_INIT_STD = 0.08
"""What a narrow module starts with: at 0.02 its attention would be even for hundreds of steps."""

IMAGE_TOKEN = 1
"""The id, no byte of text, at positions where tokens of an image go."""


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
    """True if the output head uses the embedding's matrix instead of a second matrix."""
    rope_base: float = 10000.0
    """Base of the rotary position frequencies."""
    init_std: float = 0.02
    """Standard deviation of matrices at the start; those that write into the residual stream start
    with less."""
    dropout: float = 0.0
    """Probability of dropping an element of the embedding and of each block's two outputs."""
    mixers: str = "a"
    """What mixes positions in each layer: a for attention, s for state space; repeated to fit."""
    feeds: str = "d"
    """What follows in each layer: d for a dense MLP, e for experts; repeated to fit."""
    num_experts: int = 8
    """Experts of each layer that has them; the expert axis must divide it."""
    top_k: int = 2
    """Experts that each token goes to."""
    expert_dim: int = 0
    """Inner width of one expert; 0 means that of a dense MLP."""
    load_balance: float = 0.01
    """Weight of the loss that keeps experts evenly used; 0 means none."""
    state_dim: int = 16
    """State space: numbers kept for each channel."""
    state_heads: int = 0
    """State space: heads, each with one decay; 0 means num_heads. The tensor axis divides it."""
    state_groups: int = 0
    """State space: groups of heads that share input and output maps; 0 means state_heads."""
    state_expand: int = 2
    """State space: inner width as a multiple of model_dim."""
    conv_width: int = 4
    """State space: positions that the causal convolution before the scan sees."""

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
        self._check_patterns()
        self._check_experts()
        self._check_state_space()

    def _check_patterns(self) -> None:
        """Refuse patterns of layers with letters that have no meaning."""
        for name, letters in (("mixers", "as"), ("feeds", "de")):
            pattern = getattr(self, name)
            if not pattern or set(pattern) - set(letters):
                raise ConfigError(
                    f"{_flag(name)} {pattern!r}: it is a pattern of the letters "
                    f"{letters[0]} and {letters[1]}, one for each layer, repeated to fit"
                )

    def _check_experts(self) -> None:
        """Refuse sizes of experts that cannot be, if there are any."""
        if "e" not in self.feeds:
            return
        for name in ("num_experts", "top_k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)}; set it to 1 or more")
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"--top-k {self.top_k} of --num-experts {self.num_experts}: a token cannot go to "
                f"more experts than there are; lower --top-k"
            )
        if self.expert_dim < 0 or self.load_balance < 0:
            raise ConfigError("--expert-dim and --load-balance are 0 or positive")

    def _check_state_space(self) -> None:
        """Refuse sizes of a state space that cannot be, if there is one."""
        if "s" not in self.mixers:
            return
        for name in ("state_dim", "state_expand", "conv_width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)}; set it to 1 or more")
        heads, groups = self.num_state_heads, self.num_state_groups
        if heads < 1 or self.state_inner_dim % heads:
            raise ConfigError(
                f"--state-heads {heads} does not divide the inner width {self.state_inner_dim} "
                f"(--state-expand x --model-dim)"
            )
        if groups < 1 or heads % groups:
            raise ConfigError(f"--state-groups {groups} does not divide --state-heads {heads}")

    def mixer(self, layer: int) -> str:
        """`a` or `s`: what mixes positions in one layer."""
        return self.mixers[layer % len(self.mixers)]

    def feed(self, layer: int) -> str:
        """`d` or `e`: what follows the mixer in one layer."""
        return self.feeds[layer % len(self.feeds)]

    @property
    def has_experts(self) -> bool:
        """Return True if any layer has experts."""
        return any(self.feed(layer) == "e" for layer in range(self.num_layers))

    @property
    def has_state_space(self) -> bool:
        """Return True if any layer mixes by a state space."""
        return any(self.mixer(layer) == "s" for layer in range(self.num_layers))

    @property
    def expert_inner_dim(self) -> int:
        """Inner width of one expert that is really used."""
        return self.expert_dim or self.inner_dim

    @property
    def state_inner_dim(self) -> int:
        """Width of the state space's inner stream."""
        return self.state_expand * self.model_dim

    @property
    def num_state_heads(self) -> int:
        """Heads of the state space that are really used."""
        return self.state_heads or self.num_heads

    @property
    def num_state_groups(self) -> int:
        """Groups of state-space heads that are really used."""
        return self.state_groups or self.num_state_heads

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


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Sizes of a vision encoder, and of the projector behind it."""

    multimodal: bool = False
    """Train a vision encoder, a projector and the language model together, to describe images of
    digits; the preset multimodal sets it."""
    vision_layers: int = 2
    """Encoder: number of blocks."""
    vision_dim: int = 64
    """Encoder: width of the residual stream; a multiple of twice `vision_heads`."""
    vision_heads: int = 4
    """Encoder: attention heads; --vision-tp must divide it."""
    vision_mixers: str = "a"
    """Encoder: what mixes patches in each layer: a for attention to all, s for a state space."""
    vision_dropout: float = 0.0
    """Encoder: probability of dropping an element of each block's two outputs."""
    patch_size: Literal[1, 2, 4] = 2
    """Encoder: pixels of a patch along each side."""
    projector_dim: int = 128
    """Projector: inner width of the MLP from the encoder's width to the language model's."""

    def __post_init__(self) -> None:
        for name in ("vision_layers", "vision_dim", "vision_heads", "projector_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)}; set it to 1 or more")
        if self.vision_dim % (2 * self.vision_heads):
            raise ConfigError(
                f"--vision-dim {self.vision_dim} with --vision-heads {self.vision_heads}: each "
                f"head needs an even whole width; set --vision-dim to a multiple of "
                f"{2 * self.vision_heads}"
            )
        if not self.vision_mixers or set(self.vision_mixers) - set("as"):
            raise ConfigError(
                f"--vision-mixers {self.vision_mixers!r}: it is a pattern of the letters a and s, "
                f"one for each layer, repeated to fit"
            )
        if not 0.0 <= self.vision_dropout < 1.0:
            raise ConfigError(
                f"--vision-dropout is {self.vision_dropout}; set a probability in [0, 1)"
            )

    @property
    def blocks(self) -> GPTConfig:
        """The encoder's blocks, in the terms of the language model's."""
        return GPTConfig(
            num_layers=self.vision_layers,
            model_dim=self.vision_dim,
            num_heads=self.vision_heads,
            mixers=self.vision_mixers,
            init_std=_SMALL_INIT_STD,
            dropout=self.vision_dropout,
        )


def check_vision_layout(config: VisionConfig, *, layout: Layout) -> None:
    """Refuse a layout that the encoder is not written for: it has a tensor and a data axis."""
    if layout.pp != 1 or layout.cp != 1 or layout.ep != 1 or layout.expt_tp != layout.tp:
        raise ConfigError(f"the encoder is split over tensor and data ranks only, not as {layout}")
    blocks = config.blocks
    _check_divides("vision-tp", layout.tp, config.vision_heads, what="--vision-heads")
    _check_divides(
        "vision-tp", layout.tp, blocks.inner_dim, what="its MLP's inner width", flag="--vision-dim"
    )
    if blocks.has_state_space:
        _check_divides("vision-tp", layout.tp, blocks.num_state_groups, what="--vision-heads")


def _flag(name: str) -> str:
    """The option that sets a field."""
    return "--" + name.replace("_", "-")


def check_layout(config: GPTConfig, *, layout: Layout) -> None:
    """Refuse, naming the flag and the fix, a layout that this model is not written for."""
    tp = layout.tp
    if config.has_experts:
        check_experts(config, ep=layout.ep, expt_tp=layout.expt_tp)
    elif layout.ep != 1 or layout.expt_tp != tp:
        raise ConfigError(
            f"--ep {layout.ep}, --expt-tp {layout.expt_tp}: the model has no experts; give it some "
            f"with --feeds e, or leave --ep and --expt-tp out"
        )
    if config.has_state_space:
        check_state_space(config, tp=tp, cp=layout.cp)
    _check_divides("tp", tp, config.num_heads, what="--num-heads")
    _check_divides("tp", tp, config.inner_dim, what="the MLP's inner width", flag="--mlp-dim")


def check_experts(config: GPTConfig, *, ep: int, expt_tp: int) -> None:
    """Refuse expert axes that do not divide the experts, or their inner width."""
    _check_divides("ep", ep, config.num_experts, what="--num-experts")
    width = config.expert_inner_dim
    what = "the experts' inner width"
    _check_divides("expt-tp", expt_tp, width, what=what, flag="--expert-dim")


def _check_divides(axis: str, size: int, number: int, *, what: str, flag: str = "") -> None:
    """Refuse an axis that does not divide a number; `flag` sets that, by default `what`."""
    if number % size:
        raise ConfigError(
            f"--{axis} {size} does not divide {what} {number}: set {flag or what} to a multiple of "
            f"{size}, or another --{axis}"
        )


def check_state_space(config: GPTConfig, *, tp: int, cp: int) -> None:
    """Refuse axes that do not divide the groups of state-space heads."""
    if config.num_state_groups % (tp * cp):
        raise ConfigError(
            f"--tp {tp} x --cp {cp} = {tp * cp} does not divide the {config.num_state_groups} "
            f"groups of state-space heads: set --state-groups (by default as many as heads) to a "
            f"multiple of {tp * cp}, or another --tp or --cp"
        )
