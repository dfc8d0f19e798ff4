"""Markers: a user's declarations of how a value is placed and whether it is kept.

A `DTensor` declares its own placement and needs no marker. A plain tensor that several ranks hold
is taken to be replicated, and that claim is *checked* by content at every save; the markers below
declare placements, so that no check is needed and every mistake has a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.arguments import check_choice
from holdfast.errors import PlacementError
from holdfast.parallel import ProcessGroups
from holdfast.parallel.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """A hand-sharded tensor: the piece of one global tensor that this rank holds.

    Two ways to say which piece:

    - `dims={0: "tp"}`: tensor dim 0 is split over the axis (or group) `tp` as `torch.chunk` splits
      it: ceil(n/size) rows each, the last ones shorter or empty. A tuple of axes splits a dim
      repeatedly, from left to right.
    - `offset=(row, column, ...)` with `over=("tp",)`: the piece starts there, and ranks that differ
      along `over` hold different pieces.

    Ranks equal along the named axes are replicas of each other; ranks of other pipeline stages
    take no part unless `pp` is named.

    Args:
        local: This rank's piece; any strides, any device.
        shape: The global shape.
        dims: Tensor dim -> axis, or axes from the outermost on, that it is split over.
        offset: Where the piece starts, one index for each dim; instead of `dims`.
        over: With `offset`: the axes along which ranks hold different pieces.

    Raises:
        PlacementError: For an axis named twice, a dim out of range, or a piece out of bounds.

    Cost: no collectives, no copies; declared replicas are not compared at a save.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    dims: Mapping[int, str | tuple[str, ...]] | None = None
    offset: tuple[int, ...] | None = None
    over: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what can be checked without a layout."""
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        ndim = len(self.shape)
        if self.local.ndim != ndim:
            raise PlacementError(
                f"Sharded: the local tensor has {self.local.ndim} dims, the global shape "
                f"{list(self.shape)} has {ndim}"
            )
        if (self.dims is None) == (self.offset is None):
            raise PlacementError("Sharded: give either dims={dim: axis} or offset=(...), not both")
        if self.dims is not None:
            self._check_dims(ndim)
        else:
            self._check_offset()

    def _check_dims(self, ndim: int) -> None:
        """Raise PlacementError unless each dim exists, and no dim or axis is named twice."""
        if self.over:
            raise PlacementError("Sharded: `over` goes with offset=; dims= names the axes itself")
        clean: dict[int, tuple[str, ...]] = {}
        for dim, axes in (self.dims or {}).items():
            if not -ndim <= dim < ndim:
                raise PlacementError(
                    f"Sharded: dim {dim} is out of range for a tensor of {ndim} dims"
                )
            position = dim % ndim
            if position in clean:
                raise PlacementError(f"Sharded: dim {position} is declared twice")
            clean[position] = axis_names(axes)
        named = [axis for axes in clean.values() for axis in axes]
        for axis in named:
            if named.count(axis) > 1:
                raise PlacementError(
                    f"Sharded: axis '{axis}' is declared twice; one axis splits one dim once"
                )
        object.__setattr__(self, "dims", clean)

    def _check_offset(self) -> None:
        """Raise PlacementError unless the piece lies inside the global shape."""
        offset = tuple(int(o) for o in self.offset or ())
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "over", tuple(self.over))
        if len(offset) != len(self.shape):
            raise PlacementError(
                f"Sharded: offset {list(offset)} and global shape {list(self.shape)} differ in "
                f"length"
            )
        for dim, (start, size, whole) in enumerate(
            zip(offset, self.local.shape, self.shape, strict=True)
        ):
            if start < 0 or start + size > whole:
                raise PlacementError(
                    f"Sharded: rows {start}..{start + size} of dim {dim} lie outside the global "
                    f"size {whole}"
                )
        for axis in self.over:
            if self.over.count(axis) > 1:
                raise PlacementError(f"Sharded: axis '{axis}' is named twice in `over`")


@dataclass(frozen=True, slots=True, eq=False)
class FlatShard:
    """A run of elements of a parameter-shaped tensor, as a sharded optimizer holds it.

    The whole is a tensor of the shape and placement of `like`; this rank holds the elements
    [start, start + len(local)) of the row-major *local* tensor that `like` has here. Ranks that
    differ along `over` hold other runs; ranks that are replicas of `like` and equal along `over`
    hold the same run. It is stored in the coordinates of the parameter, as at most
    max(1, 2 * ndim - 1) boxes, so that it loads under any other sharding.

    Args:
        local: The run: contiguous, 1-d, any dtype and device.
        start: Its first element in the row-major local tensor of `like`.
        like: The parameter: a DTensor, which declares its replicas, or a plain tensor, which
            declares nothing, so that boxes that several ranks hold are compared at every save.
        over: The group or axis along which ranks hold other runs.

    Raises:
        PlacementError: For a run that leaves the local tensor.
    """

    local: torch.Tensor
    start: int
    like: torch.Tensor
    over: str

    def __post_init__(self) -> None:
        """Check that the run is one of the local tensor."""
        size = self.like.to_local().numel() if isinstance(self.like, DTensor) else self.like.numel()
        if self.local.ndim != 1 or not self.local.is_contiguous():
            raise PlacementError(
                f"FlatShard: the run must be a contiguous 1-d tensor, got shape "
                f"{list(self.local.shape)}"
            )
        if self.start < 0 or self.start + self.local.numel() > size:
            raise PlacementError(
                f"FlatShard: elements {self.start}..{self.start + self.local.numel()} lie outside "
                f"the {size} elements that this rank holds of the parameter"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The boxes of one global tensor that this rank holds, each a tensor of its own.

    Nothing declares who else holds them: boxes that several ranks hold are compared at every save,
    as plain tensors are. All ranks cut the tensor into the same boxes, or into disjoint ones.

    Args:
        locals: A tensor for each box, of its shape and all of one dtype; any strides, any device.
        offsets: Where each box starts, one index for each dim.
        shape: The global shape.

    Raises:
        PlacementError: For no box at all, other dtypes or numbers of dims, a box out of bounds.
    """

    locals: tuple[torch.Tensor, ...]
    offsets: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that every box is one of the tensor."""
        object.__setattr__(self, "locals", tuple(self.locals))
        object.__setattr__(self, "offsets", tuple([tuple(map(int, o)) for o in self.offsets]))
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        dtypes = {each.dtype for each in self.locals}
        if len(dtypes) != 1:
            raise PlacementError("Pieces: give one piece at least, and all of one dtype")
        if len(self.locals) != len(self.offsets):
            raise PlacementError("Pieces: give one offset for each piece")
        for local, offset in zip(self.locals, self.offsets, strict=True):
            sizes = local.shape
            is_inside = len(sizes) == len(offset) == len(self.shape)
            for start, size, whole in zip(offset, sizes, self.shape, strict=False):
                is_inside &= 0 <= start <= whole - size
            if not is_inside:
                raise PlacementError(
                    f"Pieces: a piece of shape {list(sizes)} at {list(offset)} does not lie "
                    f"inside of {list(self.shape)}"
                )

    @property
    def local(self) -> torch.Tensor:
        """The first piece."""
        return self.locals[0]


@dataclass(frozen=True, slots=True, eq=False)
class Replicated:
    """A tensor that every rank of its pipeline stage holds whole: declared, so not compared.

    Args:
        local: The tensor; not a DTensor, which declares its own placement.
    """

    local: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """A tensor of which only the elements inside `shape` are real; the rest is padding.

    Padding is at the end of each dim. It is never stored: the stored tensor has the real shape, and
    a load fills the real elements of its target and sets the padding to zero. So a checkpoint loads
    under any other padding of the same real shape, and under none. For modules and optimizers see
    `declare_padding`.

    Args:
        value: A tensor, DTensor, `Sharded`, `FlatShard` or `Replicated` of the padded shape.
        shape: The global shape without padding.

    Raises:
        PlacementError: For a shape that does not fit.
    """

    value: torch.Tensor | Sharded | FlatShard | Replicated
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that the real part is a part."""
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if not isinstance(self.value, torch.Tensor | Sharded | FlatShard | Replicated):
            raise PlacementError(
                f"Padded: a {type(self.value).__name__} cannot be padded; it takes a tensor, "
                f"Sharded, FlatShard or Replicated"
            )
        check_real_shape(self.shape, self.padded_shape, where="Padded")

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The global shape with padding."""
        return global_shape(self.value)

    @property
    def local(self) -> torch.Tensor:
        """The tensor itself, padding included."""
        return self.value if isinstance(self.value, torch.Tensor) else self.value.local


def axis_names(axes: str | Sequence[str]) -> tuple[str, ...]:
    """Return the axes that a user names: one as text, or several."""
    return (axes,) if isinstance(axes, str) else tuple(axes)


def check_real_shape(shape: tuple[int, ...], padded: tuple[int, ...], *, where: str) -> None:
    """Raise PlacementError, with `where` first, unless `shape` is a part of the padded shape."""
    if len(shape) != len(padded) or any(
        not 0 <= real <= whole for real, whole in zip(shape, padded, strict=True)
    ):
        raise PlacementError(
            f"{where}: a real shape of {list(shape)} is not a part of the tensor's {list(padded)}; "
            f"it has as many dims, none of them larger"
        )


@dataclass(frozen=True, slots=True, eq=False)
class PerRank:
    """A tree of which each coordinate of the given axes has its own.

    The policies `missing`, `surplus` and `merge` are those of a load, under a layout with other
    coordinates than the one saved. Stored with more axes than requested, a value is found if the
    others have one coordinate each; everything else about axes that differ is a MismatchError,
    unless there is a `merge`.

    Args:
        tree: This rank's tree. Ranks with equal coordinates must hold equal values.
        axes: Names of layout axes (`tp cp dp pp` or `expt_tp ep expt_dp pp`); default: the dense
            four, one value for each rank.
        missing: On a rank whose coordinate the checkpoint does not have, "error" raises
            MismatchError; "keep" leaves the local value, in `LoadReport.kept`.
        surplus: Where the checkpoint has coordinates that no rank takes, "error" raises
            MismatchError on all ranks; "drop" leaves them, in `LoadReport.dropped`. Consent can be
            given at the load as well: `allow_missing=[...]`, `allow_dropped=[...]`.
        merge: Makes this rank's tree of all stored ones; then nothing is missing or surplus. It is
            called on every rank if the stored coordinates are not exactly those of the layout
            (more, fewer, or along other axes), with a dict from label ("dp=0", "dp=1,tp=0"; axes by
            name) to loaded tree in ascending order of coordinates, the first of `axes` most
            significant; tensors in it are new. What it returns is the loaded tree; tensors that the
            marker's own tree has at the same places are filled with it.

    Raises:
        PlacementError: For an unknown policy, or axes named twice.

    Cost: without `merge` a rank reads its own tree; with it, if it is called, all stored trees.
    """

    tree: object
    axes: Sequence[str] = ("tp", "cp", "dp", "pp")
    missing: str = "error"
    surplus: str = "error"
    merge: Callable[[dict[str, Any]], object] | None = None

    def __post_init__(self) -> None:
        """Check the policies and the axes."""
        for name, other in (("missing", "keep"), ("surplus", "drop")):
            check_choice(
                getattr(self, name),
                name=f"PerRank: {name}",
                choices=("error", other),
                error=PlacementError,
            )
        if self.merge is not None and not callable(self.merge):
            raise PlacementError(f"PerRank: merge={self.merge!r} cannot be called")
        axes = axis_names(self.axes)
        if not axes or len(set(axes)) != len(axes):
            raise PlacementError(
                f"PerRank: axes {list(axes)} must be named once each, at least one"
            )
        object.__setattr__(self, "axes", axes)


@dataclass(frozen=True, slots=True, eq=False)
class Union:
    """A dict whose members are spread over the ranks: each rank may hold others.

    The checkpoint has the members of all ranks. One that several ranks hold must be equal on all of
    them, as any value must (dicts inside it, too, unless they are unions themselves). A load fills
    the members that the template names. Modules and optimizers are unions without being declared.

    Args:
        mapping: A dict, OrderedDict, Counter or defaultdict.

    Raises:
        PlacementError: For anything else.
    """

    mapping: Mapping[Any, object]

    def __post_init__(self) -> None:
        """Check that it has members."""
        if not isinstance(self.mapping, Mapping):
            raise PlacementError(
                f"Union: a {type(self.mapping).__name__} does not have members by name that "
                f"ranks could share out; it takes a dict"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Transient:
    """A value that is not stored; a load leaves the local one.

    Args:
        value: Anything, also what could not be stored.
    """

    value: object = None


@dataclass(frozen=True, slots=True, eq=False)
class AppliesLater:
    """A part of the state that takes its state only later, as a data loader does at `iter`.

    It is also for one that takes only a part of it on purpose.

    After a load every object with `state_dict` and `load_state_dict` is asked for its state, which
    must be what was loaded. This one is not asked: it is saved and loaded as any other, and its
    name is in `LoadReport.handed_over`, for what it does with the state nobody has seen.

    Nor has anybody seen what it draws then, after the load has restored the random streams: torch's
    loaders draw a seed at `iter`, from the default stream unless they have a `generator=` of their
    own, and what training draws after that is not what the saved run would have drawn. A
    `StatefulDataLoader` needs no marker: asked for its state it makes its iterator, and the streams
    are restored after that.

        state = {"model": model, "loader": AppliesLater(loader)}

    Args:
        value: The object.
    """

    value: object


@dataclass(frozen=True, slots=True, eq=False)
class OnLayout:
    """A part of the state that lives on its own layout, not on the checkpointer's.

    For models of several modules on disjoint or overlapping ranks; the checkpointer's own groups
    span them all.

    Args:
        layout: The layout (or the `ProcessGroups` of it) that gives the part's axes their meaning.
            Ranks outside of it leave the part out of their state.
        value: The part.

    Raises:
        PlacementError: If it is not a layout.
    """

    layout: Layout | ProcessGroups
    value: object

    def __post_init__(self) -> None:
        """Check the layout's type."""
        if not isinstance(self.layout, Layout | ProcessGroups):
            raise PlacementError(
                f"OnLayout: a {type(self.layout).__name__} is not a layout; it takes a Layout or "
                f"the ProcessGroups of one, and the value after that"
            )

    @property
    def own_layout(self) -> Layout:
        """The layout itself."""
        return self.layout if isinstance(self.layout, Layout) else self.layout.layout


@dataclass(frozen=True, slots=True, eq=False)
class FromPart:
    """In a load request: what the checkpoint holds at another place than the state's own name.

        checkpointer.load({"encoder": FromPart("model.encoder", encoder)})

    The load is as strict as any, over what lies below the path; what lies elsewhere is not looked
    at. Paths in errors, patterns and the report begin with the state's own name. Any layout, as
    with every load.

    Args:
        path: A part of the checkpoint ("model", for one saved under another name), or what lies
            below a name in it, names joined by dots: the entries `encoder.…` of a module's part, or
            a branch of a tree.
        value: What a state may hold: a module, `ModuleState`, `OptimizerState`, `RNG`, an object
            with `state_dict`, a tree.

    Raises:
        PlacementError: If the path is not text, or is empty.
    """

    path: str
    value: object

    def __post_init__(self) -> None:
        """Check the path's type."""
        if not isinstance(self.path, str) or not self.path.strip("."):
            raise PlacementError(f"FromPart: {self.path!r} is not a path in a checkpoint")


@dataclass(frozen=True, slots=True)
class Stored:
    """In a load request: whatever the checkpoint holds here, as a new tree.

    Args:
        all_ranks: Of a value per rank all that are stored, as `PerRankValues`, instead of the one
            of this rank's coordinates.

    Cost: tensors are whole, in new host memory.
    """

    all_ranks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PerRankValues:
    """The stored trees of one `PerRank` value, as `Stored(all_ranks=True)` returns it."""

    axes: tuple[str, ...]
    """The axes along which it was saved."""
    values: Mapping[str, object]
    """"dp=0,tp=1" -> tree, one for each coordinate that was saved; axes in order of name."""


@dataclass(frozen=True, slots=True, eq=False)
class Fresh:
    """In a part's template: what the checkpoint knows nothing of, and what starts fresh.

    It takes the caller's consent (`allow_missing`). With it the path is in `LoadReport.fresh`, and
    the marker is in the tree that the part gets back. Without it the load raises MismatchError with
    `why`; or, where `is_required` is False, the part gets nothing, and removes what it has there.
    """

    why: str
    is_required: bool = True


Marked = Sharded | FlatShard | Pieces | Replicated | Padded
"""Markers that wrap the local tensor, or tensors, of one global tensor."""


def as_loaded(marker: Marked) -> torch.Tensor | list[torch.Tensor]:
    """Return what a load gives back for a marker: its tensor, of `Pieces` a list of them."""
    return list(marker.locals) if isinstance(marker, Pieces) else marker.local


def global_shape(target: torch.Tensor | Marked) -> tuple[int, ...]:
    """Return the shape of the whole tensor, without padding, of which a target is a piece."""
    if isinstance(target, FlatShard | Replicated):
        target = target.like if isinstance(target, FlatShard) else target.local
    return tuple(target.shape)
