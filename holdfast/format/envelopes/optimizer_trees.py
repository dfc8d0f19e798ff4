"""An optimizer's state as Holdfast stores it, and as PyTorch's state dicts have it.

Both go by parameter names. Holdfast keeps the settings of groups apart from who is in them:

    {"state": {name: entries}, "groups": [settings], "membership": {name: group}, "parameters": …}

PyTorch (`torch.distributed.checkpoint.state_dict`) lists names in the groups, or writes each
entry under one flat name (`flatten_optimizer_state_dict`):

    {"state": {name: entries}, "param_groups": [settings + {"params": [names]}]}
    {"state.<name>.<entry>": …, "param_groups.<name>.<setting>": …}

Everything here maps nodes of trees to nodes of trees. Nothing is lost on the way there and back but
shapes of parameters, which their tensors have, too, and the order of their memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import CorruptionError, PlanError
from holdfast.format.values import Node, is_plain_dict, leaf_node, members, node_bytes, pairs_of

_STATE = "state"
_PARAM_GROUPS = "param_groups"
_PARAMS = "params"
_PARAM_NAMES = "param_names"
_BY_NAME = frozenset((_STATE, "groups", "membership"))
_INNER = "inner"
_KEPT = ("main", "num_groups", "param_state_sharding_type", _INNER)
"""Entries of a stored optimizer that PyTorch has not, and ignores where it meets them."""
_RESERVED = frozenset((*_BY_NAME, *_KEPT, _PARAM_GROUPS, "parameters", "others", "extra"))


def is_by_name(node: Any) -> bool:
    """Return True for the node of an optimizer that Holdfast stored by parameter name."""
    return is_plain_dict(node) and node.keys() >= _BY_NAME and isinstance(node["groups"], list)


def to_torch(node: Any) -> Any:
    """Return a stored optimizer as a state dict of PyTorch; any other node as it is.

    What PyTorch has no place for (main parameters, which parameters were frozen) stays under its
    own name: PyTorch ignores it. Shapes of parameters and the order of their memory are left out.

    Raises:
        CorruptionError: A parameter is in a group that is not there.
    """
    if not is_by_name(node):
        return node
    groups = [dict(settings) for settings in node["groups"]]
    listed: list[list[Node]] = [[] for _ in groups]
    for name, group in node["membership"].items():
        if not isinstance(group, int) or not 0 <= group < len(groups):
            raise CorruptionError(f"parameter {name!r} is in group {group}, which is not there")
        listed[group].append(name)
    for group, names in zip(groups, listed, strict=True):
        group[_PARAMS] = names
    tree = {
        _STATE: _joined(node[_STATE], node.get("others", {})),
        _PARAM_GROUPS: groups,
        **{key: node[key] for key in _KEPT if key in node},
        **_extra_to_torch(node.get("extra", {})),
    }
    facts = _without_shapes(node.get("parameters", {}))
    if facts:
        tree["parameters"] = facts
    if _INNER in tree:
        tree[_INNER] = {path: to_torch(inner) for path, inner in tree[_INNER].items()}
    return tree


def from_torch(node: Any, shapes: Mapping[str, Sequence[int]] | None = None) -> Any:
    """Return a state dict of PyTorch as Holdfast stores an optimizer; any other node as it is.

    It has names in its groups, or `param_names` next to numbers, or is flat. One with numbers alone
    stays as it is: nothing in it says which parameter a number is.

    Args:
        node: The stored tree.
        shapes: Of the parameters, by name, where they are known. A load compares them.

    Raises:
        CorruptionError: A flat name is a value and the start of others.
    """
    shapes = {} if shapes is None else shapes
    node = _unflattened(node) if _is_flat(node) else node
    listed = _named_groups(node)
    if listed is None:
        return node
    members_of = {name: group for group, names in enumerate(listed) for name in names.values()}
    by_key = {key: name for names in listed for key, name in names.items()}
    state: dict[str, Any] = {}
    others: list[tuple[Node, Any]] = []
    for key, entries in pairs_of(node.get(_STATE, {})) or []:
        # DCP makes strings of the numbers of parameters.
        name = by_key.get(key) if isinstance(key, int | str) else None
        if name is None and isinstance(key, str) and key.isascii() and key.isdigit():
            name = by_key.get(int(key))
        if name is None:
            others.append((key, entries))
        else:
            state[name] = entries
    tree: dict[str, Any] = {
        _STATE: state,
        "groups": [_settings(group) for group in node[_PARAM_GROUPS]],
        "membership": members_of,
    }
    if others:
        tree["others"] = _mapping(others)
    extra = {key: value for key, value in node.items() if key not in _RESERVED}
    extra |= node.get("extra", {})
    if extra:
        tree["extra"] = extra
    tree |= {key: node[key] for key in _KEPT if key in node}
    if _INNER in tree:
        tree[_INNER] = {path: from_torch(inner, shapes) for path, inner in tree[_INNER].items()}
    tree["parameters"] = _facts(members_of, shapes, node.get("parameters", {}))
    return tree


# ---- the two forms' parts ----


def _facts(
    names: Mapping[str, int], shapes: Mapping[str, Sequence[int]], others: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what is known of each parameter; nothing of one whose shape is unknown."""
    facts = {name: {"shape": [*shapes[name]]} for name in names if name in shapes}
    return facts | {name: {**facts.get(name, {}), **others[name]} for name in others}


def _without_shapes(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is stated of parameters beyond their tensors' shapes and order of memory."""
    facts = {
        name: {key: value for key, value in each.items() if key not in ("shape", "order")}
        for name, each in parameters.items()
    }
    return {name: each for name, each in facts.items() if each}


def _extra_to_torch(extra: Any) -> dict[str, Any]:
    """Return further entries of an optimizer's own form, side by side with its state again."""
    if is_plain_dict(extra) and not extra.keys() & _RESERVED:
        return extra
    return {"extra": extra}


def _joined(state: Any, others: Any) -> Any:
    """Return state by parameter, and that under other keys, as one mapping."""
    if not others:
        return state
    return _mapping([*(pairs_of(state) or []), *(pairs_of(others) or [])])


def _mapping(pairs: Sequence[tuple[Node, Any]]) -> Any:
    """Return a mapping's node; one whose keys are not all strings is stored as pairs."""
    if all(isinstance(key, str) for key, _ in pairs):
        return dict(pairs)
    return leaf_node("dict", v=[[key, value] for key, value in pairs])


def _settings(group: Any) -> dict[str, Any]:
    """Return the settings of a group of PyTorch's."""
    return {name: value for name, value in group.items() if name not in (_PARAMS, _PARAM_NAMES)}


def _named_groups(node: Any) -> list[dict[Any, str]] | None:
    """Return per group the name of each listed parameter; None if it is not a tree with names."""
    if not is_plain_dict(node) or not isinstance(node.get(_PARAM_GROUPS), list):
        return None
    # DCP writes leaves: of an optimizer without state it has no state at all.
    if pairs_of(node.get(_STATE, {})) is None:
        return None
    groups = []
    for group in node[_PARAM_GROUPS]:
        listed = group.get(_PARAMS) if is_plain_dict(group) else None
        if not isinstance(listed, list):
            return None
        names = [name for _, name in members(group.get(_PARAM_NAMES, listed))]
        if len(names) != len(listed) or not all(isinstance(name, str) for name in names):
            return None
        groups.append(dict(zip(listed, names, strict=True)))
    return groups


# ---- the flat form ----


def to_flat(node: Any) -> Any:
    """Return a state dict of PyTorch in its flat form; any other node as it is.

    Raises PlanError for what has no flat name: state of no parameter, and a group of none.
    """
    if _named_groups(node) is None:
        return node
    flat: dict[str, Any] = {}
    names = [name for group in node[_PARAM_GROUPS] for name in group[_PARAMS]]
    for key, entries in pairs_of(node.get(_STATE, {})) or []:
        if key not in names or not is_plain_dict(entries):
            raise PlanError(f"the optimizer's state of {key!r} has no flat name")
        _flatten(entries, f"{_STATE}.{key}", flat)
    for number, group in enumerate(node[_PARAM_GROUPS]):
        if not group[_PARAMS]:
            raise PlanError(f"the optimizer's group {number} has no parameters, so no flat name")
        settings = _settings(group)
        flat |= {
            f"{_PARAM_GROUPS}.{name}.{key}": value
            for name in group[_PARAMS]
            for key, value in settings.items()
        }
    return flat | {k: value for k, value in node.items() if k not in (_STATE, _PARAM_GROUPS)}


def _flatten(entries: dict[str, Any], prefix: str, flat: dict[str, Any]) -> None:
    for name, value in entries.items():
        if is_plain_dict(value):
            _flatten(value, f"{prefix}.{name}", flat)
        else:
            flat[f"{prefix}.{name}"] = value


def _is_flat(node: Any) -> bool:
    """Return True for a flat state dict: settings of groups by parameter, and no groups."""
    if not is_plain_dict(node) or _STATE in node or _PARAM_GROUPS in node:
        return False
    return any(_is_setting(key) for key in node)


def _is_setting(key: str) -> bool:
    return key.startswith(f"{_PARAM_GROUPS}.") and key.count(".") >= 2


def _unflattened(node: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a flat state dict; parameters with equal settings are one group again."""
    settings: dict[str, dict[str, Any]] = {}
    tree: dict[str, Any] = {_STATE: {}, _PARAM_GROUPS: []}
    for key, value in node.items():
        if _is_setting(key):
            # No setting has a dot in its name; parameters have.
            name, _, setting = key[len(_PARAM_GROUPS) + 1 :].rpartition(".")
            settings.setdefault(name, {})[setting] = value
        elif not key.startswith(f"{_STATE}."):
            tree[key] = value
    for key, value in node.items():
        if key.startswith(f"{_STATE}.") and key.count(".") >= 2:
            components = key[len(_STATE) + 1 :].split(".")
            name = _owner(components, settings)
            path = components[name.count(".") + 1 :]
            _put(tree[_STATE].setdefault(name, {}), path, value)
    groups: dict[bytes, dict[str, Any]] = {}
    for name, each in settings.items():
        group = groups.setdefault(node_bytes(each), {**each, _PARAMS: []})
        group[_PARAMS].append(name)
    tree[_PARAM_GROUPS] = list(groups.values())
    return tree


def _put(entries: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Put a value at a path of nested dicts."""
    for name in path[:-1]:
        entries = entries.setdefault(name, {})
        if not is_plain_dict(entries):
            raise CorruptionError(f"the optimizer has a value both at {name!r} and below it")
    entries[path[-1]] = value


def _owner(components: Sequence[str], names: Mapping[str, object]) -> str:
    """Return the longest name of a parameter at the start; else all components but the last."""
    for length in range(len(components) - 1, 0, -1):
        name = ".".join(components[:length])
        if name in names:
            return name
    return ".".join(components[:-1])
