"""The place of a loader whose dataset and collator draw from generators of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

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
