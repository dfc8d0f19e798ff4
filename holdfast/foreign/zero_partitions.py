"""Which elements of which flat tensors the parameters of a DeepSpeed ZeRO checkpoint are.

Stages 1 and 2 lay the parameters of a group end to end, as one flat tensor, of which each rank has
an equal run; padding follows the last parameter, and in newer releases any parameter. Stage 3 cuts
each parameter into equal runs, the last of them padded, and lays a rank's runs end to end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.arrays.boxes import flat_range_boxes
from holdfast.errors import CorruptionError
from holdfast.foreign.catalog import CatalogTensor, Chunk, FileBytes
from holdfast.format.dtypes import DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatTensor:
    """A flat tensor of one rank: where its elements lie, one after another."""

    file: str
    start: int
    numel: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRun:
    """Elements of a parameter that lie one after another in a flat tensor.

    Args:
        rank: Whose flat tensor.
        at: First element in it.
        first: First element of the parameter, in row-major order.
        numel: How many.
    """

    rank: int
    at: int
    first: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter, and the runs of which it is made, which cover it once and in order."""

    shape: tuple[int, ...]
    runs: tuple[FlatRun, ...]


Shapes = Mapping[str, tuple[int, ...]]
"""Of the parameters of a group, in the order in which they are laid out."""


def parameters_of_group(
    shapes: Shapes, paddings: Sequence[int], sizes: Sequence[int], *, end: int | None, place: str
) -> dict[str, Parameter]:
    """Return where the parameters of a group lie in the flat tensors of stages 1 and 2.

    Args:
        shapes: Of the parameters.
        paddings: Elements that follow each of them.
        sizes: Elements of the flat tensor, by rank.
        end: Elements of padding at the end of the whole flat tensor; None if it is not stated.
        place: Of the group, for messages.

    Raises:
        CorruptionError: The flat tensors are not those of these parameters.
    """
    size, needed = sizes[0], sum(map(math.prod, shapes.values())) + sum(paddings)
    # Padding at the end is cut off, of the last rank alone.
    if any(each != size for each in sizes[:-1]) or sizes[-1] > size:
        raise CorruptionError(
            f"{place}: the partitions of the ranks have {list(sizes)} elements, which are not "
            f"equal runs of one flat tensor"
        )
    whole, step = size * len(sizes), 2 * len(sizes)
    if end is None:  # of old releases: the whole is padded to a multiple of `step`
        is_good = needed <= sum(sizes) and -(-sum(sizes) // step) == -(-needed // step)
    else:
        is_good = needed in (whole - end, whole if len(sizes) == 1 else -1) and needed <= sum(sizes)
    if not is_good:
        raise CorruptionError(
            f"{place}: its partitions have {sum(sizes)} elements, and its parameters {needed}"
        )
    parameters, begin = {}, 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel, runs = math.prod(shape), []
        at = begin
        while at < begin + numel:
            rank = at // size
            stop = min(begin + numel, (rank + 1) * size)
            runs.append(FlatRun(rank=rank, at=at - rank * size, first=at - begin, numel=stop - at))
            at = stop
        parameters[name] = Parameter(shape=shape, runs=tuple(runs))
        begin += numel + padding
    return parameters


def cut_parameters(shapes: Shapes, sizes: Sequence[int], *, place: str) -> dict[str, Parameter]:
    """Return where the parameters of a group lie in the flat tensors of stage 3.

    Arguments and errors as of `parameters_of_group`.
    """
    parameters, begin, num_ranks = {}, 0, len(sizes)
    for name, shape in shapes.items():
        numel = math.prod(shape)
        size = -(-numel // num_ranks)
        starts = [(rank, rank * size) for rank in range(num_ranks) if rank * size < numel]
        parameters[name] = Parameter(
            shape=shape,
            runs=tuple(
                FlatRun(rank=rank, at=begin, first=first, numel=min(size, numel - first))
                for rank, first in starts
            ),
        )
        begin += size
    if any(each != begin for each in sizes):
        raise CorruptionError(
            f"{place}: the partitions of the ranks have {list(sizes)} elements, and each rank's "
            f"part of the parameters {begin}"
        )
    return parameters


def tensor_of_runs(key: str, parameter: Parameter, flats: Sequence[FlatTensor]) -> CatalogTensor:
    """Return a tensor with an element for each one of a parameter.

    Args:
        key: Of the tensor.
        parameter: Where it lies.
        flats: The flat tensor of each rank, of one element type.

    Cost: at most twice as many chunks for a run as the parameter has dims.
    """
    dtype = flats[0].dtype
    itemsize = DTYPES[dtype].itemsize
    chunks = []
    for run in parameter.runs:
        flat, at = flats[run.rank], run.at
        for box in flat_range_boxes(parameter.shape, run.first, run.first + run.numel):
            chunks.append(Chunk(box, FileBytes(flat.file, flat.start + at * itemsize)))
            at += box.numel
    return CatalogTensor(key=key, dtype=dtype, shape=parameter.shape, chunks=tuple(chunks))
