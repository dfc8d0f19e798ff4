"""Where modules are, by flags; and what is refused before anything is started."""

from __future__ import annotations

import pytest

from holdfast.errors import ConfigError, LayoutError
from holdfast_trainer.command import parse


def spans(words: str, world_size: int) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """tp, dp and ranks of each module."""
    config = parse(["multimodal", *words.split()])
    config.check(world_size=world_size)
    layouts = config.module_layouts(world_size=world_size)
    return {name: (layout.tp, layout.dp, layout.ranks) for name, layout in layouts.items()}


@pytest.mark.parametrize(
    ("words", "vision", "projector", "language"),
    [
        ("", (1, 2, (0, 1)), (1, 2, (0, 1)), (1, 2, (2, 3))),
        ("--tp 2", (1, 2, (0, 1)), (1, 2, (0, 1)), (2, 1, (2, 3))),
        ("--language-first", (1, 2, (2, 3)), (1, 2, (2, 3)), (1, 2, (0, 1))),
        ("--vision-tp 2", (2, 1, (0, 1)), (1, 2, (0, 1)), (1, 2, (2, 3))),
        ("--projector-on language --tp 2", (1, 2, (0, 1)), (1, 2, (2, 3)), (2, 1, (2, 3))),
        (
            "--colocated --tp 2 --vision-tp 4",
            (4, 1, (0, 1, 2, 3)),
            (1, 4, (0, 1, 2, 3)),
            (2, 2, (0, 1, 2, 3)),
        ),
        (
            "--vision-ranks 1 --dp 3 --global-batch-size 6",
            (1, 1, (0,)),
            (1, 1, (0,)),
            (1, 3, (1, 2, 3)),
        ),
    ],
)
def test_flags_place_the_modules(
    words: str, vision: object, projector: object, language: object
) -> None:
    assert spans(words, 4) == {"vision": vision, "projector": projector, "language": language}


def test_one_process_has_all_modules() -> None:
    assert set(spans("", 1).values()) == {(1, 1, (0,))}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--vision-ranks 4", "--vision-ranks 4 of 4 leaves no rank for the language model"),
        ("--colocated --language-first", "--colocated with --language-first"),
        ("--colocated --vision-ranks 2", "--colocated with --vision-ranks"),
        ("--vision-ranks 3 --vision-tp 2", "--vision-tp 2 does not divide the 3 ranks"),
        ("--vision-tp 2 --vision-heads 1", "--vision-tp 2 does not divide --vision-heads 1"),
        ("--global-batch-size 3", "--global-batch-size 3 cannot be shared by the 2 data ranks"),
        ("--zero 0", "set --zero 1 or 2"),
        ("--fsdp optim --zero 0", "leave --fsdp out"),
        ("--data README.md", "--data with the preset multimodal"),
        ("--freeze-vision --fresh-vision-optim --load x", "a frozen encoder has no optimizer"),
        ("--vision-dim 30", "--vision-dim 30 with --vision-heads 4"),
        ("--projector-on nowhere", "--projector-on needs vision or language"),
        ("--vision-tp 0", "--vision-tp"),
    ],
)
def test_mistakes_are_answered_with_the_flag_and_the_fix(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["multimodal", *words.split()]).check(world_size=4)


def test_data_widths_that_do_not_divide_each_other_are_refused() -> None:
    """M18."""
    words = "multimodal --vision-ranks 2 --global-batch-size 6"
    with pytest.raises(LayoutError, match=r"dp=2.*dp=3"):
        parse(words.split()).check(world_size=5)


@pytest.mark.parametrize("words", ["--vision-tp 2", "--colocated", "dense --freeze-vision"])
def test_flags_of_an_encoder_mean_nothing_without_one(words: str) -> None:
    with pytest.raises(ConfigError, match="has no meaning without a vision encoder"):
        parse(words.split()).check(world_size=4)
