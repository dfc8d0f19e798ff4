"""The rerun machine of a training run: what is validated, and what follows from its decision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from holdfast import KeepLast
from holdfast.checkpoint import Checkpointer, SaveReport
from holdfast.errors import DriftError, FaultError
from holdfast.format.values import Codecs
from holdfast.optim import LossScaler
from holdfast.parallel import ProcessGroups
from holdfast.rerun import (
    Decision,
    ErrorInjector,
    ExitCode,
    Limits,
    Mode,
    NotFinite,
    Rejects,
    Replayed,
    RerunMachine,
    Spike,
)
from holdfast.storage import is_url, shown
from holdfast_trainer.train.config import TrainConfig
from holdfast_trainer.train.digits import DigitBatch
from holdfast_trainer.train.rerun_config import RerunConfig, rerun_dir

_ADVICE = {
    ExitCode.RESUME_TO_DISAMBIGUATE: "a bad value came out twice; start again, on other devices if "
    "possible, to tell why",
    ExitCode.TRANSIENT_ERROR: "a transient error; start again",
    ExitCode.PERSISTENT_ERROR: "a persistent error; start again without the device that the report "
    "names",
    ExitCode.CORRECT_RESULT: "a bad value is the correct result; look at the data, the code and "
    "the settings",
    ExitCode.UNDECIDED: "a bad value could not be explained; the report has what is known",
    ExitCode.SPOILED_STATE: "the state was bad before the step; start again from a "
    "checkpoint of an earlier step",
}


class RerunExit(FaultError):
    """The rerun machine ends the run, on all ranks, with an exit code that says why."""

    def __init__(self, decision: Decision) -> None:
        """Take the machine's decision, which has an exit code."""
        super().__init__(decision.message)
        self.decision = decision

    @property
    def exit_code(self) -> int:
        """With which every process of the run ends."""
        return int(self.decision.exit_code or 0)

    def advice(self, save: Path | None) -> str:
        """One line for the person: the exit code, what it means, what to do.

        Args:
            save: the directory of --save.
        """
        text = f"exit code {self.exit_code}: {_ADVICE[ExitCode(self.exit_code)]}"
        if save is None:
            return text
        report = "" if is_url(save) else f"; report in {rerun_dir(save)}"
        return f"{text} (--load {shown(save)}{report})"


class StepRows(Iterator[object]):
    """The rows of the step that the sampler is at, as often as they are requested.

    The sampler's position is the number of finished steps. So after a restart this starts with the
    rows of the step that is run again: it is rewound by nature.
    """

    def __init__(self, take: Callable[[], object]) -> None:
        """Note what makes the rows of the current step."""
        self._take = take

    def __next__(self) -> object:
        """The rows of the current step; never ends."""
        return self._take()


def make_machine(
    config: TrainConfig,
    *,
    groups: ProcessGroups,
    device: torch.device,
    replayed: Replayed,
    optimizer: object,
    note: Callable[[str], None],
) -> RerunMachine:
    """The machine that the options describe. Collective: one agreement.

    Injected errors are in the output of a middle block of each of this rank's modules.

    Args:
        config: of the run.
        groups: of all ranks.
        device: of this process.
        replayed: what is brought back before a rerun.
        optimizer: whose state has to be finite.
        note: takes a line for the person.
    """
    rerun, save = config.rerun, config.checkpoint.save
    injector = None
    if rerun.error_injection_rate:
        injector = ErrorInjector(
            rerun.error_injection_rate,
            rerun.error_injection_type,
            seed=config.seed,
            modules=[_middle_block(each) for each in replayed.modules],
        )
    return RerunMachine(
        groups,
        mode=rerun.rerun_mode,
        directory=None if save is None or is_url(save) else rerun_dir(save),
        replayed=replayed,
        device=device,
        optimizers=[optimizer],
        limits=Limits(max_restarts=rerun.rerun_max_restarts),
        skip_rejected=rerun.rerun_skip_rejected,
        injector=injector,
        report_every=rerun.rerun_report_interval,
        codecs=Codecs(dataclasses=[DigitBatch]),
        note=note,
    )


def validate_step(
    machine: RerunMachine,
    rerun: RerunConfig,
    *,
    row_losses: Tensor | None,
    num_microbatches: int,
    gradient_share: Callable[[], float],
    scaler: LossScaler | None,
) -> None:
    """Validate what this rank has computed in a step: losses before anything is averaged.

    With a loss scale a value that is not finite is ordinary until the scale is at its minimum: the
    update then leaves the step out. Only at the minimum it is rejected.

    Args:
        machine: inside of `attempts`; a disabled one leaves it to the update.
        rerun: tolerance and spikes.
        row_losses: of this rank's rows, microbatch after microbatch; None or empty without any.
        num_microbatches: into how many equal parts they are cut.
        gradient_share: see `BaseTrainer.gradient_share`; collective.
        scaler: of the loss.

    Cost: a wait for the device; that of `gradient_share`.
    """
    if machine.mode is Mode.DISABLED:
        return
    is_ordinary = scaler is not None and scaler.scale > scaler.minimum
    rule = Rejects(_never, "") if is_ordinary else NotFinite()
    tolerance = rerun.rerun_tolerance
    if row_losses is not None and len(row_losses):
        for loss in row_losses.view(num_microbatches, -1).mean(dim=1).tolist():
            machine.validate("loss", loss, rule, tolerance=tolerance)
            if rerun.rerun_spike_factor:
                spike = Spike(factor=rerun.rerun_spike_factor)
                machine.validate("spike", loss, spike, fatal=False, tolerance=tolerance)
    # Gradients are reduced over all ranks.
    machine.validate("gradient", gradient_share(), rule, tolerance=tolerance, fed_by="all")


@contextmanager
def recording_drift(machine: RerunMachine) -> Iterator[None]:
    """Around a save: ranks that hold other bytes than their replicas get into the report."""
    try:
        yield
    except DriftError as error:
        machine.record_drift(error)
        raise


def save_fault(
    machine: RerunMachine, *, step: int, state: dict[str, object], groups: ProcessGroups
) -> SaveReport:
    """Save the state at the start of a step with a fault, apart from good checkpoints. Collective.

    Args:
        machine: says where; part of the state.
        step: finished steps.
        state: whole, whatever ordinary saves leave out.
        groups: of all ranks.
    """
    with Checkpointer(machine.checkpoints, groups=groups, retention=KeepLast(1)) as faults:
        return faults.save(step, state, overwrite=True)


def _middle_block(module: nn.Module) -> nn.Module:
    """Return a module whose output is an activation in the midst of a model.

    Without blocks, as a projector, that is the module itself.
    """
    blocks = getattr(module, "blocks", None)
    if not isinstance(blocks, nn.ModuleDict) or not blocks:
        return module
    return list(blocks.values())[len(blocks) // 2]


def _never(value: object) -> bool:
    """Reject nothing."""
    del value
    return False
