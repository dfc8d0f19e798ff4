"""An iterator over batches that can repeat those of the current step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError, CorruptionError, ErrorRecord
from holdfast.format.values import Codecs
from holdfast.rerun.kept_trees import keep_tree, revive_tree
from holdfast.state import RNG
from holdfast.state.rng import CapturedStreams
from holdfast.state.tensor_elements import tensors_of


@dataclass(frozen=True, slots=True)
class _Drawn:
    """One answer of the source: a batch, its end, or an error."""

    batch: Any = None
    """In the form that `keep_tree` returns."""
    error: Exception | None = None
    """`StopIteration` at the end."""
    streams: Sequence[CapturedStreams | Mapping[str, Any]] = ()
    """The random streams behind that; empty if the source has drawn from none."""


class ReplayableBatches(Iterator[Any]):
    """The batches of a source, each kept until the step that takes it is accepted.

        batches = ReplayableBatches(loader)
        batches.begin()
        first = next(batches)
        batches.rewind()
        again = next(batches)  # equal to what `first` was, whatever was done to it since

    A first pass returns the source's own objects; a replay returns copies of what they were. After
    the last kept batch a replay continues with the source. The end of the source, and an error that
    it raises, are kept and replayed like batches. So is what a source draws from random streams, to
    shuffle or to augment: a replay asks no source, and sets the streams to where it had left them.

    A batch is kept in one form, in the process and in a checkpoint (`holdfast.rerun.kept_trees`):
    a batch that a checkpoint could not hold is refused when it is taken.

    Args:
        source: An iterator, or an iterable, which is iterated once.
        codecs: Types in batches beyond the built-in ones: dataclasses, enums, others.
        is_rewound: True if after a restart the source starts with the batches of the repeated step
            (like a loader that counts steps), not behind them. Each saved batch that is replayed is
            then also taken from the source, and passed over.
        keeps: False to keep nothing: the source's own batches cannot be replayed, only those of
            `replay_kept`.
        streams: the random streams that a source may draw from, and the program, too.

    Cost: each batch is copied once when it is taken, and kept on its own device until `begin`;
    `kept_nbytes` returns the size of the copies. Some 0.02 ms for each batch and set of streams.
    """

    def __init__(
        self,
        source: Iterator[Any] | Iterable[Any],
        *,
        codecs: Codecs | None = None,
        is_rewound: bool = False,
        keeps: bool = True,
        streams: Sequence[RNG] = (),
    ) -> None:
        """Take nothing from the source yet."""
        self._streams = tuple(streams)
        self.num_requests = 0
        """How often a batch was taken, kept or new."""
        self._source: Iterator[Any] = iter(source)
        self._codecs = codecs or Codecs()
        self._is_rewound = is_rewound
        self._keeps = keeps
        self._kept: list[_Drawn] = []
        self._position = 0
        self._taken: tuple[Any, Sequence[CapturedStreams]] | None = None
        """A batch that the source has passed and that is not kept yet, and the streams then."""
        self._entries: Sequence[Any] | None = None
        """The saved batches that the step starts with, if any."""
        self._borrowed: list[_Drawn] | None = None
        """The batches of another rank, which the step runs on meanwhile."""
        self._borrowed_position = 0
        self._num_to_pass_over = 0
        """Number of the kept batches, from the first, that the source will return once more."""
        self._num_passed_over = 0
        """Number of these that were already taken from the source: a second replay of a step must
        not take them again."""

    def __iter__(self) -> ReplayableBatches:
        """Return the iterator itself, at its position."""
        return self

    def __next__(self) -> Any:
        """Return the next batch, kept or new; raise StopIteration and errors like the source.

        Raises:
            ConfigError: The batch cannot be kept, or a source with `is_rewound` ends before the
                saved batches do.
        """
        self.num_requests += 1
        if self._borrowed is not None and self._borrowed_position < len(self._borrowed):
            drawn = self._borrowed[self._borrowed_position]
            self._borrowed_position += 1
            return self._answer(drawn, self._borrowed_position - 1)
        if self._position == len(self._kept):
            return self._take()
        if self._num_passed_over <= self._position < self._num_to_pass_over:
            self._pass_over(self._kept[self._position])
        self._position += 1
        return self._answer(self._kept[self._position - 1], self._position - 1)

    def _answer(self, drawn: _Drawn, number: int) -> Any:
        """Return a kept batch as it was, or raise what the source had raised."""
        self._set_streams(drawn.streams)
        if drawn.error is not None:
            raise drawn.error.with_traceback(None)
        return self._revive(drawn.batch, number)

    def _set_streams(self, drawn: Sequence[CapturedStreams | Mapping[str, Any]]) -> None:
        """Set the streams to where the source had left them, if it had drawn from them."""
        if len(drawn) == len(self._streams):
            for stream, states in zip(self._streams, drawn, strict=True):
                if isinstance(states, Mapping):  # of another process
                    known = stream.capture().states()
                    states = {name: state for name, state in states.items() if name in known}
                stream.reset(states)

    @property
    def is_replaying(self) -> bool:
        """True if the next batch is a kept one."""
        return self._position < len(self._kept)

    @property
    def num_kept(self) -> int:
        """Number of kept batches, including the end of the source and errors."""
        return len(self._kept)

    @property
    def kept_nbytes(self) -> int:
        """Bytes of the tensors, arrays and long texts of the kept batches, on whatever device."""
        batches = [drawn.batch for drawn in self._kept]
        memory = {id(each): each.nbytes for _, each in tensors_of(batches)}
        return sum(memory.values())

    @property
    def is_rewound(self) -> bool:
        """True if the source returns the batches of the step again after a restart."""
        return self._is_rewound

    def begin(self) -> None:
        """Start a step: forget the batches that were taken before it.

        Batches that a rerun has not taken again count as not consumed: they come next.
        """
        self._entries = self._taken = None
        del self._kept[: self._position]
        self._num_to_pass_over = max(0, self._num_to_pass_over - self._position)
        self._num_passed_over = max(0, self._num_passed_over - self._position)
        self._position = 0

    def rewind(self) -> None:
        """Replay from the first batch of the step."""
        self._position = 0

    def borrow(self, entries: Sequence[Any]) -> None:
        """Run the step on the batches that another rank's `kept` has returned, until `give_back`.

        A run that takes more than these gets batches of the source; they come again afterwards.

        Raises:
            CorruptionError, MismatchError: as of `replay_kept`.
        """
        borrowed = [_drawn_of(entry) for entry in entries]
        self._position = len(self._kept)
        self._borrowed, self._borrowed_position = borrowed, 0

    def give_back(self) -> None:
        """Replay the rank's own batches again, from the first of the step."""
        self._borrowed = None
        self.rewind()

    def kept(self) -> list[dict[str, Any]]:
        """Return all batches of the step as a tree for a checkpoint, at any position of a replay.

        An error of the source is stored as its class and text. Nothing is copied: a kept batch is
        never changed.
        """
        return [_entry_of(drawn) for drawn in self._kept]

    def replay_kept(self, entries: Sequence[Any]) -> None:
        """Replay the batches that `kept` returned in another process, before those of the source.

        Batches that were taken from the source so far are forgotten; but a step that was left, and
        starts with the same entries once more, keeps what it has taken, and passes over no more.

        Raises:
            CorruptionError: `kept` does not return such entries. Nothing has changed then.
            MismatchError: A dataclass, enum or codec in them is not registered here.
        """
        if entries is self._entries:
            self.give_back()
            return
        kept = [_drawn_of(entry) for entry in entries]
        for number, drawn in enumerate(kept):
            # To fail now, before anything has changed, and not in the middle of the step.
            self._revive(drawn.batch, number)
        self._kept, self._entries, self._taken = kept, entries, None
        self._position = self._num_passed_over = 0
        self._num_to_pass_over = len(kept) if self._is_rewound else 0

    def _revive(self, batch: Any, number: int) -> Any:
        return revive_tree(batch, path=f"batch {number}", codecs=self._codecs)

    def _take(self) -> Any:
        """Take a batch from the source, and keep a copy: the caller may change the original."""
        if not self._keeps:
            return next(self._source)
        if self._taken is None:
            before = self._capture()
            try:
                batch = next(self._source)
            except StopIteration as end:
                # A new object, which holds no frames of the caller.
                self._keep(_Drawn(error=StopIteration(*end.args), streams=self._drawn(before)))
                raise
            except Exception as error:
                self._keep(_Drawn(error=error, streams=self._drawn(before)))
                raise
            self._taken = batch, self._drawn(before)
        else:
            self._set_streams(self._taken[1])
        batch, streams = self._taken
        # The source has passed it, and a step that starts again does not run on the batch behind
        # it: it is refused again, or kept then, after an interrupt or for want of memory now.
        try:
            kept = keep_tree(batch, path=f"batch {self._position}", codecs=self._codecs)
        except ConfigError as error:
            self._keep(_Drawn(error=error, streams=streams))
            raise
        self._keep(_Drawn(kept, streams=streams))
        return batch

    def _drawn(self, before: Sequence[CapturedStreams]) -> Sequence[CapturedStreams]:
        """Return the streams if the source has drawn from them since then; else nothing."""
        now = self._capture()
        return () if all(map(CapturedStreams.is_same, before, now)) else now

    def _keep(self, drawn: _Drawn) -> None:
        """Keep an answer of the source."""
        self._kept.append(drawn)
        self._position += 1
        self._taken = None

    def _capture(self) -> list[CapturedStreams]:
        return [each.capture() for each in self._streams]

    def _pass_over(self, drawn: _Drawn) -> None:
        """Take from the source the batch that a saved one replaces."""
        try:
            next(self._source)
        except StopIteration:
            if drawn.error is None:
                raise ConfigError(
                    "the source of batches was declared with is_rewound=True, but it ends before "
                    "the saved batches of the repeated step do, so it does not start at that "
                    "step's first batch; pass is_rewound=False if it starts behind the step"
                ) from None
        except Exception:
            if drawn.error is None:
                raise
        self._num_passed_over = self._position + 1


def _entry_of(drawn: _Drawn) -> dict[str, Any]:
    entry: dict[str, Any] = {"batch": drawn.batch}
    if isinstance(drawn.error, StopIteration):
        entry = {"end": True}
    elif drawn.error is not None:
        record = ErrorRecord.of(drawn.error)
        entry = {"error_type": record.error_type, "message": record.message}
    if drawn.streams:
        states = [
            each.states() if isinstance(each, CapturedStreams) else dict(each)
            for each in drawn.streams
        ]
        entry["streams"] = keep_tree(states, path="random streams", codecs=Codecs())
    return entry


def _drawn_of(entry: Any) -> _Drawn:
    streams: Any = ()
    if isinstance(entry, Mapping) and "streams" in entry:
        streams = revive_tree(entry["streams"], path="random streams", codecs=Codecs())
    match entry:
        case {"end": True}:
            return _Drawn(error=StopIteration(), streams=streams)
        case {"error_type": str(error_type), "message": str(message)}:
            record = ErrorRecord(error_type=error_type, message=message)
            return _Drawn(error=record.to_error(), streams=streams)
        case {"batch": batch}:
            return _Drawn(batch, streams=streams)
    raise CorruptionError(
        "the kept batches of a rerun have a form that this version does not know; load an older "
        "checkpoint, or continue without the rerun"
    )
