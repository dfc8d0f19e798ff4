"""TOML files, flags, and the checks between them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError, HoldfastError, LayoutError
from holdfast_trainer.command import parse
from holdfast_trainer.train.config import TrainConfig, read_toml


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        "steps = 7\nseed = 5\n[layout]\ntp = 2\n[checkpoint]\nload = 'x'\nsave_optim = false\n"
        "[data]\ndata = ['a', 'b']\n[optim]\nlr = 1\n",
    )
    config = parse([str(path), "--steps", "9", "--save", "there", "--no-load-rng"])
    assert (config.steps, config.seed, config.layout.tp) == (9, 5, 2)
    assert (config.checkpoint.save, config.checkpoint.load) == (Path("there"), Path("x"))
    assert config.checkpoint.save_optim is False
    assert config.checkpoint.load_rng is False
    assert config.checkpoint.load_optim is True
    assert config.data.data == (Path("a"), Path("b"))
    assert config.optim.lr == 1.0
    assert config.optim.min_lr == TrainConfig().optim.min_lr


def test_every_checkpoint_and_layout_flag_is_there() -> None:
    words = (
        "--tp 2 --pp 1 --cp 1 --ep 1 --expt-tp 2 --dp 2 --order tp-dp --save s --load l "
        "--save-interval 3 --no-save-optim --no-load-optim --no-load-scheduler --no-save-rng "
        "--no-load-rng --finetune --exit-on-missing-checkpoint --data a b"
    )
    config = parse(words.split())
    kept = config.checkpoint
    assert (kept.save_optim, kept.load_optim, kept.load_scheduler) == (False, False, False)
    assert (kept.save_rng, kept.load_rng) == (False, False)
    assert kept.finetune
    assert kept.exit_on_missing_checkpoint
    assert kept.save_interval == 3
    assert (config.layout.expt_tp, config.layout.dp, config.layout.order) == (2, 2, "tp-dp")
    assert config.data.data == (Path("a"), Path("b"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stepz = 3", "unknown key 'stepz'; did you mean 'steps'?"),
        ("[model]\nnum_layer = 3", "table [model]: unknown key 'num_layer'; did you mean"),
        ("num_layers = 3", "it belongs in the table [model]"),
        ("[optim]\nxyzzy = 3", "valid keys here: optimizer, lr"),
        ("[modle]\nnum_layers = 3", "did you mean 'model'?"),
        ("steps = 'x'", "Expected `int`, got `str` - at `$.steps`"),
        ("precision = 'fp8'", "fp8"),
        ("steps = ", "not valid TOML"),
        ("[model]\nmodel_dim = 100", "--model-dim 100"),
        ("[data]\ndata = 'a'", "data"),
    ],
)
def test_a_wrong_file_is_answered_with_the_place_and_the_fix(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_toml(toml(tmp_path, text))
    assert said in str(caught.value)
    assert "run.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tpp 2", "--tpp"),
        ("--steps x", "--steps needs a whole number, not 'x'"),
        ("--lr high", "--lr needs a number, not 'high'"),
        ("--mlp relu", "--mlp"),
        ("--steps", "--steps"),
        ("--model-dim 100", "--model-dim 100 with --num-heads 4"),
        ("extra.toml", "extra.toml"),
    ],
)
def test_a_wrong_flag_is_one_line(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(words.split())
    text = str(caught.value)
    assert said in text
    assert not re.search(r"[\n╭│]", text)


@pytest.mark.parametrize(
    ("words", "num_ranks", "said"),
    [
        ("--pp 4 --num-layers 3", 4, "lower --pp"),
        ("--pp 2 --stages-per-rank 2", 4, "--pp-schedule 1f1b"),
        ("--pp 2 --stage-layers 3 2", 4, "--stage-layers 3 2"),
        ("--pp 2 --global-batch-size 2", 4, "cannot fill 2 pipeline stages"),
        ("--pp 2 --micro-batch-size 8", 4, "cannot fill 2 pipeline stages"),
        ("--cp 2 --seq-len 30", 4, "a multiple of 4"),
        ("--ep 2", 4, "--feeds e"),
        ("--tp 2 --expt-tp 1", 4, "leave --ep and --expt-tp out"),
        ("moe --ep 4 --num-experts 6", 4, "a multiple of 4"),
        ("hybrid --tp 4 --state-groups 2", 4, "--state-groups"),
        ("--tp 8", 8, "--num-heads"),
        ("--global-batch-size 6", 4, "a multiple of 4"),
        ("--micro-batch-size 3", 4, "a divisor of 4"),
        ("--steps 0", 1, "--steps"),
        ("--save-interval 0", 1, "--save-interval"),
        ("--seed -1", 1, "--seed"),
        ("--vocab-size 255", 1, "--vocab-size"),
        ("--lr 1e-5", 1, "--min-lr"),
        ("--warmup-steps 500", 1, "--warmup-steps"),
        ("--beta2 1", 1, "--beta2"),
        ("--lr nan", 1, "--lr"),
        ("--finetune", 1, "add --load DIR"),
        ("--no-load-optim", 1, "add --load DIR"),
        ("--exit-on-missing-checkpoint", 1, "add --load DIR"),
        ("--load a --save a --finetune", 1, "--save"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_flag(
    words: str, num_ranks: int, said: str
) -> None:
    config = parse(words.split())
    with pytest.raises(ConfigError, match=re.escape(said)):
        config.check(world_size=num_ranks)


@pytest.mark.parametrize("words", ["--tp 3", "--dp 3", "--order tp-xx-dp --tp 2"])
def test_sizes_and_orders_that_make_no_layout_are_refused(words: str) -> None:
    with pytest.raises(LayoutError):
        parse(words.split()).check(world_size=4)


def test_one_process_with_many_ranks_is_told_how_to_start_them() -> None:
    with pytest.raises(LayoutError, match="--nproc N"):
        parse(["--tp", "2"]).check(world_size=1)


def test_dp_is_what_is_left() -> None:
    layout = parse(["--tp", "2", "--order", "dp-tp"]).check(world_size=4)
    assert (layout.size("dp"), layout.order) == (2, "dp-tp")


def test_every_field_is_documented() -> None:
    # The text under a field is its help on the command line.
    def undocumented(kind: Any) -> list[str]:
        source = Path(__import__(kind.__module__, fromlist=["x"]).__file__).read_text()
        body = source.split(f"class {kind.__name__}:", 1)[1]
        return [
            name
            for name in kind.__dataclass_fields__
            if not re.search(rf"^    {name}: .*\n    \"\"\"", body, re.MULTILINE)
        ]

    config = TrainConfig()
    sections = [config, *(getattr(config, n) for n in ("model", "layout", "data", "optim", "log"))]
    sections.append(config.checkpoint)
    assert {
        type(s).__name__: undocumented(type(s)) for s in sections if undocumented(type(s))
    } == {}


def test_errors_are_holdfasts_own() -> None:
    with pytest.raises(HoldfastError):
        replace(TrainConfig(), steps=-1).check(world_size=1)
