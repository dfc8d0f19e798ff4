"""The place of a loader whose dataset and collator draw from generators of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from holdfast.integrations.loaders import place_of


class Rows(Dataset[torch.Tensor]):
    """Rows with noise from a generator of NumPy."""

    def __init__(self) -> None:
        self.noise = np.random.default_rng(3)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.noise.random()])


class Masks:
    """A collator that draws from generators of torch and of Python."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.jitter = random.Random(5)

    def __call__(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Return a batch."""
        masks = torch.rand(len(rows), 2, generator=self.generator)
        return torch.stack(rows) + masks + self.jitter.random()


class Lazily:
    """As collators of transformers are: it makes its generator when it draws first."""

    seed, generator = 7, None

    def create_rng(self) -> None:
        """Make the generator."""
        self.generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Return a batch."""
        if self.generator is None:
            self.create_rng()
        return torch.stack(rows) + torch.rand(1, generator=self.generator)


OWNERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "dataset of a subset": lambda: (Subset(Rows(), range(10)), None),
    "collator": lambda: (Rows(), Masks()),
    "method": lambda: (Rows(), Masks().__call__),
    "made when it draws": lambda: (Rows(), Lazily()),
}


@pytest.mark.parametrize("at", [2, 4])
@pytest.mark.parametrize("name", OWNERS)
def test_generators_of_datasets_and_collators_go_on(name: str, at: int) -> None:
    """X20. With the batch that was fetched ahead, which a loader has drawn for before the save."""

    def loader_of() -> DataLoader[torch.Tensor]:
        dataset, collate = OWNERS[name]()
        return DataLoader(dataset, batch_size=2, shuffle=True, collate_fn=collate)

    torch.manual_seed(1)
    first = loader_of()
    place: Any = place_of(first)
    place.ahead = lambda: 1  # as loops that know their last batch fetch
    rest = iter(first)
    ahead = [next(rest) for _ in range(at)][-1]
    state, now = place.state_dict(), torch.get_rng_state()
    assert state["batches"] == at - 1
    expected = [[batch.tolist() for batch in each] for each in (rest, first)]
    second = loader_of()
    torch.manual_seed(2)
    resumed: Any = place_of(second)
    resumed.load_state_dict(state)
    torch.set_rng_state(now)
    rest = iter(second)
    assert next(rest).tolist() == ahead.tolist()
    assert [[batch.tolist() for batch in each] for each in (rest, second)] == expected


def _order(loader: DataLoader[torch.Tensor]) -> list[list[float]]:
    return [batch[:, 0].tolist() for batch in loader]


@pytest.mark.parametrize("num_rows", [11, 12])
def test_the_draw_of_a_sampler_at_its_end_counts(num_rows: int) -> None:
    """X20. A `RandomSampler` with a generator draws once more: with the last rows, or after them.

    A resume set the generator back after that draw, and later passes had another order.
    """

    def loader_of(seed: int) -> DataLoader[torch.Tensor]:
        own = torch.Generator().manual_seed(seed)
        return DataLoader(
            Subset(Rows(), range(num_rows)), batch_size=2, shuffle=True, generator=own
        )

    for at in range(2, 7):
        first, second = loader_of(1), loader_of(2)
        place, resumed = place_of(first), place_of(second)
        assert place is not None
        assert resumed is not None
        place.ahead = lambda: 1
        rest = iter(first)
        ahead = [next(rest) for _ in range(at)][-1]
        resumed.load_state_dict(place.state_dict())
        expected = [ahead[:, 0].tolist(), *([each[:, 0].tolist() for each in rest])]
        assert _order(second) == expected
        assert _order(second) == _order(first), at


def test_a_generator_that_two_loaders_share_goes_on_once() -> None:
    """X20. A validation whose pass begins after a resume does not set the training's back."""
    orders = []
    states: list[Any] = []
    for seed in (1, 2):
        own = torch.Generator().manual_seed(seed)
        loaders: list[DataLoader[torch.Tensor]] = [
            DataLoader(Rows(), batch_size=4, shuffle=True, generator=own) for _ in range(2)
        ]
        places: Any = [place_of(each) for each in loaders]
        if states:
            for place, state in zip(places, states, strict=True):
                place.load_state_dict(state)
        else:
            _order(loaders[0])
            states = [each.state_dict() for each in places]
        order = [_order(loaders[0])]
        saved_again = places[1].state_dict()["own"]
        assert torch.equal(saved_again["loader-0"], own.get_state())
        orders.append([*order, _order(loaders[1]), _order(loaders[0])])
    assert orders[0] == orders[1]


def test_the_seed_of_a_distributed_sampler_goes_on() -> None:
    """X20. Lightning and Fabric take it from the environment, where `seed_everything` puts it."""

    def loader_of(seed: int) -> DataLoader[torch.Tensor]:
        sampler: Any = DistributedSampler(Rows(), 2, 0, seed=seed)
        return DataLoader(Rows(), batch_size=2, sampler=sampler)

    first, second = loader_of(1), loader_of(2)
    place, resumed = place_of(first), place_of(second)
    assert place is not None
    assert resumed is not None
    rest = iter(first)
    next(rest)
    resumed.load_state_dict(place.state_dict())
    assert _order(second) == [each[:, 0].tolist() for each in rest]
    assert _order(second) == _order(first)


def test_a_seed_without_its_sampler_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A program that has no such sampler any more trains in another order, and is told."""
    sampler: Any = DistributedSampler(Rows(), 2, 0, seed=1)
    place = place_of(DataLoader(Rows(), batch_size=2, sampler=sampler))
    other = place_of(DataLoader(Rows(), batch_size=2))
    assert place is not None
    assert other is not None
    place.load_state_dict(place.state_dict())
    assert not caplog.text
    other.load_state_dict(place.state_dict())
    assert (
        "had 1 sampler with a seed when the checkpoint was saved and has 0 samplers" in caplog.text
    )


def test_data_of_another_length_is_named_within_a_pass(caplog: pytest.LogCaptureFixture) -> None:
    """The rest has another order; from the end of a pass more data is a new pass over all of it."""
    loader = DataLoader(Rows(), batch_size=2)
    place, equal = (place_of(each) for each in (loader, DataLoader(Rows(), batch_size=2)))
    fewer = place_of(DataLoader(Subset(Rows(), range(10)), batch_size=2))
    assert place is not None
    assert equal is not None
    assert fewer is not None
    fewer.load_state_dict(place.state_dict())
    next(rest := iter(loader))
    equal.load_state_dict(place.state_dict())
    assert not caplog.text
    fewer.load_state_dict(place.state_dict())
    assert "within a pass over 12 rows" in caplog.text
    rest.close()  # type: ignore[attr-defined]
