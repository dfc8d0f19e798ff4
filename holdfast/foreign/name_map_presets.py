"""The name maps that come with the library, each in both directions."""

from __future__ import annotations

from importlib import resources

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
            result = NameMap.from_toml(file.read_text(encoding="utf-8"))
            result.name = each
            return result.inverse() if is_inverse else result
    raise ConfigError(f"there is no name map {name!r}; there are {', '.join(preset_names())}")


def _turned(name: str) -> str:
    """Return the name of the inverse."""
    one, _, other = name.partition("-to-")
    return f"{other}-to-{one}"
