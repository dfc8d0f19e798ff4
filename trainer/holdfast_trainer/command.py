"""`holdfast train [PRESET | CONFIG.toml] [--flags]`: train the reference model."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.cli import EXIT_MISTAKE, parse_arguments, print_error, run_command
from holdfast.errors import ConfigError, HoldfastError, LayoutError
from holdfast_trainer.train.config import TrainConfig, read_toml
from holdfast_trainer.train.data import check_paths
from holdfast_trainer.train.digits import check_digits_installed
from holdfast_trainer.train.launch_environment import LaunchEnvironment, record_failure
from holdfast_trainer.train.presets import PRESETS
from holdfast_trainer.train.resume import step_to_load

_ABOUT = (
    "Train the reference model: holdfast train [dense | moe | hybrid | multimodal | CONFIG.toml] "
    "[--flags]. Flags win over preset and file. Start it under torchrun, or with --nproc N by "
    "itself, or alone as one process."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run as `holdfast train` does, without the `holdfast` command; the exit code.

    Args:
        argv: the words after `holdfast train`; default those of this process.
    """
    return run_command(run, sys.argv[1:] if argv is None else argv)


def run(words: Sequence[str]) -> int:
    """Parse, check, and train in this process or in new ones; the exit code.

    Everything that can be refused without torch is refused before it is imported, and before any
    process is started.

    Raises:
        HoldfastError: to be printed as one line by the caller.
    """
    environment = LaunchEnvironment.from_environment()
    try:
        config = parse(words)
        if environment.is_launched:
            _check_foreign(config, environment=environment)
            return _work(config, environment=environment)
        config.check(world_size=config.nproc)
        check_paths(config.data.data)
        if config.vision.multimodal:
            check_digits_installed()
        step_to_load(config.checkpoint)
        if config.nproc == 1:
            return _work(config, environment=environment)
    except HoldfastError as error:
        if environment.is_ours:
            record_failure(error)
            return EXIT_MISTAKE
        if environment.local_rank != 0 and isinstance(error, (ConfigError, LayoutError)):
            # The same on every process; the first one of the machine prints it.
            return EXIT_MISTAKE
        raise
    return _launch(config, words)


def _launch(config: TrainConfig, words: Sequence[str]) -> int:
    """Train in processes of our own; the exit code."""
    from holdfast_trainer.train.launch import launch

    failure = launch(config, arguments=words)
    if failure is None:
        return 0
    if failure.message:
        print_error(failure.message)
    return failure.exit_code


def _work(config: TrainConfig, *, environment: LaunchEnvironment) -> int:
    """Train in this process; the exit code."""
    config.check(world_size=environment.world_size)
    from holdfast_trainer.train.worker import run_worker

    return run_worker(config, environment=environment)


def _check_foreign(config: TrainConfig, *, environment: LaunchEnvironment) -> None:
    """Refuse to start processes inside of those that another launcher has started."""
    if config.nproc > 1 and not environment.is_ours:
        raise ConfigError(
            f"--nproc {config.nproc} inside of another launcher, which has started "
            f"{environment.world_size} processes already: leave --nproc out"
        )


def parse(words: Sequence[str]) -> TrainConfig:
    """The run that a command line describes: a preset or a TOML file, if named first, and flags.

    Raises:
        ConfigError: a mistake in either.
    """
    rest = list(words)
    default = TrainConfig()
    if rest and not rest[0].startswith("-"):
        default = _named(rest.pop(0))
    return parse_arguments(
        TrainConfig,
        rest,
        prog="holdfast train",
        about=_ABOUT,
        default=default,
        has_pairs=True,
        stray="a preset or a CONFIG.toml comes first, and everything else is an option",
    )


def _named(word: str) -> TrainConfig:
    """The run that the first word names: a preset, or a file."""
    if word in PRESETS:
        return PRESETS[word]
    path = Path(word)
    if path.suffix == ".toml" or "/" in word or path.exists():
        return read_toml(path)
    near = difflib.get_close_matches(word, PRESETS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"unknown preset {word!r}: {hint}the presets are {', '.join(PRESETS)}; "
        f"a configuration file is named with its ending, CONFIG.toml"
    )
