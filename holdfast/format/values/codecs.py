"""The types beyond the built-in ones that a state may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar

from holdfast.errors import ConfigError, HoldfastError, MismatchError, PlacementError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How one type is stored: as the plain tree that `encode` makes and `decode` takes."""

    name: str
    type: type[Any]
    encode: Callable[[Any], object]
    decode: Callable[[Any], Any]

    def encoded(self, value: object, path: str) -> object:
        """What `encode` makes of a value; PlacementError with the path where it fails."""
        try:
            return self.encode(value)
        except HoldfastError:
            raise
        except Exception as error:
            raise PlacementError(
                f"{path}: the codec {self.name!r} cannot encode this "
                f"{type(value).__name__}: {type(error).__name__}: {error}"
            ) from error

    def decoded(self, plain: object, path: str) -> Any:
        """What `decode` makes of a stored tree; MismatchError with the path where it fails.

        The stored bytes have been proved by then: it is no damage, and no older checkpoint helps.
        """
        try:
            return self.decode(plain)
        except HoldfastError:
            raise
        except Exception as error:
            raise MismatchError(
                f"{path}: the codec {self.name!r} cannot decode what is stored: "
                f"{type(error).__name__}: {error}; register one that knows this form"
            ) from error


class Codecs:
    """Dataclasses, enums and codecs that a state may hold; immutable, always passed explicitly.

    Dataclasses and enums are stored under their qualified name, with their fields and member names
    as they are; a codec brings its name. Raises ConfigError for two types under one name.
    """

    __slots__ = ("_codec_types", "_codecs", "_dataclasses", "_enums")

    def __init__(
        self,
        *,
        dataclasses: Iterable[type[Any]] = (),
        enums: Iterable[type[Enum]] = (),
        codecs: Iterable[Codec] = (),
    ) -> None:
        self._dataclasses = _by_name("dataclass", [(t.__qualname__, t) for t in dataclasses])
        self._enums = _by_name("enum", [(t.__qualname__, t) for t in enums])
        self._codecs = _by_name("codec", [(codec.name, codec) for codec in codecs])
        self._codec_types = MappingProxyType({c.type: c for c in self._codecs.values()})
        for cls in self._dataclasses.values():
            if not is_dataclass(cls):
                raise ConfigError(f"{cls.__qualname__} is registered as a dataclass, but is none")
        if len(self._codec_types) != len(self._codecs):
            raise ConfigError(f"two codecs for one type among {sorted(self._codecs)}")

    def joined(self, other: Codecs) -> Codecs:
        """Both sets together; ConfigError where they use one name for two types."""
        return Codecs(
            dataclasses=_joined(self._dataclasses, other._dataclasses),
            enums=_joined(self._enums, other._enums),
            codecs=_joined(self._codecs, other._codecs),
        )

    def dataclass_named(self, name: str) -> type[Any] | None:
        """The registered dataclass of that name, or None."""
        return self._dataclasses.get(name)

    def enum_named(self, name: str) -> type[Enum] | None:
        """The registered enum of that name, or None."""
        return self._enums.get(name)

    def codec_named(self, name: str) -> Codec | None:
        """The codec of that name, or None."""
        return self._codecs.get(name)

    def codec_for(self, cls: type[Any]) -> Codec | None:
        """The codec of exactly that type, or None."""
        return self._codec_types.get(cls)


def _by_name(kind: str, named: list[tuple[str, T]]) -> Mapping[str, T]:
    table: dict[str, T] = {}
    for name, value in named:
        if name in table and table[name] is not value:
            raise ConfigError(f"two {kind}s are registered under the name {name!r}")
        table[name] = value
    return MappingProxyType(table)


def _joined(first: Mapping[str, T], second: Mapping[str, T]) -> list[T]:
    return [*first.values(), *(v for v in second.values() if v not in first.values())]
