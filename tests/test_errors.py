"""The carrier of errors: whatever goes in, a HoldfastError of the hierarchy comes out."""

from __future__ import annotations

import builtins
import enum
import json
import pickle
from collections import UserList
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import errors
from holdfast.errors import (
    MAX_DETAILS_SIZE,
    MAX_MESSAGE_LENGTH,
    ConfigError,
    DeadlineError,
    DriftError,
    ErrorRecord,
    HoldfastError,
    LayoutError,
    StorageError,
    joined_details,
    joined_error,
    late_ranks,
    named_ranks,
    shorten_ranks,
    values_by_rank,
)

_EXPORTED = [
    value
    for value in (getattr(holdfast, name) for name in holdfast.__all__)
    if isinstance(value, type) and issubclass(value, HoldfastError)
]
_ODD_NAMES = sorted({*vars(errors), *vars(builtins), "", "annotations", "__class__", "os.path"})


def _through_msgpack(record: ErrorRecord) -> ErrorRecord:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=ErrorRecord)


def test_every_error_of_the_hierarchy_is_exported_and_drawn() -> None:
    defined = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, HoldfastError)
    ]
    assert sorted(kind.__name__ for kind in _EXPORTED) == sorted(defined)
    tree = (errors.__doc__ or "").split("\n\n")[1]
    assert [line.strip(" │├└─").split()[0] for line in tree.splitlines()] == defined


@given(kind=st.sampled_from(_EXPORTED), text=st.text(max_size=50))
def test_errors_of_the_hierarchy_keep_class_and_text(kind: type[HoldfastError], text: str) -> None:
    error = _through_msgpack(ErrorRecord.of(kind(text))).to_error()
    assert type(error) is kind
    lines = [errors.clean(line) for line in text.split("\n")]
    assert str(error) == ("\n".join(lines) or kind.__name__)


@given(kind=st.sampled_from(_EXPORTED), text=st.text())
def test_a_message_prints_whatever_names_it_quotes(kind: type[HoldfastError], text: str) -> None:
    """R8: control and direction marks are escaped, on whichever rank it is raised."""
    error = kind(f"key {text!s} is missing\nsecond line")
    for each in (error, ErrorRecord.of(error).to_error()):
        assert all(line.isprintable() for line in str(each).split("\n"))
    assert "\\u202e" in str(kind("a\u202eb"))
    assert "\\x1b[31m" in str(kind("\x1b[31m"))


@given(name=st.sampled_from(_ODD_NAMES) | st.text(), message=st.text())
def test_a_name_in_a_record_never_reaches_anything_but_the_hierarchy(
    name: str, message: str
) -> None:
    error = ErrorRecord(error_type=name, message=message).to_error()
    assert "\n".join(map(errors.clean, message.split("\n"))) in str(error)
    if name in {kind.__name__ for kind in _EXPORTED}:
        assert type(error).__name__ == name
    else:
        assert type(error) is HoldfastError
        assert repr(name[:100]) in str(error)


@given(
    error=st.sampled_from([OSError, KeyError, KeyboardInterrupt, ValueError, MemoryError]).flatmap(
        lambda kind: st.text(st.characters(), max_size=30).map(kind)
    )
)
def test_foreign_errors_name_their_class_and_survive_any_text(error: BaseException) -> None:
    plain = _through_msgpack(ErrorRecord.of(error)).to_error()
    assert type(plain) is HoldfastError
    assert str(plain).startswith(type(error).__name__)
    stored = _through_msgpack(ErrorRecord.of(error, foreign=StorageError)).to_error()
    assert type(stored) is StorageError
    assert str(stored) == str(plain)


def test_a_file_name_that_is_not_utf8_can_be_carried() -> None:
    error = FileNotFoundError(2, "No such file", b"\xff.bin".decode(errors="surrogateescape"))
    assert ".bin" in _through_msgpack(ErrorRecord.of(error)).to_error().args[0]


def test_a_subclass_is_raised_as_its_base_and_a_namesake_as_a_foreign_error() -> None:
    class OwnLayoutError(LayoutError):
        pass

    namesake = type("LayoutError", (Exception,), {})
    assert type(ErrorRecord.of(OwnLayoutError("x")).to_error()) is LayoutError
    assert type(ErrorRecord.of(namesake("x")).to_error()) is HoldfastError
    assert isinstance(ErrorRecord.of(ConfigError("x")).to_error(), ValueError)


def test_long_texts_are_cut_and_notes_and_broken_texts_are_kept() -> None:
    class NoTextError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    long = ErrorRecord.of(StorageError("x" * 10**6)).message
    assert len(long) == MAX_MESSAGE_LENGTH
    assert long.endswith("x...")
    noted = OSError("no space")
    noted.add_note("part 'model'")
    assert ErrorRecord.of(noted).message == "part 'model': OSError: no space"
    assert ErrorRecord.of(NoTextError()).message == "NoTextError: (its text cannot be produced)"


def test_ranks_are_written_in_one_way_in_every_message() -> None:
    """Long runs as ranges, in the order given; what a limit leaves out is counted."""
    assert [shorten_ranks(ranks) for ranks in ([0, 1, 2, 3, 7, 8], [3, 1, 2], range(5), [])] == [
        "0-3, 7, 8", "3, 1, 2", "0-4", "",
    ]  # fmt: skip
    odd = range(1, 101, 2)
    assert shorten_ranks(odd, most=3) == "1, 3, 5, ... (50 in all)"
    assert shorten_ranks(odd, most=None).count(", ") == 49
    assert [named_ranks([4]), named_ranks([4, 5, 6])] == ["rank 4", "ranks 4-6"]
    assert values_by_rank({0: 1, 1: 2, 2: 1}) == "1 on ranks 0, 2; 2 on rank 1"


def test_failures_of_ranks_are_joined_under_the_first_class() -> None:
    same, other = (
        ErrorRecord.of(kind(text)) for kind, text in ((LayoutError, "a"), (OSError, "b"))
    )
    joined = joined_error({1: same, 4: other, 6: same}, num_ranks=8, phase="save")
    assert type(joined) is LayoutError
    assert str(joined) == "3 of 8 ranks failed (save):\nranks 1, 6: a\nrank 4: OSError: b"
    assert str(joined_error({0: other}, num_ranks=1, phase="save")) == "save: OSError: b"
    # Ranks that have waited are not the late ones, however many errors theirs are joined of.
    waits = [ErrorRecord.of(DeadlineError("x", details={"waited_s": s})) for s in (9.0, 9.5, 0.5)]
    pair = ErrorRecord.of(joined_error(dict(enumerate(waits[:2])), num_ranks=2, phase="step"))
    assert late_ranks({0: pair, 1: pair, 2: waits[2]}, ranks=range(4), limit_s=10) == [2, 3]


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=9)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below),
    max_leaves=12,
)  # fmt: skip


class _Grade(enum.IntEnum):
    GOOD = 3


class _Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@given(kind=st.sampled_from(_EXPORTED), ranks=st.lists(st.integers(0, 10**6)), one=_PLAIN)
def test_details_arrive_as_they_were(kind: type[HoldfastError], ranks: list[int], one: Any) -> None:
    """Through msgpack, JSON, pickle and the joined error of several ranks."""
    error = kind("x", details={"ranks": ranks, "one": _shallow(one)})
    record = ErrorRecord.of(error)
    in_json = msgspec.json.decode(msgspec.json.encode(record), type=ErrorRecord)
    for carried in (
        _through_msgpack(record).to_error(),
        in_json.to_error(),
        pickle.loads(pickle.dumps(error)),
    ):
        assert carried.details == error.details
    joined = joined_error({2: record, 5: record}, num_ranks=8, phase="save")
    assert joined.details == {"failed_ranks": [2, 5], **error.details}


def _shallow(value: Any) -> Any:
    """A value without the members of which there are too many levels."""
    if isinstance(value, dict):
        return {k: v for k, v in value.items() if not isinstance(v, dict | list)}
    if isinstance(value, list):
        return [v for v in value if not isinstance(v, dict | list)]
    return value


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ((1, 2), [1, 2]), ({3, 1, 2}, [1, 2, 3]), (range(3), [0, 1, 2]), (_Grade.GOOD, 3),
        (UserList([1]), [1]), (np.int64(7), 7), (np.float32(0.5), 0.5), ({4: (1,)}, {"4": [1]}),
        (PurePosixPath("a/b"), "a/b"), (2**70, str(2**70)), (float("nan"), "nan"),
        (float("inf"), "inf"), (b"ab", "b'ab'"), ("\udc80", "\\udc80"), (ConfigError("x"), "x"),
        ([[[[1]]]], [[["[1]"]]]), (True, True),
    ],
)  # fmt: skip
def test_details_of_other_types_become_the_nearest_plain_value(value: object, plain: Any) -> None:
    details = StorageError("x", details={"it": value}).details
    assert details == {"it": plain}
    assert type(details["it"]) is type(plain)
    assert json.loads(json.dumps(details, allow_nan=False)) == details


def test_details_are_bounded_and_never_raise() -> None:
    for many in (
        range(10**12),
        ["x" * 100] * 10**6,
        {str(i): i for i in range(10**5)},
        "x" * 10**6,
    ):
        record = ErrorRecord.of(DriftError("x", details={"first": 1, "many": many, "last": 2}))
        assert record.details["incomplete"] is True
        assert record.details["first"] == 1
        kept = list(record.details["many"])[:-1]  # the last one may be cut off
        assert len(kept) > 100
        assert kept == list(islice(many, len(kept)))
        assert len(msgspec.msgpack.encode(record)) < 2 * MAX_DETAILS_SIZE
    for odd in ({"x": _Hostile()}, {"x": {1, "a", None}}, {_Hostile(): 1}, [1], 3):
        assert isinstance(ErrorRecord.of(DriftError("x", details=odd)).details, dict)  # type: ignore[arg-type]
    foreign = OSError("x")
    foreign.details = {"a": 1}  # type: ignore[attr-defined]
    assert ErrorRecord.of(foreign).details == {}


def test_details_of_several_errors_are_joined_by_name() -> None:
    joined = joined_details(
        [{"keys": ["a", "b"], "step": 3, "x": 1}, {"keys": ["b", "c"], "step": 4, "x": 1}, {"y": 0}]
    )
    assert joined == {"keys": ["a", "b", "c"], "step": [3, 4], "x": 1, "y": 0}


def test_a_record_without_details_has_none() -> None:
    """As any of an error that has none, and one of another version."""
    data = msgspec.msgpack.encode({"error_type": "PlanError", "message": "x", "more": [1]})
    assert msgspec.msgpack.decode(data, type=ErrorRecord).to_error().details == {}
    assert b"details" not in msgspec.msgpack.encode(ErrorRecord.of(LayoutError("x")))


def test_records_of_other_shapes_are_refused_by_the_decoder() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"error_type": 3}), type=ErrorRecord)
