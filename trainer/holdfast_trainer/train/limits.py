"""Which numbers a run's options may have, each on its own; torch-free.

Every numeric field of every table is checked, also one that is added later: a number is finite, not
negative and not absurd, and stricter where the tables here say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from holdfast.errors import ConfigError

_MOST = 10**12
_MOST_OF: dict[str, float] = {
    "momentum": 1.0,
    "nproc": 1024,
    "seed": 2**63 - 1,
    "timeout_s": 30 * 86400.0,
    "data_timeout_s": 30 * 86400.0,
    "num_layers": 10**5,
    "num_experts": 10**6,
    "vocab_size": 2**31,
    "model_dim": 2**24,
    "mlp_dim": 2**24,
    "expert_dim": 2**24,
    "num_heads": 2**24,
    "vision_layers": 10**5,
    "vision_dim": 2**24,
    "vision_heads": 2**24,
    "projector_dim": 2**24,
    "state_dim": 2**24,
    "state_heads": 2**24,
    "state_groups": 2**24,
    "state_expand": 2**16,
    "conv_width": 2**16,
    "seq_len": 2**31,
    "global_batch_size": 2**31,
}
"""Greatest values where the general one is too large to mean anything."""

_POSITIVE = frozenset(
    {
        *(
            "nproc",
            "steps",
            "timeout_s",
            "data_timeout_s",
            "seq_len",
            "global_batch_size",
            "log_interval",
        ),
        *("save_interval", "bucket_nbytes", "tp", "pp", "cp", "ep", "expt_tp", "dp"),
        *("stages_per_rank", "stage_layers", "vocab_size", "num_layers", "model_dim", "num_heads"),
        *("vision_layers", "vision_dim", "vision_heads", "projector_dim", "vision_tp"),
        *("rerun_max_restarts", "rerun_report_interval"),
        *("num_experts", "top_k", "state_dim", "state_expand", "conv_width", "rope_base"),
        "init_std",
    }
)
"""Where 0 has no meaning either."""

_BELOW_1 = frozenset({"beta1", "beta2", "dropout", "vision_dropout"})
"""Decays and probabilities."""


def check_numbers(config: object) -> None:
    """Refuse a number that cannot be meant; ConfigError with the flag, the value and the range."""
    for name, value in _numbers(config):
        range_ = None
        if not math.isfinite(value) or value < 0 or (value == 0 and name in _POSITIVE):
            range_ = "a positive number" if name in _POSITIVE else "0 or a positive number"
        elif name in _BELOW_1 and value >= 1:
            range_ = "a number in [0, 1)"
        elif value > (most := _MOST_OF.get(name, _MOST)):
            range_ = f"{most:,} or less"
        if range_ is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; set it to {range_}")


def _numbers(config: object) -> Iterator[tuple[str, int | float]]:
    """Each numeric field by name, those of the tables below included; several of a tuple."""
    table: Any = config
    for field in fields(table):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _numbers(value)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, int | float) and not isinstance(item, bool):
                yield field.name, item
