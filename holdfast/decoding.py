"""Decoding JSON and MessagePack into types, in any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

_LOCK = threading.Lock()


@overload
def decode_json_as(data: bytes | str | memoryview, kind: type[T]) -> T: ...
@overload
def decode_json_as(data: bytes | str | memoryview, kind: Any) -> Any: ...
def decode_json_as(data: bytes | str | memoryview, kind: Any) -> Any:
    """Return what JSON stands for, as a value of a type.

    Raises:
        msgspec.DecodeError: It is not JSON, or has another type.
    """
    return _json_decoder(kind)(data)


@overload
def decode_msgpack_as(data: bytes | memoryview, kind: type[T]) -> T: ...
@overload
def decode_msgpack_as(data: bytes | memoryview, kind: Any) -> Any: ...
def decode_msgpack_as(data: bytes | memoryview, kind: Any) -> Any:
    """Return what MessagePack stands for, as a value of a type.

    Raises:
        msgspec.DecodeError: It is not MessagePack, or has another type.
    """
    return _msgpack_decoder(kind)(data)


@overload
def convert_as(value: object, kind: type[T]) -> T: ...
@overload
def convert_as(value: object, kind: Any) -> Any: ...
def convert_as(value: object, kind: Any) -> Any:
    """Return a value of plain types, as decoded before, as one of a type.

    Raises:
        msgspec.ValidationError: It has another type.
    """
    _json_decoder(kind)  # has looked at the type
    return msgspec.convert(value, kind)


@cache
def _json_decoder(kind: Any) -> Callable[[Any], Any]:
    # msgspec looks at the fields of a type when it is first decoded into, and lets other threads
    # run meanwhile: two that do so at a time end the process.
    with _LOCK:
        return msgspec.json.Decoder(kind).decode


@cache
def _msgpack_decoder(kind: Any) -> Callable[[Any], Any]:
    with _LOCK:
        return msgspec.msgpack.Decoder(kind).decode
