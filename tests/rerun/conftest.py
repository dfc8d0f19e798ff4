"""The groups of a single process, for every test of the machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast import ProcessGroups


@pytest.fixture
def groups() -> Iterator[ProcessGroups]:
    with ProcessGroups.single() as single:
        yield single
