"""`Checkpointer`: the one object a training loop needs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, NoReturn, SupportsIndex, cast

import torch.distributed as dist

from holdfast.arguments import check_instance
from holdfast.checkpoint.load.loader import Loader
from holdfast.checkpoint.options import (
    CkptFormat,
    LoadOptions,
    LoadSource,
    NameSource,
    OnDrift,
    SaveRequest,
    SaverOptions,
    Stage,
    WhenBusy,
)
from holdfast.checkpoint.reports import CheckpointerStats, LoadReport, SaveReport, timed_report
from holdfast.checkpoint.save.pending import PendingSave
from holdfast.checkpoint.save.saver import Saver
from holdfast.errors import ConfigError, GroupError, HoldfastError, StorageError, some_of
from holdfast.format.digest import DEFAULT_BLOCK_NBYTES
from holdfast.format.inventory import CheckpointInfo, inspect_checkpoint
from holdfast.format.names import list_steps
from holdfast.format.root_identity import RootIdentity
from holdfast.format.values import Codecs
from holdfast.parallel import ProcessGroups, current_groups
from holdfast.parallel.control.guard import Guard, guarded
from holdfast.policies.keep import KeepPolicy
from holdfast.policies.save import SavePolicy
from holdfast.policies.schedule import SaveSchedule
from holdfast.storage import Storage, open_storage
from holdfast.storage.reading import fail_within


class Checkpointer:
    """Saves and loads the whole training state under one directory.

    A context manager: leaving it waits for saves in flight and raises what failed.

    Args:
        root: a directory (made by the first save), the URL of a place in a bucket
            (`s3://bucket/run`, `gs://`, `az://`; see docs/object-stores.md), or a `Storage`.
        groups: the communicators of the layout that the state lives on; every call that saves or
            loads is collective over its ranks. Default: the ones made current by
            `groups.as_default()`; a process on its own needs none.
        codecs: types beyond the built-in ones that values may have.
        staging_buffers: 1 or 2, each as large as this rank's share of a save, allocated once and
            reused. With 1, a save waits for the one before; with 2, it is staged while the one
            before is written.
        deadline_s: seconds for a save, from staged to committed.
        settle_s: seconds that the first look for a checkpoint waits for writers that outlived an
            earlier run.
        retention: which checkpoints to keep, applied after each commit by the coordinator
            (`KeepLast(3) | KeepEvery(1000)`); the newest sound one, the one just saved and one
            being read always stay. None keeps all.
        save_when: when `maybe_save` saves (`EverySteps(1000) | OnSignal()`). Handlers of signals
            are in force until `close`.
        fingerprints: store a digest of each logical tensor that does not depend on its sharding,
            so that `holdfast diff` compares checkpoints of any layouts without reading them (about
            1.5 GB/s a core, in the writer).
        check_replicas_every: every so many saves, compare what several ranks hold as
            `save(check_replicas=True)` does; 0 for never.
        block_nbytes: bytes per digest, a power of two from 4 KiB to 64 MiB. A load of a slice reads
            and hashes whole blocks.
        replicate_over: axes of the layout, `("tp",)` for example: of each tensor that ranks with
            several coordinates along them hold, one copy is stored for each of these, by a rank
            that has it, so that on a load every rank reads what is near. Tensors sharded over the
            axes get none. Of experts, `tp` is `expt_tp` and `dp` is `expt_dp`. Names do not
            change, and any layout loads with or without copies.
        max_copy_fraction: the most bytes that copies may add, as a fraction of the bytes without
            them; more is a PlanError of the save. 0.05 is ample for norms, routers and biases.
        max_copied_nbytes: the largest tensor that is copied, in bytes of the whole tensor; larger
            ones are stored once. None copies all.
        on_drift: what to do if copies of one tensor differ: "raise" (a save commits nothing, a
            load raises CorruptionError), or "warn": a load then takes the first copy on all ranks.
        keep_image_s: seconds that the staged bytes of the newest checkpoint stay in memory after
            this process has gone (killed, or after `close`), for a restart on the same host, whose
            load copies them instead of reading the disk. A process of each rank keeps them; it ends
            before its time where memory is short, a newer step is committed, another save needs the
            memory, or SIGTERM comes. 0, the default, keeps nothing and looks for nothing. Linux
            only; has no effect for a storage that other processes cannot open, and is refused for a
            bucket.
        max_kept_nbytes: the largest image that a rank keeps, in bytes; None for any. An image is as
            large as the rank's data file.
        ckpt_format: "holdfast" writes data files of safetensors, "torch_dist" those of PyTorch DCP,
            with what DCP (`dcp.load`, `dcp_to_torch_save`) and Megatron-core
            (`dist_checkpointing.load`) begin with next to them: they open the checkpoint as their
            own. Everything here works with both alike. The second costs some 3 µs of CPU
            time more for each tensor, and the files next to the data.

    Raises:
        ConfigError: an argument out of range.
        GroupError: several processes run and no groups are given.
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
        retention: KeepPolicy | None = None,
        save_when: SavePolicy | None = None,
        fingerprints: bool = False,
        check_replicas_every: int = 0,
        block_nbytes: int = DEFAULT_BLOCK_NBYTES,
        replicate_over: Sequence[str] = (),
        max_copy_fraction: float = 1.0,
        max_copied_nbytes: int | None = None,
        on_drift: OnDrift = "raise",
        keep_image_s: float = 0.0,
        max_kept_nbytes: int | None = None,
        ckpt_format: CkptFormat = "holdfast",
    ) -> None:
        options = SaverOptions(
            block_nbytes=block_nbytes,
            staging_buffers=staging_buffers,
            deadline_s=deadline_s,
            retention=retention,
            fingerprints=fingerprints,
            check_replicas_every=check_replicas_every,
            replicate_over=replicate_over,
            max_copy_fraction=max_copy_fraction,
            max_copied_nbytes=max_copied_nbytes,
            on_drift=on_drift,
            keep_image_s=keep_image_s,
            max_kept_nbytes=max_kept_nbytes,
            ckpt_format=ckpt_format,
        )
        self._storage = _storage_at(root)
        groups = groups if groups is not None else _default_groups()
        hint = ": ProcessGroups.create(layout) makes them"
        self._groups = check_instance(groups, name="groups", kind=ProcessGroups, hint=hint)
        self._bounded(self._storage)
        codecs = codecs if codecs is not None else Codecs()
        check_instance(codecs, name="codecs", kind=Codecs, hint=", such as Codecs(enums=[Color])")
        self._codecs, self._on_drift = codecs, on_drift
        self._root = RootIdentity(self._storage)
        self._saver = Saver(
            self._storage, self._groups, codecs=codecs, options=options, root=self._root
        )
        self._loader = Loader(
            self._storage,
            self._groups,
            codecs=codecs,
            settle_s=settle_s,
            on_drift=on_drift,
            takes_images=options.keep_image_s > 0,
        )
        control = self._groups.control
        self.guards: Mapping[str, Guard[Any]] = {
            "save": self._saver.save_guard,
            "save_async": self._saver.async_guard,
            "prepare": self._saver.prepare_guard,
            "load": Guard(control, "load", retry_if=self._loader.was_replaced),
            "load_all": Guard(control, "load", retry_if=self._loader.was_replaced),
        }
        self._nbytes_loaded = 0
        self._parts_left = _PartsLeft(self._groups.rank)
        self._preempted = ""
        # Last: what it starts (handlers of signals) is given back by `close`.
        self._schedule = SaveSchedule(save_when, control=control) if save_when is not None else None
        if self._schedule is not None:
            self._saver.on_failure = self._schedule.not_saved

    def __repr__(self) -> str:
        return f"Checkpointer({self._storage.describe('')!r}, layout={self._groups.layout.name!r})"

    @property
    def storage(self) -> Storage:
        """The root of the checkpoints."""
        return self._storage

    @property
    def groups(self) -> ProcessGroups:
        """The communicators in use."""
        return self._groups

    @property
    def stats(self) -> CheckpointerStats:
        """Counters of this rank so far: a snapshot that does not change. No collectives."""
        counts, guards = self._saver.counts, self.guards
        return CheckpointerStats(
            num_saves=guards["save"].num_done + counts["committed"],
            num_failed_saves=(
                guards["save"].num_failed + guards["save_async"].num_failed + counts["failed"]
            ),
            num_skipped_saves=counts["skipped"],
            num_saves_in_flight=self._saver.num_in_flight,
            num_loads=guards["load"].num_done + guards["load_all"].num_done,
            num_failed_loads=guards["load"].num_failed + guards["load_all"].num_failed,
            num_plans=counts["planned"],
            num_plan_reuses=counts["reused"],
            num_allocations=self._saver.num_allocations,
            nbytes_saved=counts["nbytes"],
            nbytes_loaded=self._nbytes_loaded,
            writer_pid=self._saver.writer_pid,
        )

    @property
    def preempted(self) -> str:
        """Why the run is to stop, the same on all ranks; empty while it is not.

        Set by `maybe_save` and `should_save` when a policy of `save_when` stops the run
        (`OnSignal`, `AtDeadline`). The state of that step is saved or in flight: leave the loop and
        `close`.
        """
        return self._preempted

    @timed_report
    @guarded
    def save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        overwrite: bool = False,
        check_replicas: bool = False,
        metadata: Mapping[str, object] | None = None,
    ) -> SaveReport:
        """Save the state as checkpoint `step`; returns when it is committed and durable.

        Args:
            step: its number, in [0, 10**18).
            state: part name -> module, `OptimizerState`, `RNG`, object with `state_dict`, or plain
                tree of tensors and values. It is not changed. The shards that the ranks hold must
                cover each tensor exactly, and values that several ranks supply must be equal.
            overwrite: replace an existing checkpoint of the step, which survives until the new one
                is durable.
            check_replicas: compare the bytes of every box that several ranks hold, even if a
                placement declares them equal; the error names key, ranks and, by majority, the odd
                ones out. Costs one hash of all local bytes.
            metadata: a JSON object of your own (a commit hash, a loss), at most 64 KiB, the same on
                all ranks. `LoadReport.metadata`, `inspect` and `holdfast ls` and `show` have it.

        Raises:
            PlanError, PlacementError: the state is not one that can be stored whole, or ranks call
                with different arguments.
            ConfigError: an argument is wrong on some rank.
            StorageError, DeadlineError, GroupError: as their messages say.

            All on all ranks; nothing is committed, and the previous checkpoint is untouched.

        Cost: three small collectives (three more when the structure changed), one copy of the
        assigned bytes, one write and hash of them.
        """
        request = SaveRequest(
            kind="save",
            step=step,
            overwrite=overwrite,
            check_replicas=check_replicas,
            metadata=metadata,
        )
        report = self._saver.save(request, state)
        self._note_saved(request.step)
        self._parts_left.warn_of(state)
        return report

    @guarded
    def save_async(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        overwrite: bool = False,
        check_replicas: bool = False,
        metadata: Mapping[str, object] | None = None,
        when_busy: WhenBusy = "wait",
        stage: Stage = "at once",
    ) -> PendingSave:
        """Save the state as it is now; returns once it is copied, and is written in the background.

        The copy goes to staging memory; a writer process of this rank (torch-free, in a session of
        its own, so that it outlives this process) brings it to storage, and the coordinator's
        commits. Training may change everything at once.

        With `stage="lazily"` large parameters and tensors of optimizers (`OptimizerState`) are
        copied by a thread after the call has returned. Steps of these optimizers wait for it (on a
        CUDA device, behind the copies on its streams), and so does everything that a checkpointer
        is asked for next; before anything else changes such a tensor, call `PendingSave.staged()`.
        The kernel watches the memory, and sums are compared of what is on a CUDA device: if
        something writes to it before it is copied, the save fails on all ranks and names the
        tensor. Where the kernel cannot (before Linux 6.7), and for tensors on other devices, the
        copy is made at once. Until it is staged the save needs this process.

        Args:
            step, state, overwrite, check_replicas, metadata: as of `save`.
            when_busy: what to do while no staging buffer is free on some rank: "wait" for one, or
                "skip" this save on all ranks: then a clock, file or signal of `save_when` that has
                asked for it asks again. The last save of a run that is `preempted` waits.
            stage: when to copy, "at once" or "lazily"; ranks may differ.

        Raises:
            HoldfastError: on all ranks, as of `save`, what is wrong with the state or the
                structure. A failure after that is raised by `PendingSave.result()`. One that some
                rank has not raised yet is raised on all ranks by the next save, and on that rank by
                `close()` at the latest.

        Cost in steady state: one small collective, one `torch._foreach_copy_` of the assigned
        bytes, no allocation; plus one hash of tensors whose replication nothing declares.
        """
        request = SaveRequest(
            kind="save_async",
            step=step,
            overwrite=overwrite,
            check_replicas=check_replicas,
            metadata=metadata,
            when_busy=when_busy,
            stage=stage,
        )
        if self._preempted:
            request = replace(request, when_busy="wait")
        pending = self._saver.save_async(request, state)
        if not pending.skipped:
            self._note_saved(request.step)
            self._parts_left.warn_of(state)
        elif self._schedule is not None:
            self._schedule.not_saved()
        return pending

    def maybe_save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        overwrite: bool = False,
        metadata: Mapping[str, object] | None = None,
        when_busy: WhenBusy = "wait",
        stage: Stage = "at once",
    ) -> PendingSave | None:
        """Save in the background if a policy of `save_when` says so; call it after every step.

        `preempted` says afterwards whether the run is to stop.

        Args:
            step, state, overwrite, metadata, when_busy, stage: as of `save_async`.

        Returns:
            The save; None if no policy asks for one, or the step was saved or loaded already.

        Raises:
            ConfigError: the checkpointer was made without `save_when`.
            HoldfastError: on all ranks, as of `should_save` and `save_async`. The step does not
                count as saved then: what has asked for it asks again.

        Cost: that of `should_save`, and of `save_async` if it saves.
        """
        if not self.should_save(step):
            return None
        return self.save_async(
            step,
            state,
            overwrite=overwrite,
            metadata=metadata,
            when_busy=when_busy,
            stage=stage,
        )

    def should_save(self, step: int) -> bool:
        """Return True if a policy of `save_when` says to save now; the same on all ranks.

        The decision of `maybe_save`, for a loop that saves by itself. Call it after every step.

        Raises:
            ConfigError: the checkpointer was made without `save_when`.
            PlanError: ranks are at different steps, or have different policies.
            HoldfastError: what a policy raised on any rank, on all of them.

        Cost: nothing where only the step decides (`EverySteps`, `AtStep`). With a policy of clocks,
        files or signals, one collective of some 50 bytes a rank at the steps that its `check_every`
        divides. One at the first call.
        """
        if self._schedule is None:
            raise ConfigError(
                "maybe_save needs to know when: Checkpointer(..., save_when=EverySteps(1000))"
            )
        decision = self._schedule.decide(step)
        if decision.stop:
            self._preempted = decision.reason
        return decision.save

    def _note_saved(self, step: int) -> None:
        """Tell the policy of `save_when` that a step is saved."""
        if self._schedule is not None:
            self._schedule.saved(step)

    @guarded
    def prepare(self, state: Mapping[str, object]) -> None:
        """Do what the first save does once: plan, allocate and touch memory, start the writer.

        Collective; nothing is written. The next save is then as fast as any other.

        Raises:
            HoldfastError: on all ranks, as of `save`.
        """
        self._saver.prepare(state)

    @timed_report
    @guarded
    def load(
        self,
        state: Mapping[str, object],
        *,
        step: int | None = None,
        source: LoadSource | None = None,
        names: NameSource | None = None,
        ignore_unexpected: bool | Sequence[str] = False,
        allow_missing: Sequence[str] = (),
        allow_dropped: Sequence[str] = (),
        cast: bool = False,
        verify: bool = True,
        exchange: bool | Literal["auto"] = "auto",
        max_fallbacks: int | None = 0,
    ) -> LoadReport:
        """Load a checkpoint into the state, under any layout.

        The whole request is matched with the checkpoint before any target is touched. Parts that
        the state leaves out are not loaded. Tensors are read in place; values (hyperparameters,
        schedulers, RNG) are restored only after every tensor on every rank was good.

        Args:
            state: as of `save`; what it holds is overwritten.
            step: which checkpoint; default the newest committed one.
            source: load from there instead of from the own root: the path of another run or of one
                of its checkpoints, or of a checkpoint in a foreign format (`holdfast.foreign`),
                which is read in place by byte ranges. It counts as a start, not as a step that was
                saved. A foreign one has no digests: `LoadReport.is_verified` says so.
            names: with `source`: how its names become those of the state (renamed, split, joined,
                transposed, …): a `NameMap`, the name of a preset, or a TOML file. The bytes of a
                mapped source count as not verified.
            ignore_unexpected: leave stored entries that no rank asks for: all, or by patterns, on
                every rank that asks for their part. A plain dict asks for everything stored in its
                place; with targets in it, it then asks for the tensors that it names, and leaves
                others.
            allow_missing: `fnmatch` patterns of full paths that may be absent.
            allow_dropped: patterns of per-rank values whose coordinates no rank of this layout has.
            cast: convert dtypes.
            verify: check the digest of every block read.
            exchange: True: what several ranks ask for is read once, in equal shares, and sent over
                the control communicator; False: each rank reads for itself; "auto": the faster of
                both for what ranks of several hosts ask for (`HOLDFAST_HOST_ID` in the guide),
                measured if that is 256 MiB or more. A rank always reads what its own file has, and
                receives none of it.
            max_fallbacks: how many older checkpoints may be tried if the newest is damaged or
                incomplete (never for a MismatchError): 0, only the newest or that of `step`; n, at
                most n older ones; None, any number. All ranks take the same one, which overwrites
                what the damaged one wrote; `LoadReport.fell_back` says what was given up and why.

        Raises:
            MismatchError: state and checkpoint differ in what is not allowed.
            CorruptionError: damage; the message lists the targets that were written to before.
            StorageError: the checkpoint does not exist, or cannot be read.
            ConfigError: an argument is wrong. All of these on all ranks.

        Cost: five small collectives, one of them a broadcast of manifest and index. An exchange:
        one carries all requests, and one more, with as much memory, each 64 MiB that a rank shares.
        With `max_fallbacks`: two more. With `source`: one more, and a broadcast of the metadata
        that the coordinator reads of a foreign format.
        """
        _check_mapping(state)
        options = LoadOptions(
            step=step,
            ignore_unexpected=ignore_unexpected,
            allow_missing=allow_missing,
            allow_dropped=allow_dropped,
            cast=cast,
            verify=verify,
            exchange=exchange,
            max_fallbacks=max_fallbacks,
        )
        self._saver.wait_staged()  # a load writes to what may still be copied
        return self._load(state, options, source, names)

    @timed_report
    @guarded
    def load_all(
        self,
        *,
        step: int | None = None,
        source: LoadSource | None = None,
        names: NameSource | None = None,
        verify: bool = True,
        exchange: bool | Literal["auto"] = "auto",
        max_fallbacks: int | None = 0,
    ) -> LoadReport:
        """Load everything that a checkpoint holds, without templates.

        `LoadReport.values` has each part as the tree that was saved: modules and optimizers as
        dicts by name, values with their types (registered ones need the same `codecs`), tensors
        whole, in host memory, with their stored dtypes; of a value per rank, the values of all
        coordinates as `PerRankValues`. Nothing is written to any object of the caller's.

        Collective, under any layout and in a process on its own; meant for looking into checkpoints
        and converting them. Arguments and errors as of `load`.

        Cost: each rank reads or receives all tensors, and holds them.
        """
        options = LoadOptions(
            step=step, verify=verify, exchange=exchange, max_fallbacks=max_fallbacks
        )
        return self._load(None, options, source, names)

    def _load(
        self,
        state: Mapping[str, object] | None,
        options: LoadOptions,
        source: LoadSource | None,
        names: NameSource | None,
    ) -> LoadReport:
        """Load from the own root or from a source, and count what was read."""
        if source is None and names is not None:
            raise ConfigError("names map those of a source: give source=, too")
        if source is None:
            self._root.check(learns=False)
            report = self._loader.load(state, options)
            self._note_saved(report.step)  # a step that was loaded is saved, too
            self._parts_left.note(report)
        else:
            # Here and not above: it imports all foreign formats, which most runs never read.
            from holdfast.checkpoint.load.sources import open_source

            self._loader.finder.version = None  # the next load is another loader's
            with ExitStack() as stack:
                storage, step = open_source(
                    source,
                    stack,
                    control=self._groups.control,
                    opener=lambda place: self._bounded(open_storage(place)),
                    step=options.step,
                    names=names,
                    on_drift=self._on_drift,
                )
                loader = Loader(
                    self._bounded(storage),
                    self._groups,
                    codecs=self._codecs,
                    settle_s=0.0,
                    on_drift=self._on_drift,
                    is_source=True,
                )
                report = loader.load(state, replace(options, step=step))
        self._nbytes_loaded += report.nbytes_read
        return report

    def _bounded(self, storage: Storage) -> Storage:
        """Have a storage give up before the other ranks give this one up.

        Else they would not learn what has failed.
        """
        control = self._groups.control
        if control.size > 1:
            fail_within(storage, _RETRY_SHARE * control.timeout_s)
        return storage

    def one_version(self) -> AbstractContextManager[None]:
        """Return a context in which all loads read the version that the first one has loaded.

        For a state that is made piece by piece, such as a model first and its optimizer once that
        is placed: a step that is saved again, or removed, between two loads would give weights of
        one version and moments of another. The version stays open, under one lease, and is found
        and proven once. Called by all ranks, as the loads are.

            with checkpointer.one_version():
                checkpointer.load({"model": model})
                optimizer = make_optimizer(model)
                checkpointer.load({"optimizer": OptimizerState(optimizer, model)})

        It holds for the own root, not for `source=`. A load of another step raises ConfigError.

        Raises:
            ConfigError: when it is entered within another one.
        """
        return self._loader.finder.one_version()

    def inspect(self, step: int | None = None) -> CheckpointInfo:
        """Return what checkpoint `step` (by default the newest committed one) says about itself.

        Raises:
            StorageError: the checkpoint does not exist.
            CorruptionError: its manifest is damaged.

        Cost: one read of the manifest; no collectives.
        """
        while True:
            chosen = step if step is not None else self.latest()
            if chosen is None:
                raise StorageError(f"{self._storage.describe('')} holds no committed checkpoint")
            try:
                return inspect_checkpoint(self._storage, chosen)
            except StorageError:
                # Retention may have removed the newest since that look: there is a newer one then.
                if step is not None or chosen in self.steps():
                    raise

    def steps(self) -> list[int]:
        """Committed steps, ascending; none in a root that does not exist yet.

        Raises:
            StorageError: the root has vanished, or is another one than before.

        Cost: one listing of the directory and one small read; no collectives.
        """
        self._root.check()
        return list_steps(self._storage) if self._storage.is_dir("") else []

    def latest(self) -> int | None:
        """The newest committed step, or None: what a run continues from.

        The first call before any save or load waits up to `settle_s` for writers that have outlived
        an earlier run, and commits what they left complete, as a load does. `steps` does not wait.

        Raises:
            StorageError: the root has vanished, or is another one than before.

        Cost: as of `steps`, and the wait; no collectives. A killed writer on a local file system is
        known at once, any other after five seconds without a heartbeat.
        """
        self._root.check()
        stats = self.stats
        if not (stats.num_saves or stats.num_saves_in_flight):  # its own writers are not leftovers
            self._loader.finder.wait_for_writers()
        return max(self.steps(), default=None)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse copies: two objects would stage into one buffer, and count saves apart."""
        del protocol
        raise ConfigError(
            "a Checkpointer belongs to its process, with communicators and a writer, and cannot be "
            "copied or pickled; make another one where one is needed, and leave it out of objects "
            "that are copied or sent to worker processes"
        )

    def close(self) -> None:
        """Wait for saves in flight, stop the writer, give memory and signal handlers back.

        No collectives; the groups are the caller's. Saves are refused from then on; loads and looks
        (`steps`, `inspect`) are not.

        Raises:
            HoldfastError: what a save failed with, if this rank has not raised it.
            ConfigError: handlers of signals remain, as this is not the main thread.
        """
        with ExitStack() as stack:  # one after the other, whatever either raises
            stack.callback(self._saver.close)
            if self._schedule is not None:
                stack.callback(self._schedule.close)

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


def _check_mapping(state: object) -> None:
    """Raise ConfigError if `state` cannot be loaded into."""
    if not isinstance(state, Mapping):
        why = "the state must map names to parts; load_all() needs no state"
        raise ConfigError(f"load({type(state).__name__.removesuffix('Type')}): {why}")


_RETRY_SHARE = 0.6
"""Of the time that ranks wait for each other, how much one may send failed requests again."""


def _storage_at(root: object) -> Storage:
    """Return the storage at a root; ConfigError if it is none and names none."""
    if isinstance(root, str | os.PathLike):
        return open_storage(root)
    # `Storage` is a protocol with dozens of methods, and wrappers may delegate: two tell enough.
    if isinstance(root, type) or not (hasattr(root, "rename_dir") and hasattr(root, "describe")):
        raise ConfigError(
            f"root must be a path, a URL or a Storage, got {root!r:.80}: "
            f"Checkpointer('checkpoints') saves in a directory of this name"
        )
    return cast(Storage, root)


def _default_groups() -> ProcessGroups:
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


class _PartsLeft:
    """Parts that the loads of this rank left out although they were stored, and that it saves.

    An optimizer that is made later in training (of a discriminator, after a warm-up) is in the
    state when it is saved, and not yet in that of a restart, which would silently continue with a
    new one. A rank can tell by itself: it saves a part that the checkpoint had when the rank loaded
    it, and that it did not ask for.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._step = -1
        self._names: set[str] = set()

    def note(self, report: LoadReport) -> None:
        """Take in a load. Several of one step count together, those of another one start again."""
        names = set(report.not_requested)
        self._names = self._names & names if report.step == self._step else names
        self._step = report.step

    def warn_of(self, saved: Iterable[str]) -> None:
        """Name what is among the parts that were saved, once."""
        started_anew = sorted(self._names & set(saved))
        if started_anew:
            self._names -= set(started_anew)
            logging.getLogger("holdfast").warning(
                "rank %s: the checkpoint of step %s, which this run loaded, had %s; the load did "
                "not ask for it, so what is saved under this name now does not continue it. If it "
                "is to, have it in the state when loading",
                self._rank,
                self._step,
                some_of(started_anew),
            )
