"""What every trainer does, whatever it trains: the loop, saves, resuming, reports, stopping."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from holdfast import AppliesLater, AtStep, EverySteps, SavePolicy, SaveSchedule
from holdfast.checkpoint import LoadReport, PendingSave, RankLog, SaveReport
from holdfast.errors import ConfigError, FaultError, HoldfastError
from holdfast.optim import LossScaler, StepOutcome
from holdfast.parallel import ProcessGroups
from holdfast.rerun import Replayed
from holdfast.storage import is_url, shown
from holdfast_trainer.train.checkpointer import (
    init_weights,
    load_checkpoint,
    make_checkpointer,
    wait_for_writers,
)
from holdfast_trainer.train.config import OptimConfig, TrainConfig
from holdfast_trainer.train.data import EpochSampler
from holdfast_trainer.train.metrics import Reporter, StepMetrics, readable_nbytes
from holdfast_trainer.train.progress import Progress
from holdfast_trainer.train.rerun import (
    RerunExit,
    StepRows,
    make_machine,
    recording_drift,
    save_fault,
    validate_step,
)
from holdfast_trainer.train.resume import check_save, find_checkpoint
from holdfast_trainer.train.schedule import HasParamGroups, Schedule, ScheduleSettings
from holdfast_trainer.train.stopping import WhenReaderLeaves

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of matrix products by `--precision`."""


class BaseTrainer(ABC):
    """A training state, the loop that changes it step by step, and its checkpoints."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        groups: ProcessGroups,
        optimizer: HasParamGroups,
        sampler: EpochSampler,
        scaler: LossScaler | None,
        num_microbatches: int,
        device: torch.device,
        replayed: Replayed,
        reporter: Reporter | None,
        stop: SavePolicy | None,
    ) -> None:
        """Everything but the model, at step 0.

        Args:
            config: checked by `TrainConfig.check`.
            groups: of all ranks of the run: checkpoints and agreement.
            optimizer: whose groups the schedule sets.
            sampler: of the rows of each step.
            scaler: of the loss; absent without scaling.
            num_microbatches: equal parts of a rank's rows.
            device: of this process.
            replayed: what a rerun of a step needs to be as it was.
            reporter: where this rank reports; absent on all ranks but one.
            stop: stops the run, with the number of a signal as its vote, such as `OnSignal`.
        """
        self.config = config
        self.groups = groups
        self.reporter = reporter
        self.scaler = scaler
        self.num_microbatches = num_microbatches
        self.device = device
        self.machine = make_machine(
            config,
            groups=groups,
            device=device,
            replayed=replayed,
            optimizer=optimizer,
            note=self._note,
        )
        self._batches = self.machine.replayable(StepRows(self.step_rows), is_rewound=True)
        self.schedule = Schedule(
            optimizer,
            settings=_schedule_settings(config.optim, num_steps=config.steps),
            on_override=self._note,
        )
        self._num_tokens = config.data.global_batch_size * config.data.seq_len
        self.progress = Progress(sampler, allow_other_data=config.data.allow_other_data)
        # In other data a run continues at the stored row, and states its own data.
        self._progress_part = (
            AppliesLater(self.progress) if config.data.allow_other_data else self.progress
        )
        self._checkpointer = make_checkpointer(config.checkpoint, groups=groups)
        policy = EverySteps(config.checkpoint.save_interval) | AtStep(config.steps)
        policy |= WhenReaderLeaves(reporter)
        self._save_schedule = SaveSchedule(
            policy if stop is None else policy | stop, control=groups.control
        )
        self._save_schedule.saved(0)  # a run that has not started has nothing to keep
        self._pending: tuple[PendingSave, float, float] | None = None
        save = config.checkpoint.save
        # A log grows line by line, which an object cannot.
        log_in = save if config.log.rank_log and save is not None and not is_url(save) else None
        self._log = RankLog(log_in, groups=groups)
        self._damaged: tuple[int, ...] = ()
        self.safe: tuple[int, Path] | None = None
        """The step that a run can continue from, and the directory it is in; None before any is."""

    @abstractmethod
    def state(self) -> dict[str, object]:
        """The whole training state by part; what `Checkpointer` saves and loads into."""

    @abstractmethod
    def step_rows(self) -> object:
        """This rank's rows of the batch at the sampler's position; the same each time."""

    @abstractmethod
    def forward_backward(self, rows: object) -> Tensor | None:
        """Add the gradient of the mean loss of one global batch to the parameters. Collective.

        After `drop_gradients`, and with the random generators as before, another call adds bitwise
        the same gradients.

        Args:
            rows: what `step_rows` gave; not changed.

        Returns:
            (rows,) losses of this rank's rows, microbatch after microbatch; empty or None on ranks
            that compute none.
        """

    @abstractmethod
    def gradient_share(self) -> float:
        """The norm of what this rank holds of the reduced gradients. Collective.

        Cost: the reductions that the update would make otherwise; reads this rank's part once.
        """

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget what `forward_backward` has added; nothing else of the state."""

    @abstractmethod
    def finish_update(self, row_losses: Tensor | None) -> tuple[float, StepOutcome]:
        """Average the losses of all ranks, and update unless something is not finite. Collective.

        Nothing is updated either if the rerun machine of any rank has a veto.

        Args:
            row_losses: what `forward_backward` gave.

        Returns:
            The mean loss of the global batch, and the outcome of the update.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until this rank's parameters are whole and up to date."""

    @abstractmethod
    def detach(self) -> None:
        """Take the optimizer's hooks off the model."""

    @abstractmethod
    def after_step(self, step: int) -> None:
        """Return what else is to be done once a step is finished; collective."""

    def __enter__(self) -> Self:
        """Itself; leaving gives back the staging memory and the hooks on the model."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Give back the staging memory and the hooks; groups and reporter are the caller's."""
        if error is None:
            self.detach()
        self._save_schedule.close()
        if self._checkpointer is not None:
            self._checkpointer.close()

    def run(self) -> int:
        """Resume if configured to, then train to the last step; see `resume` and `train`."""
        self.resume()
        if self.progress.step >= self.config.steps:
            self._note(
                f"step {self.progress.step} of {self.config.steps}: nothing is left to train; "
                f"raise --steps to continue"
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
            self.after_step(metrics.step)
            decision = self._save_schedule.decide(metrics.step)
            if decision.save and self._checkpointer is not None:
                self.save()
            self._report_finished()
        self.synchronize()
        self._finish_save()
        return decision.stop_vote if self.progress.step < num_steps else 0

    def train_step(self) -> StepMetrics:
        """One optimizer step on the next global batch.

        With sharded optimizers updated parameters may still be on their way when it returns; the
        next step and `save` wait for them, anything else calls `synchronize()`.

        Raises:
            FaultError: on every rank, before the update, if loss or gradient is not finite; with
                a loss scale, only when that cannot be lowered any more.
            RerunExit: on every rank, with a rerun machine in place of that; the state is saved
                where the machine asks for it.
        """
        started = time.perf_counter()
        step = self.progress.step + 1
        if self.machine.skips(step, self._batches):
            return self._leave_out(step, started=started)
        loss, outcome = math.nan, None
        for number in self.machine.attempts(step, self._batches):
            if number:
                self.drop_gradients()
            row_losses = self.forward_backward(next(self._batches))
            validate_step(
                self.machine,
                self.config.rerun,
                row_losses=row_losses,
                num_microbatches=self.num_microbatches,
                gradient_share=self.gradient_share,
                scaler=self.scaler,
            )
            # Inside: the sum of the update carries what this rank has rejected.
            loss, outcome = self.finish_update(row_losses)
        self._obey_decision()
        assert outcome is not None
        return self._finish_step(outcome, loss=loss, started=started)

    def _obey_decision(self) -> None:
        """Go on, or save what the machine asks for and raise RerunExit on all ranks."""
        decision = self.machine.decision
        if decision.exit_code is None:
            return
        self.drop_gradients()
        self.synchronize()
        if decision.save:
            try:
                self._finish_save()
            except HoldfastError as error:  # that step is lost, this one need not be
                self._note(f"the save in flight failed: {error}")
            step = self.progress.step
            report = save_fault(self.machine, step=step, state=self.state(), groups=self.groups)
            if self.reporter is not None:
                self.reporter.event("fault_save", {"step": step, "path": str(report.path)})
            self._note(f"saved the state before step {step + 1} for its rerun: {report.path}")
        raise RerunExit(decision)

    def _leave_out(self, step: int, *, started: float) -> StepMetrics:
        """Pass over the rows of a step, and update nothing."""
        self._note(
            f"step {step} is left out: by the report its data is bad, whatever device it runs on"
        )
        next(self._batches)
        self.progress.advance()
        return StepMetrics(
            step=self.progress.step,
            loss=math.nan,
            lr=self.schedule.lr,
            weight_decay=self.schedule.weight_decay,
            grad_norm=math.nan,
            num_tokens=self._num_tokens,
            seconds=time.perf_counter() - started,
            skipped=True,
        )

    def _finish_step(self, outcome: StepOutcome, *, loss: float, started: float) -> StepMetrics:
        """Count a step that was updated, or left out for a lower loss scale; else FaultError.

        Args:
            outcome: of the update.
            loss: mean of the global batch.
            started: when the step began, by `time.perf_counter`.
        """
        if outcome.skipped and (self.scaler is None or outcome.loss_scale <= self.scaler.minimum):
            raise FaultError(
                f"step {self.progress.step + 1}: the loss is {loss:g} and the gradient is not "
                f"finite on {len(outcome.bad_ranks)} of {self.groups.layout.world_size} ranks "
                f"{list(outcome.bad_ranks)}; no update was made. Resume from the last checkpoint "
                f"with a lower --lr"
            )
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
            num_tokens=self._num_tokens,
            seconds=time.perf_counter() - started,
            loss_scale=None if self.scaler is None else outcome.loss_scale,
            skipped=outcome.skipped,
        )

    def save(self) -> None:
        """Save the state at the current step; collective.

        With `async_save` it returns once the state is copied, or, with `lazy_staging`, agreed on;
        the next update waits for the rest of the copy. The save is reported as saved at the first
        step after it is committed.
        """
        if self._checkpointer is None:
            raise ConfigError("a save in a run without --save: add --save DIR")
        state = self.state()
        if not self.config.checkpoint.save_optim:
            state = _without(state, {"optimizer"})
        if not self.config.checkpoint.save_rng:
            state = _without(state, {"rng"})
        started, began = time.perf_counter(), time.time()
        step = self.progress.step
        self._save_schedule.saved(step)
        overwrite = step in self._damaged
        if self.config.checkpoint.async_save:
            self._finish_save()
            pending = self._checkpointer.save_async(
                step,
                state,
                overwrite=overwrite,
                stage="lazily" if self.config.checkpoint.lazy_staging else "at once",
            )
            self._pending = (pending, time.perf_counter() - started, began)
        else:
            with recording_drift(self.machine):
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
            with recording_drift(self.machine):
                self._report_save(pending.result(), seconds, began=began)

    def _report_save(self, report: SaveReport, seconds: float, *, began: float) -> None:
        """Report a committed save, from which the run can now continue."""
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
        """Load what the configuration asks for; None if this run starts afresh. Collective."""
        checkpoint = self.config.checkpoint
        begin = find_checkpoint(
            checkpoint,
            wait=lambda: wait_for_writers(checkpoint, groups=self.groups),
            control=self.groups.control,
        )
        if checkpoint.load is None or begin is None:
            if checkpoint.load is not None:
                self._note(
                    f"no committed checkpoint in {shown(checkpoint.load)}: starting at step 0"
                )
            return None if checkpoint.init_from is None else self._init_weights()
        state = self.state()
        chosen = {
            "optimizer": checkpoint.load_optim,
            "scheduler": checkpoint.load_scheduler,
            "rng": checkpoint.load_rng,
            # A step that does not start as it did says nothing about what it was.
            "rerun": checkpoint.load_optim and checkpoint.load_rng,
        }
        if checkpoint.finetune:
            chosen = dict.fromkeys(map(_kind, state), False) | {"model": True}
        started, began = time.perf_counter(), time.time()
        report = load_checkpoint(
            _without(state, {kind for kind, is_chosen in chosen.items() if not is_chosen}),
            begin=begin,
            config=checkpoint,
            groups=self.groups,
            may_be_missing=self.may_be_missing,
            note=self._note,
        )
        self._after_load(report)
        self._damaged += begin.left_out
        self._log.load(report, began=began)
        if report.missing:
            self._note(self.describe_missing(report))
        seconds = time.perf_counter() - started
        # The optimizer's part brings the stored lr: this run's schedule applies.
        self.schedule.apply()
        self._report_load(report, seconds=seconds)
        return report

    def _init_weights(self) -> LoadReport:
        """Load the weights of --init-from; everything else starts afresh. Collective."""
        state = self.state()
        others = set(map(_kind, state)) - {"model"}
        report = init_weights(
            _without(state, others), config=self.config.checkpoint, groups=self.groups
        )
        verified = "" if report.is_verified else ", without digests"
        self._note(
            f"weights from {self.config.checkpoint.init_from}: {len(report.loaded)} tensors, "
            f"{readable_nbytes(report.job.nbytes_read)} read by all ranks in "
            f"{report.seconds:.2f} s{verified}"
        )
        for sentence in report.left_out:
            self._note(f"left out of --init-from: {sentence}")
        return report

    @property
    def may_be_missing(self) -> tuple[str, ...]:
        """Parts that a checkpoint need not have."""
        return ("scaler",)

    def describe_missing(self, report: LoadReport) -> str:
        """Return what a person reads where some were missing."""
        del report
        return "the checkpoint was trained without a loss scale: it starts afresh"

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
        source = self.config.checkpoint.load
        if self.reporter is None or source is None:
            return
        self.reporter.event(
            "load",
            {
                "step": report.step,
                "path": shown(source),
                "begins_at": self.progress.step,
                "nbytes_read": report.job.nbytes_read,
                "nbytes_needed": report.job.nbytes_needed,
                "seconds": round(seconds, 4),
            },
        )
        what = "weights of step" if self.config.checkpoint.finetune else "step"
        self._note(
            f"loaded {what} {report.step} from {shown(source)}: "
            f"{readable_nbytes(report.job.nbytes_read)} read by all ranks in {seconds:.2f} s"
        )

    def _note(self, text: str) -> None:
        """One line for the person, on the rank that reports."""
        if self.reporter is not None:
            self.reporter.note(text, style="yellow")


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


def _kind(name: str) -> str:
    """Return what a part is, without the module it is of: `vision.optimizer` is an optimizer."""
    return name.rpartition(".")[2]


def _without(state: dict[str, object], kinds: Collection[str]) -> dict[str, object]:
    """A state without the parts of some kinds."""
    return {name: part for name, part in state.items() if _kind(name) not in kinds}
