"""A vision encoder and the projector behind it, on their own groups.

An image comes as the patches of it that show something, so images have different numbers of tokens.
The blocks are those of the language model; attention looks in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.parallel import ProcessGroups
from holdfast_trainer.models.config import VisionConfig, check_vision_layout
from holdfast_trainer.models.gpt import Block, make_norm
from holdfast_trainer.models.split import SplitModule, plan_blocks


class VisionEncoder(nn.Module):
    """Patches with a 2-D position each, then blocks, then a norm."""

    def __init__(self, config: VisionConfig, *, image_side: int, groups: ProcessGroups) -> None:
        """Make the modules, with torch's usual initial values.

        Args:
            config: sizes.
            image_side: pixels of an image along each side; a multiple of the patch size.
            groups: of the ranks that share the encoder.
        """
        super().__init__()
        blocks = config.blocks
        side = image_side // config.patch_size
        self.patch = nn.Linear(config.patch_size**2, config.vision_dim, bias=False)
        self.row = nn.Embedding(side, config.vision_dim)
        self.column = nn.Embedding(side, config.vision_dim)
        self.blocks = nn.ModuleDict(
            {
                str(layer): Block(blocks, layer=layer, groups=groups, variant="gather")
                for layer in range(config.vision_layers)
            }
        )
        self.norm = make_norm(blocks)

    def forward(self, patches: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        """Return what is in each patch, seen together with the others of its image.

        Args:
            patches: (images, patches, patch_size ** 2) pixels; padded at the end.
            places: (images, patches, 2) row and column of each.
            mask: (images, patches) which are there, at least one in each image.

        Returns:
            (images, patches, vision_dim); what is padded has no meaning.
        """
        x = self.patch(patches) + self.row(places[..., 0]) + self.column(places[..., 1])
        # As Vaswani et al. (2017) scale embeddings: blocks add to what is seen, not to nothing.
        x = x * math.sqrt(x.shape[-1])
        balance = x.new_zeros(len(x))
        for block in self.blocks.values():
            x, balance = block(x, balance, None, mask)
        encoded: Tensor = self.norm(x)
        return encoded


class Projector(nn.Module):
    """An MLP from the encoder's width to the language model's."""

    def __init__(self, config: VisionConfig, *, model_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(config.vision_dim, config.projector_dim, bias=False)
        self.down = nn.Linear(config.projector_dim, model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, vision_dim) -> (tokens, model_dim)."""
        projected: Tensor = self.down(functional.gelu(self.up(x)))
        return projected


class ParallelVision(SplitModule[VisionEncoder]):
    """A vision encoder on the groups of a layout of tensor and data ranks."""

    def __init__(
        self,
        config: VisionConfig,
        *,
        image_side: int,
        groups: ProcessGroups,
        seed: int = 0,
        device: torch.device | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Build and initialise the local part; no collective.

        Args:
            config: sizes.
            image_side: pixels of an image along each side; a multiple of the patch size.
            groups: see `SplitModule`, as for the rest.
            seed: see there.
            device: see there.
            autocast: see there.

        Raises:
            ConfigError: the encoder cannot be split over this layout.
            GroupError: a communicator is missing.
        """
        check_vision_layout(config, layout=groups.layout)
        with torch.device("meta"):
            module = VisionEncoder(config, image_side=image_side, groups=groups)
        super().__init__(
            module,
            groups=groups,
            blocks=config.blocks,
            plan=plan_blocks(module.blocks, config=config.blocks),
            seed=seed,
            device=device,
            autocast=autocast,
            scope="vision.",
        )

    def encode(self, patches: Tensor, places: Tensor, counts: Sequence[int]) -> Tensor:
        """The tokens of all images, one after the other.

        Args:
            patches: (images, longest, patch_size ** 2) pixels, padded.
            places: (images, longest, 2), padded with what is in the grid.
            counts: how many patches each image has.

        Returns:
            (sum(counts), vision_dim), in the dtype of the parameters.
        """
        dtype = next(self.module.parameters()).dtype
        number = torch.tensor(list(counts), dtype=torch.int64, device=patches.device)
        mask = torch.arange(patches.shape[1], device=patches.device) < number[:, None]
        encoded: Tensor = self.run(patches.to(dtype), places, mask)
        there = mask.flatten().nonzero()[:, 0]
        return encoded.flatten(0, 1).index_select(0, there).to(dtype)


class ParallelProjector(SplitModule[Projector]):
    """A projector on the groups of a layout of data ranks."""

    def __init__(
        self,
        config: VisionConfig,
        *,
        model_dim: int,
        groups: ProcessGroups,
        seed: int = 0,
        device: torch.device | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Build and initialise it; no collective. Arguments as those of `ParallelVision`.

        Args:
            config: sizes.
            model_dim: width of the language model.
            groups: of data ranks.
            seed: see there.
            device: see there.
            autocast: see there.
        """
        with torch.device("meta"):
            module = Projector(config, model_dim=model_dim)
        super().__init__(
            module,
            groups=groups,
            blocks=config.blocks,
            plan={},
            seed=seed,
            device=device,
            autocast=autocast,
            scope="projector.",
        )

    def project(self, tokens: Tensor) -> Tensor:
        """(tokens, vision_dim) -> (tokens, model_dim), in the dtype of the parameters."""
        projected: Tensor = self.run(tokens)
        return projected.to(next(self.module.parameters()).dtype)


def place_images(tokens: Tensor, counts: Tensor, *, num_positions: int) -> Tensor:
    """Packed tokens of images, where the rows have their placeholders: at their start.

    Args:
        tokens: (sum(counts), model_dim).
        counts: (rows,) int64, on the CPU.
        num_positions: of a row.

    Returns:
        (rows, num_positions, model_dim), zeros elsewhere; a new tensor without gradient.
    """
    placed = tokens.new_zeros((len(counts) * num_positions, tokens.shape[1]))
    places = _places(counts, num_positions=num_positions).to(tokens.device)
    placed.index_copy_(0, places, tokens.detach())
    return placed.view(len(counts), num_positions, tokens.shape[1])


def pack_images(placed: Tensor, counts: Tensor) -> Tensor:
    """The inverse of `place_images`: (sum(counts), model_dim) of what is at the placeholders."""
    places = _places(counts, num_positions=placed.shape[1]).to(placed.device)
    return placed.flatten(0, 1).index_select(0, places)


def _places(counts: Tensor, *, num_positions: int) -> Tensor:
    """The placeholders' numbers among the positions of all rows."""
    mask = torch.arange(num_positions) < counts[:, None]
    return mask.flatten().nonzero()[:, 0]
