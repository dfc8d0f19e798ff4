"""Pictures of digits with descriptions to generate, and rows of text alone.

scikit-learn carries 1,797 handwritten digits of 8 x 8 pixels. A row of an image is

    <image> x n  "image: a "  "seven, bold.\\n"

with one placeholder for each patch of 2 x 2 pixels that has ink (7 to 16 of them), a prompt, and
the answer, which alone is trained on: what the digit is, and whether it has more ink than most.
Other rows have no image: "text: 407 is " "four zero seven.\\n".

Rows of a step follow from (seed, position, global batch size) only, never from a layout.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.errors import ConfigError, MismatchError
from holdfast_trainer.models.config import IMAGE_TOKEN
from holdfast_trainer.train.data import EpochSampler, IntArray

IMAGE_SIDE = 8
"""Pixels of an image along each side."""
NUM_TEXT_ROWS = 400
"""Rows without an image in an epoch, next to some 1,500 with one."""
HELD_OUT_EVERY = 6
"""Every sixth image is never trained on."""

_INK_LEVELS = 16.0
_BOLD = 313.0
"""Total ink from which a digit is called bold: the median of all images."""
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row: an image or none, a prompt and its answer."""

    image: FloatArray | None
    """(8, 8), ink from 0 to 1; None in a row of text alone."""
    prompt: bytes
    """What comes before the answer; not trained on."""
    answer: bytes
    """What is trained on and evaluated."""
    num_word_bytes: int
    """Number of bytes of the answer that name the digit, at its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitBatch:
    """Rows as arrays. Images are those of the rows that have one, in the order of the rows."""

    tokens: IntArray
    """(rows, seq_len) ids; `IMAGE_TOKEN` where the tokens of the row's image go, then bytes."""
    targets: IntArray
    """(rows, seq_len) the next id at each position."""
    weights: FloatArray
    """(rows, seq_len) weight of each position's loss: 0 outside of the answer; a row's mean is 1,
    so that the mean of the weighted losses is the mean over the answer."""
    words: NDArray[np.bool_]
    """(rows, seq_len) whether the target is a byte of the digit's name."""
    counts: IntArray
    """(rows,) patches of each row's image; 0 without one."""
    patches: FloatArray
    """(images, longest, patch_size ** 2) pixels of the patches with ink, padded with zeros."""
    places: IntArray
    """(images, longest, 2) row and column of each patch in the grid; 0 if padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """All rows of a run, in memory."""

    train: tuple[Row, ...]
    """What an epoch visits: images, then rows of text alone."""
    held_out: tuple[Row, ...]
    """Images to evaluate on."""
    fingerprint: str
    """XXH3-128 of everything in the rows to train on, 32 hex digits."""

    @property
    def source(self) -> str:
        """For people."""
        num_images = sum(row.image is not None for row in self.train)
        return (
            f"{num_images:,} images of scikit-learn's digits and "
            f"{len(self.train) - num_images:,} rows of text, {len(self.held_out)} images held out"
        )


def check_digits_installed() -> None:
    """Refuse to start where scikit-learn is missing; ConfigError with what to install."""
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError(
            "the multimodal preset trains on scikit-learn's digits, which is not installed: "
            "pip install 'holdfast-trainer[multimodal]'"
        )


def read_digits() -> Digits:
    """Read the images from the package; nothing is downloaded.

    Raises:
        ConfigError: scikit-learn is not installed.

    Cost: two seconds, to import scikit-learn; under 1 MB.
    """
    check_digits_installed()
    from sklearn.datasets import load_digits

    loaded = load_digits()
    rows = [
        _image_row(image, number=int(number))
        for image, number in zip(loaded.images, loaded.target, strict=True)
    ]
    held_out = tuple(rows[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    train = [row for number, row in enumerate(rows, start=1) if number % HELD_OUT_EVERY]
    return make_digits([*train, *map(_text_row, range(NUM_TEXT_ROWS))], held_out=held_out)


def make_digits(train: Sequence[Row], *, held_out: Sequence[Row]) -> Digits:
    """Rows of the caller's own choice, with their fingerprint."""
    hasher = xxhash.xxh3_128()
    for row in train:
        image = b"" if row.image is None else row.image.tobytes()
        for part in (image, row.prompt, row.answer):
            hasher.update(len(part).to_bytes(8, "little") + part)
    return Digits(train=tuple(train), held_out=tuple(held_out), fingerprint=hasher.hexdigest())


class DigitSampler(EpochSampler):
    """The rows of each step."""

    def __init__(
        self, digits: Digits, *, seed: int, seq_len: int, global_batch_size: int, patch_size: int
    ) -> None:
        """Note the sizes; nothing is copied.

        Raises:
            ConfigError: a row is longer than `seq_len`.
        """
        super().__init__(
            num_items=len(digits.train), seed=seed, global_batch_size=global_batch_size
        )
        self.digits = digits
        self.seq_len = seq_len
        self.patch_size = patch_size
        longest = max(
            _length(row, patch_size=patch_size) for row in (*digits.train, *digits.held_out)
        )
        if longest - 1 > seq_len:
            raise ConfigError(
                f"--seq-len {seq_len}: the longest row, with its image, has {longest - 1} "
                f"positions; set --seq-len to at least that"
            )

    def batch(self, *, index: int = 0, num_shares: int = 1) -> DigitBatch:
        """This share's rows of the batch at the current position; see `EpochSampler.numbers`."""
        numbers = self.numbers(index=index, num_shares=num_shares)
        return self.collate([self.digits.train[number] for number in numbers])

    def collate(self, rows: Sequence[Row]) -> DigitBatch:
        """Rows as arrays; see there."""
        return collate(rows, seq_len=self.seq_len, patch_size=self.patch_size)

    def describe(self) -> dict[str, object]:
        """Order and rows."""
        return {
            "seed": self.seed,
            "fingerprint": self.digits.fingerprint,
            "num_rows": len(self.digits.train),
        }

    def check_same(self, state: Mapping[str, object]) -> None:
        """Refuse a position in other rows, or in another order of them."""
        if state["fingerprint"] != self.digits.fingerprint:
            raise MismatchError(
                f"the checkpoint was trained on other rows ({state['num_rows']}, fingerprint "
                f"{state['fingerprint']}) than these ({len(self.digits.train)}, fingerprint "
                f"{self.digits.fingerprint}): use the same scikit-learn, or --allow-other-data to "
                f"continue with these"
            )
        if state["seed"] != self.seed:
            raise MismatchError(
                f"the checkpoint's data position is for --seed {state['seed']}, this run has "
                f"--seed {self.seed}: set it to {state['seed']}, or add --allow-other-data to go "
                f"on in another order"
            )


def collate(rows: Sequence[Row], *, seq_len: int, patch_size: int) -> DigitBatch:
    """Rows as arrays.

    Args:
        rows: at most `seq_len` + 1 ids each.
        seq_len: positions of each row; what is behind its end is 0, with weight 0.
        patch_size: pixels of a patch along each side.
    """
    ids = np.zeros((len(rows), seq_len + 1), dtype=np.int64)
    weights = np.zeros((len(rows), seq_len), dtype=np.float32)
    words = np.zeros((len(rows), seq_len), dtype=np.bool_)
    counts = np.zeros(len(rows), dtype=np.int64)
    cuts = []
    for number, row in enumerate(rows):
        if row.image is not None:
            cuts.append(_cut(row.image, patch_size=patch_size))
            counts[number] = len(cuts[-1][0])
        text = np.frombuffer(row.prompt + row.answer, dtype=np.uint8)
        ids[number, : counts[number]] = IMAGE_TOKEN
        ids[number, counts[number] : counts[number] + len(text)] = text
        # The target at a position is the next id, so an answer starts one position earlier.
        begin = counts[number] + len(row.prompt) - 1
        weights[number, begin : begin + len(row.answer)] = seq_len / len(row.answer)
        words[number, begin : begin + row.num_word_bytes] = True
    longest = max((len(patches) for patches, _ in cuts), default=1)
    padded = np.zeros((len(cuts), longest, patch_size**2), dtype=np.float32)
    places = np.zeros((len(cuts), longest, 2), dtype=np.int64)
    for number, (patches, where) in enumerate(cuts):
        padded[number, : len(patches)] = patches
        places[number, : len(patches)] = where
    return DigitBatch(
        tokens=ids[:, :-1],
        targets=ids[:, 1:],
        weights=weights,
        words=words,
        counts=counts,
        patches=padded,
        places=places,
    )


def _cut(image: FloatArray, *, patch_size: int) -> tuple[FloatArray, IntArray]:
    """The patches with ink, row by row, and where they are in the grid."""
    side = IMAGE_SIDE // patch_size
    grid = image.reshape(side, patch_size, side, patch_size).transpose(0, 2, 1, 3)
    patches = grid.reshape(side, side, patch_size**2)
    where = np.argwhere(patches.sum(axis=2) > 0)
    return patches[where[:, 0], where[:, 1]], where.astype(np.int64)


def _length(row: Row, *, patch_size: int) -> int:
    """Ids of a row."""
    count = 0 if row.image is None else len(_cut(row.image, patch_size=patch_size)[0])
    return count + len(row.prompt) + len(row.answer)


def _image_row(image: NDArray[np.float64], *, number: int) -> Row:
    """An image, what it shows and how much ink it has."""
    ink = "bold" if image.sum() > _BOLD else "thin"
    word = _WORDS[number]
    return Row(
        image=(image / _INK_LEVELS).astype(np.float32),
        prompt=b"image: a ",
        answer=f"{word}, {ink}.\n".encode(),
        num_word_bytes=len(word),
    )


def _text_row(number: int) -> Row:
    """A number and the names of its digits."""
    # 7 is coprime to 1,000, so the numbers are different and spread over all three digits.
    digits = f"{number * 7 % 1000:03d}"
    words = " ".join(_WORDS[int(digit)] for digit in digits)
    return Row(
        image=None,
        prompt=f"text: {digits} is ".encode(),
        answer=f"{words}.\n".encode(),
        num_word_bytes=len(words),
    )
