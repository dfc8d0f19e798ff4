"""What a save or a load did, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """One finished save, as one rank saw it.

    `nbytes`: staged and written by this rank. `total_nbytes`: all tensors of the checkpoint once.
    `seconds`: by phase (`wait`, `flatten`, `plan`, `lay out`, `stage`, `compare`, `write`,
    `commit`; `total` of a synchronous save, `stall` of an asynchronous one).
    `planned`: whether the structure had to be planned anew. `skipped`: nothing was saved, because
    an earlier save was under way.
    """

    step: int
    path: str
    nbytes: int
    total_nbytes: int
    num_tensors: int
    planned: bool
    seconds: Mapping[str, float]
    skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReading:
    """What all ranks of a load read together; the same on each of them.

    `nbytes_unique`: of the elements that at least one rank asked for, each once. `nbytes_needed`:
    the sum over the ranks of what each asked for. `nbytes_read`: from storage, digests' blocks
    included. `nbytes_received`: by ranks from other ranks. `max_nbytes_read`: by any one rank.
    """

    nbytes_unique: int = 0
    nbytes_needed: int = 0
    nbytes_read: int = 0
    nbytes_received: int = 0
    num_opens: int = 0
    max_nbytes_read: int = 0

    @property
    def amplification(self) -> float:
        """Bytes read from storage for each byte that some rank asked for; 1.0 is the best."""
        return self.nbytes_read / self.nbytes_unique if self.nbytes_unique else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FellBack:
    """A newer checkpoint that could not be loaded, and why."""

    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """One finished load, as one rank saw it.

    Paths are full: part name first. `loaded`: tensors filled. `missing`: asked for, absent, allowed
    (their targets keep what they had). `fresh`: what the checkpoint knows nothing of and what
    therefore starts fresh, allowed (a parameter that is new to its optimizer, a new
    hyperparameter). `unexpected`: stored, asked for by no rank, allowed.
    `cast`: converted from another dtype. `kept`: per-rank values that stay local by their policy.
    `dropped`: stored per-rank values that no rank took, by consent; the same on all ranks, but for
    streams of a device that this rank does not have.
    `not_requested`: stored parts that the request left out. `values`: part name -> loaded tree, for
    parts that are plain trees. `nbytes_needed`, `nbytes_read`, `nbytes_received`: of tensor data,
    on this rank: asked for, read from storage, got from other ranks. More is read than needed where
    a digest covers more than the slice, or for other ranks. `num_opens`: of data files, on this
    rank. `job`: the same for all ranks together. `replaced`: each copy that was damaged or missing
    and that another copy of the same box replaced, on this rank, in words. `fell_back`: newer
    checkpoints that were given up for this one, newest first.
    """

    step: int
    path: str
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    not_requested: tuple[str, ...] = ()
    values: Mapping[str, object] = field(default_factory=dict)
    nbytes_needed: int = 0
    nbytes_read: int = 0
    nbytes_received: int = 0
    num_opens: int = 0
    job: JobReading = field(default_factory=JobReading)
    replaced: tuple[str, ...] = ()
    fell_back: tuple[FellBack, ...] = ()
    seconds: float = 0.0

    def summary(self) -> str:
        """One line for a log."""
        extra = "".join(
            f", {len(names)} {what}"
            for what, names in (
                ("missing", self.missing),
                ("started fresh", self.fresh),
                ("unexpected", self.unexpected),
                ("cast", self.cast),
                ("kept local", self.kept),
                ("dropped", self.dropped),
                ("damaged copies replaced", self.replaced),
                ("newer checkpoints given up", self.fell_back),
            )
            if names
        )
        return (
            f"step {self.step} from {self.path}: {len(self.loaded)} tensors, "
            f"{self.nbytes_read / 1e6:.1f} MB read in {self.seconds:.2f} s{extra}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartInfo:
    """One part of a checkpoint, as its manifest has it.

    `kind`: what the part's tree is ("mapping", "tensor", "value per dp,tp", …). `num_tensors`,
    `nbytes`: of the tensors that it refers to, each once; those it shares with another part count
    in both. `num_values`: leaves of the tree that are no tensors.
    """

    kind: str
    num_tensors: int
    nbytes: int
    num_values: int
