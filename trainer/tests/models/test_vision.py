"""The encoder: what it sees of an image, split over ranks or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.errors import ConfigError
from holdfast.parallel import Layout, ProcessGroups
from holdfast_trainer.models.config import IMAGE_TOKEN, GPTConfig, VisionConfig
from holdfast_trainer.models.gpt import GPT
from holdfast_trainer.models.stages import Stage
from holdfast_trainer.models.vision import (
    ParallelVision,
    pack_images,
    place_images,
)
from tests.harness import RankContext, run_ranks

SIZES = VisionConfig(vision_layers=2, vision_dim=16, vision_heads=2, vision_mixers="sa")


def make_images(counts: list[int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    longest = max(counts, default=1)
    patches = torch.rand(len(counts), longest, 4, generator=generator, dtype=torch.float64)
    places = torch.randint(0, 4, (len(counts), longest, 2), generator=generator)
    return patches, places


def make_encoder(groups: ProcessGroups, config: VisionConfig = SIZES) -> ParallelVision:
    encoder = ParallelVision(config, image_side=8, groups=groups, seed=2)
    encoder.module.to(torch.float64)
    return encoder


def test_an_image_does_not_depend_on_the_others_or_on_padding() -> None:
    encoder = make_encoder(ProcessGroups.single())
    counts = [3, 7, 1]
    patches, places = make_images(counts)
    together = encoder.encode(patches, places, counts).split(counts)
    for number, count in enumerate(counts):
        mine = slice(number, number + 1)
        alone = encoder.encode(patches[mine, :count], places[mine, :count], [count])
        torch.testing.assert_close(alone, together[number])
    noisy = patches.clone()
    noisy[0, 3:] = 100.0
    assert torch.equal(encoder.encode(noisy, places, counts).split(counts)[0], together[0])


def test_every_patch_is_seen_by_those_before_it_too() -> None:
    encoder = make_encoder(ProcessGroups.single())
    patches, places = make_images([4])
    before = encoder.encode(patches, places, [4])
    patches[0, 3] += 1.0
    after = encoder.encode(patches, places, [4])
    assert (before - after).abs().amin(dim=0).max() > 1e-4
    moved = places.clone()
    moved[0, 3] = (places[0, 3] + 1) % 4
    assert (encoder.encode(patches, moved, [4]) - after).abs().max() > 1e-4


def test_no_images_are_no_tokens_with_a_gradient_of_zero() -> None:
    encoder = make_encoder(ProcessGroups.single())
    patches, places = make_images([])
    tokens = encoder.encode(patches, places, [])
    assert tokens.shape == (0, 16)
    tokens.sum().backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in encoder.module.parameters() if p.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)


def encode_split(rank: RankContext, layout: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens of this data rank's images, and the gradients summed over data ranks."""
    with ProcessGroups.create(Layout(**layout)) as groups:
        encoder = make_encoder(groups)
        counts = [5, 2, 6, 4]
        patches, places = make_images(counts)
        share = len(counts) // groups.size("dp")
        mine = slice(groups.index("dp") * share, (groups.index("dp") + 1) * share)
        tokens = encoder.encode(patches[mine], places[mine], counts[mine])
        tokens.square().sum().backward()  # type: ignore[no-untyped-call]
        encoder.module.requires_grad_(False)
        gradients = {}
        for name, parameter in encoder.module.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            local = parameter.grad.to_local().clone()
            if groups.size("dp") > 1:
                torch.distributed.all_reduce(local, group=groups.group("dp_cp"))
            whole = DTensor.from_local(
                local, parameter.grad.device_mesh, parameter.grad.placements, run_check=False
            )
            gradients[name] = whole.full_tensor()
        return tokens.detach(), gradients


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2}])
def test_a_split_encoder_is_the_whole_one(layout: dict[str, int]) -> None:
    counts = [5, 2, 6, 4]
    encoder = make_encoder(ProcessGroups.single())
    tokens = encoder.encode(*make_images(counts), counts)
    tokens.square().sum().backward()  # type: ignore[no-untyped-call]
    results = run_ranks(2, encode_split, layout).results
    shares = [results[0][0]] if "tp" in layout else [result[0] for result in results]
    torch.testing.assert_close(torch.cat(shares), tokens.detach())
    for _, gradients in results:
        for name, parameter in encoder.module.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)


def test_modules_of_one_seed_begin_with_other_values() -> None:
    from holdfast_trainer.models.parallelize import ParallelGPT

    groups = ProcessGroups.single()
    encoder = ParallelVision(SIZES, image_side=8, groups=groups, seed=2)
    language = ParallelGPT(SIZES.blocks, groups=groups, seed=2)
    ours = dict(encoder.module.named_parameters())
    common = [n for n, p in language.module.named_parameters() if n in ours and p.ndim > 1]
    assert common
    for name in common:
        assert not torch.equal(language.module.get_parameter(name), ours[name])


def test_tokens_of_images_come_back_from_where_they_are_placed() -> None:
    counts = torch.tensor([2, 0, 3])
    tokens = torch.arange(10.0).view(5, 2)
    placed = place_images(tokens, counts, num_positions=4)
    assert placed[0].tolist() == [[0, 1], [2, 3], [0, 0], [0, 0]]
    assert not placed[1].any()
    assert torch.equal(pack_images(placed, counts), tokens)


def test_images_take_the_places_of_their_tokens_and_nothing_else() -> None:
    config = GPTConfig(num_layers=1, model_dim=8, num_heads=2)
    model = GPT(config)
    tokens = torch.tensor([[IMAGE_TOKEN, IMAGE_TOKEN, 65, 66]])
    images = torch.randn(1, 4, 8, requires_grad=True)
    logits, _ = model(tokens, stage=Stage(layers=range(1)), images=images)
    logits.sum().backward()
    assert images.grad is not None
    assert (images.grad.abs().sum(dim=2) > 0).tolist() == [[True, True, False, False]]


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="--vision-dim 10 with --vision-heads 4"):
        VisionConfig(vision_dim=10)
    with pytest.raises(ConfigError, match="--vision-mixers 'x'"):
        VisionConfig(vision_mixers="x")
    with pytest.raises(ConfigError, match="--vision-dropout"):
        VisionConfig(vision_dropout=1.0)
