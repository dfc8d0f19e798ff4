"""`holdfast train --save` and `--load` with a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.format.names import list_steps
from holdfast.storage import open_storage

pytest.importorskip("obstore")
pytest.importorskip("moto")

from tests.buckets.server import environment, new_bucket, s3_server
from trainer.tests.launches import SMALL, run_on_ranks


def test_a_run_saves_to_a_bucket_and_continues_from_it(unlaunched: Path) -> None:
    with s3_server() as endpoint:
        url = f"s3://{new_bucket(endpoint)}/run"
        for steps in (2, 4):
            words = [*SMALL, "--data", "text", "--steps", str(steps), "--save-interval", "2"]
            words += ["--save", url, "--load", url]
            # The server of ranks may be older than the credentials in this process's environment.
            run = run_on_ranks(2, words, directory=unlaunched, **environment(endpoint))
            assert run.codes == [0, 0], run.printed
            assert list_steps(open_storage(url)) == list(range(2, steps + 1, 2))
        assert "loaded" in run.printed
