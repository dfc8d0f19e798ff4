"""Which ranks have which module of a multimodal model, and under which layouts. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import ConfigError
from holdfast.parallel import Layout, ModuleLayouts
from holdfast_trainer.models.config import VisionConfig, check_vision_layout

MODULE_EDGES = (("vision", "projector"), ("projector", "language"))
"""Which module feeds which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Multimodal: where the encoder and the projector are; --tp, --pp, ... are of the language
    model."""

    vision_ranks: int = 0
    """Ranks of the encoder, which the language model does not have; 0 means half of all."""
    vision_tp: int = 1
    """Tensor axis of the encoder; its other ranks are data ranks."""
    colocated: bool = False
    """Put encoder and language model on all ranks, each with its own layout."""
    language_first: bool = False
    """Give the first ranks to the language model, and the last ones to the encoder."""
    projector_on: Literal["vision", "language"] = "vision"
    """Whose ranks have the projector; all of them are data ranks of it."""
    freeze_vision: bool = False
    """Leave the encoder's parameters as they are."""
    fresh_vision_optim: bool = False
    """With --load: begin with a fresh optimizer of the encoder where the checkpoint has none, as
    one of a run with --freeze-vision."""
    eval_interval: int = 0
    """Steps between evaluations on held-out images; 0 means one at the end."""

    def split(self, world_size: int) -> tuple[range, range]:
        """The encoder's and the language model's ranks.

        Raises:
            ConfigError: there are too few ranks, or options contradict each other.
        """
        everywhere = range(world_size)
        if self.colocated and (self.vision_ranks or self.language_first):
            flag = "--vision-ranks" if self.vision_ranks else "--language-first"
            raise ConfigError(
                f"--colocated with {flag}: all ranks have both modules; leave one of them out"
            )
        if self.colocated or world_size == 1:
            return everywhere, everywhere
        num_vision = self.vision_ranks or world_size // 2
        if num_vision >= world_size:
            raise ConfigError(
                f"--vision-ranks {num_vision} of {world_size} leaves no rank for the language "
                f"model: lower it, raise --nproc, or put both on all ranks with --colocated"
            )
        if self.language_first:
            return everywhere[world_size - num_vision :], everywhere[: world_size - num_vision]
        return everywhere[:num_vision], everywhere[num_vision:]

    def layouts(
        self, world_size: int, *, make_language: Callable[[range], Layout]
    ) -> ModuleLayouts:
        """The layouts of all modules.

        Args:
            world_size: ranks of the run.
            make_language: makes the language model's layout of its ranks.

        Raises:
            ConfigError: see `split`; or the tensor axis does not divide the encoder's ranks.
            LayoutError: data widths do not divide each other.
        """
        vision, language = self.split(world_size)
        if len(vision) % self.vision_tp:
            raise ConfigError(
                f"--vision-tp {self.vision_tp} does not divide the {len(vision)} ranks of the "
                f"encoder: set it to a divisor, or --vision-ranks to a multiple"
            )
        projector = vision if self.projector_on == "vision" else language
        return ModuleLayouts(
            {
                "vision": Layout(
                    tp=self.vision_tp, dp=len(vision) // self.vision_tp, ranks=tuple(vision)
                ),
                "projector": Layout(dp=len(projector), ranks=tuple(projector)),
                "language": make_language(language),
            },
            edges=MODULE_EDGES,
        )


def check_placement(
    placement: PlacementConfig,
    *,
    vision: VisionConfig,
    layouts: ModuleLayouts,
    global_batch_size: int,
) -> None:
    """Refuse layouts that the modules or the batch do not fit.

    Raises:
        ConfigError: naming the flag and the fix.
    """
    check_vision_layout(vision, layout=layouts["vision"])
    for module in ("vision", "projector"):
        width = layouts[module].dp
        if global_batch_size % width:
            raise ConfigError(
                f"--global-batch-size {global_batch_size} cannot be shared by the {width} data "
                f"ranks of module {module!r}: set it to a multiple of {width}"
            )
    if placement.fresh_vision_optim and placement.freeze_vision:
        raise ConfigError(
            "--fresh-vision-optim with --freeze-vision: a frozen encoder has no optimizer; leave "
            "one of them out"
        )


def refuse_placement(placement: PlacementConfig) -> None:
    """Refuse options of a multimodal run in another one; ConfigError naming them."""
    default = PlacementConfig()
    given = [
        "--" + name.replace("_", "-")
        for name in PlacementConfig.__slots__
        if getattr(placement, name) != getattr(default, name)
    ]
    if given:
        raise ConfigError(
            f"{given[0]} has no meaning without a vision encoder: train the preset multimodal"
        )
