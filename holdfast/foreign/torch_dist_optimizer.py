"""The optimizer of a Megatron `torch_dist` checkpoint, as Holdfast stores an optimizer.

Tensors come as `optimizer.state.<entry>.<parameter>`, of chained optimizers with `chained_<i>.`
before it. Settings of groups come from the common values; which parameter is in which group is not
stored, and follows the rule by which Megatron makes the groups. Formats that store buckets
(`dp_reshardable`, `fully_sharded_bucket_space`, `dp_zero_gather_scatter`) do not say which part of
a bucket a parameter is: they are kept as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from holdfast.arrays.boxes import Box
from holdfast.errors import some_of
from holdfast.foreign.catalog import CatalogTensor, Chunk, HeldBytes
from holdfast.foreign.draft import Draft
from holdfast.format.values import is_plain_dict, is_tensor, pairs_of, tensor_keys

PART = "optimizer"
RAW_PART = "optimizer_raw"
OBJECTS_PART = "optimizer_objects"
COMMON_PART = "optimizer_common"

_STATE = re.compile(r"(?:chained_([0-9]{1,6})\.)?optimizer\.state\.([^.]+)\.(.+)", re.ASCII)
_OWN = re.compile(r"(?:chained_[0-9]{1,6}\.)?optimizer\.", re.ASCII)
_MAIN = frozenset(("fp32_param", "param", "master_param"))
"""Entries with the parameter itself, in the precision in which it is updated."""
_STACKED = re.compile(r"(?:^|\.)layers\.(?![0-9]+\.)", re.ASCII)
_STACKED_EXPERTS = re.compile(r"\.experts\.(?:experts|local_experts)\.(?![0-9]+\.)", re.ASCII)
_EXPERT = re.compile(r"(?<!shared)\.experts\.|\.local_experts\.", re.ASCII)
_NOT_SETTINGS = ("params", "step")
_MAX_NAMED = 3


def is_of_optimizer(name: str) -> bool:
    """Return True for the flat name of a tensor or an object of an optimizer."""
    return _OWN.match(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Optimizer:
    """One of the chained optimizers, from the common values.

    Args:
        groups: Settings of its groups.
        steps: By group the number of steps, or the node of the tensor that has it; None if unknown.
        rest: What else is known of it.
    """

    groups: list[dict[str, Any]]
    steps: list[Any]
    rest: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A tensor of an optimizer: whose and which."""

    chain: int | None
    parameter: str
    entry: str
    tensor: CatalogTensor


def add_optimizer(
    made: Draft,
    tensors: Mapping[str, CatalogTensor],
    objects: Mapping[str, Any],
    common: Any,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    common_tensors: Mapping[str, CatalogTensor],
    file: str,
) -> None:
    """Add the parts of an optimizer.

    Args:
        made: The catalog so far.
        tensors: Its tensors by flat name.
        objects: Nodes of its sharded objects by flat name.
        common: The node of what the common values have of it; None if there is nothing.
        shapes: Of the model's tensors, by name.
        common_tensors: Tensors in `common`, by key.
        file: Name of the file with the common values.

    Raises:
        CorruptionError: Two optimizers have state of one parameter.

    Cost: linear in the names.
    """
    optimizers = _optimizers(common)
    entries, raw = _entries(tensors, shapes, made)
    if entries:
        _add_tree(made, entries, optimizers, shapes, common_tensors, file)
        rest = [each.rest for each in optimizers]
    else:
        rest = [common] if common is not None else []
    rest = [each for each in rest if not _is_empty(each)]
    if rest:
        made.parts[COMMON_PART] = rest[0] if len(rest) == 1 else rest
    # Settings may be tensors, too: the learning rate of an optimizer that is in a CUDA graph.
    settings = [group for each in optimizers for group in each.groups] if entries else []
    keys = {key for each in (*rest, *settings) for key in tensor_keys(each)}
    made.add_tensors(common_tensors[key] for key in sorted(keys))
    if raw:
        _add_raw(made, raw)
    if objects:
        made.parts[OBJECTS_PART] = dict(objects)
    if any(".distributed." in name for name in (*raw, *objects)):
        where = RAW_PART if raw else OBJECTS_PART
        made.left_out.append(
            f"{PART}: it is stored in buckets, without a record of which parameter has which part "
            f"of a bucket; the buckets are in the part {where!r} as they are (Megatron stores "
            f"moments by parameter as 'fully_reshardable')"
        )


def _entries(
    tensors: Mapping[str, CatalogTensor],
    shapes: Mapping[str, tuple[int, ...]],
    made: Draft,
) -> tuple[list[_Entry], dict[str, CatalogTensor]]:
    """Return the tensors that belong to a parameter and have its shape, and all others."""
    entries: list[_Entry] = []
    raw: dict[str, CatalogTensor] = {}
    for name, tensor in tensors.items():
        match = _STATE.fullmatch(name)
        if match is None:
            raw[name] = tensor
            continue
        # Without a model, as in a checkpoint of the optimizer alone, the state is all there is.
        shape = shapes.get(match[3]) if shapes else tensor.shape
        if shape != tensor.shape:
            raw[name] = tensor
            of = "no parameter is" if shape is None else f"the parameter is {list(shape)}"
            made.left_out.append(
                f"{name}: where it is in its parameter; it is stored as {list(tensor.shape)}, and "
                f"{of}; it is in the part {RAW_PART!r}"
            )
            continue
        chain = None if match[1] is None else int(match[1])
        entries.append(_Entry(chain=chain, entry=match[2], parameter=match[3], tensor=tensor))
    return entries, raw


def _add_raw(made: Draft, raw: Mapping[str, CatalogTensor]) -> None:
    """Keep tensors that belong to no parameter under their own names."""
    made.parts[RAW_PART] = {
        name: made.add_tensor(replace(tensor, key=f"{RAW_PART}.{name}"))
        for name, tensor in raw.items()
    }


# ---- what the common values have ----


def _optimizers(common: Any) -> list[_Optimizer]:
    """Return the chained optimizers, in order; one if it is not a chain."""
    if common is None:
        return []
    pairs = pairs_of(common) or []
    chained = {key: node for key, node in pairs if type(key) is int}
    if pairs and len(chained) == len(pairs):
        return [_one(chained[number]) for number in sorted(chained)]
    return [_one(common)]


def _one(node: Any) -> _Optimizer:
    """Return one optimizer from its node."""
    if not is_plain_dict(node):
        return _Optimizer(groups=[], steps=[], rest={"value": node})
    own = dict(node)
    inner = own.pop("optimizer", None)
    if not is_plain_dict(inner):
        inner, own = node, {}
    inner = dict(inner)
    listed = inner.get("param_groups")
    if isinstance(listed, list):
        del inner["param_groups"]
    has_state = pairs_of(inner.get("state")) is not None
    state = dict(_text_pairs(inner.pop("state") if has_state else {}))
    common_step = state.pop("common_step", None)
    rest = {
        **{key: value for key, value in {**own, **inner}.items() if not _is_empty(value)},
        **({"state": state} if not _is_empty(state) else {}),
    }
    groups, steps = [], []
    for group in listed if isinstance(listed, list) else []:
        settings = group if is_plain_dict(group) else {}
        groups.append({key: each for key, each in settings.items() if key not in _NOT_SETTINGS})
        steps.append(settings.get("step", common_step))
    return _Optimizer(groups=groups, steps=steps, rest=rest)


def _text_pairs(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the pairs of a mapping with keys as text."""
    for key, value in pairs_of(node) or []:
        yield str(key), value


def _is_empty(node: Any) -> bool:
    """Return True for what holds nothing: what remains where tensors were taken out."""
    if node is None:
        return True
    pairs = pairs_of(node)
    inside = [each for _, each in pairs] if pairs is not None else node
    return isinstance(inside, list) and all(_is_empty(each) for each in inside)


# ---- the tree ----


def _add_tree(
    made: Draft,
    entries: Sequence[_Entry],
    optimizers: Sequence[_Optimizer],
    shapes: Mapping[str, tuple[int, ...]],
    common_tensors: Mapping[str, CatalogTensor],
    file: str,
) -> None:
    """Add the part of an optimizer that is stored by parameter."""
    state: dict[str, Any] = {}
    main: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    chain_of: dict[str, int | None] = {}
    for each in entries:
        name = each.parameter
        chain_of[name] = each.chain
        is_main = each.entry in _MAIN
        key = f"{PART}.main.{name}" if is_main else f"{PART}.state.{name}.{each.entry}"
        node = made.add_tensor(replace(each.tensor, key=key))
        if is_main:
            main[name] = node
        else:
            state.setdefault(name, {})[each.entry] = node
        facts[name] = {"shape": [*shapes.get(name, each.tensor.shape)]}
    groups, steps, ranges = _all_groups(optimizers)
    everything = range(len(groups))
    membership = {
        name: number
        for name, chain in chain_of.items()
        if (number := _group_of(name, facts[name]["shape"], groups, ranges.get(chain, everything)))
        is not None
    }
    without = []
    for name, entries_of in state.items():
        if "step" in entries_of:
            continue  # its own, next to the one that its group states
        step = steps[membership[name]] if name in membership else _only(steps)
        tensor = step_tensor(f"{PART}.state.{name}.step", step, common_tensors, file)
        if tensor is not None:
            entries_of["step"] = made.add_tensor(tensor)
        elif any(each is not None for each in steps):
            without.append(name)
    if without:
        made.left_out.append(
            f"{PART}: the number of steps of {some_of(without, most=_MAX_NAMED)}, which differs "
            f"between groups"
        )
    tree = {"state": state, "groups": groups, "membership": membership, "parameters": facts}
    made.parts[PART] = tree | ({"main": main} if main else {})
    _note_groups(made, groups, [name for name in chain_of if name not in membership])


def _all_groups(
    optimizers: Sequence[_Optimizer],
) -> tuple[list[dict[str, Any]], list[Any], dict[int | None, range]]:
    """Return the groups of all chained optimizers, their steps, and which are whose."""
    groups: list[dict[str, Any]] = []
    steps: list[Any] = []
    ranges: dict[int | None, range] = {}
    for number, each in enumerate(optimizers):
        ranges[number] = range(len(groups), len(groups) + len(each.groups))
        groups += each.groups
        steps += each.steps
    return groups, steps, ranges


def _group_of(
    name: str, shape: Sequence[int], groups: Sequence[Mapping[str, Any]], among: Sequence[int]
) -> int | None:
    """Return the group that Megatron puts a parameter into; None if that is not certain.

    Experts are apart where experts are sharded; biases and parameters with one dim, not counting
    dims over layers and experts, have no weight decay.
    """
    is_expert = _EXPERT.search(name) is not None
    num_stacked = sum(bool(each.search(name)) for each in (_STACKED, _STACKED_EXPERTS))
    is_vector = name.endswith(".bias") or len(shape) - num_stacked <= 1
    apart = [number for number in among if groups[number].get("is_expert_parallel") is is_expert]
    chosen = apart or list(among)  # without parallelism of experts they are as all others
    without = [number for number in chosen if groups[number].get("wd_mult") == 0]
    decaying = [number for number in chosen if number not in without]
    chosen = (without if is_vector else decaying) or chosen
    first = next(iter(chosen), None)
    is_certain = first is not None and all(groups[number] == groups[first] for number in chosen)
    return first if is_certain else None


def _note_groups(made: Draft, groups: Sequence[object], without: Sequence[str]) -> None:
    if without:
        more = ", …" if len(without) > _MAX_NAMED else ""
        made.left_out.append(
            f"{PART}: the group of {len(without)} parameters, which is not stored and does not "
            f"follow from the groups' settings: {', '.join(without[:_MAX_NAMED])}{more}"
        )
    elif len(groups) > 1:
        made.left_out.append(
            f"{PART}: which group a parameter is in; it is not stored, and follows Megatron's "
            f"rule (experts apart, no weight decay for biases and vectors)"
        )


def _only(steps: Sequence[Any]) -> Any:
    """Return the step that all groups have; None if they differ."""
    return steps[0] if steps and all(each == steps[0] for each in steps) else None


def step_tensor(
    key: str, step: Any, common_tensors: Mapping[str, CatalogTensor], file: str
) -> CatalogTensor | None:
    """Return the number of steps of a parameter as PyTorch keeps it: a tensor of one float.

    None for a step that is not a finite number, nor the node of a tensor.
    """
    if is_tensor(step):
        (stored,) = tensor_keys(step)
        return replace(common_tensors[stored], key=key)
    if type(step) not in (int, float) or not math.isfinite(step):
        return None
    data = HeldBytes(np.array(step, dtype="<f4").tobytes(), file)
    return CatalogTensor(key=key, dtype="F32", shape=(), chunks=(Chunk(Box((), ()), data),))
