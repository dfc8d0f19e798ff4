"""Layouts: which rank has which coordinates. Pure arithmetic, no torch, no processes.

A layout factorises one list of ranks in two ways that share the pipeline axis:

- dense view:  ``tp * cp * dp * pp = number of ranks``
- expert view: ``expt_tp * ep * expt_dp * pp = number of ranks``

The leftmost axis of the order string varies fastest. The dense view leaves `ep` out of it; the
expert view leaves `cp` out, and reads `tp` as `expt_tp` and `dp` as `expt_dp`.

A layout without experts (ep = 1, expt_tp = tp) need not have an expert view. If the order makes the
two views differ in `pp`, it is valid, and only questions about expert groups are refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.arguments import check_int
from holdfast.errors import LayoutError, counted, shorten_ranks
from holdfast.format.manifest import LayoutInfo

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("expt_tp", "ep", "expt_dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
SIZED_AXES = ("tp", "cp", "ep", "dp", "pp", "expt_tp")
"""Those whose sizes a layout is made with."""

_TOKENS = ("tp", "cp", "ep", "dp", "pp")
_WHOLE = "tp-cp-dp-pp"
_EXPERT_TOKEN = {"tp": "expt_tp", "ep": "ep", "dp": "expt_dp", "pp": "pp"}

NAMED_AXES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("cp", "dp"),
    "tp_cp": ("tp", "cp"),
    "mp": ("tp", "pp"),
    "ep": ("ep",),
    "expt_tp": ("expt_tp",),
    "expt_dp": ("expt_dp",),
    "tp_ep": ("expt_tp", "ep"),
    "tp_ep_pp": ("expt_tp", "ep", "pp"),
}
CLONED = {
    "dp_cp_ag": "dp_cp",
    "expt_dp_ag": "expt_dp",
    "dp_cp_intra_ag": "dp_cp_intra",
    "expt_dp_intra_ag": "expt_dp_intra",
}
"""Names of second communicators, with the group that each duplicates."""
SLICED = {
    "dp_cp_intra": "dp_cp",
    "dp_cp_inter": "dp_cp",
    "expt_dp_intra": "expt_dp",
    "expt_dp_inter": "expt_dp",
}
GROUP_NAMES = (*NAMED_AXES, "embd", *SLICED, *CLONED)
"""Every named group but `control`, in the order in which communicators are created."""


def axes_of(name: str) -> tuple[str, ...]:
    """Return the axes that a group runs along; `embd` and the like give themselves."""
    name = CLONED.get(name, name)
    return NAMED_AXES.get(SLICED.get(name, name)) or tuple(name.split("-"))


def runs_along_data(name: str) -> bool:
    """Return True if a group is over data ranks, and so never shares a communicator.

    Gradients and parameters travel on it while the model computes. Their collectives have no fixed
    place among those of other groups: a gradient may come later on one rank, or not at all.
    """
    return not {"dp", "expt_dp", "intra_dist_opt"}.isdisjoint(axes_of(name))


ALIASES: Mapping[str, str] = {
    "tensor_model_parallel": "tp",
    "pipeline_model_parallel": "pp",
    "context_parallel": "cp",
    "data_parallel": "dp",
    "data_parallel_with_cp": "dp_cp",
    "model_parallel": "mp",
    "embedding": "embd",
    "position_embedding": "pos_embd",
    "tensor_and_context_parallel": "tp_cp",
    "tp_dp": "tp-dp",
    "tensor_and_data_parallel": "tp-dp",
    "tp_dp_cp": "tp-cp-dp",
    "tensor_and_data_parallel_with_cp": "tp-cp-dp",
    "expert_model_parallel": "ep",
    "expert_tensor_parallel": "expt_tp",
    "expert_data_parallel": "expt_dp",
    "ep_dp": "expt_dp",
    "expert_tensor_and_model_parallel": "tp_ep",
    "expert_tensor_model_pipeline_parallel": "tp_ep_pp",
    "expt_tp_pp": "expt_tp-pp",
    "intra_dp_cp": "dp_cp_intra",
    "intra_expt_dp": "expt_dp_intra",
    "intra_distributed_optimizer_instance": "intra_dist_opt",
    "inter_distributed_optimizer_instance": "inter_dist_opt",
}
"""Names that other code has for groups, mostly Megatron's."""

STAGES: Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "embd": lambda pipeline: pipeline if len(pipeline) <= 2 else (pipeline[0], pipeline[-1]),
    "pos_embd": lambda pipeline: pipeline[:1],
}
"""The ranks of a pipeline that hold its embedding, and those that hold position embeddings."""


class _Lookups:
    """Tables that a layout computes once, on first use; not part of its value, nor of a copy."""

    __slots__ = ("_position_of", "_strides_of")
    _position_of: dict[int, int]
    _strides_of: dict[tuple[str, ...], dict[str, tuple[int, int]]]

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the value of the lookup `name`, computed the first time."""
        try:
            return getattr(self, name)
        except AttributeError:
            object.__setattr__(self, name, compute())  # a layout is frozen
            return getattr(self, name)


@dataclass(frozen=True, slots=True, init=False)
class Layout(_Lookups):
    """Axis sizes and the ranks they span; equal layouts have equal fields and equal digests.

    `expt_tp` defaults to `tp`, `ranks` to ``range(tp * cp * dp * pp)``. `ranks` may be any
    distinct ranks in any order: the rank at coordinate ``c`` is
    ``ranks[sum(c[axis] * stride[axis])]``. An axis of size 1 may be left out of `order`.
    `replicas` cuts data parallelism for hybrid sharding: that many contiguous slices of `dp_cp`
    (and of `expt_dp`) hold the same shards.

    Raises:
        LayoutError: Sizes, order, ranks or replicas do not fit each other, or there are experts and
            the two views do not enumerate `pp` identically. The arithmetic is in the message.
    """

    tp: int
    cp: int
    ep: int
    dp: int
    pp: int
    expt_tp: int
    order: str
    ranks: tuple[int, ...]
    name: str
    replicas: int

    def __init__(
        self,
        *,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        dp: int = 1,
        pp: int = 1,
        expt_tp: int | None = None,
        order: str = DEFAULT_ORDER,
        ranks: Sequence[int] | None = None,
        name: str = "model",
        replicas: int = 1,
    ) -> None:
        """Check and store; see the class."""
        if not isinstance(name, str) or not name:
            raise LayoutError(f"A layout's name must be a non-empty string, got {name!r}.")
        sizes = {"tp": tp, "cp": cp, "ep": ep, "dp": dp, "pp": pp}
        sizes["expt_tp"] = tp if expt_tp is None else expt_tp
        sizes["replicas"] = replicas
        for field, value in sizes.items():
            object.__setattr__(self, field, _checked_size(field, value, name))
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "order", order)
        world = self.tp * self.cp * self.dp * self.pp
        object.__setattr__(self, "ranks", _checked_ranks(ranks, world, name))
        self._check_world(world)
        self._check_order()
        self._check_pipeline()
        self._check_replicas()

    @classmethod
    def of_world(
        cls,
        world_size: int,
        *,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        dp: int | None = None,
        pp: int = 1,
        expt_tp: int | None = None,
        order: str = DEFAULT_ORDER,
        ranks: Sequence[int] | None = None,
        name: str = "model",
        replicas: int = 1,
    ) -> Layout:
        """Return the layout that fills `world_size` ranks: `dp` is what the other axes leave.

        Raises:
            LayoutError: The sizes do not multiply to `world_size`.
        """
        rest = math.prod(
            _checked_size(axis, n, name) for axis, n in (("tp", tp), ("cp", cp), ("pp", pp))
        )
        world_size = _checked_size("world_size", world_size, name)
        product = f"tp * cp * pp = {tp} * {cp} * {pp} = {rest}"
        if dp is None:
            if world_size % rest:
                raise LayoutError(
                    f"Layout {name!r}: {counted(world_size, 'rank')} cannot be divided by "
                    f"{product} (remainder {world_size % rest}). "
                    "Change a size or the number of ranks."
                )
            dp = world_size // rest
        elif rest * _checked_size("dp", dp, name) != world_size:
            raise LayoutError(
                f"Layout {name!r}: {product}, times dp = {dp} makes {rest * dp} ranks, "
                f"but world_size is {world_size}. Leave dp out to have it derived."
            )
        return cls(
            tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, expt_tp=expt_tp, order=order, ranks=ranks,
            name=name, replicas=replicas,
        )  # fmt: skip

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Layout:
        """Return the layout of such a `to_dict`; LayoutError for an unknown or missing field."""
        known = set(cls.__dataclass_fields__)
        if set(values) != known:
            unknown, missing = sorted(set(values) - known), sorted(known - set(values))
            raise LayoutError(
                f"Not the fields of a layout: unknown {unknown}, missing {missing}; "
                f"expected {sorted(known)}."
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return every field as JSON-able values; `from_dict` is the inverse."""
        values = {field: getattr(self, field) for field in self.__dataclass_fields__}
        values["ranks"] = list(self.ranks)
        return values

    @classmethod
    def from_info(cls, info: LayoutInfo) -> Layout:
        """Return the layout that a manifest describes; LayoutError or TypeError if it is not one.

        `to_info` is the inverse.
        """
        order = info.order or DEFAULT_ORDER
        return cls(name=info.name, order=order, ranks=info.ranks, **info.axes)

    def to_info(self) -> LayoutInfo:
        """Return the layout as the manifest keeps it."""
        # Spelled out, because the manifest keeps them: a new field of `Layout` must not change the
        # format by itself.
        names = ("tp", "cp", "ep", "dp", "pp", "expt_tp", "replicas")
        axes = {name: getattr(self, name) for name in names}
        return LayoutInfo(name=self.name, axes=axes, order=self.order, ranks=list(self.ranks))

    def digest(self) -> str:
        """Return 32 hex digits, equal exactly for equal layouts (the name included)."""
        return digest_of(self.to_dict())

    @property
    def world_size(self) -> int:
        """Number of ranks in the layout."""
        return len(self.ranks)

    @property
    def expt_dp(self) -> int:
        """Size of expert data parallelism: what expt_tp, ep and pp leave of the ranks."""
        return self.world_size // (self.expt_tp * self.ep * self.pp)

    @property
    def has_experts(self) -> bool:
        """True if experts are placed by their own axes: ep > 1, or expt_tp other than tp."""
        return self.ep > 1 or self.expt_tp != self.tp

    @property
    def has_expert_view(self) -> bool:
        """True if expert groups have the pipelines of the dense view, as they must with experts."""
        views = self._views()
        return self.pp == 1 or views[DENSE_AXES]["pp"] == views[EXPERT_AXES]["pp"]

    def resolve(self, name: str) -> str:
        """Return the layout's name of a group, whose alias (docs/layouts.md) may be given.

        Raises:
            LayoutError: `inter_dist_opt` or `intra_dist_opt`, if dense and expert ones differ.
        """
        name = ALIASES.get(name, name)
        if name == "intra_dist_opt":
            self._instances()
            return _WHOLE if self.replicas == 1 else name
        if name == "inter_dist_opt":
            self._instances()
            if self.has_experts and {*self.groups("dp_cp_inter")} != {
                *self.groups("expt_dp_inter")
            }:
                raise LayoutError(
                    f"{self}: inter_dist_opt has other ranks for dense than for expert "
                    "parameters; ask for dp_cp_inter and expt_dp_inter."
                )
            return "dp_cp_inter"
        return name

    def is_expert_group(self, axes: str) -> bool:
        """Return True if a group belongs to the expert view alone."""
        return not set(axes_of(self.resolve(axes))).isdisjoint(set(EXPERT_AXES) - {"pp"})

    def size(self, axes: str) -> int:
        """Return the size of each group of `axes`, a named group or axes joined by ``-``."""
        axes = self._own_name(axes)
        if axes == "embd":
            return min(self.pp, 2)
        if axes == "pos_embd":
            return 1
        if axes == "intra_dist_opt":
            return self.world_size // self.replicas
        if axes in SLICED:
            whole = self.size(SLICED[axes])
            return self.replicas if axes.endswith("_inter") else whole // self.replicas
        tokens, strides = self._view(axes)
        return math.prod(strides[token][0] for token in tokens)

    def tokens(self, axes: str) -> tuple[str, ...]:
        """Return the axes of a named group or of axes joined by ``-``, fastest first."""
        return tuple(self._view(axes)[0])

    def groups(self, axes: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of `axes` with their ordered ranks, by the first member's position.

        Every rank is in exactly one, except for `embd`, the first and last stage of each pipeline,
        and `pos_embd`, the first stage of each by itself.

        Cost: one pass over the ranks.
        """
        axes = self._own_name(axes)
        if axes in STAGES:
            return tuple(STAGES[axes](group) for group in self.groups("pp"))
        if axes == "intra_dist_opt":
            return self._instances()
        if axes in SLICED:
            wholes = self.groups(SLICED[axes])
            inter = axes.endswith("_inter")
            return tuple(piece for whole in wholes for piece in self._slices(whole, inter))
        tokens, strides = self._view(axes)
        members = _sums_of_strides(strides[token] for token in tokens)
        firsts = _sums_of_strides(strides[axis] for axis in strides if axis not in tokens)
        return tuple(tuple(self.ranks[first + member] for member in members) for first in firsts)

    def group(self, axes: str, rank: int) -> tuple[int, ...]:
        """Return the ordered ranks of the group of `axes` that `rank` is in.

        Raises:
            LayoutError: The rank is not in the layout, or in no `embd` or `pos_embd` group.
        """
        axes = self._own_name(axes)
        position = self._position(rank)
        if axes in STAGES:
            ends = STAGES[axes](self.group("pp", rank))
            if rank not in ends:
                where = "an interior" if axes == "embd" else "not the first"
                raise LayoutError(
                    f"Rank {rank} is {where} pipeline stage of {self}, so it is not in the "
                    f"{axes!r} group of its pipeline, {ends}."
                )
            return ends
        if axes == "intra_dist_opt":
            return next(ranks for ranks in self._instances() if rank in ranks)
        if axes in SLICED:
            pieces = self._slices(self.group(SLICED[axes], rank), axes.endswith("_inter"))
            return next(piece for piece in pieces if rank in piece)
        tokens, strides = self._view(axes)
        members = _sums_of_strides(strides[token] for token in tokens)
        # The position of the member whose coordinates along the group's axes are all 0.
        for token in tokens:
            size, stride = strides[token]
            position -= position // stride % size * stride
        return tuple(self.ranks[position + member] for member in members)

    def has_group(self, axes: str, rank: int) -> bool:
        """Return True if `rank` is in a group of `axes`: always, but for `embd` and `pos_embd`."""
        self.size(axes)
        self._position(rank)
        ends = STAGES.get(self._own_name(axes))
        return ends is None or rank in ends(self.group("pp", rank))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinates of `rank` in the dense view: tp, cp, dp and pp."""
        return self._coordinate(rank, DENSE_AXES)

    def expert_coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinates of `rank` in the expert view: expt_tp, ep, expt_dp and pp."""
        return self._coordinate(rank, EXPERT_AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of `rank` in every view that the layout has."""
        dense = self.coordinate(rank)
        return {**dense, **self.expert_coordinate(rank)} if self.has_expert_view else dense

    def __str__(self) -> str:
        """Return one line for messages, without the whole list of ranks."""
        sizes = " ".join(f"{axis}={getattr(self, axis)}" for axis in _TOKENS)
        extra = f" expt_tp={self.expt_tp}" if self.expt_tp != self.tp else ""
        extra += f" replicas={self.replicas}" if self.replicas != 1 else ""
        return (
            f"layout {self.name!r} ({sizes}{extra}, order {self.order}, "
            f"ranks {shorten_ranks(self.ranks)})"
        )

    def _position(self, rank: int) -> int:
        """Return the index of a rank in the list of ranks."""
        positions: dict[int, int] = self._once(
            "_position_of", lambda: {rank: place for place, rank in enumerate(self.ranks)}
        )
        try:
            return positions[rank]
        except KeyError:
            raise LayoutError(f"Rank {rank} is not in {self}.") from None

    def _coordinate(self, rank: int, axes: tuple[str, ...]) -> dict[str, int]:
        """Return the coordinates of a rank along the axes of one view."""
        position = self._position(rank)
        strides = self._strides(axes)
        return {axis: position // strides[axis][1] % strides[axis][0] for axis in axes}

    def _views(self) -> dict[tuple[str, ...], dict[str, tuple[int, int]]]:
        """Return size and stride of each axis, of both views."""
        views: dict[tuple[str, ...], dict[str, tuple[int, int]]] = self._once(
            "_strides_of",
            lambda: {axes: self._enumerate(axes) for axes in (DENSE_AXES, EXPERT_AXES)},
        )
        return views

    def _strides(self, axes: tuple[str, ...]) -> dict[str, tuple[int, int]]:
        """Return size and stride of each axis of a view; LayoutError if there is no expert view."""
        if axes == EXPERT_AXES and not self.has_expert_view:
            raise LayoutError(
                f"{self} has no experts (ep = 1, expt_tp = tp) and no expert view: with its order "
                f"experts would have pipelines of other ranks. {self._views_of_pp()}"
            )
        return self._views()[axes]

    def _enumerate(self, axes: tuple[str, ...]) -> dict[str, tuple[int, int]]:
        """Return size and stride of each axis of a view, fastest first; left-out axes come last."""
        expert = axes == EXPERT_AXES
        named = [_EXPERT_TOKEN.get(t, "") if expert else t for t in self.order.split("-")]
        ordered = [axis for axis in named if axis in axes]
        ordered += [axis for axis in axes if axis not in ordered]
        strides, stride = {}, 1
        for axis in ordered:
            size: int = getattr(self, axis)
            strides[axis] = (size, stride)
            stride *= size
        return strides

    def _axes_of(self, tokens: Iterable[str]) -> tuple[str, ...]:
        """Return the axes of the view that all of `tokens` belong to."""
        for axes in (DENSE_AXES, EXPERT_AXES):
            if set(tokens) <= set(axes):
                return axes
        raise LayoutError(
            f"Group {'-'.join(tokens)!r} of {self} is in neither view: the dense view has the axes "
            f"{', '.join(DENSE_AXES)}, the expert view {', '.join(EXPERT_AXES)}. Named groups are "
            f"{', '.join(GROUP_NAMES)} and control."
        )

    def _view(self, axes: str) -> tuple[list[str], dict[str, tuple[int, int]]]:
        """Return the tokens of `axes` fastest first, and the strides of their view."""
        axes = self._own_name(axes)
        named = DENSE_AXES if axes == "control" else NAMED_AXES.get(axes)
        tokens = tuple(axes.split("-")) if named is None else named
        if len(set(tokens)) != len(tokens):
            raise LayoutError(f"Axes {axes!r} name an axis twice.")
        strides = self._strides(self._axes_of(tokens))
        return [axis for axis in strides if axis in tokens], strides

    def _own_name(self, axes: str) -> str:
        """Return `axes` with aliases resolved, and the source in place of a clone."""
        axes = self.resolve(axes)
        return CLONED.get(axes, axes)

    def _instances(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each instance of a sharded optimizer: one slice of data ranks.

        Raises:
            LayoutError: The slices of dense and of expert parameters are not the same ranks.
        """
        by_view = [
            self._instances_over(whole) for whole in ("dp_cp", "expt_dp")[: 1 + self.has_experts]
        ]
        if any(instances != by_view[0] for instances in by_view):
            raise LayoutError(
                f"{self} does not give each slice one instance of a sharded optimizer: with "
                f"replicas = {self.replicas} the slices of dp_cp have ranks "
                f"{[list(ranks) for ranks in by_view[0]][:8]}, those of expt_dp have ranks "
                f"{[list(ranks) for ranks in by_view[1]][:8]}. Ask for dp_cp_intra and "
                "dp_cp_inter, expt_dp_intra and expt_dp_inter."
            )
        return by_view[0]

    def _instances_over(self, whole: str) -> tuple[tuple[int, ...], ...]:
        """Return the ranks with the same number of slice, by that number."""
        length = self.size(whole) // self.replicas
        slice_of = {
            rank: i // length for group in self.groups(whole) for i, rank in enumerate(group)
        }
        return tuple(
            tuple(rank for rank in self.ranks if slice_of[rank] == number)
            for number in range(self.replicas)
        )

    def _slices(self, whole: tuple[int, ...], inter: bool) -> list[tuple[int, ...]]:
        """Cut a group into one slice for each replica, or into the groups between these slices."""
        length = len(whole) // self.replicas
        # Slices are contiguous, so that the ranks of one are near each other. A group between
        # slices has the rank at the same place of each.
        if inter:
            return [whole[start::length] for start in range(length)]
        return [whole[start : start + length] for start in range(0, len(whole), length)]

    def _check_world(self, world: int) -> None:
        """Raise LayoutError unless both views have as many ranks as the layout."""
        dense = f"tp * cp * dp * pp = {self.tp} * {self.cp} * {self.dp} * {self.pp} = {world}"
        if len(self.ranks) != world:
            raise LayoutError(
                f"Layout {self.name!r}: {dense}, but it has {len(self.ranks)} ranks "
                f"({shorten_ranks(self.ranks)}). The sizes must multiply to the number of ranks."
            )
        expert = self.expt_tp * self.ep * self.pp
        if world % expert:
            raise LayoutError(
                f"Layout {self.name!r}: {dense} ranks cannot be divided by expt_tp * ep * pp = "
                f"{self.expt_tp} * {self.ep} * {self.pp} = {expert} (remainder {world % expert}), "
                "so there is no expt_dp. Change ep or expt_tp."
            )

    def _check_order(self) -> None:
        """Raise LayoutError unless the order names every axis of several ranks, each once."""
        tokens = self.order.split("-") if isinstance(self.order, str) else [repr(self.order)]
        where = f"Layout {self.name!r}: order {self.order!r}"
        unknown = [token for token in tokens if token not in _TOKENS]
        if unknown:
            raise LayoutError(f"{where} has unknown axes {unknown}; known are {', '.join(_TOKENS)}")
        repeated = sorted({token for token in tokens if tokens.count(token) > 1})
        if repeated:
            raise LayoutError(f"{where} names {', '.join(repeated)} more than once.")
        for token in _TOKENS:
            named = (token, _EXPERT_TOKEN.get(token, token))[: 1 + self.has_experts]
            for axis in dict.fromkeys(named):
                size = getattr(self, axis)
                if token not in tokens and size != 1:
                    raise LayoutError(
                        f"{where} lacks {token!r}, but {axis} = {size}. Only axes of size 1 may be "
                        f"left out: add {token!r} to the order."
                    )

    def _check_replicas(self) -> None:
        """Raise LayoutError unless data ranks can be cut into equal slices."""
        for whole in ("dp_cp", "expt_dp")[: 1 + self.has_experts]:
            size = self.size(whole)
            if size % self.replicas:
                raise LayoutError(
                    f"Layout {self.name!r}: {whole} has {size} ranks, which cannot be cut into "
                    f"replicas = {self.replicas} equal slices (remainder {size % self.replicas})."
                )

    def _check_pipeline(self) -> None:
        """Raise LayoutError if there are experts and the two views have different pipelines."""
        if self.has_experts and not self.has_expert_view:
            raise LayoutError(
                f"Layout {self.name!r}: with order {self.order!r} the dense and the expert view "
                f"enumerate pp differently. {self._views_of_pp()} Put pp last in the order, or "
                "make the sizes left of pp multiply to the same number in both views."
            )

    def _views_of_pp(self) -> str:
        """Return the pipelines of both views, for messages."""
        dense, expert = (self._views()[axes]["pp"][1] for axes in (DENSE_AXES, EXPERT_AXES))
        return (
            f"Dense: {self._pipelines(dense)} (stride {dense}). Expert: {self._pipelines(expert)} "
            f"(stride {expert})."
        )

    def _pipelines(self, stride: int) -> str:
        """Return the first pipelines of a view in which `pp` has this stride, for messages."""
        span = stride * self.pp
        firsts = [p for p in range(self.world_size) if p % span < stride]
        shown = [list(self.ranks[p : p + span : stride]) for p in firsts[:8]]
        return f"{shown}{' ...' if len(firsts) > 8 else ''}"


def _checked_size(field: str, value: int, name: str) -> int:
    """Return a size of the layout `name`; raise LayoutError if it is not an integer above 0."""
    return check_int(value, name=f"Layout {name!r}: {field}", least=1, error=LayoutError)


def _checked_ranks(ranks: Sequence[int] | None, world: int, name: str) -> tuple[int, ...]:
    """Return the ranks of the layout `name`, by default the first `world`; LayoutError if wrong."""
    if ranks is None:
        return tuple(range(world))
    try:
        numbers = tuple(operator.index(rank) for rank in ranks)
    except TypeError:
        raise LayoutError(f"Layout {name!r}: ranks must be integers, got {ranks!r}.") from None
    negative = [rank for rank in numbers if rank < 0]
    if negative:
        raise LayoutError(f"Layout {name!r}: ranks must not be negative, got {negative}.")
    if len(set(numbers)) != len(numbers):
        twice = sorted({rank for rank in numbers if numbers.count(rank) > 1})
        raise LayoutError(f"Layout {name!r}: ranks {twice} are in the list more than once.")
    return numbers


def _sums_of_strides(axes: Iterable[tuple[int, int]]) -> list[int]:
    """Return every sum of index * stride, the first axis fastest."""
    steps = [0]
    for size, stride in axes:
        steps = [step + index * stride for index in range(size) for step in steps]
    return steps


def digest_of(fields: Mapping[str, Any]) -> str:
    """Return 32 hex digits, equal exactly for equal fields."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
