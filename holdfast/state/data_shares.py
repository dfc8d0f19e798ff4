"""Positions in data that ranks share: what they count, and of how many shares.

A loader with a `DistributedSampler` counts the samples of its own rank. These counts are equal on
all ranks, so they are one value of the checkpoint, and nothing in it says how many ranks there
were. Under another number of them the same count is another position: samples would be trained on
twice, or never. So the number of shares is stored with the position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler

from holdfast.errors import MismatchError
from holdfast.state.stored import StoredPart

NUM_SHARES = "_num_data_shares"
"""Key of the number of shares in the state of a loader or sampler."""


def with_shares(owner: object, state: object) -> object:
    """Return the state of an object, with the number of shares of its data if that is known."""
    shares = num_shares(owner)
    if shares is None or type(state) is not dict:
        return state
    return {**state, NUM_SHARES: shares}


def without_shares(tree: object) -> object:
    """Return the state of an object as it made it."""
    if isinstance(tree, Mapping) and NUM_SHARES in tree:
        made: Any = dict(tree)
        del made[NUM_SHARES]
        return made
    return tree


def refuse_other_shares(owner: object, stored: StoredPart) -> None:
    """Raise MismatchError if a position counts samples of another number of shares."""
    saved, here = stored.value(NUM_SHARES), num_shares(owner)
    if saved is None or here is None or saved == here or _is_between_passes(stored):
        return
    raise MismatchError(
        f"{stored.name}: the position of a {type(owner).__name__} counts the samples of one of "
        f"{saved} shares of the data, and here there are {here}: samples would be trained on twice "
        f"or never. Load it under {saved} data ranks; or take what is stored "
        f"(load({{'{stored.name}': Stored()}})), make a position of it, and give the loader that"
    )


def _is_between_passes(stored: StoredPart) -> bool:
    """Return True for the state of a `StatefulDataLoader` at which a whole pass comes next."""
    since = (("_num_yielded",), ("_steps_since_snapshot",), ("_snapshot", "_snapshot_step"))
    counts = [value for path in since if (value := stored.value(*path)) is not None]
    return stored.value("_iterator_finished") is True or (bool(counts) and not any(counts))


def num_shares(owner: object) -> int | None:
    """Return into how many shares the data of a loader or sampler are split.

    Known by samplers (`DistributedSampler`, those of Accelerate) and by datasets of Hugging Face
    that are split by node.

    Returns:
        None for other objects, and for an iterable dataset that does not say it.
    """
    is_of_hugging_face = type(owner).__module__.partition(".")[0] == "datasets"
    if not (isinstance(owner, DataLoader | Sampler | IterableDataset) or is_of_hugging_face):
        return None
    batches = getattr(owner, "batch_sampler", None)
    samplers = (owner, getattr(owner, "sampler", None), batches, getattr(batches, "sampler", None))
    dataset = getattr(owner, "dataset", owner)
    for each in (*samplers, dataset):
        for name in ("num_replicas", "num_processes"):
            if isinstance(value := getattr(each, name, None), int):
                return value
    by_node = getattr(getattr(dataset, "_distributed", None), "world_size", None)
    if isinstance(by_node, int):
        return by_node
    is_known = isinstance(owner, DataLoader) and not isinstance(dataset, IterableDataset)
    return 1 if is_known else None
