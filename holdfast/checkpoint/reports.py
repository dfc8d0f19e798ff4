"""Reports of saves and loads, for people and for programs."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ParamSpec, Protocol, Self, TypeVar

import msgspec

from holdfast.decoding import decode_msgpack_as
from holdfast.errors import counted, in_bytes, some_of
from holdfast.parallel import Control

_MAX_SUMMARY = 150
_NAMES = (
    "loaded",
    "handed_over",
    "other_rates",
    "other_kinds",
    "missing",
    "fresh",
    "unexpected",
    "cast",
    "kept",
    "dropped",
    "replaced",
)
"""Fields of a load report that list paths of one rank, or lines that start with one."""


P = ParamSpec("P")


class _Report(Protocol):
    def lasting(self, seconds: float) -> Self:
        """Return the report of a call that took so long as a whole."""


R = TypeVar("R", bound=_Report)


def timed_report(method: Callable[P, R]) -> Callable[P, R]:
    """Make the report of a call say how long the whole call took.

    The body that makes the report cannot: after it a rank still waits for the others, up to the
    whole commit.
    """

    @wraps(method)
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        began = time.perf_counter()
        report = method(*args, **kwargs)
        return report.lasting(time.perf_counter() - began)

    return timed


class Phases:
    """When each phase of a save starts on one rank, from the call on, and how long it takes.

    Attributes:
        began: when the call came, by `time.monotonic`, which a writer on this machine shares.
        seconds: by phase, the time that it took.
        starts: by phase, the seconds from `began` to its first start.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.starts: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time that the body takes to the phase."""
        start = time.monotonic()
        self.starts.setdefault(name, start - self.began)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """One finished save, as one rank saw it."""

    step: int
    """The step of the checkpoint."""
    path: str
    """Path of the checkpoint, as its storage describes it."""
    nbytes: int
    """Of tensor data, staged and written by this rank; its file has a header besides."""
    total_nbytes: int
    """Of all tensors of the checkpoint, each once."""
    copies_nbytes: int
    """Bytes that copies of replicated tensors add to that (`replicate_over`)."""
    num_tensors: int
    """Tensors of the checkpoint."""
    planned: bool
    """True if a plan was made for this save."""
    seconds: Mapping[str, float]
    """By phase (`wait`, `flatten`, `plan`, `lay out`, `stage`, `compare`, `write`; `commit`, which
    ranks that do not commit wait for; `total` of a synchronous save, the wall time of the call;
    `stall` of an asynchronous one)."""
    starts: Mapping[str, float] = field(default_factory=dict)
    """By phase, the seconds from the call to its first start. Phases overlap: a synchronous save
    writes while it stages, an asynchronous one writes and commits after the call has returned."""
    skipped: bool = False
    """True if nothing was saved, because an earlier save was in progress."""
    requests: Mapping[str, int] = field(default_factory=dict)
    """By kind, what this rank has asked of storage while it saved (`put`, `part`, `get`, …); empty
    where storage does not count, as on a disk. `holdfast show` has the sum over all ranks."""
    unstored: Sequence[str] = ()
    """Attributes of modules (`model.encoder.queue`) and optimizers (`optimizer.num_steps`) that
    have changed between two saves of this checkpointer and that no state dict shows: a load does
    not bring them back. So are samplers (`data.sampler`) and generators (`data.generator`) of a
    loader from which the order of its samples follows, and which no part of the state has. Each is
    named by the first save that notices it, with a warning."""
    new_root: bool = False
    """True if this save is the first one in a root that held no checkpoint. In a run that resumed,
    or was to resume, it says that the root is not the one meant: a volume may not be mounted."""

    def summary(self) -> str:
        """One line for a log."""
        if self.skipped:
            return f"step {self.step} was not saved: an earlier save was in progress"
        extra = "".join(
            f", {words}"
            for words, applies in (
                ("a new plan", self.planned),
                ("the first of its root", self.new_root),
                (f"{counted(len(self.unstored), 'attribute')} not stored", self.unstored),
            )
            if applies
        )
        copies = f" + {in_bytes(self.copies_nbytes)} of copies" if self.copies_nbytes else ""
        phase, verb = ("total", "saved in") if "total" in self.seconds else ("stall", "stalled for")
        return (
            f"step {self.step} in {self.path}: {counted(self.num_tensors, 'tensor')}, "
            f"{in_bytes(self.total_nbytes)}{copies}, {verb} {self.seconds[phase]:.2f} s{extra}"
        )

    def __str__(self) -> str:
        return self.summary()

    def lasting(self, seconds: float) -> SaveReport:
        """Return the report of a synchronous save that took so long as a whole.

        What it took beyond the phases so far was a wait for the rank that commits.
        """
        waited = seconds - self.seconds["total"]
        commit = self.seconds.get("commit", 0.0) + waited
        return replace(self, seconds={**self.seconds, "commit": commit, "total": seconds})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReading:
    """The bytes that all ranks of a load read together; the same on each of them."""

    nbytes_unique: int | None = None
    """Of the elements that at least one rank requested, each once; None if nothing was exchanged
    (see `exchange=`): then no rank knows what the others requested."""
    nbytes_needed: int = 0
    """Sum over the ranks of what each requested."""
    nbytes_read: int = 0
    """From storage, including the rest of digest blocks."""
    nbytes_received: int = 0
    """By ranks from other ranks."""
    num_opens: int = 0
    """Of data files."""
    max_nbytes_read: int = 0
    """By any one rank."""
    nbytes_from_images: int = 0
    """Copied from images that were kept in memory (`keep_image_s`) instead of read."""
    requests: Mapping[str, int] = field(default_factory=dict)
    """By kind, what all ranks have asked of storage until everything was read; empty where storage
    does not count, as on a disk."""

    @property
    def amplification(self) -> float | None:
        """Bytes read from storage for each byte that some rank requested; 1.0 is the best.

        None if `nbytes_unique` is.
        """
        if self.nbytes_unique is None:
            return None
        return self.nbytes_read / self.nbytes_unique if self.nbytes_unique else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FellBack:
    """A newer checkpoint that could not be loaded, and why."""

    step: int
    """Its step."""
    path: str
    """Path of the checkpoint."""
    why: str
    """The whole error."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Those of the error."""

    @property
    def summary(self) -> str:
        """The step and what is wrong with it, for one line of a log."""
        clause = self.why.partition("\n")[0].partition("; ")[0].partition(". ")[0]
        # The path is that of the step, which the line names.
        where = clause.removeprefix(self.path).lstrip("/: ").partition(": damaged")[0]
        return f"step {self.step} is damaged ({where[:_MAX_SUMMARY]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """One finished load, as one rank saw it. Paths are full: part name first."""

    step: int
    """The step that was loaded."""
    path: str
    """Path of the checkpoint, as its storage describes it."""
    save_id: str = ""
    """Which version of the step was loaded: if the step is saved again, it has another one."""
    loaded: tuple[str, ...] = ()
    """Tensors that were filled and, where they were given to an object of the user's, that it has
    stated to have."""
    handed_over: tuple[str, ...] = ()
    """What was given to an owner that applies it only later (`AppliesLater`), or to a module that
    converts it from another version of its class: names of parts and of entries. Nothing
    has proved that it arrived, so that nothing below them is in `loaded`."""
    other_rates: tuple[str, ...] = ()
    """Schedules (`LambdaLR`, `CyclicLR`) whose functions, which no checkpoint has, compute another
    learning rate for the epoch of the save than the stored one: training continues by them."""
    other_kinds: tuple[str, ...] = ()
    """Optimizers (by a group or an attribute: `optimizer.groups.0`), schedules and other objects
    that took the state of another class, and data sets and samplers of loaders that are of another
    one than in the saved run: training continues by the class that is there now."""
    missing: tuple[str, ...] = ()
    """Requested, absent, and allowed: their targets keep what they had."""
    fresh: tuple[str, ...] = ()
    """Entries that the saved run did not have and that start fresh, as allowed: a parameter
    that is new to its optimizer, a new hyperparameter."""
    unexpected: tuple[str, ...] = ()
    """Stored, requested by no rank, and allowed."""
    cast: tuple[str, ...] = ()
    """Converted from another dtype."""
    kept: tuple[str, ...] = ()
    """Per-rank values that stay local by their policy."""
    dropped: tuple[str, ...] = ()
    """Stored per-rank values that no rank took, as allowed; the same on all ranks, but for random
    streams of a device that this rank does not have."""
    not_requested: tuple[str, ...] = ()
    """Stored parts that the state left out."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Part name -> loaded tree, for parts that are plain trees."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The `metadata=` of the save; empty if it had none."""
    is_verified: bool = True
    """True if every block read was checked against its digest: not with `verify=False`, and not
    from a foreign format, which has none."""
    left_out: tuple[str, ...] = ()
    """What a foreign checkpoint has that is not read at all, one sentence each."""
    nbytes_needed: int = 0
    """Of tensor data, requested on this rank."""
    nbytes_read: int = 0
    """Of tensor data, asked of storage by this rank: more than needed if a digest covers more
    than the slice, for other ranks, and where a read failed and was made again."""
    nbytes_received: int = 0
    """Of tensor data, received from other ranks."""
    nbytes_from_images: int = 0
    """Of tensor data, copied by this rank from images that were kept in memory (`keep_image_s`);
    `nbytes_read` does not count it."""
    refused_images: tuple[str, ...] = ()
    """Each image that was offered on this host and not used by this rank, and why, in words. The
    bytes came from storage instead."""
    num_opens: int = 0
    """Of data files, by this rank."""
    nbytes_by_file: Mapping[str, int] = field(default_factory=dict)
    """Data file name (`data/00000.safetensors`) -> bytes that this rank read from it; files that it
    read nothing from are absent. Their sum is `nbytes_read`."""
    job: JobReading = field(default_factory=JobReading)
    """The same for all ranks together."""
    replaced: tuple[str, ...] = ()
    """Each copy that was damaged or missing and that another copy of the same box replaced, on
    this rank, in words."""
    requests: Mapping[str, int] = field(default_factory=dict)
    """By kind, what this rank has asked of storage; empty where storage does not count."""
    fell_back: tuple[FellBack, ...] = ()
    """Newer checkpoints that were given up for this one, newest first."""
    seconds: float = 0.0
    """Wall time of the call."""

    def __str__(self) -> str:
        return self.summary()

    def lasting(self, seconds: float) -> LoadReport:
        """Return the report of a load that took so long as a whole."""
        return replace(self, seconds=seconds)

    def of(self, name: str) -> LoadReport:
        """Return the report of one module of several, or of one part, by the name before a dot.

        Lists and values are those whose paths start with `name`; all else, bytes included, is that
        of the whole load. If no path starts with the name, the lists are empty.
        """
        lists: dict[str, Any] = {
            field: _below(getattr(self, field), name) for field in (*_NAMES, "not_requested")
        }
        values = {part: tree for part, tree in self.values.items() if _below((part,), name)}
        return replace(self, **lists, values=values)

    def of_all_ranks(self, control: Control) -> LoadReport:
        """The report with the lists of all ranks together, equal on all; collective.

        A rank's own report names what that rank loaded: with modules on different ranks, or
        pipeline stages, a part of the whole. Here a path is listed if it is on any rank's list, and
        a part is `not_requested` if no rank requested it. Values and counts stay this rank's.

        Args:
            control: of the groups that the load was made with.

        Cost: one or two collectives that carry every rank's names, compressed.
        """
        own = {field: getattr(self, field) for field in (*_NAMES, "not_requested")}
        payload = zlib.compress(msgspec.msgpack.encode(own), 1)
        gathered = control.all_gather(payload, phase="load report of all ranks")
        # Equal ones once: on a thousand ranks most are.
        rows = [
            decode_msgpack_as(zlib.decompress(data), dict[str, list[str]])
            for data in dict.fromkeys(gathered)
        ]
        united: dict[str, Any] = {
            field: tuple(dict.fromkeys(name for row in rows for name in row[field]))
            for field in _NAMES
        }
        left_out = set.intersection(*(set(row["not_requested"]) for row in rows))
        return replace(self, **united, not_requested=tuple(sorted(left_out)))

    def summary(self) -> str:
        """One line for a log."""
        extra = "".join(
            f", {len(names)} {what}"
            for what, names in (
                ("handed over", self.handed_over),
                ("schedules of other rates", self.other_rates),
                ("of another class", self.other_kinds),
                ("missing", self.missing),
                ("started fresh", self.fresh),
                ("unexpected", self.unexpected),
                ("cast", self.cast),
                ("kept local", self.kept),
                ("dropped", self.dropped),
                ("damaged copies replaced", self.replaced),
                ("kept images refused", self.refused_images),
                ("newer checkpoints given up", self.fell_back),
                ("left out by the format", self.left_out),
            )
            if names
        )
        if self.not_requested:
            extra += f", without the parts {some_of(self.not_requested)}"
        extra += "" if self.is_verified else ", without digests"
        copied = ""
        if self.nbytes_from_images:
            copied = f", {in_bytes(self.nbytes_from_images)} copied from memory,"
        return (
            f"step {self.step} from {self.path}: {counted(len(self.loaded), 'tensor')}, "
            f"{in_bytes(self.nbytes_read)} read{copied} in {self.seconds:.2f} s{extra}"
        )


def _below(paths: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the paths that are a name or start with it and a dot."""
    return tuple(path for path in paths if is_below(path, (name,)))


def is_below(path: str, names: Sequence[str]) -> bool:
    """Return True if a path is one of these names, or starts with one and a dot."""
    return path in names or any(path.startswith(f"{name}.") for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointerStats:
    """Counters of one `Checkpointer` on this rank, since it was made."""

    num_saves: int
    """Committed checkpoints."""
    num_failed_saves: int
    """Saves that raised, or failed after `save_async` had returned."""
    num_skipped_saves: int
    """Saves skipped by `when_busy="skip"`."""
    num_saves_in_flight: int
    """Asynchronous saves that are not done."""
    num_loads: int
    """Finished loads."""
    num_failed_loads: int
    """Loads that raised."""
    num_plans: int
    """Number of plans that were made."""
    num_plan_reuses: int
    """Saves under a plan that was there."""
    num_allocations: int
    """Number of times staging memory was allocated."""
    nbytes_saved: int
    """Tensor bytes that this rank wrote for committed checkpoints."""
    nbytes_loaded: int
    """Tensor bytes that this rank read from storage for finished loads."""
    writer_pid: int | None
    """Process id of this rank's writer; None before the first asynchronous save."""
