"""`holdfast train --save` and `--load` with a bucket."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.format.names import list_steps
from holdfast.storage import open_storage

pytest.importorskip("obstore")
pytest.importorskip("moto")

from tests.buckets.server import new_bucket, s3_server


def test_a_run_saves_to_a_bucket_and_continues_from_it() -> None:
    with s3_server() as endpoint:
        url = f"s3://{new_bucket(endpoint)}/run"
        for steps in (2, 4):
            words = ["train", "dense", "--steps", str(steps), "--save-interval", "2"]
            run = subprocess.run(
                [sys.executable, "-m", "holdfast.cli.main", *words, "--save", url, "--load", url],
                capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert run.returncode == 0, run.stdout + run.stderr
            assert list_steps(open_storage(url)) == list(range(2, steps + 1, 2))
        assert "loaded" in run.stdout
