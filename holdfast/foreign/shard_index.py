"""Which files of a folder are the shards of one model: by an index, or by their names.

Hugging Face's tools name them `model-00001-of-00003.safetensors`, and write an index next to them.
PyTorch DCP's variant has several for each number, `shard-00002-model-00001-of-00003.safetensors`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from holdfast.decoding import convert_as
from holdfast.errors import CorruptionError, some_of
from holdfast.foreign.location import Location
from holdfast.format.manifest import MAX_MANIFEST_NBYTES

_COMPUTED = ("total_size", "total_parameters")
_SHARD = re.compile(r"(?:shard-\d+-)?(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.(?P<type>\w+)")


def the_index(location: Location, names: Sequence[str]) -> str | None:
    """Return the one of these names that is the index of a folder; None if there is none.

    Raises:
        CorruptionError: There are several.
    """
    if len(names) > 1:
        raise CorruptionError(
            f"{location.label} has {len(names)} indices ({', '.join(names)}): name one file"
        )
    return names[0] if names else None


def refuse_missing_tensors(
    location: Location, placed: Collection[str], there: Collection[str]
) -> None:
    """Raise CorruptionError if a tensor that an index names is in none of its files."""
    missing = sorted(set(placed) - set(there))
    if missing:
        raise CorruptionError(
            f"{location.label}: the index names {len(missing)} tensors that their files lack, for "
            f"example {missing[0]!r}"
        )


def read_index(
    location: Location, name: str, present: Collection[str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return by tensor the file that an index states, and metadata that no program computes.

    Args:
        location: The folder.
        name: Of the index in it.
        present: The names that a file may have; no other path is ever opened.

    Raises:
        CorruptionError: It is not an index, states a tensor twice, or names an absent file.
    """
    place = location.storage.describe(name)
    size = location.storage.size(name)
    if size > MAX_MANIFEST_NBYTES:
        raise CorruptionError(f"{place}: {size} bytes are too many for an index")
    try:
        text = location.storage.read(name).decode()
        table = convert_as(decode_json(text), dict[str, object])
        placed = convert_as(table["weight_map"], dict[str, str])
        metadata = convert_as(table.get("metadata") or {}, dict[str, Any])
    except (ValueError, KeyError, RecursionError) as error:
        raise CorruptionError(f"{place}: this is not an index of tensors: {error}") from None
    for key, file in placed.items():
        if file not in present:
            raise CorruptionError(
                f"{place}: tensor {key!r} is to be in {file!r}, which is not a file of the folder; "
                f"if the index is left from an earlier save, name one file to read it alone"
            )
    return placed, {key: value for key, value in metadata.items() if key not in _COMPUTED}


def decode_json(text: str | bytes) -> Any:
    """Return a value of JSON; ValueError if a name is in an object twice, or RecursionError.

    What is not a finite number is the text that stands for it.
    """
    return json.loads(text, object_pairs_hook=_once, parse_constant=str)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; json.loads itself takes the last of equal names."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"{name!r} is there twice")
        table[name] = value
    return table


def refuse_missing_shards(location: Location, names: Iterable[str]) -> None:
    """Raise CorruptionError if the names of files say that there are more, which are not there.

    For files that no index lists: without this, half of a model would be a whole one.
    """
    numbers: defaultdict[tuple[str, str, str], set[int]] = defaultdict(set)
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is not None:
            numbers[match["stem"], match["count"], match["type"]].add(int(match["number"]))
    for (stem, count, kind), there in numbers.items():
        # Of a count that is absurd the first ones are enough.
        expected = range(1, min(int(count), len(there) + 10) + 1)
        missing = [
            f"{stem}-{number:0{len(count)}d}-of-{count}.{kind}"
            for number in expected
            if number not in there
        ]
        if missing:
            raise CorruptionError(
                f"{location.label}: its files are shards of {int(count)}, and there is no "
                f"{some_of(missing)}; name one file to read it alone"
            )


def refuse_two_models(location: Location, whole: str, used: Collection[str]) -> None:
    """Raise CorruptionError if a file that is a whole model by its name is not one of the index.

    Transformers reads the file, and other programs the index: one may be left from an earlier save.
    """
    if whole not in used and location.has(whole):
        raise CorruptionError(
            f"{location.label}: it has {whole}, and an index of other files. Programs differ in "
            f"which of the two they read: name {whole} to read it, or move one of them away"
        )


def shard_sets(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files that are shards by their names, by the model that they are of."""
    sets: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is not None:
            sets[f"{match['stem']}-…-of-{match['count']}.{match['type']}"].append(name)
    return sets


def note_on_siblings(name: str) -> list[str]:
    """Return a sentence for a file whose name says that it is one of several."""
    match = _SHARD.fullmatch(name)
    if match is None or int(match["count"]) < 2:
        return []
    return [f"{name} is one of {int(match['count'])} shards by its name: the others are not read"]
