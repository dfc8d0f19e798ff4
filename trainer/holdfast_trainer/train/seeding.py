"""Seeds of the random streams of a run."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_generators(value: int) -> None:
    """Seed Python's, NumPy's and torch's streams of the process."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def derive_seed(*parts: object) -> int:
    """A seed that is a function of these parts' texts; different ones have different seeds."""
    text = ":".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
