"""What tests of the multimodal trainer have in common: rows, runs, and one process without it all.

`train_alone` is the oracle: plain modules, one autograd graph, torch's SGD. No bridge, no layout,
no sharded optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.parallel import ModuleGroups, ProcessGroups
from holdfast_trainer.command import parse
from holdfast_trainer.models.parallelize import ParallelGPT
from holdfast_trainer.models.stages import Stage
from holdfast_trainer.models.vision import ParallelProjector, ParallelVision
from holdfast_trainer.train.config import TrainConfig
from holdfast_trainer.train.digits import IMAGE_SIDE, Digits, DigitSampler, Row, make_digits
from holdfast_trainer.train.multimodal import MultimodalTrainer
from tests.harness import RankContext

SIZES = (
    "multimodal --steps 8 --save-interval 3 --num-layers 2 --model-dim 16 --num-heads 2 "
    "--mlp-dim 32 --feeds d --seq-len 24 --global-batch-size 8 --vision-layers 1 --vision-dim 16 "
    "--vision-heads 4 --projector-dim 8 --warmup-steps 2 --deterministic"
)
SGD = "--optimizer sgd --lr 0.5 --min-lr 0.5 --warmup-steps 0 --weight-decay 0 --clip-grad 0.5"
EXPERTS = "--feeds de --num-experts 4 --expert-dim 8"


@dataclass
class Seen:
    """What one rank saw of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Whole parameters by module and name, of the modules that the rank has."""


def make_rows(*, num_images: int = 20, num_texts: int = 6) -> Digits:
    """Images with 4 to 12 patches of ink, answers of several lengths, and rows of text alone."""
    random = np.random.default_rng(0)

    def image_row(number: int) -> Row:
        image = np.zeros((4, 2, 4, 2), dtype=np.float32)
        for place in random.permutation(16)[: random.integers(4, 13)]:
            image[place // 4, :, place % 4] = random.uniform(0.1, 1.0, (2, 2))
        answer = b"abcdefg"[: 2 + number % 5] + b"\n"
        whole = image.reshape(IMAGE_SIDE, IMAGE_SIDE)
        return Row(image=whole, prompt=b"i:", answer=answer, num_word_bytes=2)

    texts = [
        Row(image=None, prompt=b"t%d:" % number, answer=b"xyz"[: 1 + number % 3], num_word_bytes=1)
        for number in range(num_texts)
    ]
    images = [image_row(number) for number in range(num_images)]
    return make_digits([*images[5:], *texts], held_out=images[:5])


def config_of(*words: str) -> TrainConfig:
    return parse([word for text in (SIZES, *words) for word in text.split()])


@contextmanager
def open_run(config: TrainConfig, digits: Digits, world_size: int) -> Iterator[MultimodalTrainer]:
    """The trainer of this rank, in a world that has been initialised."""
    config.check(world_size=world_size)
    layouts = config.module_layouts(world_size=world_size)
    with (
        ModuleGroups.create(layouts) as groups,
        MultimodalTrainer(config, groups=groups, digits=digits) as trainer,
    ):
        yield trainer


def whole_parameters(trainer: MultimodalTrainer) -> dict[str, Tensor]:
    trainer.synchronize()
    return {
        f"{module}.{name}": (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for module, split in trainer.model.modules.items()
        for name, p in split.module.named_parameters()
    }


@contextmanager
def in_float64() -> Iterator[None]:
    """Make new tensors float64; a live rank that keeps the dtype of before serves the next job."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@in_float64()
def train_together(rank: RankContext, digits: Digits, words: str, num_steps: int) -> Seen:
    """Some steps in float64, under the layouts that the words describe."""
    seen = Seen()
    with open_run(config_of(words), digits, rank.num_ranks) as trainer:
        for _ in range(num_steps):
            metrics = trainer.train_step()
            seen.losses.append(metrics.loss)
            seen.norms.append(metrics.grad_norm)
        seen.tensors = whole_parameters(trainer)
    return seen


@in_float64()
def train_alone(rank: RankContext, digits: Digits, words: str, num_steps: int) -> Seen:
    """The same steps without anything distributed; the words' layouts are not looked at."""
    del rank
    config = config_of(words)
    groups = ProcessGroups.single()
    vision = ParallelVision(config.vision, image_side=IMAGE_SIDE, groups=groups, seed=config.seed)
    projector = ParallelProjector(
        config.vision, model_dim=config.model.model_dim, groups=groups, seed=config.seed
    )
    language = ParallelGPT(config.model, groups=groups, seed=config.seed)
    modules: dict[str, nn.Module] = {
        "vision": vision.module,
        "projector": projector.module,
        "language": language.module,
    }
    if config.placement.freeze_vision:
        vision.module.requires_grad_(False)
    named = {f"{m}.{n}": p for m, module in modules.items() for n, p in module.named_parameters()}
    trained = [p for p in named.values() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=config.optim.lr, momentum=config.optim.momentum)
    sampler = DigitSampler(
        digits,
        seed=config.seed,
        seq_len=config.data.seq_len,
        global_batch_size=config.data.global_batch_size,
        patch_size=config.vision.patch_size,
    )
    seen = Seen()
    for _ in range(num_steps):
        batch = sampler.batch()
        sampler.advance()
        counts = batch.counts.tolist()
        encoded = vision.encode(
            torch.from_numpy(batch.patches),
            torch.from_numpy(batch.places),
            [count for count in counts if count],
        )
        tokens = projector.module(encoded)
        shape = (config.data.seq_len, config.model.model_dim)
        images = torch.stack(
            [
                torch.cat([part, part.new_zeros((shape[0] - len(part), shape[1]))])
                for part in tokens.split(counts)
            ]
        )
        losses, balance = language.module(
            torch.from_numpy(batch.tokens),
            stage=Stage(layers=range(config.model.num_layers)),
            targets=torch.from_numpy(batch.targets),
            weights=torch.from_numpy(batch.weights),
            images=images,
        )
        seen.losses.append(float(losses.mean()))
        optimizer.zero_grad()
        (losses.mean() + balance.mean()).backward()
        # Not torch's clipping, which adds 1e-6 to the norm.
        norm = float(nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]))
        seen.norms.append(norm)
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad *= min(1.0, config.optim.clip_grad / norm)
        optimizer.step()
    seen.tensors = {name: parameter.detach().clone() for name, parameter in named.items()}
    return seen
