"""Where a run starts: the checkpoint that `--load` means, and a `--save` that can take more.

Torch-free, so that the command line can look before it starts any process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError, CorruptionError, HoldfastError, StorageError
from holdfast.format.names import (
    FAULT_CHECKPOINTS,
    LATEST,
    RANK_LOG_DIR,
    list_steps,
    parse_step_dir,
)
from holdfast.format.rerun_report import REPORT_NAME, read_events, steps_to_leave_out
from holdfast.storage import PosixStorage, Storage, is_url, open_storage, shown
from holdfast_trainer.train.config import CheckpointConfig
from holdfast_trainer.train.rerun_config import RERUN_DIR, rerun_dir

if TYPE_CHECKING:
    from holdfast.parallel import Control


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointToLoad:
    """A committed checkpoint that a run starts with."""

    step: int
    is_fault: bool
    """True if it is one that a fault has left: the state at the start of the step with it."""
    left_out: tuple[int, ...] = ()
    """Later steps whose state is not finite, by the report of the rerun machine."""

    def root(self, load: Path) -> Path:
        """The directory of its step, in that of --load."""
        return fault_checkpoints(load) if self.is_fault else load


def fault_checkpoints(directory: Path) -> Path:
    """Return where the fault checkpoints of a run are, in its --save or --load."""
    return rerun_dir(directory) / FAULT_CHECKPOINTS


def find_checkpoint(
    checkpoint: CheckpointConfig, *, wait: Callable[[], object], control: Control
) -> CheckpointToLoad | None:
    """Return what to load, the same on every rank; None to start afresh.

    One rank looks, so that ranks with different views of a shared file system cannot disagree.

    Args:
        checkpoint: the options.
        wait: waits for writers of an earlier run; called by that rank before it looks.
        control: of all ranks.

    Raises:
        ConfigError, StorageError, CorruptionError: on every rank; see `checkpoint_to_load`.
    """
    answer = b""
    if control.is_coordinator:
        try:
            wait()
            begin = checkpoint_to_load(checkpoint)
            if begin is None:
                answer = b"-1 0"
            else:
                numbers = (begin.step, int(begin.is_fault), *begin.left_out)
                answer = " ".join(map(str, numbers)).encode()
        except (HoldfastError, OSError) as error:
            # Sent as an answer, not agreed on: it is one rank's finding, and speaks for all.
            kind = type(error).__name__ if isinstance(error, HoldfastError) else "StorageError"
            answer = f"{kind}: {error}".encode()
    with control.in_step():  # it may wait longer than ranks do between steps
        answer = control.broadcast(answer or None, phase="find checkpoint")
    kind, _, message = answer.decode().partition(": ")
    if message:
        errors = {each.__name__: each for each in (StorageError, CorruptionError)}
        raise errors.get(kind, ConfigError)(message)
    step, is_fault, *left_out = map(int, kind.split())
    if step < 0:
        return None
    return CheckpointToLoad(step=step, is_fault=bool(is_fault), left_out=tuple(left_out))


def step_to_load(checkpoint: CheckpointConfig) -> int | None:
    """The step of `checkpoint_to_load`."""
    begin = checkpoint_to_load(checkpoint)
    return None if begin is None else begin.step


def checkpoint_to_load(checkpoint: CheckpointConfig) -> CheckpointToLoad | None:
    """Return what to load as this process sees it; None to start afresh.

    The newest fault checkpoint comes before a good one of the same step or an older one, unless
    --load-step or --finetune asks for another. Left out are those that the report of the rerun
    machine knows to be not finite, and the one of a fault that training has passed.

    Raises:
        ConfigError: --load is not a checkpoint directory, or has no checkpoint and
            --exit-on-missing-checkpoint is set, or --save already holds later steps.
        StorageError: --save cannot be written.
    """
    begin = None
    if checkpoint.load is not None:
        known = read_past(checkpoint.load)
        fault = _fault_in(checkpoint.load, checkpoint=checkpoint, known=known)
        step = _step_in(
            checkpoint.load, checkpoint=checkpoint, known=known, has_fault=fault is not None
        )
        if step is not None:
            begin = CheckpointToLoad(step=step, is_fault=False)
        if fault is not None and (step is None or fault >= step):
            begin = CheckpointToLoad(step=fault, is_fault=True)
        if begin is not None and checkpoint.load_step is None:
            later = tuple(sorted(each for each in known.spoiled if each > begin.step))
            begin = replace(begin, left_out=later)
    if checkpoint.save is not None:
        begins_at = 0 if begin is None or checkpoint.finetune else begin.step
        check_save(
            checkpoint.save, begins_at=begins_at, left_out=() if begin is None else begin.left_out
        )
    return begin


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSteps:
    """Checkpoints to leave out, by finished steps, as the report of the rerun machine has them."""

    spoiled: frozenset[int] = frozenset()
    """Their state is not finite."""
    retired: frozenset[int] = frozenset()
    """Fault checkpoints whose step training has passed."""


def read_past(directory: Path) -> KnownSteps:
    """Return what the report in a run's directory says of its checkpoints.

    Raises:
        StorageError, CorruptionError: the report cannot be read.
    """
    if is_url(directory):
        return KnownSteps()  # a rerun machine needs a directory
    spoiled, retired = steps_to_leave_out(read_events(rerun_dir(directory) / REPORT_NAME))
    # The machine counts steps from 1 here: step n + 1 starts with the state of n finished ones.
    return KnownSteps(
        spoiled=frozenset(step - 1 for step in spoiled),
        retired=frozenset(step - 1 for step in retired),
    )


def _fault_in(load: Path, *, checkpoint: CheckpointConfig, known: KnownSteps) -> int | None:
    """The step of the newest fault checkpoint; None without one, or where another is asked for."""
    root = fault_checkpoints(load)
    if is_url(load) or checkpoint.finetune or checkpoint.load_step is not None or not root.is_dir():
        return None
    left_out = known.spoiled | known.retired
    return max(
        (step for step in list_steps(PosixStorage(root)) if step not in left_out), default=None
    )


def _step_in(
    load: Path, *, checkpoint: CheckpointConfig, known: KnownSteps, has_fault: bool
) -> int | None:
    """The step to load from a directory; None when it has none and this run fills it."""
    is_own = load == checkpoint.save
    if not is_url(load) and not load.is_dir():
        if is_own and not load.exists():
            _refuse_missing(f"--load {shown(load)}: no such directory", checkpoint=checkpoint)
            return None
        reason = "not a directory" if load.exists() else "no such directory"
        raise ConfigError(
            f"--load {shown(load)}: {reason}; name the directory that an earlier run gave as --save"
        )
    storage = open_storage(load)
    steps = list_steps(storage)
    if checkpoint.load_step is not None:
        if checkpoint.load_step not in steps:
            have = ", ".join(map(str, steps)) or "none"
            raise ConfigError(
                f"--load-step {checkpoint.load_step}: {shown(load)} has no committed checkpoint "
                f"of that step; it has {have}"
            )
        return checkpoint.load_step
    sound = [step for step in steps if step not in known.spoiled]
    if sound:
        return max(sound)
    if steps:
        raise ConfigError(
            f"--load {shown(load)}: the state of every checkpoint is not finite, by the report in "
            f"{rerun_dir(load)}; name another directory, or --load-step to start with one anyway"
        )
    if has_fault:
        return None
    names = storage.list("")
    if names and not any(_is_ours(name) for name in names):
        inside = " (it is one checkpoint: name its parent)" if "manifest.json" in names else ""
        raise ConfigError(
            f"--load {shown(load)}: not a checkpoint directory{inside}; name the directory that an "
            f"earlier run gave as --save"
        )
    _refuse_missing(f"--load {shown(load)}: no committed checkpoint", checkpoint=checkpoint)
    return None


def _refuse_missing(what: str, *, checkpoint: CheckpointConfig) -> None:
    """Refuse to start afresh where the options say so."""
    if checkpoint.exit_on_missing_checkpoint:
        raise ConfigError(
            f"{what}, and --exit-on-missing-checkpoint is set: name another directory, or leave "
            f"the flag out to start at step 0"
        )


def _is_ours(name: str) -> bool:
    """Return True if a name in a directory is one that saves make."""
    return (
        name in (LATEST, RANK_LOG_DIR, RERUN_DIR)
        or name.startswith((".saving-", ".trash-"))
        or (parse_step_dir(name) is not None)
    )


def _prove_writable(save: Path, storage: Storage) -> None:
    """Write something where a run will save; StorageError if that fails."""
    if is_url(save):
        storage.write_file(".probe", b"")
        storage.remove_tree(".probe")
        return
    try:
        save.mkdir(parents=True, exist_ok=True)
        probe = save / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StorageError(
            f"--save {shown(save)}: cannot be written ({error.strerror}); name a directory that can"
        ) from error


def check_save(save: Path, *, begins_at: int, left_out: Sequence[int] = ()) -> None:
    """Refuse now what would only fail at the first save, after training towards it.

    Args:
        save: the directory of `--save`; it is made.
        begins_at: the step at which the run starts.
        left_out: later steps that are not finite, which the run will save over.

    Raises:
        ConfigError: the directory holds later steps than that.
        StorageError: it cannot be written.
    """
    storage = open_storage(save)
    _prove_writable(save, storage)
    later = [step for step in list_steps(storage) if step > begins_at]
    later = [step for step in later if step not in left_out]
    if later:
        raise ConfigError(
            f"--save {shown(save)} already holds step {later[-1]} and this run starts at step "
            f"{begins_at}: resume with --load {shown(save)}, or give --save another directory"
        )
    if is_url(save):
        return
    faults = fault_checkpoints(save)
    over = {*left_out, *read_past(save).retired}
    known = list_steps(PosixStorage(faults)) if faults.is_dir() else []
    at_fault = max((step for step in known if step not in over), default=None)
    if at_fault is not None and at_fault > begins_at:
        raise ConfigError(
            f"--save {shown(save)} holds the state of a fault at step {at_fault} and this run "
            f"starts at step {begins_at}: resume with --load {shown(save)}, remove {faults}, or "
            f"give --save another directory"
        )
