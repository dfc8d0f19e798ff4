"""Where a run begins: the checkpoint that `--load` means, and a `--save` that can take more.

Torch-free, so that the command line can look before it starts any process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError, HoldfastError, StorageError
from holdfast.format.names import LATEST, latest_step, list_steps, parse_step_dir
from holdfast.reference.train.config import RANK_LOG_DIR, CheckpointConfig
from holdfast.storage import PosixStorage

if TYPE_CHECKING:
    from holdfast.parallel import Control


def find_checkpoint(checkpoint: CheckpointConfig, *, control: Control) -> int | None:
    """The step to load, the same on every rank; None to begin afresh.

    One rank looks, so that ranks with different views of a shared file system cannot disagree.

    Raises:
        ConfigError, StorageError: on every rank; see `step_to_load`.
    """
    answer = b""
    if control.is_coordinator:
        try:
            answer = b"%d" % (-1 if (step := step_to_load(checkpoint)) is None else step)
        except HoldfastError as error:
            # Sent as an answer, not agreed on: it is one rank's finding, and speaks for all.
            answer = f"{type(error).__name__}: {error}".encode()
    answer = control.broadcast(answer or None, phase="find checkpoint")
    kind, _, message = answer.decode().partition(": ")
    if message:
        raise StorageError(message) if kind == "StorageError" else ConfigError(message)
    return None if int(kind) < 0 else int(kind)


def step_to_load(checkpoint: CheckpointConfig) -> int | None:
    """The step to load as this process sees it; None to begin afresh.

    Raises:
        ConfigError: --load is no checkpoint directory, or has no checkpoint and
            --exit-on-missing-checkpoint is set, or --save already holds later steps.
        StorageError: --save cannot be written.
    """
    step = None if checkpoint.load is None else _step_in(checkpoint.load, checkpoint=checkpoint)
    if checkpoint.save is not None:
        check_save(checkpoint.save, begins_at=0 if checkpoint.finetune else step or 0)
    return step


def _step_in(load: Path, *, checkpoint: CheckpointConfig) -> int | None:
    """The step to load from a directory; None when it is empty and this run fills it."""
    is_own = load == checkpoint.save
    if not load.is_dir():
        if is_own and not load.exists():
            _refuse_missing(f"--load {load}: no such directory", checkpoint=checkpoint)
            return None
        reason = "not a directory" if load.exists() else "no such directory"
        raise ConfigError(
            f"--load {load}: {reason}; name the directory that an earlier run gave as --save"
        )
    storage = PosixStorage(load)
    steps = list_steps(storage)
    if checkpoint.load_step is not None:
        if checkpoint.load_step not in steps:
            have = ", ".join(map(str, steps)) or "none"
            raise ConfigError(
                f"--load-step {checkpoint.load_step}: {load} has no committed checkpoint of that "
                f"step; it has {have}"
            )
        return checkpoint.load_step
    if steps:
        return latest_step(storage)
    names = storage.list("")
    if names and not any(_is_ours(name) for name in names):
        inside = " (it is one checkpoint: name its parent)" if "manifest.json" in names else ""
        raise ConfigError(
            f"--load {load}: not a checkpoint directory{inside}; name the directory that an "
            f"earlier run gave as --save"
        )
    _refuse_missing(f"--load {load}: no committed checkpoint", checkpoint=checkpoint)
    return None


def _refuse_missing(what: str, *, checkpoint: CheckpointConfig) -> None:
    """Refuse to begin afresh where the options say so."""
    if checkpoint.exit_on_missing_checkpoint:
        raise ConfigError(
            f"{what}, and --exit-on-missing-checkpoint is set: name another directory, or leave "
            f"the flag out to start at step 0"
        )


def _is_ours(name: str) -> bool:
    """Whether a name in a directory is one that saves make."""
    return (
        name in (LATEST, RANK_LOG_DIR)
        or name.startswith((".saving-", ".trash-"))
        or (parse_step_dir(name) is not None)
    )


def check_save(save: Path, *, begins_at: int) -> None:
    """Refuse now what would only fail at the first save, after training towards it.

    Args:
        save: the directory of `--save`; it is made.
        begins_at: the step at which the run begins.

    Raises:
        ConfigError: the directory holds later steps than that.
        StorageError: it cannot be written.
    """
    try:
        save.mkdir(parents=True, exist_ok=True)
        probe = save / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StorageError(
            f"--save {save}: cannot be written ({error.strerror}); name a directory that can"
        ) from error
    later = [step for step in list_steps(PosixStorage(save)) if step > begins_at]
    if later:
        raise ConfigError(
            f"--save {save} already holds step {later[-1]} and this run begins at step "
            f"{begins_at}: resume with --load {save}, or give --save another directory"
        )
