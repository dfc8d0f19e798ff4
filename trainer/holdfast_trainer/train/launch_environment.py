"""Which process of a run this is. Imports torch only to record a failure."""

from __future__ import annotations

import os
from dataclasses import dataclass

from holdfast.errors import ConfigError, HoldfastError

RUN_PREFIX = "holdfast-"
"""How the run id starts that our own launcher gives its processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """Which process this is, from the variables that a launcher sets."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    is_launched: bool = False
    """True if a launcher (torchrun, ours) started this process."""
    is_ours: bool = False
    """True if it was ours, which prints errors itself."""

    @classmethod
    def from_environment(cls) -> LaunchEnvironment:
        """Read torchrun's variables; without them, one process.

        Raises:
            ConfigError: only some are set, or one is not a number.
        """
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            return cls()
        try:
            rank = int(os.environ["RANK"])
            return cls(
                rank=rank,
                world_size=int(os.environ["WORLD_SIZE"]),
                local_rank=int(os.environ.get("LOCAL_RANK", rank)),
                local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
                is_launched=True,
                is_ours=os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_PREFIX),
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"the environment has only part of what a launcher sets ({error}): set RANK, "
                f"WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none of them"
            ) from error


def record_failure(error: HoldfastError) -> None:
    """Leave the error where our launcher finds it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
