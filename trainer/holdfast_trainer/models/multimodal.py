"""A vision encoder, a projector and a language model, each on its own ranks and layout.

Forward: the encoder's tokens cross a bridge to the projector, whose tokens cross another one to the
language model's first stage, where they take the places of placeholders. Backward: the same way
back. The graph is cut at each bridge and the gradient passed on explicitly, so that every rank runs
the same exchanges in the same order, whichever modules it has, and a pipeline or several
microbatches of the language model may come in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from holdfast.bridge import Bridge, Bridged
from holdfast.errors import ConfigError
from holdfast.parallel import ModuleGroups
from holdfast_trainer.models.config import GPTConfig, VisionConfig
from holdfast_trainer.models.parallelize import ParallelGPT, RowLosses
from holdfast_trainer.models.pipeline import AroundMicrobatch, Rows
from holdfast_trainer.models.split import SplitModule
from holdfast_trainer.models.stages import Pipeline, Variant
from holdfast_trainer.models.vision import (
    ParallelProjector,
    ParallelVision,
    pack_images,
    place_images,
)

T = TypeVar("T")

MODULES = ("vision", "projector", "language")
"""The modules' names, in the order of the data flow."""
EDGES = (("vision", "projector"), ("projector", "language"))
"""Which of them feeds which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images of an encoder data rank's rows."""

    patches: Tensor
    """(images, longest, patch_size ** 2) pixels, padded."""
    places: Tensor
    """(images, longest, 2) row and column of each patch."""
    counts: Tensor
    """(rows,) int64 on the CPU: patches of each row's image; 0 for a row without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    """One forward of encoder and projector on one rank."""

    encoded: Bridged | None
    """What crossed to the projector; None on ranks of neither end."""
    leaf: Tensor | None
    """What the projector's graph starts at, on its ranks."""
    projected: Bridged | None
    """What crossed to the language model; None on ranks of neither end."""
    placed: Tensor | None
    """(rows, positions, model_dim), on ranks with the language model's first stage."""


class MultimodalModel:
    """The modules that this rank has of a vision encoder, a projector and a language model.

    A module that is not here is None.
    """

    def __init__(
        self,
        config: GPTConfig,
        vision: VisionConfig,
        *,
        groups: ModuleGroups,
        image_side: int,
        seed: int = 0,
        device: torch.device | None = None,
        pipeline: Pipeline | None = None,
        variant: Variant = "gather",
        autocast: torch.dtype | None = None,
        freeze_vision: bool = False,
        streams: Mapping[str, AbstractContextManager[object]] | None = None,
    ) -> None:
        """Build this rank's modules; no collective but the bridges' own.

        Args:
            config: sizes of the language model.
            vision: sizes of encoder and projector.
            groups: of the modules `MODULES`, with the edges `EDGES`. The projector has data ranks
                only.
            image_side: pixels of an image along each side.
            seed: parameters are a function of it and of their names.
            device: where parameters live; default the CPU.
            pipeline: of the language model; see `ParallelGPT`.
            variant: see there.
            autocast: see there; for all modules.
            freeze_vision: whether the encoder's parameters stay what they are.
            streams: by module, entered around its forward: what dropout draws from then.

        Raises:
            ConfigError: a module cannot be split over its layout.
            GroupError: a module, an edge or a communicator is missing.
        """
        self.groups = groups
        device = device or torch.device("cpu")
        self.vision: ParallelVision | None = None
        self.projector: ParallelProjector | None = None
        self.language: ParallelGPT | None = None
        common: dict[str, Any] = {"seed": seed, "device": device, "autocast": autocast}
        if groups.has("vision"):
            self.vision = ParallelVision(
                vision, image_side=image_side, groups=groups["vision"], **common
            )
            self.vision.module.requires_grad_(not freeze_vision)
        if groups.has("projector"):
            self.projector = ParallelProjector(
                vision, model_dim=config.model_dim, groups=groups["projector"], **common
            )
        if groups.has("language"):
            self.language = ParallelGPT(
                config, groups=groups["language"], pipeline=pipeline, variant=variant, **common
            )
        self._streams = dict(streams or {})
        self._bridges = {
            edge: Bridge(groups, *edge, device=device) if any(map(groups.has, edge)) else None
            for edge in EDGES
        }

    @property
    def modules(self) -> dict[str, SplitModule[torch.nn.Module]]:
        """The modules that this rank has, by name."""
        have = {name: getattr(self, name) for name in MODULES}
        return {name: module for name, module in have.items() if module is not None}

    @property
    def loss_width(self) -> int:
        """The ranks whose losses are averaged, for which gradients of every module are divided."""
        language = self.groups.layouts["language"]
        return language.dp * language.cp

    def forward_backward(
        self,
        images: Images | None,
        rows: Rows | None,
        *,
        num_microbatches: int = 1,
        loss_scale: float = 1.0,
        around: Mapping[str, AroundMicrobatch] | None = None,
    ) -> RowLosses | None:
        """Add the gradient of the mean loss to the parameters of every module. Collective.

        The gradients of all data ranks of a module are still to be added, and divided by
        `loss_width`.

        Args:
            images: of this rank's share of the batch as a data rank of the encoder; None on ranks
                without it.
            rows: of its share as a data rank of the language model, without images; None on ranks
                without it.
            num_microbatches: parts of the language model's rows; encoder and projector take all
                rows at once.
            loss_scale: see `ParallelGPT.forward_backward`.
            around: by module, entered around the backward of a microbatch.

        Returns:
            The losses of the rows; None on ranks without the language model.

        Cost: forward and backward of two bridges.
        """
        around = around or {}
        forward = self._forward(images, rows)
        losses = None
        if self.language is not None:
            rows = _given(rows, "language", "rows")
            with self._stream("language"):
                losses = self.language.forward_backward(
                    rows.tokens,
                    rows.targets,
                    weights=rows.weights,
                    images=forward.placed,
                    num_microbatches=num_microbatches,
                    loss_scale=loss_scale,
                    around=around.get("language"),
                )
        with _around(around, "projector"):
            if forward.projected is not None:
                forward.projected.backward(_gradient_of(forward.projected, losses))
        with _around(around, "vision"):
            if forward.encoded is not None:
                forward.encoded.backward(None if forward.leaf is None else forward.leaf.grad)
        return losses

    @torch.no_grad()
    def find_hits(
        self, images: Images | None, rows: Rows | None, *, num_microbatches: int = 1
    ) -> Tensor | None:
        """Return which targets are the most likely tokens; see `ParallelGPT.find_hits`. Collective.

        Nothing is drawn. Arguments as those of `forward_backward`; None on ranks without the
        language model.
        """
        with self._evaluating():
            forward = self._forward(images, rows)
        if self.language is None:
            return None
        rows = _given(rows, "language", "rows")
        return self.language.find_hits(
            rows.tokens, rows.targets, images=forward.placed, num_microbatches=num_microbatches
        )

    def _forward(self, images: Images | None, rows: Rows | None) -> _Forward:
        """Encode, project and place, with both exchanges."""
        tokens = counts = leaf = placed = None
        if self.vision is not None:
            images = _given(images, "vision", "images")
            counts = images.counts
            with self._stream("vision"):
                tokens = self.vision.encode(
                    images.patches, images.places, [count for count in counts.tolist() if count]
                )
        encoded = self._cross(EDGES[0], tokens, counts)
        tokens = counts = None
        if self.projector is not None and encoded is not None and encoded.tokens is not None:
            counts = encoded.counts
            leaf = encoded.tokens.detach().requires_grad_(torch.is_grad_enabled())
            with self._stream("projector"):
                tokens = self.projector.project(leaf)
        projected = self._cross(EDGES[1], tokens, counts)
        if projected is not None and projected.tokens is not None and projected.counts is not None:
            rows = _given(rows, "language", "rows")
            placed = place_images(
                projected.tokens, projected.counts, num_positions=rows.tokens.shape[1]
            )
        return _Forward(encoded=encoded, leaf=leaf, projected=projected, placed=placed)

    def _cross(
        self, edge: tuple[str, str], tokens: Tensor | None, counts: Tensor | None
    ) -> Bridged | None:
        """One exchange, on ranks that have to do with it."""
        bridge = self._bridges[edge]
        return None if bridge is None else bridge(tokens, counts)

    def _stream(self, module: str) -> AbstractContextManager[object]:
        """The context in which a module draws."""
        return self._streams.get(module, nullcontext())

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Encoder and projector without dropout."""
        modules = [each.module for each in (self.vision, self.projector) if each is not None]
        for module in modules:
            module.eval()
        try:
            yield
        finally:
            for module in modules:
                module.train()


def _gradient_of(projected: Bridged, losses: RowLosses | None) -> Tensor | None:
    """The gradient of the tokens that the language model took, on ranks that took any."""
    if projected.tokens is None or projected.counts is None or losses is None:
        return None
    if losses.image_gradient is None:
        return None
    return pack_images(losses.image_gradient, projected.counts).to(projected.tokens.dtype)


def _around(around: Mapping[str, AroundMicrobatch], module: str) -> AbstractContextManager[None]:
    """The context of a module's only backward of a step."""
    return around[module](is_last=True) if module in around else nullcontext()


def _given(value: T | None, module: str, what: str) -> T:
    """Return what a rank with a module needs; ConfigError if it is missing."""
    if value is None:
        raise ConfigError(f"this rank has module {module!r} and got no {what} for it")
    return value
