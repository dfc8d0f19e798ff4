"""Positions in data: what a count of samples is a count of.

A loader with a `DistributedSampler` counts the samples of its own rank. These counts are equal on
all ranks, so they are one value of the checkpoint, and nothing in it says how many ranks there
were. Under another number of them the same count is another position: samples would be trained on
twice, or never. So the number of shares is stored with the position.

Nor does a count say in which order the samples come. With a `DistributedSampler` that follows from
the epoch, which a loop sets before each pass. A load makes the loader's iterator, before the loop
can say it, so the epoch is stored with the position and set before the loader takes that. An order
that a sampler without a state draws for each pass is in no checkpoint, and a save names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from holdfast.errors import MismatchError
from holdfast.state.stored import StoredPart

NUM_SHARES = "_num_data_shares"
"""Key of the number of shares in the state of a loader or sampler."""
EPOCHS = "_data_epochs"
"""Key of the epochs of the samplers in the state of a loader or sampler."""
_ADDED = (NUM_SHARES, EPOCHS)
_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers of torch that draw the order of each pass and have no state."""


def with_measures(owner: object, state: object) -> object:
    """Return the state of an object, with what its position in data is measured by, if known."""
    if type(state) is not dict:
        return state
    shares, epochs = num_shares(owner), [each.epoch for each in _by_epoch(owner)]
    added = {} if shares is None else {NUM_SHARES: shares}
    return {**state, **added} | ({EPOCHS: epochs} if epochs else {})


def without_measures(tree: object) -> object:
    """Return the state of an object as it made it."""
    if isinstance(tree, Mapping) and any(key in tree for key in _ADDED):
        made: Any = dict(tree)
        for key in _ADDED:
            made.pop(key, None)
        return made
    return tree


def set_epochs(owner: object, tree: object) -> None:
    """Bring the samplers of a loader to the epoch of the position that it is about to take.

    Args:
        owner: The loader, or a sampler.
        tree: What `with_measures` returned.
    """
    epochs = tree.get(EPOCHS, ()) if isinstance(tree, Mapping) else ()
    samplers = _by_epoch(owner)
    if len(samplers) == len(epochs):  # otherwise it was a loader of other samplers
        for each, epoch in zip(samplers, epochs, strict=True):
            each.set_epoch(epoch)


def _by_epoch(owner: object) -> list[Any]:
    """Return the samplers of a loader whose order follows from an epoch that a loop sets."""
    if not isinstance(owner, DataLoader | Sampler):
        return []
    return [
        each
        for each in samplers_of(owner)
        if callable(getattr(each, "set_epoch", None)) and type(getattr(each, "epoch", None)) is int
    ]


def samplers_of(loader: Any) -> list[Any]:
    """Return a loader and every sampler inside its samplers, each once, from outside to inside."""
    seen: list[Any] = []
    waiting = [loader]
    while waiting:
        each = waiting.pop(0)
        if each is None or any(each is other for other in seen):
            continue
        seen.append(each)
        waiting += [getattr(each, name, None) for name in ("batch_sampler", "sampler")]
        if isinstance(each, Sampler):  # Lightning's, over the one that the user's loader had
            waiting.append(getattr(getattr(each, "dataset", None), "_sampler", None))
    return seen


def unstored_orders(owner: object, name: str, *, kept: Iterable[object]) -> dict[str, str]:
    """Return what the order of a loader's samples follows from and its position does not have.

    Args:
        owner: The loader, or any other object.
        name: Its name.
        kept: Generators that the state keeps as random streams.

    Returns:
        By path, what is lost and what to do.
    """
    state_dict = getattr(type(owner), "state_dict", None)
    if not isinstance(owner, DataLoader) or not _is_of_torchdata(state_dict):
        return {}
    lost = {}
    samplers = samplers_of(owner)[1:]
    drawing = next((each for each in samplers if _draws_unstored(each, owner)), None)
    if drawing is not None and not any(hasattr(each, "state_dict") for each in samplers):
        lost[f"{name}.sampler"] = (
            f"a {type(drawing).__name__} draws the order of each pass and has no state, so that a "
            f"load within a pass skips as many samples of another order: some are trained on "
            f"twice, others never; StatefulDataLoader(shuffle=True) keeps its order if its sampler "
            f"is in no wrapper, and so does a sampler with a state, or one whose order follows "
            f"from its epoch (DistributedSampler)"
        )
    generator = getattr(owner, "generator", None)
    if generator is not None and not any(generator is each for each in kept):
        lost[f"{name}.generator"] = (
            "passes that begin after a load have another order than in the saved run; keep it as a "
            "random stream: RNG(generators={'data': loader.generator})"
        )
    return lost


def _draws_unstored(sampler: object, loader: DataLoader[Any]) -> bool:
    """Return True for a sampler that draws the order of each pass, which no state has.

    One of torchdata has it, if the loader itself iterates over it: its iterator has a state. One in
    a wrapper that takes a rank's share, as Lightning Fabric makes it, is asked for none.
    """
    kind = type(sampler)
    is_its_own = kind.__name__ == "RandomSampler" and _is_of_torchdata(kind)
    return kind in _DRAWING or (is_its_own and sampler is not loader.sampler)


def _is_of_torchdata(function: object) -> bool:
    return getattr(function, "__module__", "").partition(".")[0] == "torchdata"


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
    dataset = getattr(owner, "dataset", owner)
    for each in (*samplers_of(owner), dataset):
        for name in ("num_replicas", "num_processes"):
            if isinstance(value := getattr(each, name, None), int):
                return value
    by_node = getattr(getattr(dataset, "_distributed", None), "world_size", None)
    if isinstance(by_node, int):
        return by_node
    is_known = isinstance(owner, DataLoader) and not isinstance(dataset, IterableDataset)
    return 1 if is_known else None
