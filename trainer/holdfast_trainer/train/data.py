"""Text as bytes, and which rows of it a step trains on.

Token ids are bytes. The text is cut into windows of `seq_len` + 1 bytes (a window's last byte is
the next one's first); every epoch visits each window once, in an order that is a function of
(seed, epoch). The rows of a step follow from seed, position, global batch size, sequence length and
text only, never from the layout: a data rank takes its share of the same rows.
"""

from __future__ import annotations

import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.errors import ConfigError, MismatchError

ByteArray = NDArray[np.uint8]
IntArray = NDArray[np.int64]

SEPARATOR = b"\0"
"""Between two files; text has no NUL bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """All text of a run, in memory, one byte per token."""

    tokens: ByteArray
    """The files' bytes in order, each followed by a separator."""
    num_files: int
    """Files read."""
    fingerprint: str
    """XXH3-128 of `tokens`, 32 hex digits; names and places of files do not count."""
    source: str
    """Where it came from, for messages."""

    @property
    def nbytes(self) -> int:
        """Size of the text."""
        return int(self.tokens.size)


def read_corpus(paths: Sequence[Path] = ()) -> Corpus:
    """Read files and directories, in order of their names, or Python's standard library.

    Directories are read whole, without hidden files and `__pycache__`. The standard library is
    its `.py` files, without installed packages.

    Raises:
        ConfigError: a path does not exist or cannot be read, or no file has any text.

    Cost: memory for the text, twice while reading and once after.
    """
    source = ", ".join(map(str, paths)) if paths else "Python's standard library"
    files = list(_user_files(paths)) if paths else list(_library_files())
    pieces = []
    for file in files:
        try:
            pieces.append(file.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"--data {file}: cannot be read ({error.strerror}); check the path and its "
                f"permissions"
            ) from error
    text = b"".join(piece + SEPARATOR for piece in pieces if piece)
    if not text:
        raise ConfigError(
            f"no text in {source}: name files or directories that have some with --data PATH"
        )
    return Corpus(
        tokens=np.frombuffer(text, dtype=np.uint8),
        num_files=len(files),
        fingerprint=xxhash.xxh3_128_hexdigest(text),
        source=source,
    )


def check_paths(paths: Sequence[Path]) -> None:
    """Refuse a path that does not exist; ConfigError naming it. Nothing is read."""
    for path in paths:
        if not path.exists():
            raise ConfigError(f"--data {path}: no such file or directory; check the path")


class EpochSampler(ABC):
    """Visits each of a number of items once per epoch; its position belongs to the training state.

    The items of a step follow from seed, position and global batch size, never from the layout.
    """

    def __init__(self, *, num_items: int, seed: int, global_batch_size: int) -> None:
        """Begin at the first epoch; the order of an epoch is made when it is reached."""
        self.num_items = num_items
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.num_samples = 0
        """Rows already trained on, over all epochs; the next batch starts here."""
        self._order: tuple[int, IntArray] | None = None

    def numbers(self, *, index: int = 0, num_shares: int = 1) -> list[int]:
        """The items, by number, of one share of the batch at the current position.

        Args:
            index: which share, in [0, num_shares).
            num_shares: into how many equal runs the batch is cut; must divide it.
        """
        share = self.global_batch_size // num_shares
        first = self.num_samples + index * share
        return [self._number(first + row) for row in range(share)]

    def advance(self) -> None:
        """Move to the next batch."""
        self.num_samples += self.global_batch_size

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Return what a position is a position in; plain values."""

    @abstractmethod
    def check_same(self, state: Mapping[str, object]) -> None:
        """Refuse a position in something else than `describe` has; MismatchError with the fix."""

    def state_dict(self) -> dict[str, object]:
        """The position, and what it is a position in."""
        return {"num_samples": self.num_samples, **self.describe()}

    def load_state_dict(self, state: Mapping[str, object], *, allow_other: bool = False) -> None:
        """Take a position, if it is one in this data cut the same way.

        Args:
            state: what `state_dict` gave.
            allow_other: take the number of rows even if data, cut or order differ.

        Raises:
            MismatchError: the data, or their order, are not those of the state.
        """
        mine = self.state_dict()
        if set(state) != set(mine) or not isinstance(state["num_samples"], int):
            raise MismatchError(
                f"the stored data position has the entries {sorted(state)}, expected "
                f"{sorted(mine)}: use --finetune to start at the start of the data"
            )
        if not allow_other:
            self.check_same(state)
        self.num_samples = state["num_samples"]

    def _number(self, sample: int) -> int:
        """The item that a row shows, by its number over all epochs."""
        epoch, position = divmod(sample, self.num_items)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.num_items, seed=self.seed, epoch=epoch))
        return int(self._order[1][position])


class BatchSampler(EpochSampler):
    """The rows of text of each step."""

    def __init__(self, corpus: Corpus, *, seed: int, seq_len: int, global_batch_size: int) -> None:
        """Count windows; nothing is copied.

        Raises:
            ConfigError: the text is shorter than one window.
        """
        self.corpus = corpus
        self.seq_len = seq_len
        self.num_windows = (corpus.nbytes - 1) // seq_len
        if self.num_windows < 1:
            raise ConfigError(
                f"{corpus.source} has {corpus.nbytes} bytes, fewer than one row of "
                f"--seq-len {seq_len} and its next byte: give more text or a smaller --seq-len"
            )
        super().__init__(num_items=self.num_windows, seed=seed, global_batch_size=global_batch_size)

    def rows(self, *, index: int = 0, num_shares: int = 1) -> IntArray:
        """This share's rows of the batch at the current position.

        Args:
            index: which share, in [0, num_shares).
            num_shares: into how many equal runs the batch is cut; must divide it.

        Returns:
            (global_batch_size / num_shares, seq_len + 1) token ids; a fresh array.
        """
        starts = [n * self.seq_len for n in self.numbers(index=index, num_shares=num_shares)]
        tokens = self.corpus.tokens
        cut = np.stack([tokens[start : start + self.seq_len + 1] for start in starts])
        return cut.astype(np.int64)

    def describe(self) -> dict[str, object]:
        """Order, cut and text."""
        return {
            "seed": self.seed,
            "seq_len": self.seq_len,
            "fingerprint": self.corpus.fingerprint,
            "nbytes": self.corpus.nbytes,
        }

    def check_same(self, state: Mapping[str, object]) -> None:
        """Refuse a position in other text, or in text cut or ordered otherwise."""
        if state["fingerprint"] != self.corpus.fingerprint:
            raise MismatchError(
                f"the checkpoint was trained on other text ({state['nbytes']} bytes, fingerprint "
                f"{state['fingerprint']}) than {self.corpus.source} ({self.corpus.nbytes} bytes, "
                f"fingerprint {self.corpus.fingerprint}): give the same text with --data, or "
                f"--allow-other-data to continue with this one"
            )
        for flag, name in (("--seq-len", "seq_len"), ("--seed", "seed")):
            if state[name] != getattr(self, name):
                raise MismatchError(
                    f"the checkpoint's data position is for {flag} {state[name]}, this run has "
                    f"{flag} {getattr(self, name)}: set it to {state[name]}, or add "
                    f"--allow-other-data to continue in another order"
                )


def epoch_order(num_windows: int, *, seed: int, epoch: int) -> IntArray:
    """The order of the windows in one epoch: a permutation of range(num_windows).

    Sorted by a hash (the finaliser of SplitMix64, Steele et al. 2014) instead of drawn from NumPy's
    generators, whose streams may change with its version. Cost: O(n log n), 24 bytes per window.
    """
    key = int.from_bytes(xxhash.xxh3_64_digest(f"{seed}:{epoch}".encode()), "little")
    z = np.arange(num_windows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable").astype(np.int64)


def _library_files() -> Iterator[Path]:
    """The sources of the standard library, in order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    for directory, names, files in os.walk(root):
        names[:] = sorted(set(names) - {"site-packages", "dist-packages", "__pycache__"})
        yield from (Path(directory, name) for name in sorted(files) if name.endswith(".py"))


def _user_files(paths: Sequence[Path]) -> Iterator[Path]:
    """The files of `--data`, directories read whole; ConfigError for a path that does not exist."""
    check_paths(paths)
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for directory, names, files in os.walk(path):
            names[:] = sorted(n for n in names if n[0] != "." and n != "__pycache__")
            yield from (Path(directory, name) for name in sorted(files) if name[0] != ".")
