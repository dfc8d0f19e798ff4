"""An iterator over batches that can give those of the current step again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError, CorruptionError, ErrorRecord
from holdfast.format.values import Codecs
from holdfast.rerun.kept_trees import keep_tree, revive_tree
from holdfast.state.tensor_elements import tensors_of


@dataclass(frozen=True, slots=True)
class _Drawn:
    """One answer of the source: a batch, its end, or an error."""

    batch: Any = None
    """As `keep_tree` makes it."""
    error: Exception | None = None
    """A `StopIteration` is the end."""


class ReplayableBatches(Iterator[Any]):
    """The batches of a source, each kept until the step that takes it is accepted.

        batches = ReplayableBatches(loader)
        batches.begin()
        first = next(batches)
        batches.rewind()
        again = next(batches)  # equal to what `first` was, whatever was done to it since

    A first pass gets the source's own objects; a replay gets copies of what they were. When the
    kept batches are used up, a replay continues with the source. The end of the source, and an
    error that it raises, are kept and replayed like batches.

    A batch is kept in one form, in the process and in a checkpoint (`holdfast.rerun.kept_trees`):
    what a checkpoint could not hold is refused when it is taken.

    Args:
        source: An iterator, or an iterable, of which one iterator is made. It has no length.
        codecs: Types in batches beyond the built-in ones: dataclasses, enums, others.
        is_rewound: After a restart the source starts at the batches of the step that is repeated
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
        self._kept: list[_Drawn] = []
        self._position = 0
        self._num_to_pass_over = 0
        """How many of the kept batches, counted from the first, the source will also give."""
        self._num_passed_over = 0

    def __iter__(self) -> ReplayableBatches:
        """The iterator itself, at its position."""
        return self

    def __next__(self) -> Any:
        """The next batch, kept or new; StopIteration and errors as the source raises them.

        Raises:
            ConfigError: The batch cannot be kept, or a source that is declared rewound ends before
                the saved batches do.
        """
        if self._position == len(self._kept):
            return self._take()
        if self._num_passed_over <= self._position < self._num_to_pass_over:
            self._pass_over(self._kept[self._position])
        drawn = self._kept[self._position]
        self._position += 1
        if drawn.error is not None:
            raise drawn.error.with_traceback(None)
        return self._revive(drawn.batch, self._position - 1)

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
        """Bytes of the tensors, arrays and long texts of the kept batches, on whatever device."""
        batches = [drawn.batch for drawn in self._kept]
        memory = {id(each): each.nbytes for _, each in tensors_of(batches)}
        return sum(memory.values())

    def begin(self) -> None:
        """Start a step: forget the batches that were taken before it.

        Batches that a rerun has not taken again were never consumed: they come next.
        """
        del self._kept[: self._position]
        self._num_to_pass_over = max(0, self._num_to_pass_over - self._position)
        self._num_passed_over = max(0, self._num_passed_over - self._position)
        self._position = 0

    def rewind(self) -> None:
        """Replay from the first batch of the step."""
        self._position = 0

    def kept(self) -> list[dict[str, Any]]:
        """The kept batches as a tree for a checkpoint: the step's, whatever was replayed of them.

        An error of the source is stored as its class and text. Nothing is copied: a batch stays as
        it is here until it is forgotten.
        """
        return [_entry_of(drawn) for drawn in self._kept]

    def replay_kept(self, entries: Sequence[Any]) -> None:
        """Replay, before anything of the source, what `kept` gave in another process.

        Batches that were taken from the source before this are forgotten.

        Raises:
            CorruptionError: The entries are not such ones. Nothing has changed then.
            MismatchError: A dataclass, enum or codec in them is not registered here.
        """
        kept = [_drawn_of(entry) for entry in entries]
        for number, drawn in enumerate(kept):
            self._revive(drawn.batch, number)  # proves that it can be
        self._kept = kept
        self._position = self._num_passed_over = 0
        self._num_to_pass_over = len(kept) if self._is_rewound else 0

    def _revive(self, batch: Any, number: int) -> Any:
        return revive_tree(batch, path=f"batch {number}", codecs=self._codecs)

    def _take(self) -> Any:
        """A batch of the source, kept as it is now: the caller may change what it gets."""
        try:
            batch = next(self._source)
        except StopIteration as end:
            # A new object, which holds no frames of the caller.
            self._keep(_Drawn(error=StopIteration(*end.args)))
            raise
        except Exception as error:
            self._keep(_Drawn(error=error))
            raise
        self._keep(_Drawn(keep_tree(batch, path=f"batch {self._position}", codecs=self._codecs)))
        return batch

    def _keep(self, drawn: _Drawn) -> None:
        self._kept.append(drawn)
        self._position += 1

    def _pass_over(self, drawn: _Drawn) -> None:
        """Take from the source what it gives in the place of a saved batch."""
        try:
            next(self._source)
        except StopIteration:
            if drawn.error is None:
                raise ConfigError(
                    "a source of batches is declared rewound (is_rewound=True), but it ends before "
                    "the saved batches of the repeated step do: it does not start at that step's "
                    "first batch; declare it is_rewound=False if it starts behind the step"
                ) from None
        except Exception:
            if drawn.error is None:
                raise
        self._num_passed_over = self._position + 1


def _entry_of(drawn: _Drawn) -> dict[str, Any]:
    if isinstance(drawn.error, StopIteration):
        return {"end": True}
    if drawn.error is not None:
        record = ErrorRecord.of(drawn.error)
        return {"error_type": record.error_type, "message": record.message}
    return {"batch": drawn.batch}


def _drawn_of(entry: Any) -> _Drawn:
    match entry:
        case {"end": True}:
            return _Drawn(error=StopIteration())
        case {"error_type": str(error_type), "message": str(message)}:
            record = ErrorRecord(error_type=error_type, message=message)
            return _Drawn(error=record.to_error())
        case {"batch": batch}:
            return _Drawn(batch)
    raise CorruptionError(
        "the kept batches of a rerun are not of a form that this version knows; load an older "
        "checkpoint, or continue without the rerun"
    )
