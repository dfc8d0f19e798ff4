"""The weights of a catalog as a flat table of names: what formats without a tree can hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError, PlanError
from holdfast.foreign.catalog import Catalog, CatalogTensor
from holdfast.format.envelopes.optimizer_trees import from_torch
from holdfast.format.values import attributes_of, is_plain_dict, is_tensor, join_path, tensor_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Tensors by name, and what the table leaves out.

    Args:
        keys: By name the key in the catalog. Tied tensors have several names.
        left_out: What is not in the table, one sentence each.
    """

    keys: Mapping[str, str]
    left_out: tuple[str, ...]


def weights_of(catalog: Catalog, part: str | None) -> Weights:
    """Return the tensors of one part under their names in it.

    Args:
        catalog: The checkpoint.
        part: Which part; None for `model`, or the only one that has tensors.

    Raises:
        ConfigError: There is no such part, none is meant by None, or none of its tensors has a
            name.
        PlanError: Two of its tensors have one name: that of `{"a.b": …}` and of `{"a": {"b": …}}`.
    """
    part = choose_part(catalog, part)
    keys: dict[str, str] = {}
    paths: dict[str, tuple[str, ...]] = {}
    left_out: list[str] = []
    for names, node in _leaves(catalog.parts[part], ()):
        name = _name(names)
        path = join_path(part, name) if name else part
        if is_tensor(node):
            key, first = attributes_of(node)["k"], paths.setdefault(name, names)
            if keys.setdefault(name, key) != key:
                raise PlanError(
                    f"two tensors would have the name {name!r}, as {first} and as {names}; "
                    f"rename one"
                )
        elif inner := len(list(tensor_keys(node))):
            left_out.append(
                f"{path} is not a dict of names: the format has no names for its tensors ({inner})"
            )
        else:
            left_out.append(f"{path} is a value, which the format cannot hold")
    if not keys and any(tensor_keys(catalog.parts[part])):
        raise ConfigError(f"{catalog.label}: nothing could be written: {left_out[0]}")
    others = [name for name in catalog.parts if name != part]
    left_out += [f"part {name!r} was not asked for" for name in others]
    return Weights(keys=keys, left_out=tuple(left_out))


def choose_part(catalog: Catalog, part: str | None) -> str:
    """Return the part that is meant: that name, else `model`, else the only one with tensors.

    Raises ConfigError if there is no such part.
    """
    with_tensors = [name for name, node in catalog.parts.items() if any(tensor_keys(node))]
    if part is None and "model" in (with_tensors or catalog.parts):
        return "model"
    if part is None and len(with_tensors) == 1:
        return with_tensors[0]
    if part is None or part not in catalog.parts:
        why = "no part is named 'model'" if part is None else f"part {part!r} is not there"
        raise ConfigError(
            f"{catalog.label}: {why}; choose one with --parts: "
            f"{', '.join(with_tensors or catalog.parts)}"
        )
    return part


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield what is not a plain dict, with its path."""
    if not is_plain_dict(node):
        yield path, node
        return
    for key, member in node.items():
        yield from _leaves(member, (*path, key))


def _name(path: tuple[str, ...]) -> str:
    return ".".join(path)


def with_optimizers(
    parts: Mapping[str, Any], tensors: Mapping[str, CatalogTensor]
) -> dict[str, Any]:
    """Return parts in which optimizers of PyTorch are as Holdfast stores them, by name.

    They get the shapes of the parameters of that name, which a load compares, unless parts (a
    teacher, a student) have tensors of one name and several shapes.

    Raises:
        CorruptionError: As `from_torch`.
    """
    shapes: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for part in parts.values():
        for path, node in _leaves(part, ()):
            if is_tensor(node):
                shapes[_name(path)].add(tensors[attributes_of(node)["k"]].shape)
    known = {name: next(iter(each)) for name, each in shapes.items() if len(each) == 1}
    return {name: from_torch(node, known) for name, node in parts.items()}
