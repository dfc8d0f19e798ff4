"""The checkpointer that a run's options describe, and what it loads at the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast import KeepEvery, KeepLast
from holdfast.checkpoint import Checkpointer, LoadReport
from holdfast.errors import CorruptionError, StorageError
from holdfast.parallel import ProcessGroups
from holdfast_trainer.train.config import CheckpointConfig
from holdfast_trainer.train.resume import CheckpointToLoad


def make_checkpointer(config: CheckpointConfig, *, groups: ProcessGroups) -> Checkpointer | None:
    """Return what saves are made with; None for a run that makes none."""
    if config.save is None:
        return None
    keep_last = KeepLast(config.keep_last) if config.keep_last else None
    keep_every = KeepEvery(config.keep_every) if config.keep_every else None
    return Checkpointer(
        config.save,
        groups=groups,
        retention=keep_last | keep_every if keep_last and keep_every else keep_last,
        replicate_over=config.replicate_over,
        max_copy_fraction=config.max_copy_fraction,
        max_copied_nbytes=config.max_copied_nbytes,
        check_replicas_every=config.check_replicas_every,
        keep_image_s=config.keep_image_s,
        ckpt_format=config.ckpt_format,
    )


def wait_for_writers(config: CheckpointConfig, *, groups: ProcessGroups) -> None:
    """Wait for writers that have outlived a killed run: they may commit the step to continue from.

    Args:
        config: of this run, which may be that one again.
        groups: of all ranks; only this one waits.
    """
    for root in {root for root in (config.load, config.save) if root is not None}:
        Checkpointer(root, groups=groups).latest()


def load_checkpoint(
    state: Mapping[str, object],
    *,
    begin: CheckpointToLoad,
    config: CheckpointConfig,
    groups: ProcessGroups,
    may_be_missing: tuple[str, ...],
    note: Callable[[str], None],
) -> LoadReport:
    """Load what a run starts with into its state. Collective.

    A damaged fault checkpoint counts as one of --max-fallbacks: the next one is the newest good
    checkpoint.

    Args:
        state: parts to load into.
        begin: what `find_checkpoint` has chosen.
        config: has --load.
        groups: of all ranks.
        may_be_missing: parts that the checkpoint need not have.
        note: takes a line for the person.
    """
    assert config.load is not None
    num_fallbacks = config.max_fallbacks
    if begin.left_out:
        note(
            f"left out: checkpoints of steps {', '.join(map(str, begin.left_out))}, whose state is "
            f"not finite by the report"
        )
        num_fallbacks = 0  # a fallback would start with the newest
    if begin.is_fault:
        root = begin.root(config.load)
        note(f"continuing from the state that a fault has left at step {begin.step}: {root}")
        faults = Checkpointer(root, groups=groups)
        try:
            return faults.load(state, step=begin.step, allow_missing=may_be_missing)
        except (CorruptionError, StorageError) as error:
            if not num_fallbacks:
                raise type(error)(
                    f"{error}\nTo continue from the newest checkpoint in {config.load}: add "
                    f"--max-fallbacks 1, or remove {root}",
                    details=error.details,
                ) from error
            note(f"the state at step {begin.step} that a fault has left was given up: {error}")
            num_fallbacks -= 1
    return Checkpointer(config.load, groups=groups, keep_image_s=config.keep_image_s).load(
        state,
        step=None if begin.is_fault or num_fallbacks else begin.step,
        allow_missing=may_be_missing,
        max_fallbacks=num_fallbacks,
    )


def init_weights(
    state: dict[str, object], *, config: CheckpointConfig, groups: ProcessGroups
) -> LoadReport:
    """Load the weights that a new run starts with. Collective.

    Args:
        state: the parts with weights.
        config: has --init-from.
        groups: of all ranks.

    Raises:
        HoldfastError: on all ranks: it is in no known format, or does not fit the model.
    """
    assert config.init_from is not None
    # Nothing is saved there: a checkpointer needs a root, and this load a source.
    checkpointer = Checkpointer(config.save or config.init_from, groups=groups)
    return checkpointer.load(state, source=config.init_from, names=config.init_map, cast=True)
