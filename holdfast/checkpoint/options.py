"""The options of a `Checkpointer`, of a save and of a load, checked in one place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, get_args

from holdfast.arguments import (
    check_choice,
    check_flag,
    check_instance,
    check_int,
    check_number,
    check_patterns,
)
from holdfast.errors import ConfigError
from holdfast.format.digest import DEFAULT_BLOCK_NBYTES
from holdfast.format.manifest import MAX_BLOCK_NBYTES, Envelope, encode_metadata
from holdfast.format.stored_copies import CopyPolicy
from holdfast.parallel.layout import DENSE_AXES, EXPERT_AXES
from holdfast.policies.keep import KeepPolicy
from holdfast.storage import Storage

WhenBusy = Literal["wait", "skip"]
"""The choice of `save_async` while no staging buffer is free: wait for one, or skip the save."""

Stage = Literal["at once", "lazily"]
"""When `save_async` copies the state: before it returns, or while training continues."""

OnDrift = Literal["raise", "warn"]
"""The reaction to stored copies of one tensor that differ: fail, or log a warning."""

CkptFormat = Literal["holdfast", "torch_dist"]
"""The form of the data files: safetensors, or items of PyTorch DCP with its metadata next to them,
so that PyTorch and Megatron open the directory as their own."""


class ForeignSource(Protocol):
    """The description of a foreign checkpoint, as `holdfast.foreign.open_catalog` returns it.

    A protocol, as is `NameRules`: most runs never import the room of the classes.
    """

    @property
    def label(self) -> str:
        """Its path or URL."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """What it holds, by key."""


class NameRules(Protocol):
    """A map of names, such as a `holdfast.foreign.NameMap`."""

    def apply(self, catalog: Any) -> Any:
        """Return the description of a foreign checkpoint under other names, and what was done."""


LoadSource: TypeAlias = str | os.PathLike[str] | Storage | ForeignSource
"""A path, a root of checkpoints as a `Storage`, or the description of a foreign checkpoint."""

NameSource: TypeAlias = NameRules | str | os.PathLike[str]
"""A map of names, the name of a preset, or the path of a TOML file."""

NUM_STEPS = 10**18
"""Steps are below this: a directory's name has at most eighteen digits."""

_MIN_BLOCK_NBYTES = 4096
_AXES = tuple(dict.fromkeys((*DENSE_AXES, *EXPERT_AXES)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverOptions:
    """The options of a `Checkpointer`'s saves, which documents them.

    All ranks choose alike what `in_words` has.

    Raises:
        ConfigError: a value out of range; the message names the argument.
    """

    block_nbytes: int = DEFAULT_BLOCK_NBYTES
    staging_buffers: int = 1
    deadline_s: float = 600.0
    retention: KeepPolicy | None = None
    fingerprints: bool = False
    check_replicas_every: int = 0
    replicate_over: Sequence[str] = ()
    max_copy_fraction: float = 1.0
    max_copied_nbytes: int | None = None
    on_drift: OnDrift = "raise"
    ckpt_format: CkptFormat = "holdfast"

    keep_image_s: float = 0.0
    max_kept_nbytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no save could be made with."""
        keep = partial(object.__setattr__, self)
        block_nbytes = check_int(
            self.block_nbytes,
            name="block_nbytes",
            least=_MIN_BLOCK_NBYTES,
            hint="; with smaller blocks, digests would outweigh data",
        )
        if block_nbytes.bit_count() != 1 or block_nbytes > MAX_BLOCK_NBYTES:
            # No manifest may state it, which a save would find out at its commit.
            raise ConfigError(
                f"block_nbytes={block_nbytes} must be a power of two, at most {MAX_BLOCK_NBYTES} "
                f"(64 MiB)"
            )
        keep("block_nbytes", block_nbytes)
        check_choice(self.staging_buffers, name="staging_buffers", choices=(1, 2))
        keep("deadline_s", check_number(self.deadline_s, name="deadline_s", above=0))
        if self.retention is not None:
            # Found after a commit, it would be raised as the failure of a save that is committed.
            hint = ", such as KeepLast(3)"
            check_instance(self.retention, name="retention", kind=KeepPolicy, hint=hint)
        check_flag(self.fingerprints, name="fingerprints")
        every = check_int(
            self.check_replicas_every, name="check_replicas_every", least=0, hint="; 0 for never"
        )
        keep("check_replicas_every", every)
        keep("replicate_over", _as_axes(self.replicate_over))
        most = check_number(
            self.max_copy_fraction,
            name="max_copy_fraction",
            least=0,
            hint="; it is bytes of copies for each byte without them",
        )
        keep("max_copy_fraction", most)
        check_choice(self.on_drift, name="on_drift", choices=get_args(OnDrift))
        check_choice(self.ckpt_format, name="ckpt_format", choices=get_args(CkptFormat))
        keep_s = check_number(
            self.keep_image_s, name="keep_image_s", least=0, hint="; 0 keeps no image"
        )
        keep("keep_image_s", keep_s)
        for name in ("max_copied_nbytes", "max_kept_nbytes"):
            if getattr(self, name) is not None:
                keep(name, check_int(getattr(self, name), name=name, least=0))

    @property
    def copies(self) -> CopyPolicy:
        """The policy of copies: what is stored more than once."""
        return CopyPolicy(
            axes=tuple(self.replicate_over),
            max_fraction=float(self.max_copy_fraction),
            max_nbytes=self.max_copied_nbytes,
        )

    @property
    def envelope(self) -> Envelope:
        """What surrounds the payload in data files."""
        return "torch_dist" if self.ckpt_format == "torch_dist" else "safetensors"

    def in_words(self) -> str:
        """Return what all ranks have to choose alike, in one line."""
        words = [f"block_nbytes={self.block_nbytes}"]
        if self.replicate_over:
            axes = "-".join(self.replicate_over)
            words.append(f"replicate_over={axes} max_copy_fraction={self.max_copy_fraction:g}")
            if self.max_copied_nbytes is not None:
                words.append(f"max_copied_nbytes={self.max_copied_nbytes}")
        if self.on_drift != "raise":
            words.append(f"on_drift={self.on_drift}")
        if self.ckpt_format != "holdfast":
            words.append(f"ckpt_format={self.ckpt_format}")
        return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """The arguments of one save.

    Raises:
        ConfigError: a value of a wrong type or out of range; the message names the argument.
    """

    kind: Literal["save", "save_async", "prepare"]
    """The call, which has to be the same on all ranks."""
    step: int = 0
    """The checkpoint's."""
    overwrite: bool = False
    """True if it may replace a checkpoint of that step."""
    check_replicas: bool = False
    """True if declared replicas are compared, too."""
    metadata: Mapping[str, object] | None = None
    """The caller's JSON object."""
    when_busy: WhenBusy = "wait"
    """The choice while no staging buffer is free."""
    stage: Stage = "at once"
    """When the state is copied."""
    encoded_metadata: bytes = field(init=False)
    """The metadata as it is stored; empty for none."""

    def __post_init__(self) -> None:
        """Check the arguments, and encode the metadata."""
        step = check_int(self.step, name="step", least=0, below=NUM_STEPS)
        object.__setattr__(self, "step", step)
        check_flag(self.overwrite, name="overwrite")
        check_flag(self.check_replicas, name="check_replicas")
        check_choice(self.when_busy, name="when_busy", choices=get_args(WhenBusy))
        check_choice(self.stage, name="stage", choices=get_args(Stage))
        encoded = b"" if self.metadata is None else encode_metadata(self.metadata)
        object.__setattr__(self, "encoded_metadata", encoded)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Which checkpoint a load takes, how strict it is, and how it reads: see `Checkpointer.load`.

    Raises:
        ConfigError: a value of a wrong type or out of range; the message names the argument.
    """

    step: int | None = None
    ignore_unexpected: bool | Sequence[str] = False
    allow_missing: Sequence[str] = ()
    allow_dropped: Sequence[str] = ()
    cast: bool = False
    verify: bool = True
    exchange: bool | Literal["auto"] = "auto"
    max_fallbacks: int | None = 0

    def __post_init__(self) -> None:
        """Refuse what a caller cannot have meant."""
        if not isinstance(self.ignore_unexpected, bool):
            patterns = check_patterns(self.ignore_unexpected, name="ignore_unexpected")
            object.__setattr__(self, "ignore_unexpected", patterns)
        for name in ("cast", "verify"):
            check_flag(getattr(self, name), name=name)
        check_choice(self.exchange, name="exchange", choices=("auto", True, False))
        for name in ("allow_missing", "allow_dropped"):
            object.__setattr__(self, name, check_patterns(getattr(self, name), name=name))
        most = self.max_fallbacks
        if isinstance(most, bool):
            fix = "None for as many as there are" if most else "0 for none"
            raise ConfigError(f"max_fallbacks={most}: give the number of older checkpoints; {fix}")
        if most is not None:
            most = check_int(
                most,
                name="max_fallbacks",
                least=0,
                hint="; it is how many older checkpoints to try, None for as many as there are",
            )
            object.__setattr__(self, "max_fallbacks", most)
        if self.step is not None:
            step = check_int(self.step, name="step", least=0, below=NUM_STEPS)
            object.__setattr__(self, "step", step)
            if most != 0:
                raise ConfigError(
                    f"max_fallbacks={most} with step={step}: a step given by number is loaded or "
                    f"not; leave one of them out"
                )


def _as_axes(value: object) -> tuple[str, ...]:
    """Axes in the order of the layout's views, each once; one alone may be a text."""
    named = (value,) if isinstance(value, str) else value
    if not isinstance(named, Iterable) or isinstance(named, bytes | bytearray | Mapping):
        raise ConfigError(f"replicate_over={value!r} must be axes such as ('tp',)")
    axes = list(named)
    unknown = [axis for axis in axes if axis not in _AXES]
    if unknown:
        raise ConfigError(
            f"replicate_over={value!r}: {unknown} are not axes of a layout: {', '.join(_AXES)}"
        )
    return tuple(axis for axis in _AXES if axis in axes)
