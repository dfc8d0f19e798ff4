"""The name maps that come with the library, each in both directions."""

from __future__ import annotations

import difflib
import os
from importlib import resources
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.foreign.name_map import NameMap

_SUFFIX = ".toml"


def preset_names() -> list[str]:
    """Return the names of all presets; of `a-to-b` the inverse is `b-to-a`."""
    files = resources.files("holdfast.foreign").joinpath("presets").iterdir()
    names = [file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX)]
    return sorted([*names, *map(_turned, names)])


def load_preset(name: str) -> NameMap:
    """Return the preset of that name.

    Raises:
        ConfigError: There is none; the message has the names of all.
    """
    for each, is_inverse in ((name, False), (_turned(name), True)):
        file = resources.files("holdfast.foreign").joinpath("presets", each + _SUFFIX)
        if each in preset_names() and file.is_file():
            result = NameMap.from_toml(file.read_text(encoding="utf-8"), name=each)
            return result.inverse() if is_inverse else result
    raise ConfigError(f"there is no name map {name!r}; {_near(name)}")


def _near(name: str) -> str:
    """Return which presets may be meant: those with a like name, else all."""
    names = preset_names()
    near = difflib.get_close_matches(name, names, n=4, cutoff=0.7)
    if near:
        return f"did you mean {', '.join(near)}? docs/name-maps.md lists all {len(names)}"
    return f"there are {', '.join(names)}"


def _turned(name: str) -> str:
    """Return the name of the inverse."""
    one, _, other = name.partition("-to-")
    return f"{other}-to-{one}"


def name_map_of(source: NameMap | str | os.PathLike[str]) -> NameMap:
    """Return a map, the preset of that name, or the map of a TOML file.

    Raises:
        ConfigError: It is neither the name of a preset nor a file with a map.
    """
    if isinstance(source, NameMap):
        return source
    if isinstance(source, str) and source in preset_names():
        return load_preset(source)
    path = Path(source)
    if not path.is_file() and path.suffix == _SUFFIX:
        raise ConfigError(f"{str(source)!r}, which is to have a name map, is not a file")
    if not path.is_file():
        raise ConfigError(
            f"{str(source)!r} is neither a file with a name map nor one of the presets; "
            f"{_near(str(source))}"
        )
    return NameMap.from_toml(path)
