"""The trainer: read it from top to bottom.

Every rank runs the same program on its share of the same batches. What differs between layouts is
who computes what, never which rows are trained on.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from holdfast import SavePolicy
from holdfast.optim import LossScaler, StepOutcome
from holdfast.parallel import ProcessGroups
from holdfast.rerun import Replayed
from holdfast.state import RNG, OptimizerState
from holdfast_trainer.models.parallelize import ParallelGPT
from holdfast_trainer.train.base import AUTOCAST, BaseTrainer
from holdfast_trainer.train.config import TrainConfig
from holdfast_trainer.train.data import BatchSampler, Corpus
from holdfast_trainer.train.metrics import Reporter
from holdfast_trainer.train.seeding import derive_seed, seed_generators
from holdfast_trainer.train.update import make_update, share_norm


class Trainer(BaseTrainer):
    """A model, its optimizer, its data and their checkpoint, on the groups of one layout.

    Everything that a checkpoint has to bring back is in `state()`; nothing else changes from step
    to step.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        groups: ProcessGroups,
        corpus: Corpus,
        reporter: Reporter | None = None,
        device: torch.device | None = None,
        stop: SavePolicy | None = None,
    ) -> None:
        """Build everything at step 0, and seed the process's random generators.

        Args:
            config: checked by `TrainConfig.check`.
            groups: needs a communicator for every axis larger than 1 (`dp_cp` for data).
            corpus: the same text on every rank.
            reporter: where this rank reports; absent on all ranks but one.
            device: where to compute; default the CPU.
            stop: stops the run, with the number of a signal as its vote, such as `OnSignal`.
        """
        device = device or torch.device("cpu")
        self.model = _make_model(config, groups=groups, device=device)
        stages = config.layout.pipeline().stages(
            num_layers=config.model.num_layers, pp=groups.size("pp")
        )
        num_microbatches = config.data.num_microbatches(
            dp=groups.size("dp"), num_stages=len(stages)
        )
        scaler = LossScaler() if config.precision == "fp16" else None
        self.update = make_update(self.model, optim=config.optim)
        self.sampler = BatchSampler(
            corpus,
            seed=config.seed,
            seq_len=config.data.seq_len,
            global_batch_size=config.data.global_batch_size,
        )
        super().__init__(
            config,
            groups=groups,
            optimizer=self.update.optimizer,
            sampler=self.sampler,
            scaler=scaler,
            num_microbatches=num_microbatches,
            device=device,
            replayed=Replayed(modules=[self.model.module]),
            reporter=reporter,
            stop=stop,
        )
        # Tensor ranks hold the same residual stream, so dropout must draw the same mask on them.
        place = [groups.index("dp_cp"), *([stage] if (stage := groups.index("pp")) else [])]
        seed_generators(derive_seed(config.seed, *place))

    def synchronize(self) -> None:
        """Wait until this rank's parameters are whole and up to date."""
        self.update.synchronize()

    def detach(self) -> None:
        """Take the optimizer's hooks off the model."""
        self.update.close()

    def after_step(self, step: int) -> None:
        """Nothing else is done after a step."""

    def state(self) -> dict[str, object]:
        """The whole training state by part; what `Checkpointer` saves and loads into."""
        state: dict[str, object] = {
            "model": self.model.module,
            "optimizer": OptimizerState(self.update.optimizer, self.model.module),
            "scheduler": self.schedule,
            # Ranks along tp hold the same residual stream: dropout draws the same mask on them.
            "rng": RNG(shared=("tp",)),
            "progress": self._progress_part,
            "rerun": self.machine,
        }
        return state if self.scaler is None else state | {"scaler": self.scaler}

    def step_rows(self) -> Tensor:
        """(rows, positions + 1) tokens: this data rank's share of the batch."""
        rows = self.sampler.rows(index=self.groups.index("dp"), num_shares=self.groups.size("dp"))
        return torch.from_numpy(rows)

    def forward_backward(self, rows: object) -> Tensor:
        """Add the gradients of a step; see `BaseTrainer.forward_backward`."""
        assert isinstance(rows, Tensor)
        batch = rows.to(self.device)
        losses = self.model.forward_backward(
            batch[:, :-1],
            batch[:, 1:],
            num_microbatches=self.num_microbatches,
            loss_scale=1.0 if self.scaler is None else self.scaler.scale,
            around=self.update.microbatch,
        )
        return losses.loss

    def gradient_share(self) -> float:
        """The norm of what this rank holds of the reduced gradients. Collective."""
        return share_norm([self.update], scaler=self.scaler)

    def drop_gradients(self) -> None:
        """Forget what `forward_backward` has added."""
        self.update.drop_gradients()

    def finish_update(self, row_losses: Tensor | None) -> tuple[float, StepOutcome]:
        """The mean loss, and what was updated. Collective."""
        assert row_losses is not None
        num_rows = self.sampler.global_batch_size // self.groups.size("dp")
        loss = mean_over_rows(row_losses, num_rows=num_rows, groups=self.groups)
        outcome = self.update.step(
            max_norm=self.config.optim.clip_grad,
            scaler=self.scaler,
            is_finite=math.isfinite(loss),
            veto=self.machine,
        )
        return loss, outcome


def mean_over_rows(row_losses: Tensor, *, num_rows: int, groups: ProcessGroups) -> float:
    """The mean over the rows of all data ranks, the same number under every layout.

    Args:
        row_losses: of this data rank's rows, means over this rank's positions; empty on ranks
            without the last pipeline stage.
        num_rows: rows of one data rank.
        groups: of the run.

    Cost: one all-reduce over each of `dp_cp` and `pp` of 8 bytes per row of the global batch.
    """
    # Rows are reduced, not their sums: each has its own element of a vector of zeros, so the sum
    # over data ranks is exact, and the order of addition does not depend on the layout.
    everyone = torch.zeros(
        groups.size("dp"), num_rows, dtype=torch.float64, device=row_losses.device
    )
    if len(row_losses):
        everyone[groups.index("dp")] = row_losses.double() / groups.size("cp")
    for name in ("dp_cp", "pp"):
        if groups.size(name) > 1:
            dist.all_reduce(everyone, group=groups.group(name))
    return float(np.sum(everyone.cpu().numpy()) / everyone.numel())


def _make_model(config: TrainConfig, *, groups: ProcessGroups, device: torch.device) -> ParallelGPT:
    """The model that the configuration describes, on these groups."""
    return ParallelGPT(
        config.model,
        groups=groups,
        seed=config.seed,
        device=device,
        pipeline=config.layout.pipeline(),
        variant=config.layout.cp_attention,
        autocast=AUTOCAST[config.precision],
    )
