"""The files of a ZeRO checkpoint: which there are, what they agree on, where parameters lie.

A file of each rank has the optimizer's state; of model state there is one file, or of stage 3 one
for each rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import CorruptionError, shorten_ranks, some_of
from holdfast.foreign.location import Location, is_step
from holdfast.foreign.pickled_values import EnumValue, PickledTensor, dims, index
from holdfast.foreign.pickles import NOT_READ
from holdfast.foreign.torch_files import open_file
from holdfast.foreign.torch_save import TorchFile
from holdfast.foreign.zero_partitions import (
    FlatTensor,
    Parameter,
    cut_parameters,
    parameters_of_group,
)
from holdfast.storage import Storage

OPTIMIZER_FILE = re.compile(
    r"(bf16_|fp16_)?zero_pp_rank_([0-9]{1,7})_mp_rank_([0-9]{1,7})_optim_states\.pt"
)
_CUT_OTHERWISE = re.compile(
    r"(?:expp_rank_|expert_|layer_).*_states\.pt|\w*mp_rank_0*[1-9]\d*_(?:model|optim)_states\.pt"
)
_WHOLE = "mp_rank_00_model_states.pt"
FLAT, CUT_FLAT = "single_partition_of_fp32_groups", "fp32_flat_groups"
STATE, CUT_STATE = "base_optimizer_state", "optimizer_state_dict"
ALIGNMENT, PADDINGS = "param_alignment_paddings", "group_paddings"
_ADVICE = (
    "load it with DeepSpeed and save the weights (`save_16bit_model`), or make a universal "
    "checkpoint of it (`ds_to_universal.py`)"
)


# ---- files ----


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroFile:
    """One opened file.

    Args:
        name: In the folder.
        file: Its storages.
        value: Its dict.
        identity: Of what was read.
    """

    name: str
    file: TorchFile
    value: dict[Any, Any]
    identity: bytes

    def flat(self, value: object, what: str) -> FlatTensor:
        """Return where a flat tensor lies; CorruptionError if it is not one."""
        if not isinstance(value, PickledTensor) or len(value.shape) != 1 or value.stride != (1,):
            raise CorruptionError(f"{self.file.place}: {what} is not a flat tensor")
        start, _ = self.file.range_of(value)
        return FlatTensor(file=self.name, start=start, numel=value.shape[0], dtype=value.dtype)

    def number(self, value: object, storage: Storage) -> object:
        """Return what tells one number from another, a tensor of one element included; else None.

        Cost: a read, for a tensor.
        """
        if type(value) in (int, float):
            return value
        if not isinstance(value, PickledTensor) or value.shape or not value.nbytes:
            return None
        start, nbytes = self.file.range_of(value)
        return value.dtype, storage.read(self.name, start=start, nbytes=nbytes)


def read_file(location: Location, name: str) -> ZeroFile:
    """Open a file; CorruptionError if it is damaged, or not a dict."""
    file, identity = open_file(location, name)
    if not isinstance(file.value, dict):
        raise CorruptionError(f"{file.place}: it is not a dict")
    return ZeroFile(name=name, file=file, value=file.value, identity=identity)


def files_by_rank(location: Location) -> list[str]:
    """Return the files of the optimizer, by rank.

    Raises CorruptionError if some are missing, or there are others.
    """
    names = location.names()
    others = [name for name in names if _CUT_OTHERWISE.fullmatch(name)]
    if others:
        raise CorruptionError(
            f"{location.label} has {others[0]}: ZeRO with model parallelism, a pipeline or experts "
            f"is not read; {_ADVICE}",
            details=NOT_READ,
        )
    by_rank: dict[int, str] = {}
    for name in names:
        match = OPTIMIZER_FILE.fullmatch(name)
        if match is not None:
            before = by_rank.setdefault(int(match[2]), name)
            if before != name:
                raise CorruptionError(
                    f"{location.label}: {before} and {name} are of one rank, so of two saves: move "
                    f"the older files away"
                )
    missing = sorted(set(range(max(by_rank) + 1)) - set(by_rank)) if len(by_rank) else []
    if missing:
        raise CorruptionError(
            f"{location.label}: the optimizer's files of ranks {shorten_ranks(missing)} are missing"
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


def optimizer_of(file: ZeroFile) -> dict[Any, Any]:
    """Return the state of an optimizer's file; CorruptionError if it has none."""
    state = file.value.get("optimizer_state_dict")
    if not isinstance(state, dict):
        raise CorruptionError(f"{file.file.place}: it has no optimizer_state_dict")
    return state


def stage_of(files: Sequence[ZeroFile], location: Location) -> int:
    """Return the stage; CorruptionError if the files are not all of one save by all its ranks."""
    stages: set[object] = set()
    counts: set[object] = set()
    for file in files:
        state = optimizer_of(file)
        stated = state.get("zero_stage", 1)  # BF16_Optimizer, which is like stage 1, has none
        stages.add(stated.value if isinstance(stated, EnumValue) else stated)
        count = state.get("partition_count", len(files))
        counts.update(count if isinstance(count, list) else [count])
        if state.get("ds_zero_partition_groups") is not None:
            raise CorruptionError(
                f"{file.file.place}: its groups are cut over other ranks (experts), which is not "
                f"read; {_ADVICE}",
                details=NOT_READ,
            )
    stage = stages.pop() if len(stages) == 1 else None
    if type(stage) is not int or not 1 <= stage <= 3:
        raise CorruptionError(
            f"{location.label}: its files do not state one stage of ZeRO from 1 to 3"
        )
    if counts != {len(files)}:
        raise CorruptionError(
            f"{location.label}: its optimizer was saved by {some_of(sorted(map(str, counts)))} "
            f"ranks, and there are {len(files)} files of it: some are missing, or of another save"
        )
    return stage


def model_files(location: Location, stage: int, num_ranks: int) -> list[str]:
    """Return the files of model state: one, or of stage 3 one for each rank."""
    names = [_WHOLE]
    if stage == 3:
        names = [f"zero_pp_rank_{rank}_{_WHOLE}" for rank in range(num_ranks)]
    missing = sorted(set(names) - set(location.names()))
    if missing:
        raise CorruptionError(f"{location.label}: {some_of(missing)} is missing")
    return names


def step_of(location: Location, model: Sequence[ZeroFile]) -> int:
    """Return the step that the files of model state state; CorruptionError if they differ."""
    stated = [file.value.get("global_steps") for file in model]
    steps = sorted({step for step in stated if is_step(step)})
    if len(steps) > 1:
        raise CorruptionError(
            f"{location.label}: the ranks' files of model state are of the steps {steps}, so of "
            f"several saves"
        )
    return steps[0] if steps else location.step


# ---- where parameters lie ----


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroGroup:
    """Parameters of one flat tensor, and that tensor of each rank.

    Args:
        parameters: By name.
        flats: The partition of each rank.
        size: Elements of a partition with its padding, which the optimizer's state has.
    """

    parameters: dict[str, Parameter]
    flats: list[FlatTensor]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroLayout:
    """Where all parameters lie.

    Args:
        stage: Of ZeRO.
        groups: Trainable parameters; of stage 3 by sub-group.
        frozen: Those that are cut, each by itself, in the files of model state.
    """

    stage: int
    groups: list[ZeroGroup]
    frozen: dict[str, tuple[Parameter, list[FlatTensor]]]


def layout_of(
    location: Location, stage: int, optim: Sequence[ZeroFile], model: Sequence[ZeroFile]
) -> ZeroLayout:
    """Return where all parameters lie.

    Args:
        location: Of the checkpoint.
        stage: Of ZeRO.
        optim: The files of the optimizer, by rank.
        model: Those of model state.

    Raises:
        CorruptionError: The files contradict each other, or do not have the elements they state.
    """
    key = CUT_FLAT if stage == 3 else FLAT
    listed = [list_in(optimizer_of(file), key, file) for file in optim]
    stated = [list_in(file.value, "param_shapes", file) for file in model]
    shapes = [_shapes(each, model[0]) for each in stated[0]]
    order = [[*each.items()] for each in shapes]
    if any([[*_shapes(each, model[0]).items()] for each in one] != order for one in stated[1:]):
        raise CorruptionError(f"{location.label}: the ranks' files state different param_shapes")
    if {len(each) for each in listed} != {len(shapes)}:
        raise CorruptionError(
            f"{location.label}: {len(shapes)} groups of parameters, but {key} has "
            f"{sorted({len(each) for each in listed})}"
        )
    names = [name for each in shapes for name in each]
    if len(set(names)) != len(names):
        raise CorruptionError(f"{location.label}: a parameter is in two groups")
    groups = []
    paddings = optimizer_of(optim[0]).get(ALIGNMENT)
    at_end = optimizer_of(optim[-1]).get(PADDINGS)
    for number, each in enumerate(shapes):
        flats = one_type(
            [
                file.flat(partitions[number], f"{key}[{number}]")
                for file, partitions in zip(optim, listed, strict=True)
            ],
            f"{location.label}: {key}[{number}]",
        )
        sizes = [flat.numel for flat in flats]
        place = f"{location.label}: group {number}"
        if stage == 3:
            parameters = cut_parameters(each, sizes, place=place)
        else:
            own = [index(n) for n in paddings[number]] if paddings else [0] * len(each)
            end = index(at_end[number]) if at_end else None
            parameters = parameters_of_group(each, own, sizes, end=end, place=place)
        # Of a single rank the partition itself may be cut.
        size = sizes[0] if len(sizes) > 1 or stage == 3 or not at_end else sizes[0] + at_end[number]
        groups.append(ZeroGroup(parameters=parameters, flats=flats, size=size))
    return ZeroLayout(stage=stage, groups=groups, frozen=_frozen(stage, model))


def _frozen(stage: int, model: Sequence[ZeroFile]) -> dict[str, tuple[Parameter, list[FlatTensor]]]:
    """Return the frozen parameters of stage 3; before it they are whole, in the module."""
    stated = model[0].value.get("frozen_param_shapes")
    if stage != 3 or not stated:
        return {}
    frozen = {}
    for name, shape in _shapes(stated, model[0]).items():
        flats = one_type(
            [file.flat(dict_in(file, "frozen_param_fragments").get(name), name) for file in model],
            name,
        )
        parameters = cut_parameters({name: shape}, [flat.numel for flat in flats], place=name)
        frozen[name] = parameters[name], flats
    return frozen


def one_type(flats: list[FlatTensor], what: str) -> list[FlatTensor]:
    """Return flat tensors; CorruptionError if they have several element types."""
    if len({flat.dtype for flat in flats}) != 1:
        raise CorruptionError(f"{what}: its partitions have several element types")
    return flats


def list_in(value: Mapping[Any, Any], key: str, file: ZeroFile) -> list[Any]:
    """Return a list of a file; CorruptionError if it is not one."""
    result = value.get(key)
    if not isinstance(result, list):
        raise CorruptionError(f"{file.file.place}: {key} is not a list")
    return result


def dict_in(file: ZeroFile, key: str) -> dict[Any, Any]:
    """Return a dict of a file; CorruptionError if it is not one."""
    result = file.value.get(key)
    if not isinstance(result, dict):
        raise CorruptionError(f"{file.file.place}: {key} is not a dict")
    return result


def _shapes(value: object, file: ZeroFile) -> dict[str, tuple[int, ...]]:
    """Return shapes by name."""
    if not isinstance(value, dict) or not all(type(name) is str for name in value):
        raise CorruptionError(f"{file.file.place}: param_shapes is not a dict of names")
    return {name: dims(shape) for name, shape in value.items()}
