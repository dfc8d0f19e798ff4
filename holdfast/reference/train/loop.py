"""The trainer: read it from top to bottom.

Every rank runs the same program on its share of the same batches. What differs between layouts is
who computes what, never which rows are trained on.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from holdfast.checkpoint import Checkpointer, LoadReport, PendingSave, SaveReport
from holdfast.errors import ConfigError, FaultError, HoldfastError
from holdfast.optim import LossScaler, StepOutcome
from holdfast.parallel import ProcessGroups
from holdfast.reference.models.parallelize import ParallelGPT
from holdfast.reference.train.config import CheckpointConfig, OptimConfig, TrainConfig
from holdfast.reference.train.data import BatchSampler, Corpus
from holdfast.reference.train.metrics import Reporter, StepMetrics, readable_nbytes
from holdfast.reference.train.rank_log import RankLog
from holdfast.reference.train.resume import check_save, find_checkpoint
from holdfast.reference.train.schedule import Schedule, ScheduleSettings
from holdfast.reference.train.stopping import StopRequest, StopWhenAsked
from holdfast.reference.train.update import make_update
from holdfast.retention.policies import KeepEvery, KeepLast, Policy
from holdfast.save_when.policies import AtStep, EverySteps
from holdfast.save_when.schedule import SaveSchedule
from holdfast.state import RNG, OptimizerState

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
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
        stop: StopRequest | None = None,
    ) -> None:
        """Build everything at step 0, and seed the process's random generators.

        Args:
            config: checked by `TrainConfig.check`.
            groups: needs a communicator for every axis larger than 1 (`dp_cp` for data).
            corpus: the same text on every rank.
            reporter: where this rank reports; absent on all ranks but one.
            device: where to compute; default the CPU.
            stop: asks for an end at the next step boundary; any rank's counts for all.
        """
        self.config = config
        self.groups = groups
        self.reporter = reporter
        self.device = device or torch.device("cpu")
        self.model = _make_model(config, groups=groups, device=self.device)
        stages = config.layout.pipeline().stages(
            num_layers=config.model.num_layers, pp=groups.size("pp")
        )
        self.num_microbatches = config.data.num_microbatches(
            dp=groups.size("dp"), num_stages=len(stages)
        )
        self.scaler = LossScaler() if config.precision == "fp16" else None
        self.update = make_update(self.model, optim=config.optim, scaler=self.scaler)
        self.schedule = Schedule(
            self.update.optimizer,
            settings=_schedule_settings(config.optim, num_steps=config.steps),
            on_override=self._note,
        )
        self.sampler = BatchSampler(
            corpus,
            seed=config.seed,
            seq_len=config.data.seq_len,
            global_batch_size=config.data.global_batch_size,
        )
        self.progress = Progress(self.sampler, allow_other_data=config.data.allow_other_data)
        self._checkpointer = _make_checkpointer(config.checkpoint, groups=groups)
        policy = EverySteps(config.checkpoint.save_interval) | AtStep(config.steps)
        stopping = StopWhenAsked(stop or StopRequest(), reporter)
        self._save_schedule = SaveSchedule(policy | stopping, control=groups.control)
        self._save_schedule.saved(0)  # a run that has not begun has nothing to keep
        self._pending: tuple[PendingSave, float, float] | None = None
        log_in = config.checkpoint.save if config.log.rank_log else None
        self._log = RankLog(log_in, layout=groups.layout, rank=groups.rank)
        self._damaged: tuple[int, ...] = ()
        self.safe: tuple[int, Path] | None = None
        """The step that a run can go on from, and the directory it is in; None before any is."""
        _seed_generators(
            config.seed, data_index=groups.index("dp_cp"), stage_index=groups.index("pp")
        )

    def __enter__(self) -> Trainer:
        """Itself; leaving gives back the staging memory and the hooks on the model."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Give back the staging memory and the hooks; groups and reporter are the caller's."""
        if error is None:
            self.update.close()
        self._save_schedule.close()
        if self._checkpointer is not None:
            self._checkpointer.close()

    def state(self) -> dict[str, object]:
        """The whole training state by part; what `Checkpointer` saves and loads into."""
        state: dict[str, object] = {
            "model": self.model.module,
            "optimizer": OptimizerState(self.update.optimizer, self.model.module),
            "scheduler": self.schedule,
            # Ranks along tp hold the same residual stream: dropout draws the same mask on them.
            "rng": RNG(shared=("tp",)),
            "progress": self.progress,
        }
        return state if self.scaler is None else state | {"scaler": self.scaler}

    def run(self) -> int:
        """Resume if configured to, then train to the last step; see `resume` and `train`."""
        self.resume()
        if self.progress.step >= self.config.steps:
            self._note(
                f"step {self.progress.step} of {self.config.steps}: nothing is left to train; "
                f"raise --steps to go on"
            )
        return self.train()

    def train(self) -> int:
        """Train from where the state is to the last step, and save on the way; collective.

        Returns:
            0, or the number of the signal that stopped the run on all ranks before the last step;
            the state of that step is saved.

        Raises:
            HoldfastError: on every rank; a save that failed, or a loss or gradient that is not
                finite.
        """
        num_steps = self.config.steps
        decision = self._save_schedule.decide(self.progress.step)
        while self.progress.step < num_steps and not decision.stop:
            metrics = self.train_step()
            if self.reporter is not None:
                self.reporter.step(metrics)
            decision = self._save_schedule.decide(metrics.step)
            if decision.save and self._checkpointer is not None:
                self.save()
            self._report_finished()
        self.update.synchronize()
        self._finish_save()
        return decision.votes[-1] if self.progress.step < num_steps else 0

    def train_step(self) -> StepMetrics:
        """One optimizer step on the next global batch.

        With sharded optimizers updated parameters may still be on their way when it returns; the
        next step and `save` wait for them, anything else calls `update.synchronize()`.

        Raises:
            FaultError: on every rank, before the update, if loss or gradient is not finite; with
                a loss scale, only when that cannot be lowered any more.
        """
        started = time.perf_counter()
        rows = self.sampler.rows(index=self.groups.index("dp"), num_shares=self.groups.size("dp"))
        batch = torch.from_numpy(rows).to(self.device)
        losses = self.model.forward_backward(
            batch[:, :-1],
            batch[:, 1:],
            num_microbatches=self.num_microbatches,
            loss_scale=1.0 if self.scaler is None else self.scaler.scale,
            around=self.update.microbatch,
        )
        loss = mean_over_rows(losses.loss, num_rows=len(rows), groups=self.groups)
        outcome = self._update(loss)

        lr, weight_decay = self.schedule.lr, self.schedule.weight_decay
        if not outcome.skipped:
            self.schedule.step()
        self.progress.advance()
        return StepMetrics(
            step=self.progress.step,
            loss=loss,
            lr=lr,
            weight_decay=weight_decay,
            grad_norm=outcome.norm,
            num_tokens=self.sampler.global_batch_size * self.sampler.seq_len,
            seconds=time.perf_counter() - started,
            loss_scale=None if self.scaler is None else outcome.loss_scale,
            skipped=outcome.skipped,
        )

    def _update(self, loss: float) -> StepOutcome:
        """Update the parameters, if loss and gradient are finite on all ranks; collective.

        Otherwise FaultError, or with a loss scale that can be lowered, a step left out.
        """
        outcome = self.update.step(
            max_norm=self.config.optim.clip_grad, is_finite=math.isfinite(loss)
        )
        if outcome.skipped and (self.scaler is None or outcome.loss_scale <= self.scaler.minimum):
            raise FaultError(
                f"step {self.progress.step + 1}: the loss is {loss:g} and the gradient is not "
                f"finite on {len(outcome.bad_ranks)} of {self.groups.layout.world_size} ranks "
                f"{list(outcome.bad_ranks)}; no update was made. Resume from the last checkpoint "
                f"with a lower --lr"
            )
        return outcome

    def save(self) -> None:
        """Save the state at the current step; collective.

        With `async_save` it returns once the state is copied; the save is reported as saved at the
        first step after it is committed.
        """
        if self._checkpointer is None:
            raise ConfigError("a save in a run without --save: add --save DIR")
        state = self.state()
        if not self.config.checkpoint.save_optim:
            del state["optimizer"]
        if not self.config.checkpoint.save_rng:
            del state["rng"]
        started, began = time.perf_counter(), time.time()
        step = self.progress.step
        self._save_schedule.saved(step)
        overwrite = step in self._damaged
        if self.config.checkpoint.async_save:
            self._finish_save()
            pending = self._checkpointer.save_async(step, state, overwrite=overwrite)
            self._pending = (pending, time.perf_counter() - started, began)
        else:
            report = self._checkpointer.save(step, state, overwrite=overwrite)
            self._report_save(report, time.perf_counter() - started, began=began)

    def _report_finished(self) -> None:
        """Report the asynchronous save in flight once it is committed; waits for nothing.

        One that failed is left to `_finish_save`, which raises on all ranks at the same place.
        """
        if self._pending is not None and self._pending[0].phase == "committed":
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait for the asynchronous save in flight, if any, and report it."""
        if self._pending is not None:
            (pending, seconds, began), self._pending = self._pending, None
            self._report_save(pending.result(), seconds, began=began)

    def _report_save(self, report: SaveReport, seconds: float, *, began: float) -> None:
        """Report a committed save, from which the run can now go on."""
        if self.config.checkpoint.save is not None:
            self.safe = (report.step, self.config.checkpoint.save)
        self._log.save(report, began=began)
        if self.reporter is not None:
            self.reporter.event(
                "save",
                {
                    "step": report.step,
                    "path": str(report.path),
                    "nbytes": report.total_nbytes,
                    "seconds": round(seconds, 4),
                    "phases": {name: round(value, 4) for name, value in report.seconds.items()},
                },
            )
            self.reporter.note(
                f"saved step {report.step}: {readable_nbytes(report.total_nbytes)} in "
                f"{seconds:.2f} s  {report.path}",
                style="green",
            )

    def resume(self) -> LoadReport | None:
        """Load what the configuration asks for; None if this run begins afresh. Collective."""
        checkpoint = self.config.checkpoint
        step = find_checkpoint(checkpoint, control=self.groups.control)
        if checkpoint.load is None or step is None:
            if checkpoint.load is not None:
                self._note(f"no committed checkpoint in {checkpoint.load}: starting at step 0")
            return None
        state = self.state()
        chosen = {
            "optimizer": checkpoint.load_optim,
            "scheduler": checkpoint.load_scheduler,
            "rng": checkpoint.load_rng,
        }
        if checkpoint.finetune:
            chosen = dict.fromkeys(state, False) | {"model": True}
        started, began = time.perf_counter(), time.time()
        report = Checkpointer(checkpoint.load, groups=self.groups).load(
            {name: part for name, part in state.items() if chosen.get(name, True)},
            step=None if checkpoint.max_fallbacks else step,
            allow_missing=("scaler",),
            max_fallbacks=checkpoint.max_fallbacks,
        )
        self._after_load(report)
        self._log.load(report, began=began)
        if report.missing:
            self._note("the checkpoint was trained without a loss scale: it starts afresh")
        seconds = time.perf_counter() - started
        # The optimizer's part brings the stored lr: this run's schedule applies.
        self.schedule.apply()
        self._report_load(report, seconds=seconds)
        return report

    def _after_load(self, report: LoadReport) -> None:
        """Note the step that is on storage, and the damaged ones to save over after a fallback."""
        checkpoint = self.config.checkpoint
        if not checkpoint.finetune:
            self._save_schedule.saved(report.step)
        if checkpoint.load is not None:
            self.safe = (report.step, checkpoint.load)
        for given_up in report.fell_back:
            self._note(f"{given_up.summary} and was given up")
        if not report.fell_back or checkpoint.save is None or checkpoint.load is None:
            return
        error: HoldfastError | None = None
        if checkpoint.save.resolve() == checkpoint.load.resolve():
            self._damaged = tuple(given_up.step for given_up in report.fell_back)
        elif self.groups.control.is_coordinator and not checkpoint.finetune:
            try:
                check_save(checkpoint.save, begins_at=report.step)
            except HoldfastError as reason:
                error = reason
        self.groups.control.agree(error, phase="after a fallback")

    def _report_load(self, report: LoadReport, *, seconds: float) -> None:
        """Report what was loaded, and from where."""
        if self.reporter is None:
            return
        self.reporter.event(
            "load",
            {
                "step": report.step,
                "path": str(self.config.checkpoint.load),
                "begins_at": self.progress.step,
                "nbytes_read": report.job.nbytes_read,
                "nbytes_needed": report.job.nbytes_needed,
                "seconds": round(seconds, 4),
            },
        )
        what = "weights of step" if self.config.checkpoint.finetune else "step"
        self._note(
            f"loaded {what} {report.step} from {self.config.checkpoint.load}: "
            f"{readable_nbytes(report.job.nbytes_read)} read by all ranks in {seconds:.2f} s"
        )

    def _note(self, text: str) -> None:
        """One line for the person, on the rank that reports."""
        if self.reporter is not None:
            self.reporter.note(text, style="yellow")


class Progress:
    """How far the run is: finished steps and the position in the data."""

    def __init__(self, sampler: BatchSampler, *, allow_other_data: bool = False) -> None:
        self.step = 0
        """Finished optimizer steps."""
        self._sampler = sampler
        self._allow_other_data = allow_other_data

    def advance(self) -> None:
        """A step is finished."""
        self.step += 1
        self._sampler.advance()

    def state_dict(self) -> dict[str, object]:
        """Plain numbers and strings, equal on all ranks."""
        return {"step": self.step, "data": self._sampler.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take a position; MismatchError if it is one in other data."""
        step, data = state["step"], state["data"]
        self._sampler.load_state_dict(data, allow_other=self._allow_other_data)  # type: ignore[arg-type]
        self.step = int(step)  # type: ignore[call-overload]


def mean_over_rows(row_losses: torch.Tensor, *, num_rows: int, groups: ProcessGroups) -> float:
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


def _schedule_settings(optim: OptimConfig, *, num_steps: int) -> ScheduleSettings:
    """The curves that the options describe."""
    end = optim.end_weight_decay
    return ScheduleSettings(
        lr=optim.lr,
        min_lr=optim.min_lr,
        warmup_steps=optim.warmup_steps,
        decay_steps=optim.decay_steps or num_steps,
        weight_decay=optim.weight_decay,
        end_weight_decay=optim.weight_decay if end is None else end,
    )


def _seed_generators(seed: int, *, data_index: int, stage_index: int) -> None:
    """Seed Python's, NumPy's and torch's streams: equal on tensor ranks, different elsewhere.

    Tensor ranks hold the same residual stream, so dropout must draw the same mask on them.
    """
    text = f"{seed}:{data_index}" + (f":{stage_index}" if stage_index else "")
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little") >> 1
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def _make_model(config: TrainConfig, *, groups: ProcessGroups, device: torch.device) -> ParallelGPT:
    """The model that the configuration describes, on these groups."""
    return ParallelGPT(
        config.model,
        groups=groups,
        seed=config.seed,
        device=device,
        pipeline=config.layout.pipeline(),
        variant=config.layout.cp_attention,
        autocast=_AUTOCAST[config.precision],
    )


def _make_checkpointer(config: CheckpointConfig, *, groups: ProcessGroups) -> Checkpointer | None:
    """What saves are made with; None for a run that makes none."""
    if config.save is None:
        return None
    return Checkpointer(
        config.save,
        groups=groups,
        retention=_retention(config),
        replicate_over=config.replicate_over,
        max_copy_fraction=config.max_copy_fraction,
    )


def _retention(config: CheckpointConfig) -> Policy | None:
    """Which checkpoints to keep; None keeps all."""
    if config.keep_last == 0:
        return None
    policy: Policy = KeepLast(config.keep_last)
    return policy | KeepEvery(config.keep_every) if config.keep_every else policy
