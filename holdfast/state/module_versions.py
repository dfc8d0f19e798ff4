"""Versions of the classes of modules, and what a load does where one has changed since the save.

A class whose entries have come to mean something else counts up its `_version`, and its
`_load_from_state_dict` converts the entries of an earlier one. torch notes versions in each state
dict; a checkpoint notes them by part and by logical name, all but those that are 1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from holdfast._torch import give_metadata, module_version
from holdfast.errors import MismatchError
from holdfast.format.manifest import USUAL_VERSION
from holdfast.state.module_tree import has_user_loader, walk

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedModule:
    """A module whose class has another version than the one that was saved."""

    prefix: str
    """Logical, of its entries: empty or with a dot at the end."""
    key: str
    """torch's name of the module in the metadata of a state dict."""
    kind: str
    stored: int
    own: int
    converts: bool
    """True if it has code that takes its entries, so that it is the judge of what they mean."""

    @property
    def name(self) -> str:
        """Its logical name, for messages."""
        return self.prefix.rstrip(".") or "(root)"


def noted_below(
    noted: Mapping[str, Mapping[str, T]] | None, part: str, source: str
) -> dict[str, T] | None:
    """Return what a save has noted of a part, or of a branch of it, by the rest of the names.

    Args:
        noted: By part and name, versions or classes of a manifest; None if the save notes none.
        part: The part's name.
        source: The part's name again, or a path below it.

    Returns:
        None if nothing is known of the part.
    """
    if noted is None or part not in noted:
        return None
    if part == source:
        return dict(noted[part])
    branch = source[len(part) + 1 :]
    below = f"{branch}."
    return {
        name.removeprefix(branch).removeprefix("."): each
        for name, each in noted[part].items()
        if name == branch or name.startswith(below)
    }


def changed_modules(
    module: nn.Module,
    noted: Mapping[str, int] | None,
    *,
    prefix: str,
    stored: Collection[str],
) -> list[ChangedModule]:
    """Return the modules of a tree whose class has another version than the one that was saved.

    Args:
        noted: Versions other than 1, by logical name; None if they are not known.
        prefix: Of the module's names in what is stored.
        stored: Names that are stored. A module of which nothing is stored has no version there.

    Raises:
        MismatchError: A class is older than what is stored, and has no code that could know.
    """
    if noted is None:
        return []
    result = []
    for logical, actual, inner in walk(module):
        own = module_version(inner)
        version = noted.get(f"{prefix}{logical}".rstrip("."), USUAL_VERSION)
        below = f"{prefix}{logical}"
        if version != own and any(name.startswith(below) for name in stored):
            result.append(
                ChangedModule(
                    prefix=logical,
                    key=actual.rstrip("."),
                    kind=type(inner).__name__,
                    stored=version,
                    own=own,
                    converts=has_user_loader(inner),
                )
            )
    newer = [each for each in result if each.stored > each.own and not each.converts]
    if newer:
        first = newer[0]
        raise MismatchError(
            f"{first.kind} at '{first.name}' was saved by version {first.stored} of its class, "
            f"and this one is version {first.own}, which cannot know what has changed"
            f"{f' (and {len(newer) - 1} more modules)' if len(newer) > 1 else ''}. Use the code "
            f"that saved it; or give the class a _load_from_state_dict that takes version "
            f"{first.stored}; or set _version = {first.stored} on it if its entries mean the same"
        )
    return [each for each in result if each.converts]


def unversioned_modules(
    module: nn.Module,
    *,
    prefix: str,
    stored: Collection[str],
) -> list[str]:
    """Return the modules that would convert entries of an earlier version, if one were stated.

    For a checkpoint that states no versions: its entries are taken as of the module's own. See
    `changed_modules` for the arguments.
    """
    return [
        f"{logical.rstrip('.') or '(root)'} ({type(inner).__name__}, version {own})"
        for logical, _, inner in walk(module)
        if (own := module_version(inner)) != USUAL_VERSION
        and has_user_loader(inner)
        and any(name.startswith(f"{prefix}{logical}") for name in stored)
    ]


def state_dict_below(values: Mapping[str, object], prefix: str) -> dict[str, object]:
    """Return the entries below a prefix by the rest of their names, with the versions of these."""
    below = {name[len(prefix) :]: v for name, v in values.items() if name.startswith(prefix)}
    metadata = getattr(values, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return below
    result = OrderedDict(below)
    inner = {
        f"{name}."[len(prefix) :].rstrip("."): v
        for name, v in metadata.items()
        if f"{name}.".startswith(prefix)
    }
    give_metadata(result, inner)
    return result


def give_versions(
    state_dict: Mapping[str, object], metadata: object, changed: Sequence[ChangedModule]
) -> None:
    """Give a state dict torch's metadata, with the stored versions of what has changed."""
    if isinstance(metadata, Mapping):
        kept = type(metadata)(metadata)  # type: ignore[call-arg]
        for each in changed:
            kept[each.key] = {**kept.get(each.key, {}), "version": each.stored}  # type: ignore[index]
        metadata = kept
    give_metadata(state_dict, metadata)
