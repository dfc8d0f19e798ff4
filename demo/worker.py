"""One rank of the demonstration: the reference trainer, and a save of what was just loaded.

`python -m demo.worker [--save-loaded DIR] -- <flags of holdfast train>`
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from holdfast.checkpoint import Checkpointer
from holdfast.cli.support.messages import EXIT_MISTAKE, print_error
from holdfast.errors import HoldfastError
from holdfast_trainer.command import parse
from holdfast_trainer.train.config import TrainConfig
from holdfast_trainer.train.launch_environment import LaunchEnvironment
from holdfast_trainer.train.worker import open_trainer


def main(words: list[str]) -> int:
    """Train as the rank that the environment names."""
    split = words.index("--")
    save_loaded = Path(words[1]) if words[:1] == ["--save-loaded"] else None
    try:
        work(parse(words[split + 1 :]), save_loaded=save_loaded)
    except HoldfastError as error:
        print_error(error)
        return EXIT_MISTAKE
    return 0


def work(config: TrainConfig, *, save_loaded: Path | None) -> None:
    """Resume, keep a copy of the loaded state as this layout sees it, and train on."""
    torch.use_deterministic_algorithms(config.deterministic)
    world_size = LaunchEnvironment.from_environment().world_size
    config.check(world_size=world_size)
    with open_trainer(config, world_size=world_size, device=torch.device("cpu")) as trainer:
        trainer.resume()
        if save_loaded is not None:
            with Checkpointer(save_loaded, groups=trainer.groups) as checkpointer:
                checkpointer.save(trainer.progress.step, trainer.state())
        trainer.train()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
