"""Checkpoints of DeepSpeed's ZeRO, stages 1 to 3, with the float32 weights of its optimizer.

A step is a folder (`global_step100`) with a file of each rank's optimizer state, and of model
state one file (stages 1 and 2) or one for each rank (stage 3); `latest` in the run's folder names
the newest. The weights are what `zero_to_fp32.py` gives: the float32 partitions of the trainable
parameters, and frozen parameters and buffers as they are. The optimizer's state lies in partitions
of the same cut, and is read by parameter. All other entries of the model's file are parts.

Model parallelism, pipelines and experts have files that are cut in other ways: such a checkpoint
is refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.errors import CorruptionError, some_of
from holdfast.foreign.catalog import Catalog, Checksum, describing
from holdfast.foreign.draft import Draft
from holdfast.foreign.location import Location
from holdfast.foreign.other_formats import unread_files
from holdfast.foreign.pickle_nodes import module_versions
from holdfast.foreign.pickled_values import PickledTensor, Record
from holdfast.foreign.torch_dist_optimizer import step_tensor
from holdfast.foreign.torch_files import FileMemory, tensors_of
from holdfast.foreign.zero_files import (
    ALIGNMENT,
    CUT_FLAT,
    CUT_STATE,
    FLAT,
    OPTIMIZER_FILE,
    PADDINGS,
    STATE,
    ZeroFile,
    ZeroGroup,
    ZeroLayout,
    dict_in,
    files_by_rank,
    layout_of,
    list_in,
    model_files,
    one_type,
    optimizer_of,
    read_file,
    stage_of,
    step_of,
)
from holdfast.foreign.zero_partitions import FlatTensor, Parameter, tensor_of_runs
from holdfast.format.values import join_path

FORMAT = "DeepSpeed ZeRO"
_LATEST = "latest"
_MODEL, _OPTIMIZER, _COMMON = "model", "optimizer", "optimizer_common"
_OWN = ("_optim_states.pt", "_model_states.pt")
_LAYOUT = (
    *(FLAT, CUT_FLAT, STATE, CUT_STATE, ALIGNMENT, PADDINGS, "partition_count"),
    *("zero_stage", "param_slice_mappings", "ds_version"),
)
"""Entries of an optimizer's file that say where its elements lie."""
_MODEL_LAYOUT = (
    *("module", "param_shapes", "buffer_names", "shared_params"),
    *("frozen_param_shapes", "frozen_param_fragments"),
)


def detect(location: Location) -> bool:
    """Return True for a step with files of ZeRO's optimizer, and a run whose latest is one."""
    return _checkpoint_at(location) is not None


def _checkpoint_at(location: Location) -> Location | None:
    """Return the step that a location is or names as its latest; None if there is none."""
    return location.or_latest(_LATEST, _has_step, _folder_of)


def _folder_of(latest: str) -> str | None:
    return None if latest.startswith(".") or "/" in latest or "\0" in latest else latest


def _has_step(location: Location) -> bool:
    names = location.names()
    return any(map(OPTIMIZER_FILE.fullmatch, names)) and any(
        name.endswith(_OWN[1]) for name in names
    )


def open_catalog(location: Location) -> Catalog:
    """Describe a checkpoint.

    Raises:
        CorruptionError: It is damaged or not whole, asks for what is never run, or is cut in a way
            that is not read.
        StorageError: A file cannot be read.

    Cost: reads the pickles of all files, not the tensors.
    """
    location = _checkpoint_at(location) or location
    with describing(location.label, "a checkpoint of ZeRO"):
        return _open(location)


def _open(location: Location) -> Catalog:
    ranks = files_by_rank(location)
    optim = [read_file(location, name) for name in ranks]
    stage = stage_of(optim, location)
    names = model_files(location, stage, len(ranks))
    model = [read_file(location, name) for name in names]
    made = _Made(location, FORMAT)
    layout = layout_of(location, stage, optim, model)
    _add_model(made, layout, model)
    _add_optimizer(made, layout, optim)
    _add_rest(made, model, optim)
    used = [*ranks, *names]
    made.left_out += [
        f"{name}: it is not of this save: stage {stage} has none of this name"
        for name in location.names()
        if name.endswith(_OWN) and name not in used
    ]
    made.left_out += unread_files(location, _OWN)
    return made.catalog(
        identity=b"".join(each.identity for each in (*optim, *model)),
        files=used,
        step=step_of(location, model),
        checksums=lambda files: _checksums(made, [*model, *optim]),
    )


# ---- the parts ----


class _Made(Draft):
    """The catalog so far.

    Attributes:
        memory: Of the first file of model state.
    """

    def __init__(self, location: Location, title: str) -> None:
        super().__init__(location, title)
        self.memory = FileMemory()

    def add(self, path: str, value: object, file: ZeroFile, memory: FileMemory) -> Any:
        """Add the tensors of a value, and return its node."""
        tensors, node, left_out = tensors_of(value, path, file.file, file.name, memory)
        self.add_tensors(tensors.values())
        self.left_out += left_out
        return node

    def add_runs(self, key: str, parameter: Parameter, flats: Sequence[FlatTensor]) -> Any:
        """Add a tensor that lies in flat ones, and return its node."""
        return self.add_tensor(tensor_of_runs(key, parameter, flats))


def _add_model(made: _Made, layout: ZeroLayout, model: Sequence[ZeroFile]) -> None:
    """Add the weights: in the order of the module, with what only other entries name at the end."""
    first = model[0]
    module = dict_in(first, "module")
    if not all(type(name) is str for name in module):
        raise CorruptionError(f"{first.file.place}: module is not a state dict")
    shared = dict_in(first, "shared_params") if "shared_params" in first.value else {}
    weights: dict[str, Any] = {}
    for group in layout.groups:
        for name, parameter in group.parameters.items():
            weights[name] = made.add_runs(join_path(_MODEL, name), parameter, group.flats)
            copy = module.get(name)
            if isinstance(copy, PickledTensor) and copy.nbytes and copy.shape != parameter.shape:
                raise CorruptionError(
                    f"{first.file.place}: {name!r} is {list(copy.shape)} in the module, and "
                    f"{list(parameter.shape)} in the optimizer"
                )
    for name, (parameter, flats) in layout.frozen.items():
        weights[name] = made.add_runs(join_path(_MODEL, name), parameter, flats)
    for name, other in shared.items():
        if other in weights:
            weights[name] = dict(weights[other])
    others = {name: value for name, value in module.items() if name not in weights}
    if layout.stage == 3:
        _refuse_placeholders(others, first)
    elif isinstance(first.value.get("frozen_param_fragments"), dict):
        fragments = first.value["frozen_param_fragments"]
        others = {**{n: each for n, each in fragments.items() if n not in weights}, **others}
    weights |= made.add(_MODEL, others, first, made.memory)
    copies = [n for n, each in module.items() if n not in others and not _is_placeholder(each)]
    if copies:
        made.left_out.append(
            f"module: its copies of {len(copies)} trainable parameters in the precision of "
            f"training; the optimizer's are read"
        )
    if len(model) > 1 and any(isinstance(each, PickledTensor) for each in others.values()):
        made.left_out.append(f"buffers of ranks 1 to {len(model) - 1}: those of rank 0 are read")
    ordered = [*(name for name in module if name in weights), *weights]
    made.parts[_MODEL] = {name: weights[name] for name in ordered}
    versions = module_versions(module)
    if versions is not None:
        made.versions[_MODEL] = versions


def _refuse_placeholders(others: Mapping[str, Any], file: ZeroFile) -> None:
    """Raise CorruptionError if a tensor of stage 3 is neither a parameter nor a buffer.

    A module of stage 3 has empty tensors in the place of its parameters.
    """
    buffers = file.value.get("buffer_names")
    names = set(buffers) if isinstance(buffers, list) else set()
    lost = [name for name, each in others.items() if _is_placeholder(each) and name not in names]
    if lost:
        raise CorruptionError(
            f"{file.file.place}: the values of {some_of(lost)} are in no file (were frozen "
            f"parameters excluded from the save?)"
        )


def _is_placeholder(value: object) -> bool:
    return isinstance(value, PickledTensor) and not value.nbytes


def _add_optimizer(made: _Made, layout: ZeroLayout, optim: Sequence[ZeroFile]) -> None:
    """Add the optimizer's state by parameter, in PyTorch's form."""
    key = CUT_STATE if layout.stage == 3 else STATE
    states: list[Any] = [optimizer_of(file).get(key) for file in optim]
    first = states[0]
    if not all(isinstance(state, dict) for state in states):
        made.left_out.append(f"{_OPTIMIZER}: {key} is not the state of an optimizer of PyTorch")
        return
    tree: dict[str, Any] = {"state": {}, "param_groups": []}
    steps = [_steps(state, layout, file) for state, file in zip(states, optim, strict=True)]
    memory = FileMemory()
    for at, group in enumerate(first["param_groups"]):
        numbers = [number for number in group["params"] if number in steps[0]]
        settings = {name: each for name, each in group.items() if name not in ("params", "step")}
        node = made.add(f"{_OPTIMIZER}.param_groups.{at}", settings, optim[0], memory)
        node["params"] = [name for n in numbers for name in layout.groups[n].parameters]
        tree["param_groups"].append(node)
    for number, each in enumerate(layout.groups):
        of_ranks = [dict(state["state"].get(number, {})) for state in states]
        for entries, own in zip(of_ranks, steps, strict=True):
            if own[number] is not None:
                entries.setdefault("step", own[number])
        for name in {name: None for entries in of_ranks for name in entries}:
            _add_entry(made, tree["state"], each, name, optim, [e.get(name) for e in of_ranks])
    made.parts[_OPTIMIZER] = tree


def _steps(state: Mapping[Any, Any], layout: ZeroLayout, file: ZeroFile) -> dict[int, Any]:
    """Return by partition the step that a rank's settings state; None if they state none.

    Raises CorruptionError if the settings are not those of the partitions.
    """
    partitions = range(len(layout.groups))
    groups = list_in(state, "param_groups", file)
    steps = {n: group.get("step") for group in groups for n in group["params"] if n in partitions}
    if len(steps) != len(partitions):
        raise CorruptionError(
            f"{file.file.place}: its param_groups are not those of its partitions"
        )
    return steps


def _add_entry(
    made: _Made,
    state: dict[str, Any],
    group: ZeroGroup,
    entry: str,
    files: Sequence[ZeroFile],
    values: Sequence[Any],
) -> None:
    """Add one entry of the state of a group: of each element, or one value for all."""
    place = f"{_OPTIMIZER}: {entry} of {some_of([*group.parameters], most=3)}"
    if _is_flat(values, group):
        flats = one_type(
            [file.flat(value, place) for file, value in zip(files, values, strict=True)], place
        )
        for name, parameter in group.parameters.items():
            key = f"{_OPTIMIZER}.state.{name}.{entry}"
            state.setdefault(name, {})[entry] = made.add_runs(key, parameter, flats)
        return
    storage, first = made.location.storage, values[0]
    numbers = {file.number(value, storage) for file, value in zip(files, values, strict=True)}
    if len(numbers) > 1 and entry == "step":
        raise CorruptionError(f"{place}: it differs between the files of the ranks: of two saves?")
    if len(numbers) > 1 or None in numbers:
        made.left_out.append(
            f"{place}: it has neither an element for each of the parameter nor one value for all"
        )
    elif isinstance(first, PickledTensor):
        for name in group.parameters:
            path = f"{_OPTIMIZER}.state.{name}.{entry}"
            state.setdefault(name, {})[entry] = made.add(path, first, files[0], FileMemory())
    else:
        for name in group.parameters:
            tensor = step_tensor(f"{_OPTIMIZER}.state.{name}.{entry}", first, {}, files[0].name)
            if tensor is not None:
                state.setdefault(name, {})[entry] = made.add_tensor(tensor)


def _is_flat(values: Sequence[Any], group: ZeroGroup) -> bool:
    """Return True if each rank has as many elements as of the parameters, or the padding more."""
    return all(
        isinstance(value, PickledTensor)
        and len(value.shape) == 1
        and flat.numel <= value.shape[0] <= group.size
        for value, flat in zip(values, group.flats, strict=True)
    )


def _add_rest(made: _Made, model: Sequence[ZeroFile], optim: Sequence[ZeroFile]) -> None:
    """Add what else the first files have: counts, settings, what the user saved with them."""
    first = model[0]
    rest = {key: value for key, value in first.value.items() if key not in _MODEL_LAYOUT}
    if rest.get(_OPTIMIZER) is None:
        rest.pop(_OPTIMIZER, None)
    common = {
        # A loss scaler is an object of DeepSpeed's, whose attributes say it all.
        key: each.state if isinstance(each, Record) and type(each.state) is dict else each
        for key, each in optimizer_of(optim[0]).items()
        if key not in _LAYOUT
    }
    files = [(key, value, first, made.memory) for key, value in rest.items()]
    for key, value, file, memory in [*files, (_COMMON, common, optim[0], FileMemory())]:
        name = made.free_name(str(key))
        try:
            made.parts[name] = made.add(name, value, file, memory)
        except CorruptionError as error:
            if not error.details.get("not_read"):
                raise
            # One odd value of the user's does not make the weights unreadable.
            made.left_out.append(str(error))
    made.left_out += made.memory.notes()
    if len(optim) > 1:
        made.left_out.append(
            f"values of ranks 1 to {len(optim) - 1} in their files, besides partitions: those of "
            f"rank 0 are read"
        )


def _checksums(made: _Made, files: Sequence[ZeroFile]) -> Iterator[Checksum]:
    """Yield those that the files state, each with a tensor that starts in its range."""
    starts: dict[str, list[tuple[int, str]]] = {}
    for key, tensor in made.tensors.items():
        for chunk in tensor.chunks:
            starts.setdefault(chunk.payload.file, []).append((chunk.payload.order, key))
    for file in files:
        own = sorted(starts.get(file.name, []))
        for each in FileMemory().checksums(file.file, file.name):
            at = bisect_left(own, (each.start, ""))
            is_inside = at < len(own) and own[at][0] < each.start + each.nbytes
            yield replace(each, key=own[at][1] if is_inside else None)
