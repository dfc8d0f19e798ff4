"""`Checkpointer`: the one object a training loop needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from holdfast.checkpoint.load.inventory import stored_parts
from holdfast.checkpoint.load.loader import Loader, LoadOptions
from holdfast.checkpoint.reports import LoadReport, PartInfo, SaveReport
from holdfast.checkpoint.save.executor import SaverOptions
from holdfast.checkpoint.save.handshake import SaveRequest
from holdfast.checkpoint.save.pending import PendingSave
from holdfast.checkpoint.save.saver import Saver, WhenBusy
from holdfast.errors import ConfigError, GroupError, HoldfastError, StorageError
from holdfast.format.digest import DEFAULT_BLOCK_NBYTES
from holdfast.format.names import list_steps
from holdfast.format.values import Codecs
from holdfast.parallel import ProcessGroups, current_groups
from holdfast.parallel.control.guard import Guard, guarded
from holdfast.retention.policies import Policy
from holdfast.storage import PosixStorage, Storage


class Checkpointer:
    """Saves and loads the whole training state under one directory.

    `root`: a directory (made by the first save) or a `Storage`. `groups`: the communicators of the
    layout that the state lives on; every call that saves or loads is collective over its ranks.
    Without `groups`, the ones made current by `groups.as_default()` are used; a process on its own
    needs none. `codecs`: types beyond the built-in ones that values may have.

    `staging_buffers`: how many, each as large as this rank's share of a save, allocated once and
    reused. With one, a save waits for the one before; with two, it is staged while the one
    before is written. `deadline_s`: for a save, from staged to committed. `settle_s`: how long the
    first look for a checkpoint waits for writers that outlived an earlier run. `retention`: which
    checkpoints to keep, applied after each commit by the coordinator (`KeepLast(3) |
    KeepEvery(1000)`); the newest sound one and one being read always stay. `fingerprints`: store a
    digest of each logical tensor that does not depend on its sharding, so that `holdfast diff`
    compares checkpoints of any layouts without reading them (about 1.5 GB/s a core, in the writer).
    `check_replicas_every`: every so many saves, compare what several ranks hold as
    `save(check_replicas=True)` does (0: never). `block_nbytes`: bytes per digest.

    A context manager: leaving it waits for what is under way and raises what failed.

    Raises GroupError when several processes run and no groups are given.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage,
        *,
        groups: ProcessGroups | None = None,
        codecs: Codecs | None = None,
        staging_buffers: int = 1,
        deadline_s: float = 600.0,
        settle_s: float = 60.0,
        retention: Policy | None = None,
        fingerprints: bool = False,
        check_replicas_every: int = 0,
        block_nbytes: int = DEFAULT_BLOCK_NBYTES,
    ) -> None:
        if staging_buffers not in (1, 2):
            raise ConfigError(f"staging_buffers={staging_buffers} is not 1 or 2")
        if not deadline_s > 0:
            raise ConfigError(f"deadline_s={deadline_s} must be more than 0 seconds")
        if isinstance(check_replicas_every, bool) or check_replicas_every < 0:
            raise ConfigError(
                f"check_replicas_every={check_replicas_every} is not a number of saves; 0 for never"
            )
        if block_nbytes < 4096:
            raise ConfigError(
                f"block_nbytes={block_nbytes} is below 4096: digests would outweigh data"
            )
        self._storage: Storage = (
            PosixStorage(Path(root)) if isinstance(root, str | os.PathLike) else root
        )
        self._groups = groups if groups is not None else _groups_in_force()
        codecs = codecs if codecs is not None else Codecs()
        options = SaverOptions(
            block_nbytes=block_nbytes,
            staging_buffers=staging_buffers,
            deadline_s=deadline_s,
            retention=retention,
            fingerprints=fingerprints,
            check_replicas_every=check_replicas_every,
        )
        self._saver = Saver(self._storage, self._groups, codecs=codecs, options=options)
        self._loader = Loader(self._storage, self._groups, codecs=codecs, settle_s=settle_s)
        self.guards: Mapping[str, Guard[Any]] = {
            "save": self._saver.save_guard,
            "save_async": self._saver.async_guard,
            "prepare": self._saver.prepare_guard,
            "load": Guard(self._groups.control, "load", retry_if=self._loader.was_replaced),
            "load_all": Guard(self._groups.control, "load", retry_if=self._loader.was_replaced),
        }

    @property
    def storage(self) -> Storage:
        """Where the checkpoints are."""
        return self._storage

    @property
    def groups(self) -> ProcessGroups:
        """The communicators in use."""
        return self._groups

    @property
    def writer_pid(self) -> int | None:
        """Process id of this rank's writer; None before the first asynchronous save."""
        return self._saver.writer_pid

    @property
    def num_allocations(self) -> int:
        """How often staging memory had to be allocated."""
        return self._saver.num_allocations

    @property
    def num_plans(self) -> int:
        """How often a save had to be planned anew."""
        return self._saver.num_plans

    @guarded
    def save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        overwrite: bool = False,
        check_replicas: bool = False,
    ) -> SaveReport:
        """Save the state as checkpoint `step`; returns when it is committed and durable.

        `state`: part name -> module, `OptimizerState`, `RNG`, object with `state_dict`, or plain
        tree of tensors and values. It is not changed. The boxes that the ranks hold must make whole
        tensors, and values that several ranks supply must be equal; otherwise every rank raises
        PlanError and nothing is committed. `overwrite`: replace an existing checkpoint of the step,
        which survives until the new one is durable. `check_replicas`: compare the bytes of every
        box that several ranks hold, also where a placement declares them equal; PlanError names
        key, ranks and, by majority, the odd ones out. Costs one hash of all local bytes.

        Errors are raised on all ranks: GroupError, PlacementError, PlanError, StorageError,
        DeadlineError. The previous checkpoint is untouched by any of them.
        Cost: three small collectives (three more when the structure changed), one copy of the
        assigned bytes, one write and hash of them.
        """
        ask = SaveRequest(
            kind="save", step=step, overwrite=overwrite, check_replicas=check_replicas
        )
        return self._saver.save(ask, state)

    @guarded
    def save_async(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        overwrite: bool = False,
        check_replicas: bool = False,
        when_busy: WhenBusy = "wait",
    ) -> PendingSave:
        """Save the state as it is now; returns as soon as it is copied, writing goes on beside.

        The copy goes to staging memory; a writer process of this rank (torch-free, in a session of
        its own, so that it outlives this process) brings it to storage, and the coordinator's
        commits. Training may change everything at once. `when_busy`: what to do while no staging
        memory is free on some rank: "wait" for it, or "skip" this save on all ranks.

        What is wrong with the state or the structure is raised here on all ranks, as by `save`. A
        failure after that is raised by `PendingSave.result()`. One that some rank has not raised
        yet is raised on all ranks by the next save, and on that rank by `close()` at the latest.
        Cost in steady state: one small collective, one `torch._foreach_copy_` of the assigned
        bytes, no allocation; plus one hash of tensors whose replication nothing declares.
        """
        ask = SaveRequest(
            kind="save_async", step=step, overwrite=overwrite, check_replicas=check_replicas
        )
        return self._saver.save_async(ask, state, when_busy=when_busy)

    @guarded
    def prepare(self, state: Mapping[str, object]) -> None:
        """Do what the first save does once: plan, allocate and touch memory, start the writer.

        Collective; nothing is written. The next save is then as fast as any other.
        """
        self._saver.prepare(state)

    @guarded
    def load(
        self,
        state: Mapping[str, object],
        *,
        step: int | None = None,
        ignore_unexpected: bool = False,
        allow_missing: Sequence[str] = (),
        allow_dropped: Sequence[str] = (),
        cast: bool = False,
        verify: bool = True,
        exchange: bool = True,
        fallback: bool | int = False,
    ) -> LoadReport:
        """Load checkpoint `step` (the newest committed one by default) into the state.

        The whole request is matched with the checkpoint before any target is touched: missing and
        unexpected entries, shapes, dtypes and kinds; a difference raises MismatchError on all ranks
        unless allowed (`ignore_unexpected`; `allow_missing`: `fnmatch` patterns of full paths;
        `allow_dropped`: patterns of values per rank whose coordinates no rank of this layout has;
        `cast`: convert dtypes). Parts that the state leaves out are not loaded and are named in the
        report. The layout may be any other than the one saved under.

        Tensors are read in place. With `exchange`, bytes that several ranks ask for are read from
        storage once: dealt out to those ranks by digest blocks and in equal shares, each rank's own
        file first, and sent on over the control communicator. Without it each rank reads the byte
        ranges of its own boxes and nothing is sent, which is quicker where the storage gives every
        rank its bytes faster than the network does (a page cache, a local disk with all the files).
        `verify` checks the digest of every block read. On damage every rank raises CorruptionError,
        which says which targets were written to before it was met; values (hyperparameters,
        schedulers, RNG) are restored only after every tensor on every rank was good.

        `fallback`: where the newest checkpoint is damaged or incomplete (CorruptionError,
        StorageError), go on to the next older one; True for as many as there are, a number for at
        most so many. All ranks take the same one; a warning (logger `holdfast`) and
        `LoadReport.fell_back` say what was given up and why. What the damaged one had written to
        targets is overwritten by the good one; one that would leave such a target is not taken.
        MismatchError is never a reason to fall back. If none is good the error lists them all.

        Raises ConfigError for `fallback` together with `step`, or a negative one.
        Cost: seven small collectives, of which one carries the requests of all ranks (some bytes a
        box) and one is a broadcast of manifest and index; with boxes that several ranks ask for,
        one more and one message between each two of them for every 64 MiB that they share, and as
        much memory. `fallback`: two more collectives.
        """
        if state is None:
            raise ConfigError(
                "load(None): the state must map names to parts; load_all() needs no state"
            )
        options = LoadOptions(
            ignore_unexpected=ignore_unexpected,
            allow_missing=_patterns(allow_missing, "allow_missing"),
            allow_dropped=_patterns(allow_dropped, "allow_dropped"),
            cast=cast,
            verify=verify,
            exchange=exchange,
            max_fallbacks=_max_fallbacks(fallback, step),
        )
        return self._loader.load(state, step=step, options=options)

    @guarded
    def load_all(
        self,
        *,
        step: int | None = None,
        verify: bool = True,
        exchange: bool = True,
        fallback: bool | int = False,
    ) -> LoadReport:
        """Load everything that checkpoint `step` (the newest by default) holds, without templates.

        `LoadReport.values` has each part as the tree that was saved: modules and optimizers as
        dicts by name, values with their types (registered ones need the same `codecs`), tensors
        whole, in host memory, with their stored dtypes; of a value per rank, the values of all
        coordinates as `PerRankValues`. Nothing is written to any object of the caller's.

        Collective, under any layout and in a process on its own; meant for looking into checkpoints
        and converting them. Arguments and errors as of `load`.
        Cost: each rank reads or receives all tensors, and holds them.
        """
        options = LoadOptions(
            verify=verify, exchange=exchange, max_fallbacks=_max_fallbacks(fallback, step)
        )
        return self._loader.load(None, step=step, options=options)

    def parts(self, step: int | None = None) -> dict[str, PartInfo]:
        """The parts of checkpoint `step` (the newest committed one by default), by name.

        Reads the manifest; no collectives. Raises StorageError where there is no such checkpoint,
        CorruptionError where its manifest is damaged.
        """
        chosen = step if step is not None else self.latest()
        if chosen is None:
            raise StorageError(f"{self._storage.describe('')} holds no committed checkpoint")
        return stored_parts(self._storage, chosen)

    def steps(self) -> list[int]:
        """Committed steps, ascending. Looks at storage; no collectives."""
        return list_steps(self._storage) if self._storage.is_dir("") else []

    def latest(self) -> int | None:
        """The newest committed step, or None. Looks at storage; no collectives."""
        return max(self.steps(), default=None)

    def close(self) -> None:
        """Wait for saves under way, stop the writer, give the memory back.

        Raises what a save failed with and nobody has been told. No collectives; the groups are the
        caller's.
        """
        self._saver.close()

    def __enter__(self) -> Checkpointer:
        """The checkpointer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; an error on its way out is not hidden by one of a save."""
        if error is None:
            self.close()
        else:
            with suppress(HoldfastError):
                self.close()


def _max_fallbacks(fallback: bool | int, step: int | None) -> int | None:
    """How many older checkpoints may be tried; ConfigError for what is none or not possible."""
    if not isinstance(fallback, int) or fallback < 0:
        raise ConfigError(f"fallback={fallback} is not a number of older checkpoints to try")
    if fallback and step is not None:
        raise ConfigError(
            f"fallback={fallback} with step={step}: a step asked for by number is loaded or not"
        )
    return None if fallback is True else int(fallback)


def _patterns(given: object, name: str) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Iterable) or isinstance(given, bytes | bytearray):
        raise ConfigError(f"{name}={given!r} must be patterns of paths")
    return tuple(given)


def _groups_in_force() -> ProcessGroups:
    """The default groups of the context, or those of a lone process; never a guess."""
    with suppress(GroupError):
        return current_groups()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_available() and dist.is_initialized():
        world = dist.get_world_size()
    if world > 1:
        raise GroupError(
            f"{world} processes run, and no groups were given: pass "
            f"groups=ProcessGroups.create(layout), or open `with groups.as_default():`"
        )
    return ProcessGroups.single()
