"""An iterator over batches that can give those of the current step again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from holdfast.errors import ConfigError
from holdfast.format.values import Codecs
from holdfast.rerun.batch_copies import batch_nbytes, copy_batch
from holdfast.rerun.kept_batches import Drawn, check_encodable, decode_batches, encode_batches


class ReplayableBatches(Iterator[Any]):
    """The batches of a source, each kept until the step that takes it is accepted.

        batches = ReplayableBatches(loader)
        batches.begin()
        first = next(batches)
        batches.rewind()
        again = next(batches)  # equal to what `first` was, whatever was done to it since

    The source's own objects are what a first pass gets; a replay gets copies of what they were.
    When the kept batches are used up, a replay goes on with the source. The end of the source, and
    an error that it raises, are kept and replayed like batches.

    Args:
        source: An iterator or an iterable, of which one iterator is made. It has no length.
        codecs: Types in batches that the checkpoint would not know: dataclasses, enums, others.
        is_rewound: After a restart the source begins at the batches of the step that is repeated
            (as a loader that counts steps does), not behind them. Each saved batch that is replayed
            is then taken from the source too, and passed over.

    Cost: each batch is copied once when it is taken, and kept on its own device until `begin`;
    `kept_nbytes` says how much that is.
    """

    def __init__(
        self,
        source: Iterator[Any] | Iterable[Any],
        *,
        codecs: Codecs | None = None,
        is_rewound: bool = False,
    ) -> None:
        """Take nothing from the source yet."""
        self._source: Iterator[Any] = iter(source)
        self._codecs = codecs or Codecs()
        self._is_rewound = is_rewound
        self._kept: list[Drawn] = []
        self._position = 0
        self._num_to_pass_over = 0
        """How many of the kept batches, counted from the first, the source will also give."""
        self._num_passed_over = 0

    def __iter__(self) -> ReplayableBatches:
        """The iterator itself: batches go on where they are."""
        return self

    def __next__(self) -> Any:
        """The next batch, kept or new; StopIteration and errors as the source raises them.

        Raises:
            ConfigError: The batch cannot be copied, or a source that is declared rewound ends
                before the saved batches do.
        """
        if self._position == len(self._kept):
            return self._take()
        if self._num_passed_over <= self._position < self._num_to_pass_over:
            self._pass_over(self._kept[self._position])
        drawn = self._kept[self._position]
        self._position += 1
        if drawn.error is not None:
            raise drawn.error.with_traceback(None)
        return copy_batch(drawn.batch)

    @property
    def is_replaying(self) -> bool:
        """Whether the next batch is a kept one."""
        return self._position < len(self._kept)

    @property
    def num_kept(self) -> int:
        """Batches that are kept, the end of the source and errors included."""
        return len(self._kept)

    @property
    def kept_nbytes(self) -> int:
        """Bytes that the kept batches take, on whatever device."""
        return batch_nbytes([drawn.batch for drawn in self._kept])

    def begin(self) -> None:
        """Begin a step: forget what was taken before it.

        Batches that a rerun has not taken again were never consumed: they come next.
        """
        del self._kept[: self._position]
        self._num_to_pass_over = max(0, self._num_to_pass_over - self._position)
        self._num_passed_over = max(0, self._num_passed_over - self._position)
        self._position = 0

    def rewind(self) -> None:
        """Replay from the first batch of the step."""
        self._position = 0

    def check_encodable(self) -> None:
        """Refuse batches that a checkpoint could not hold, before a fault needs them.

        Raises:
            ConfigError: Naming the place in the batch, the type, and the fix.

        Cost: one pass over the values of the kept batches; no tensor is copied.
        """
        check_encodable(self._kept, codecs=self._codecs)

    def encode(self) -> bytes:
        """The kept batches for a checkpoint: the step's, from its first, whatever was replayed.

        Raises:
            ConfigError: As `check_encodable`.

        Cost: the batches on the host, twice for a moment.
        """
        return encode_batches(self._kept, codecs=self._codecs)

    def decode_kept(self, data: bytes) -> None:
        """Replay, before anything of the source, what `encode` saved in another process.

        Batches that were taken from the source before this are forgotten.

        Raises:
            CorruptionError: The bytes are damaged. Nothing has changed then.
            MismatchError: A dataclass, enum or codec in them is not registered here.
        """
        kept = decode_batches(data, codecs=self._codecs)
        self._kept = kept
        self._position = self._num_passed_over = 0
        self._num_to_pass_over = len(kept) if self._is_rewound else 0

    def _take(self) -> Any:
        """A batch of the source, kept as it is now: the caller may change what it gets."""
        try:
            batch = next(self._source)
        except StopIteration as end:
            # Its own object, which holds no frames of the caller's.
            self._keep(Drawn(error=StopIteration(*end.args)))
            raise
        except Exception as error:
            self._keep(Drawn(error=error))
            raise
        self._keep(Drawn(copy_batch(batch)))
        return batch

    def _keep(self, drawn: Drawn) -> None:
        self._kept.append(drawn)
        self._position += 1

    def _pass_over(self, drawn: Drawn) -> None:
        """Take from the source what it gives in the place of a saved batch."""
        try:
            next(self._source)
        except StopIteration:
            if drawn.error is None:
                raise ConfigError(
                    "a source of batches is declared rewound (is_rewound=True), but it ends before "
                    "the saved batches of the repeated step do: it does not begin at that step's "
                    "first batch; declare it is_rewound=False if it begins behind the step"
                ) from None
        except Exception:
            if drawn.error is None:
                raise
        self._num_passed_over = self._position + 1
