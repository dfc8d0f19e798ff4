"""Fixtures for stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of an S3 server, whose credentials are in the environment."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto")  # here alone: each worker that collects would import it
    from tests.buckets.server import s3_server

    with s3_server() as endpoint:
        yield endpoint
