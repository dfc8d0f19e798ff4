"""The trainer of a multimodal model: several modules, one step, one checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast import SavePolicy
from holdfast.checkpoint import LoadReport
from holdfast.optim import (
    ChainedOptimizer,
    LossScaler,
    MultiModuleOptimizer,
    ShardedOptimizer,
    StepOutcome,
)
from holdfast.parallel import Layout, ModuleGroups
from holdfast.rerun import Replayed
from holdfast.state import RNG, ModuleRNG, OptimizerState, module_parts
from holdfast_trainer.models.collectives import Axis
from holdfast_trainer.models.context import take_positions
from holdfast_trainer.models.multimodal import Images, MultimodalModel
from holdfast_trainer.models.pipeline import Rows
from holdfast_trainer.train.base import AUTOCAST, BaseTrainer
from holdfast_trainer.train.config import OptimConfig, TrainConfig
from holdfast_trainer.train.digits import IMAGE_SIDE, DigitBatch, Digits, DigitSampler, Row
from holdfast_trainer.train.loop import mean_over_rows
from holdfast_trainer.train.metrics import Reporter
from holdfast_trainer.train.seeding import derive_seed, seed_generators
from holdfast_trainer.train.update import chain_sharded, make_sharded, share_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How well held-out images are described; the same on every rank.

    An answer is right if each of its bytes is the most likely one after those before it, so that
    greedy decoding would write exactly it.
    """

    step: int
    """Finished steps."""
    num_images: int
    """Number of images looked at."""
    word_accuracy: float
    """Share of images whose digit is named rightly, from 0 to 1."""
    answer_accuracy: float
    """Share of images whose whole description is right."""


class MultimodalTrainer(BaseTrainer):
    """Encoder, projector and language model, their optimizers, their data and their checkpoint.

    A rank has the modules that the layouts give it, and takes part in every step.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        groups: ModuleGroups,
        digits: Digits,
        reporter: Reporter | None = None,
        device: torch.device | None = None,
        stop: SavePolicy | None = None,
    ) -> None:
        """Build everything at step 0, and seed the process's random generators.

        Args:
            config: checked by `TrainConfig.check`.
            groups: of `config.module_layouts`.
            digits: the same rows on every rank.
            reporter: where this rank reports; absent on all ranks but one.
            device: where to compute; default the CPU.
            stop: stops the run, with the number of a signal as its vote, such as `OnSignal`.
        """
        device = device or torch.device("cpu")
        self.modules = groups
        self.streams = {name: _make_stream(groups, name, config.seed) for name in groups.modules}
        self.model = MultimodalModel(
            config.model,
            config.vision,
            groups=groups,
            image_side=IMAGE_SIDE,
            seed=config.seed,
            device=device,
            pipeline=config.layout.pipeline(),
            variant=config.layout.cp_attention,
            autocast=AUTOCAST[config.precision],
            freeze_vision=config.placement.freeze_vision,
            streams=self.streams,
        )
        self.updates = _make_updates(self.model, optim=config.optim)
        """The optimizers of this rank's modules by name; None for a frozen encoder."""
        self.optimizer = MultiModuleOptimizer(groups, self.updates)
        self.sampler = DigitSampler(
            digits,
            seed=config.seed,
            seq_len=config.data.seq_len,
            global_batch_size=config.data.global_batch_size,
            patch_size=config.vision.patch_size,
        )
        super().__init__(
            config,
            groups=groups.union,
            optimizer=self.optimizer,
            sampler=self.sampler,
            scaler=LossScaler() if config.precision == "fp16" else None,
            num_microbatches=_num_microbatches(config, language=groups.layouts["language"]),
            device=device,
            replayed=_replayed(self.model, self.streams),
            reporter=reporter,
            stop=stop,
        )
        seed_generators(derive_seed(config.seed, "process", groups.rank))

    def state(self) -> dict[str, object]:
        """The whole training state: parts of each module here, and those of the run."""
        parts: dict[str, dict[str, object]] = {}
        for name, model in self.model.modules.items():
            parts[name] = {"model": model.module, "rng": self.streams[name]}
            update = self.updates[name]
            if update is not None:
                parts[name]["optimizer"] = OptimizerState(update, model.module)
        run: dict[str, object] = {
            "rng": RNG(shared=()),
            "scheduler": self.schedule,
            "progress": self._progress_part,
            "rerun": self.machine,
        }
        if self.scaler is not None:
            run["scaler"] = self.scaler
        return module_parts(self.modules, parts) | run

    def synchronize(self) -> None:
        """Wait until this rank's parameters are whole and up to date."""
        self.optimizer.synchronize()

    def detach(self) -> None:
        """Take the optimizers' hooks off the modules."""
        self.optimizer.close()

    def step_rows(self) -> tuple[DigitBatch | None, DigitBatch | None]:
        """This rank's shares of the batch, as a data rank of the encoder and of the language model.

        None for a module that it does not have.
        """
        return self._share("vision"), self._share("language")

    def forward_backward(self, rows: object) -> Tensor | None:
        """Add the gradients of a step; see `BaseTrainer.forward_backward`."""
        assert isinstance(rows, tuple)
        images, texts = rows
        losses = self.model.forward_backward(
            self._images(images),
            self._rows(texts),
            num_microbatches=self.num_microbatches,
            loss_scale=1.0 if self.scaler is None else self.scaler.scale,
            around={m: o.microbatch for m, o in self.updates.items() if o is not None},
        )
        return None if losses is None else losses.loss

    def gradient_share(self) -> float:
        """The norm of what this rank holds of the gradients of all its modules. Collective."""
        trained = [update for update in self.updates.values() if update is not None]
        return share_norm(trained, scaler=self.scaler)

    def drop_gradients(self) -> None:
        """Forget what `forward_backward` has added."""
        self.optimizer.drop_gradients()

    def finish_update(self, row_losses: Tensor | None) -> tuple[float, StepOutcome]:
        """The mean loss, and what was updated. Collective."""
        loss = self._mean(row_losses)
        outcome = self.optimizer.step(
            max_norm=self.config.optim.clip_grad,
            scaler=self.scaler,
            is_finite=math.isfinite(loss),
            veto=self.machine,
        )
        return loss, outcome

    def after_step(self, step: int) -> None:
        """Evaluate where that is due, and report it."""
        interval = self.config.placement.eval_interval
        if step != self.config.steps and not (interval and step % interval == 0):
            return
        result = self.evaluate()
        if self.reporter is not None:
            self.reporter.event("eval", asdict(result))
            self.reporter.note(
                f"step {step}: of {result.num_images} held-out images {result.word_accuracy:.1%} "
                f"are named rightly, {result.answer_accuracy:.1%} described rightly",
                style="cyan",
            )

    def evaluate(self) -> Evaluation:
        """Describe the held-out images; collective, and nothing is learnt or drawn.

        Cost: one forward of all modules for each global batch of images, and one all-reduce of two
        numbers for each image.
        """
        rows = self.sampler.digits.held_out
        size = self.sampler.global_batch_size
        # Every data rank needs as many rows as in a step; what is added is not counted.
        num_batches = -(-len(rows) // size)
        padded = [rows[number % len(rows)] for number in range(num_batches * size)]
        wrong = torch.zeros(2, len(padded), dtype=torch.float64, device=self.device)
        for first in range(0, len(padded), size):
            self._count_wrong(padded[first : first + size], wrong[:, first : first + size])
        self._add_up(wrong)
        right = (wrong[:, : len(rows)] == 0).double().mean(dim=1).tolist()
        return Evaluation(
            step=self.progress.step,
            num_images=len(rows),
            word_accuracy=right[0],
            answer_accuracy=right[1],
        )

    def _count_wrong(self, rows: Sequence[Row], wrong: Tensor) -> None:
        """Add the wrong bytes of each row's word and answer, where this rank counts them.

        Args:
            rows: of all data ranks.
            wrong: (2, rows), changed in place.
        """
        share = self._share("language", rows)
        hits = self.model.find_hits(
            self._images(self._share("vision", rows)),
            self._rows(share),
            num_microbatches=self.num_microbatches,
        )
        if share is None or hits is None or not len(hits):
            return
        language = self.modules["language"]
        if language.index("tp"):
            return  # tensor ranks have the same hits
        # Ranks of a context axis have other positions of the same rows: their counts are added.
        context = Axis.of(language, "cp")
        mine = slice(language.index("dp") * len(hits), (language.index("dp") + 1) * len(hits))
        for number, mask in enumerate((share.words, share.weights > 0)):
            local = take_positions(torch.from_numpy(mask).to(hits.device), axis=context, dim=1)
            wrong[number, mine] += ((hits == 0) & local).sum(dim=1)

    def _share(self, module: str, rows: Sequence[Row] | None = None) -> DigitBatch | None:
        """This rank's share of rows, by default of the current batch, as a data rank of a module.

        None on ranks without the module.
        """
        if not self.modules.has(module):
            return None
        index, width = self.modules[module].index("dp"), self.modules[module].size("dp")
        if rows is None:
            return self.sampler.batch(index=index, num_shares=width)
        size = len(rows) // width
        return self.sampler.collate(rows[index * size : (index + 1) * size])

    def _images(self, batch: DigitBatch | None) -> Images | None:
        """Return what the encoder takes."""
        if batch is None:
            return None
        return Images(
            patches=torch.from_numpy(batch.patches).to(self.device),
            places=torch.from_numpy(batch.places).to(self.device),
            counts=torch.from_numpy(batch.counts),
        )

    def _rows(self, batch: DigitBatch | None) -> Rows | None:
        """Return what the language model takes."""
        if batch is None:
            return None
        return Rows(
            tokens=torch.from_numpy(batch.tokens).to(self.device),
            targets=torch.from_numpy(batch.targets).to(self.device),
            weights=torch.from_numpy(batch.weights).to(self.device),
            images=None,
        )

    def _mean(self, row_losses: Tensor | None) -> float:
        """The mean loss of the global batch, on every rank; None without the language model.

        Cost: see `mean_over_rows`; and an all-reduce of one number over all ranks.
        """
        mean = torch.zeros(1, dtype=torch.float64, device=self.device)
        if row_losses is not None:
            language = self.modules["language"]
            num_rows = self.sampler.global_batch_size // language.size("dp")
            value = mean_over_rows(row_losses, num_rows=num_rows, groups=language)
            # One rank's number and zeros of all others: the sum is exact.
            if language.rank == language.layout.ranks[0]:
                mean[0] = value
        return float(self._add_up(mean))

    def _add_up(self, numbers: Tensor) -> Tensor:
        """Add numbers over all ranks, in place."""
        if self.groups.size("dp_cp") > 1:
            dist.all_reduce(numbers, group=self.groups.group("dp_cp"))
        return numbers

    @property
    def may_be_missing(self) -> tuple[str, ...]:
        """Parts that a checkpoint need not have."""
        fresh = self.config.placement.fresh_vision_optim
        return ("scaler", "vision.optimizer") if fresh else ("scaler",)

    def describe_missing(self, report: LoadReport) -> str:
        """Return what a person reads where some were missing."""
        parts = sorted({name.partition("[")[0] for name in report.missing})
        return f"the checkpoint does not have {', '.join(parts)}: it starts afresh"


def _make_updates(
    model: MultimodalModel, *, optim: OptimConfig
) -> dict[str, ShardedOptimizer | ChainedOptimizer | None]:
    """The optimizers of this rank's modules; None for a frozen encoder. Collective."""
    updates: dict[str, ShardedOptimizer | ChainedOptimizer | None] = {}
    # Gradients of every module are those of the language model's losses, summed over its data
    # ranks: each module divides by their number, not by its own.
    width = model.loss_width
    for name, module in model.modules.items():
        parameters = list(module.module.parameters())
        if model.language is not None and name == "language":
            updates[name] = chain_sharded(model.language, optim=optim, divisor=width)
        elif any(parameter.requires_grad for parameter in parameters):
            updates[name] = make_sharded(
                "all", parameters, model=module, optim=optim, divisor=width
            )
        else:
            updates[name] = None
    return updates


def _num_microbatches(config: TrainConfig, *, language: Layout) -> int:
    """Parts of the language model's rows in a step."""
    num_layers = config.model.num_layers
    stages = config.layout.pipeline().stages(num_layers=num_layers, pp=language.pp)
    return config.data.num_microbatches(dp=language.dp, num_stages=len(stages))


def _replayed(model: MultimodalModel, streams: dict[str, ModuleRNG]) -> Replayed:
    """Return what a rerun of a step needs to be as it was."""
    modules = [split.module for split in model.modules.values()]
    return Replayed(modules=modules, streams=list(streams.values()))


def _make_stream(groups: ModuleGroups, module: str, seed: int) -> ModuleRNG:
    """A module's random stream: equal on tensor ranks, which draw the same masks."""
    own = groups[module]
    place = own.index("dp_cp"), own.index("pp")
    return ModuleRNG(seed=derive_seed(seed, module, *place), shared=("tp",))
