"""The carrier of errors: whatever goes in, a HoldfastError of the hierarchy comes out."""

from __future__ import annotations

import builtins

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import errors
from holdfast.errors import (
    MAX_MESSAGE_LENGTH,
    ConfigError,
    ErrorRecord,
    HoldfastError,
    LayoutError,
    StorageError,
    joined_error,
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
    assert str(error) == (text.encode(errors="backslashreplace").decode() or kind.__name__)


@given(name=st.sampled_from(_ODD_NAMES) | st.text(), message=st.text())
def test_a_name_in_a_record_never_reaches_anything_but_the_hierarchy(
    name: str, message: str
) -> None:
    error = ErrorRecord(error_type=name, message=message).to_error()
    assert message in str(error)
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


def test_failures_of_ranks_are_joined_under_the_first_class() -> None:
    same, other = (
        ErrorRecord.of(kind(text)) for kind, text in ((LayoutError, "a"), (OSError, "b"))
    )
    joined = joined_error({1: same, 4: other, 6: same}, num_ranks=8, phase="save")
    assert type(joined) is LayoutError
    assert str(joined) == "3 of 8 ranks failed (save):\nranks 1, 6: a\nrank 4: OSError: b"


def test_records_of_other_shapes_are_refused_by_the_decoder() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"error_type": 3}), type=ErrorRecord)
