"""How held-out images are described is the same under every placement, and what decoding writes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast_trainer.models.stages import Stage
from holdfast_trainer.models.vision import place_images
from holdfast_trainer.train.digits import Digits, Row
from holdfast_trainer.train.multimodal import MultimodalTrainer
from tests.harness import RankContext, run_ranks
from trainer.tests.train.multimodal_runs import (
    config_of,
    in_float64,
    make_rows,
    open_run,
    whole_parameters,
)

STEPS = "--steps 40 --lr 1e-2 --min-lr 1e-3 --init-std 0.08"


@torch.no_grad()
def decode(trainer: MultimodalTrainer, row: Row) -> bytes:
    """The answer that a whole model in this process writes, byte by byte."""
    model = trainer.model
    vision, projector, language = model.vision, model.projector, model.language
    assert vision is not None
    assert projector is not None
    assert language is not None
    batch = trainer.sampler.collate([row])
    counts = torch.from_numpy(batch.counts)
    tokens = projector.project(
        vision.encode(
            torch.from_numpy(batch.patches), torch.from_numpy(batch.places), counts.tolist()
        )
    )
    length = int(counts[0]) + len(row.prompt)
    written = list(batch.tokens[0][:length])
    while len(written) < length + len(row.answer):
        images = place_images(tokens, counts, num_positions=len(written))
        logits, _ = language.run(
            torch.tensor([written]), stage=Stage(layers=range(2)), images=images
        )
        written.append(int(logits[0, -1].argmax()))
    return bytes(written[length:])


@in_float64()
def evaluate(
    rank: RankContext, directory: str, digits: Digits, words: str
) -> tuple[dict[str, Any], list[bytes]]:
    """One rank trains and saves; more of them load what it has saved."""
    alone = rank.num_ranks == 1
    place = f"--save {directory}" if alone else f"--load {directory}"
    with open_run(config_of(STEPS, place, words), digits, rank.num_ranks) as trainer:
        if alone:
            while trainer.progress.step < 25:
                trainer.train_step()
            trainer.save()
        else:
            trainer.resume()
            assert trainer.progress.step == 25
        before = whole_parameters(trainer)
        written = [decode(trainer, row) for row in digits.held_out] if alone else []
        result = asdict(trainer.evaluate())
        metrics = trainer.train_step()  # training continues with the schedule of before
        assert metrics.step == 26
        after = whole_parameters(trainer)
        assert any(not torch.equal(before[name], after[name]) for name in before)
        return result, written


@pytest.mark.parametrize(
    "placements",
    [
        ("--pp 2", "--colocated --tp 2 --projector-on language"),
        pytest.param(("--tp 2", "--cp 2"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_evaluation_counts_what_greedy_decoding_writes(
    tmp_path: Path, placements: tuple[str, ...]
) -> None:
    digits = make_rows(num_images=40)
    ((alone, written),) = run_ranks(1, evaluate, str(tmp_path / "ck"), digits, "").results
    right = [text == row.answer for text, row in zip(written, digits.held_out, strict=True)]
    named = [
        text[: row.num_word_bytes] == row.answer[: row.num_word_bytes]
        for text, row in zip(written, digits.held_out, strict=True)
    ]
    assert alone == {
        "step": 25,
        "num_images": 5,
        "word_accuracy": sum(named) / 5,
        "answer_accuracy": sum(right) / 5,
    }
    # Some of each, or the comparison would show nothing.
    assert sum(named) > sum(right)
    for words in placements:
        for result, _ in run_ranks(4, evaluate, str(tmp_path / "ck"), digits, words).results:
            assert result == alone, words


@pytest.mark.nightly
def test_the_preset_learns_to_name_nine_of_ten_held_out_digits(tmp_path: Path) -> None:
    """The preset as it is, by the command: at least 90 % of images never trained on."""
    events = tmp_path / "events.jsonl"
    words = ("multimodal", "--nproc", "4", "--device", "cpu", "--jsonl", str(events))
    done = subprocess.run(
        [sys.executable, "-m", "holdfast_trainer", *words],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    (evaluation,) = [line for line in lines if line["event"] == "eval"]
    assert evaluation["num_images"] == 299
    assert evaluation["word_accuracy"] >= 0.9
    assert "held-out images" in done.stdout
