"""One process of a run: torchrun's, our own launcher's, or the only one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from holdfast import SavePolicy
from holdfast.errors import ConfigError, DeadlineError, HoldfastError
from holdfast.parallel import Layout, ModuleGroups, ModuleLayouts, ProcessGroups, shorten_ranks
from holdfast.storage import shown
from holdfast_trainer._torch import HashStore
from holdfast_trainer.train.base import BaseTrainer
from holdfast_trainer.train.config import TrainConfig
from holdfast_trainer.train.data import Corpus, read_corpus
from holdfast_trainer.train.digits import Digits, read_digits
from holdfast_trainer.train.launch_environment import LaunchEnvironment
from holdfast_trainer.train.loop import Trainer
from holdfast_trainer.train.metrics import Reporter
from holdfast_trainer.train.multimodal import MultimodalTrainer
from holdfast_trainer.train.rerun import RerunExit
from holdfast_trainer.train.stopping import (
    StopDir,
    on_stop_signals,
    print_line,
    signal_name,
    stop_directory_of_launcher,
)


def run_worker(config: TrainConfig, *, environment: LaunchEnvironment) -> int:
    """Train as one process of the run that the environment describes.

    SIGTERM or SIGINT on any rank stops all of them after the same step, which is saved; a second
    one ends the process at once.

    Returns:
        The exit code: 0, 128 and the number of the signal that the run stopped for, or that of the
        rerun machine. Our own launcher finds that in a file instead, and gets 0.

    Raises:
        HoldfastError: a mistake or a failure, on every rank.
    """
    config.check(world_size=environment.world_size)
    device = _pick_device(config, environment=environment)
    _set_determinism(config, device=device)
    stop_dir = stop_directory_of_launcher() if environment.is_ours else StopDir(None)
    is_speaker = environment.rank == 0 and not environment.is_ours
    exit_code = 0
    with (
        on_stop_signals(directories=config.checkpoint.directories if is_speaker else None) as stop,
        stop_dir.enlisted(),
        open_trainer(
            config, world_size=environment.world_size, device=device, stop=stop
        ) as trainer,
    ):
        if trainer.reporter is not None:
            trainer.reporter.note(summary(trainer))
            if config.checkpoint.save is None:
                trainer.reporter.note(
                    "nothing of this run is saved: --save DIR does", style="yellow"
                )
        try:
            with _lost_ranks_explained(trainer.groups.rank):
                stop_signal = trainer.run()
        except RerunExit as end:
            exit_code, stop_signal = end.exit_code, 0
            _end_for_rerun(end, trainer, stop_dir=stop_dir, environment=environment)
        if stop_signal and environment.rank == 0:
            print_line(_stop_message(trainer, stop_signal))
            stop_dir.record_stop(stop_signal)
    if environment.is_ours:
        return 0
    if exit_code and environment.is_launched:
        # The first process to leave has the others ended; each keeps its own exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return exit_code or (128 + stop_signal if stop_signal else 0)


@contextmanager
def open_trainer(
    config: TrainConfig, *, world_size: int, device: torch.device, stop: SavePolicy | None = None
) -> Iterator[BaseTrainer]:
    """The trainer of a run, with its communicators, data and reports; collective.

    Args:
        config: the run.
        world_size: processes of it.
        device: of this one.
        stop: stops the run, with the number of a signal as its vote.
    """
    with ExitStack() as stack:
        if config.vision.multimodal:
            modules = stack.enter_context(
                open_modules(
                    config.module_layouts(world_size=world_size),
                    device=device,
                    config=config,
                )
            )
            digits, reporter = open_digits(config, groups=modules.union, stack=stack)
            yield stack.enter_context(
                MultimodalTrainer(
                    config,
                    groups=modules,
                    digits=digits,
                    reporter=reporter,
                    device=device,
                    stop=stop,
                )
            )
            return
        layout = config.check(world_size=world_size)
        groups = stack.enter_context(open_groups(layout, device=device, config=config))
        corpus, reporter = open_inputs(config, groups=groups, stack=stack)
        yield stack.enter_context(
            Trainer(
                config, groups=groups, corpus=corpus, reporter=reporter, device=device, stop=stop
            )
        )


def _end_for_rerun(
    end: RerunExit, trainer: BaseTrainer, *, stop_dir: StopDir, environment: LaunchEnvironment
) -> None:
    """Say once why the run ends, and with which exit code. Collective."""
    if environment.rank == 0:
        print_line(end.advice(trainer.config.checkpoint.save))
        stop_dir.record_exit(end.exit_code)
    # No rank leaves, and has a launcher end the others, before the first one has reported.
    trainer.groups.control.all_gather(b"", phase="end for a rerun")


def _stop_message(trainer: BaseTrainer, stop_signal: int) -> str:
    """One line: the signal, the step, and the checkpoint to continue from."""
    stopped = f"stopped by {signal_name(stop_signal)} after step {trainer.progress.step}"
    if trainer.safe is None and trainer.config.checkpoint.save is not None:
        return f"{stopped}: there was nothing to save yet"
    if trainer.safe is None:
        return f"{stopped}: nothing of it is saved; --save DIR does"
    step, directory = trainer.safe
    place = shown(directory)
    return f"{stopped}: step {step} is safe in {place}; --load {place} continues from it"


@contextmanager
def open_groups(
    layout: Layout, *, device: torch.device, config: TrainConfig
) -> Iterator[ProcessGroups]:
    """The communicators of a layout over the environment's world; none for one process."""
    if layout.world_size == 1:
        with ProcessGroups.single() as groups:
            yield groups
        return
    with (
        _default_group(device, config=config) as backend,
        ProcessGroups.create(
            layout,
            backend=backend,
            timeout_s=config.timeout_s,
            data_timeout_s=config.data_timeout_s,
        ) as groups,
    ):
        yield groups


@contextmanager
def open_modules(
    layouts: ModuleLayouts, *, device: torch.device, config: TrainConfig
) -> Iterator[ModuleGroups]:
    """The communicators of all modules over the environment's world; also for one process."""
    # One process has no launcher to meet: it has its own store.
    alone = (
        {"store": HashStore(), "rank": 0, "world_size": 1} if layouts.union.world_size == 1 else {}
    )
    with (
        _default_group(device, config=config, **alone) as backend,
        ModuleGroups.create(
            layouts,
            backend=backend,
            timeout_s=config.timeout_s,
            data_timeout_s=config.data_timeout_s,
        ) as groups,
    ):
        yield groups


@contextmanager
def _default_group(device: torch.device, *, config: TrainConfig, **where: Any) -> Iterator[str]:
    """Torch's default group while it is used; yields the backend of the communicators.

    Args:
        device: where the model computes.
        config: its limit of time.
        where: the store to meet at; default the environment's.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        timeout=timedelta(seconds=config.timeout_s),
        **where,
    )
    try:
        yield backend
    finally:
        dist.destroy_process_group()


def open_inputs(
    config: TrainConfig, *, groups: ProcessGroups, stack: ExitStack
) -> tuple[Corpus, Reporter | None]:
    """Read the text on every rank and open the reports on one; all ranks fail together.

    Raises:
        ConfigError, StorageError: on every rank, naming the rank whose text or file is at fault.
    """
    return _open(
        config,
        groups=groups,
        stack=stack,
        read=lambda: read_corpus(config.data.data),
        what="text",
        fix="put the same files on every machine, or name a shared directory with --data",
    )


def open_digits(
    config: TrainConfig, *, groups: ProcessGroups, stack: ExitStack
) -> tuple[Digits, Reporter | None]:
    """Read the digits on every rank and open the reports on one; all ranks fail together.

    Raises:
        ConfigError, StorageError: on every rank, naming the rank whose digits or file is at fault.
    """
    return _open(
        config,
        groups=groups,
        stack=stack,
        read=read_digits,
        what="digits",
        fix="install the same version of scikit-learn on every machine",
    )


class _HasFingerprint(Protocol):
    """Data of a run."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal data."""
        ...


_Data = TypeVar("_Data", bound=_HasFingerprint)


def _open(
    config: TrainConfig,
    *,
    groups: ProcessGroups,
    stack: ExitStack,
    read: Callable[[], _Data],
    what: str,
    fix: str,
) -> tuple[_Data, Reporter | None]:
    """Read data on every rank and open the reports on one; all ranks fail together."""
    error: HoldfastError | None = None
    data: _Data | None = None
    reporter = None
    control = groups.control
    try:
        data = read()
        if control.is_coordinator:
            reporter = stack.enter_context(Reporter(config.log, num_steps=config.steps))
    except HoldfastError as reason:
        error = reason
    mine = data.fingerprint.encode() if data is not None else b""
    prints = control.agree(error, phase=f"read {what}", payload=mine)
    odd = [rank for rank, seen in zip(control.ranks, prints, strict=True) if seen != prints[0]]
    if odd or data is None:
        raise ConfigError(
            f"the {what} on rank(s) {odd} is not that of rank {control.ranks[0]}: {fix}"
        )
    return data, reporter


@contextmanager
def _lost_ranks_explained(rank: int) -> Iterator[None]:
    """Turn what a collective raises when another rank died into an error that says so.

    Gloo has no class for it, only a RuntimeError with its source file in the text.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
            raise
        raise DeadlineError(
            f"rank {rank} lost another rank in a collective: look for the one that ended first, "
            f"and start again with --load ({error})"
        ) from error


def _pick_device(config: TrainConfig, *, environment: LaunchEnvironment) -> torch.device:
    """This process's device; ConfigError if there are too few."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: this machine has no usable GPU; use --device cpu")
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if environment.local_world_size > num_devices:
        raise ConfigError(
            f"this machine has {num_devices} GPUs for {environment.local_world_size} processes: "
            f"start at most {num_devices} processes per machine, or use --device cpu"
        )
    torch.cuda.set_device(environment.local_rank)
    return torch.device("cuda", environment.local_rank)


def _set_determinism(config: TrainConfig, *, device: torch.device) -> None:
    """Process-wide switches of torch, set once at the start of the process."""
    if not config.deterministic:
        return
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def summary(trainer: BaseTrainer) -> str:
    """One line about a run for its beginning."""
    if isinstance(trainer, MultimodalTrainer):
        where = "; ".join(
            f"{name} on {_place(layout)}" for name, layout in trainer.modules.layouts.items()
        )
        return (
            f"{where} ({trainer.device.type}, {trainer.config.precision}); "
            f"{trainer.sampler.digits.source}"
        )
    if not isinstance(trainer, Trainer):
        return f"a {type(trainer).__name__}"
    sampler = trainer.sampler
    num_parameters = sum(p.numel() for p in trainer.model.module.parameters())
    return (
        f"{num_parameters:,} parameters on {_axes(trainer.groups.layout)} ({trainer.device.type}, "
        f"{trainer.config.precision}); {sampler.corpus.nbytes / 1e6:.1f} MB of text in "
        f"{sampler.corpus.num_files} files from {sampler.corpus.source}"
    )


def _place(layout: Layout) -> str:
    """A module's ranks and how they are arranged, for people."""
    ranks = shorten_ranks(layout.ranks)
    return f"ranks {ranks} as {_axes(layout)}" if layout.world_size > 1 else f"rank {ranks}"


def _axes(layout: Layout) -> str:
    """A layout's axes of several ranks, for people."""
    axes = [
        f"{axis.upper()}{layout.size(axis)}"
        for axis in ("tp", "cp", "dp", "pp")
        if layout.size(axis) > 1
    ]
    return " x ".join(axes) or "one process"
