"""One load: find, match, read, verify, restore; it succeeds or fails on all ranks together."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import attrgetter

import torch

from holdfast.checkpoint.load.finding import Finder
from holdfast.checkpoint.load.read_executor import LoadExecutor
from holdfast.checkpoint.load.requests import (
    MAX_NAMED,
    LoadRequest,
    PartRequest,
    check_consistency,
    decode_boxes,
    encode_request,
    find_dropped,
    find_unexpected,
    paths_of_sources,
    patterns_of,
    refuse_needed,
)
from holdfast.checkpoint.load.target_memory import without_ties
from holdfast.checkpoint.options import LoadOptions, OnDrift
from holdfast.checkpoint.reports import FellBack, JobReading, LoadReport, is_below
from holdfast.collector import collector_paused
from holdfast.decoding import decode_msgpack_as
from holdfast.errors import (
    CorruptionError,
    HoldfastError,
    MismatchError,
    StorageError,
    counted,
    some_of,
    some_sentences,
)
from holdfast.format.checkpoint_files import CheckpointFiles
from holdfast.format.index import validate_index
from holdfast.format.names import step_dir
from holdfast.format.values import Codecs
from holdfast.parallel import ProcessGroups
from holdfast.parallel.control.guard import Guard
from holdfast.state.markers import Stored
from holdfast.state.matcher import LocalMemory, Matcher, MatchResult
from holdfast.state.module_state import ModuleState
from holdfast.state.module_versions import noted_below
from holdfast.state.optimizer_state import OptimizerState
from holdfast.state.parts import (
    OptionalPart,
    StatefulPart,
    TreePart,
    applied_later,
    entries_of,
    is_closed,
    is_last,
    is_left_out,
    part_of,
)
from holdfast.state.schedules import other_rates
from holdfast.state.shared_memory import are_of_no_file, missing_memory, shared_memory
from holdfast.state.stored import StoredPart
from holdfast.state.unfinished import refuse_unfinished
from holdfast.storage import Storage
from holdfast.storage.reading import is_unknown, requests_of
from holdfast.writer.kept_images import KeptImages

_MAX_CANDIDATES = 10_000


class Loader:
    """Loads under one set of groups.

    Args:
        is_source: The storage is not the checkpointer's own: ranks compare which one it is.

    Attributes:
        finder: Finds the checkpoint of each load.
    """

    def __init__(
        self,
        storage: Storage,
        groups: ProcessGroups,
        *,
        codecs: Codecs,
        settle_s: float,
        on_drift: OnDrift,
        takes_images: bool = False,
        is_source: bool = False,
    ) -> None:
        self._storage = storage
        self._takes_images = takes_images
        self._groups = groups
        self._codecs = codecs
        self._on_drift = on_drift
        self._label = storage.describe("") if is_source else ""
        self.finder = Finder(storage, groups, settle_s=settle_s)

    def load(self, state: Mapping[str, object] | None, options: LoadOptions) -> LoadReport:
        """One load; see `Checkpointer.load`. None for the state: all of what is stored."""
        self.finder.version = None
        # A load makes many objects that stay: each pass of the garbage collector would visit them.
        # Made in inference mode, they would stay inference tensors, which no step can update.
        with collector_paused(), torch.inference_mode(False):
            if options.max_fallbacks != 0:
                return self._load_newest_good(state, options)
            with ExitStack() as stack:
                return self._load(state, options.step, options, stack, set())

    def was_replaced(self, error: BaseException) -> bool:
        """After a failure of all ranks: whether the checkpoint has been replaced meanwhile.

        Then the load starts again. A reader without a lease (on a storage that it cannot write to)
        is not waited for when a step is saved again.

        Cost: one collective if a checkpoint had been found.
        """
        return isinstance(error, CorruptionError | StorageError) and self.finder.was_replaced()

    def _load_newest_good(
        self, state: Mapping[str, object] | None, options: LoadOptions
    ) -> LoadReport:
        """Load the newest checkpoint that is good; all ranks try the same ones in the same order.

        What a damaged one wrote to targets is overwritten by the good one; a good one that would
        leave such a target as it is counts as damaged.
        """
        written: set[str] = set()
        failed: list[FellBack] = []
        first: HoldfastError | None = None

        def attempt(step: int) -> LoadReport:
            with ExitStack() as stack:
                return self._load(state, step, options, stack, written)

        # Bounded, because another process may write checkpoints all the time.
        for _ in range(_MAX_CANDIDATES):
            failed_steps = [each.step for each in failed]
            step, present = self.finder.candidate(
                failed_steps, options.max_fallbacks, self._settings(options)
            )
            failed = [each for each in failed if each.step in present]
            if step is None:
                break
            try:
                # Under its own guard, so that all ranks try the next one, or none does.
                control, name = self._groups.control, f"load: step {step}"
                guard = Guard[LoadReport](control, name, retry_if=self.was_replaced)
                report = guard.run(partial(attempt, step))
            except (CorruptionError, StorageError) as error:
                if is_unknown(error):
                    raise  # it may be whole: an older one in its place would lose steps
                first = first or error
                path = self._storage.describe(step_dir(step))
                failed.append(FellBack(step=step, path=path, why=str(error), details=error.details))
                continue
            except MismatchError as error:
                # An older checkpoint may lack what the newest has: no reason to go further back.
                if not failed:
                    raise
                raise MismatchError(
                    f"{error} ({describe_fallbacks(failed)})", details=error.details
                ) from error
            if failed and self._groups.control.is_coordinator:
                logging.getLogger("holdfast").warning(
                    "loaded step %s instead of a newer one: %s",
                    step,
                    "; ".join(each.summary for each in failed),
                )
            return replace(report, fell_back=tuple(failed))
        kind = type(first) if first is not None else StorageError
        raise kind(f"no checkpoint could be loaded: {describe_fallbacks(failed)}") from first

    def _load(
        self,
        state: Mapping[str, object] | None,
        step: int | None,
        options: LoadOptions,
        stack: ExitStack,
        written: set[str],
    ) -> LoadReport:
        """Load one checkpoint; what fails on one rank, at any line, the guard raises on all.

        Args:
            state: What to load into; None for all that is stored.
            step: None for the newest.
            options: Of the load.
            stack: Closes the checkpoint, and gives back the lease that keeps retention from
                removing it.
            written: Paths of the caller's targets that damaged checkpoints wrote to on this rank;
                this one's are added if it is damaged.
        """
        control, before = self._groups.control, requests_of(self._storage)
        chosen, files, hosts = self.finder.find(step, stack, self._settings(options))
        if self._takes_images:
            kept = KeptImages(files.records.manifest)
            files.take_image = lambda info: kept.take(info.name, nbytes=info.nbytes)
        if control.is_coordinator and not self.finder.is_held(files):
            # One rank proves the chunk table for all, while the others match.
            validate_index(files.index, files.manifest)
        if state is None:
            state = dict.fromkeys(files.manifest.parts, Stored(all_ranks=True))
        matcher, parts, memory = self._match(files, state, options)
        result = matcher.result
        if result.fits:
            _refuse_left_over(written, result, chosen)
        executor, unexpected, dropped = self._agree_on_reads(
            files, hosts, result, memory, parts, options, before, step=chosen
        )
        job = self._fill(executor, files, result, written)
        values = self._restore(matcher, parts)
        warn_of_kept(result, control.rank)
        if control.is_coordinator:
            warn_of_unversioned(parts)
        self.finder.keep(chosen, files, stack)
        others = _schedules_of_other_rates(parts, control.rank)
        later = tuple(path for part in parts for path in applied_later(part.name, part.part))
        paths = map(attrgetter("path"), result.tensors)
        return LoadReport(
            step=chosen,
            path=self._storage.describe(step_dir(chosen)),
            save_id=files.manifest.save_id,
            loaded=tuple(path for path in paths if not is_below(path, later))
            if later
            else tuple(paths),
            handed_over=later,
            other_rates=others,
            other_kinds=_objects_of_other_kinds(parts, control.rank),
            missing=tuple(sorted({*result.missing, *result.allowed, *result.fresh})),
            fresh=tuple(result.fresh),
            unexpected=tuple(unexpected),
            cast=tuple(result.cast),
            kept=tuple(result.kept),
            dropped=(*dropped, *result.dropped),
            not_requested=_not_requested(files, state, parts),
            values=values,
            metadata=files.manifest.metadata,
            is_verified=options.verify and files.has_digests,
            left_out=tuple(getattr(self._storage, "left_out", ())),
            nbytes_needed=executor.nbytes_needed,
            nbytes_read=files.stats.nbytes_read,
            nbytes_received=executor.nbytes_received,
            nbytes_from_images=files.stats.nbytes_from_images,
            refused_images=tuple(files.stats.refused_images),
            num_opens=files.stats.opens,
            nbytes_by_file=files.nbytes_by_file(),
            job=job,
            replaced=tuple(files.stats.fallbacks),
            requests=dict(requests_of(self._storage) - before),
        )

    def _settings(self, options: LoadOptions) -> dict[str, object]:
        """Return what all ranks must request alike."""
        return {
            "step": options.step,
            "source": self._label,
            "verify": options.verify,
            "exchange": options.exchange,
            "max_fallbacks": options.max_fallbacks,
            "on_drift": self._on_drift,
        }

    def _agree_on_reads(
        self,
        files: CheckpointFiles,
        hosts: Sequence[str],
        result: MatchResult,
        memory: LocalMemory,
        parts: Sequence[PartRequest],
        options: LoadOptions,
        requests_before: Counter[str],
        *,
        step: int,
    ) -> tuple[LoadExecutor, list[str], list[str]]:
        """Plan the reads, and check the requests of all ranks.

        A rank that cannot load what is stored says so here, and not before: only now it knows what
        no rank requests, such as the other name of an entry that it lacks.

        Returns:
            The reads; what no rank requests; and what no rank takes of the values per coordinate.
        """
        control = self._groups.control
        executor = LoadExecutor(
            files,
            control,
            result.tensors,
            memory=memory,
            hosts=hosts,
            on_drift=self._on_drift,
            verify=options.verify,
            requests_before=requests_before,
        )
        is_shared = executor.may_share(options.exchange)
        if not is_shared and result.fits:
            executor.plan()
        known = paths_of_sources(parts, self._codecs)
        boxes_sent = executor.boxes if is_shared else None
        payload = encode_request(
            parts,
            result,
            self._codecs,
            known=known,
            boxes=boxes_sent,
            leaves=patterns_of(options.ignore_unexpected),
            drops=options.allow_dropped,
        )
        payloads = control.agree(None, phase="load: match", payload=payload)
        requests = [decode_msgpack_as(data, LoadRequest) for data in payloads]
        stored = files.manifest.parts
        unexpected, refused = find_unexpected(stored, requests, self._codecs, known=known)
        raise_mismatch(result, step, stored, refused)
        if not all(request.fits for request in requests):
            control.agree(None, phase="load: match")  # raises what other ranks have raised
        refuse_needed(stored, requests)
        checks = [request.checks for request in requests]
        check_consistency(control.ranks, checks, warn=control.is_coordinator)
        dropped = find_dropped(stored, requests)
        if is_shared:
            # Ranks that request the same boxes send equal bytes, which are decoded once.
            tables = {data: decode_boxes(data) for data in {each.boxes for each in requests}}
            boxes = [tables[each.boxes] for each in requests]
            executor.plan(boxes, is_chosen=options.exchange == "auto")
        return executor, unexpected, dropped

    def _match(
        self, files: CheckpointFiles, state: Mapping[str, object], options: LoadOptions
    ) -> tuple[Matcher, list[PartRequest], LocalMemory]:
        """Match the state with what is stored, without writing to a target."""
        entries = entries_of(state, self._groups.layout, of_load=True)
        # Those of one form have one object: the matcher compares few of them.
        forms = files.manifest.forms
        distinct = [(dtype, shape) for dtype, shape, _, _ in forms.distinct]
        form_of_each = map(distinct.__getitem__, forms.number.tolist())
        keys = map(attrgetter("key"), files.manifest.tensors)
        tensors = dict(zip(keys, form_of_each, strict=True))
        matcher = Matcher(
            tensors=tensors,
            layout=self._groups.layout,
            rank=self._groups.rank,
            codecs=self._codecs,
            allow_missing=options.allow_missing,
            cast=options.cast,
        )
        parts: list[PartRequest] = []
        stored = StoredPart(files.manifest.parts, tensors)
        for name, (layout, source, value) in entries.items():
            # A part may be stored as None: then it is there, and has nothing.
            node = stored.part_or_below(source or name)
            if node is None and not stored.has_part_or_below(source or name):
                result = matcher.result
                may_miss = matcher.may_miss(name) or isinstance(value, OptionalPart)
                paths = result.allowed if may_miss else result.missing
                if is_left_out(value):
                    continue  # it would not have saved one
                paths.append(name if source is None else f"{name} (from {source})")
                continue
            part = part_of(name, value)
            try:
                refuse_unfinished(part, operation="load")
                where = source or name
                whole = where if where in files.manifest.parts else stored.name_in(where)
                versions = noted_below(files.manifest.versions, whole, where)
                kinds = noted_below(files.manifest.kinds, whole, where)
                template = part.template(
                    StoredPart(node, tensors, name, self._codecs, matcher.may_miss, versions, kinds)
                )
            except MismatchError as error:
                matcher.result.mismatched.append(str(error))
                continue  # what else differs is named with it
            except Exception as error:
                if not isinstance(error, HoldfastError):
                    error.add_note(f"state part '{name}'")
                raise
            request = PartRequest(
                name=name,
                source=source or name,
                scope=name if source is not None else "",
                layout=layout,
                part=part,
                is_closed=is_closed(part, node),
                node=node,
                template=template,
            )
            # What an object has saved it is given as a whole.
            ignore = options.ignore_unexpected if isinstance(part, TreePart) else False
            matcher.move_to(
                layout,
                scope=request.scope,
                closed=request.is_closed,
                may_leave=patterns_of(ignore),
            )
            matcher.match(template, node, name)
            request.has_left = matcher.has_left
            parts.append(request)
        # The caller's memory, before anything is written to it.
        result = matcher.result
        memory = LocalMemory(result.tensors)
        # Nearly every state is contiguous host tensors, each with its own memory.
        is_disjoint = memory.is_disjoint() and are_of_no_file(memory.tensors)
        result.mismatched += missing_memory(result.tensors, memory)
        if result.cleared or not is_disjoint:
            result.tensors = without_ties(result.tensors)
            result.mismatched += shared_memory([*result.tensors, *without_ties(result.cleared)])
            memory = LocalMemory(result.tensors)
        return matcher, parts, memory

    def _fill(
        self,
        executor: LoadExecutor,
        files: CheckpointFiles,
        result: MatchResult,
        written: set[str],
    ) -> JobReading:
        """Fill every target; if one rank meets damage, all ranks raise."""
        try:
            job = executor.run()
        except HoldfastError as caught:
            # Targets are written as bytes arrive, without a second copy of the state in memory.
            touched = executor.touched()
            # Memory made for this load alone is not the caller's.
            written |= set(touched) - {each.path for each in result.tensors if each.is_fresh}
            raise type(caught)(
                f"{caught}. Targets already written on this rank: "
                f"{some_of(touched) or 'none'}; load again from a good checkpoint before "
                f"using them",
                details=caught.details,
            ) from caught
        if files.stats.fallbacks:
            logging.getLogger("holdfast").warning(
                "rank %s: %s damaged or missing copies were replaced by good ones: %s",
                self._groups.rank,
                len(files.stats.fallbacks),
                "; ".join(files.stats.fallbacks[:MAX_NAMED]),
            )
        if files.stats.refused_images:
            logging.getLogger("holdfast").warning(
                "rank %s: kept images were not used, storage was read instead: %s",
                self._groups.rank,
                "; ".join(files.stats.refused_images[:MAX_NAMED]),
            )
        return job

    def _restore(self, matcher: Matcher, parts: Sequence[PartRequest]) -> dict[str, object]:
        """Restore the parts from the loaded trees, after every byte on every rank was good.

        What fails here on one rank fails the load on all, at its end.
        """
        values: dict[str, object] = {}
        # All trees first: what cannot be built fails before any part has changed.
        trees: list[object] = []
        for each in parts:
            matcher.move_to(each.layout, scope=each.scope, closed=each.is_closed)
            trees.append(matcher.build(each.template, each.node, each.name))
        # Random streams last: other parts may draw from them while they are restored.
        built = zip(parts, trees, strict=True)
        optimizers: list[OptimizerState] = []
        for each, tree in sorted(built, key=lambda pair: is_last(pair[0].part)):
            try:
                if isinstance(each.part, OptimizerState):
                    each.part.restore_apart(tree, optimizers)
                    optimizers.append(each.part)
                else:
                    each.part.restore(tree)
            except Exception as error:
                if not isinstance(error, HoldfastError):
                    error.add_note(f"state part '{each.name}'")
                raise
            if isinstance(each.part, TreePart):
                values[each.name] = tree
            if isinstance(each.part, StatefulPart):
                matcher.result.allowed += each.part.missing
        for each in parts:
            if isinstance(each.part, StatefulPart):
                each.part.follow(optimizers)
        return values


def _refuse_left_over(written: set[str], result: MatchResult, step: int) -> None:
    """Raise CorruptionError if a load of this step would leave a written target as it is."""
    left = sorted(written - {each.path for each in result.tensors}) if written else []
    if left:
        raise CorruptionError(
            f"step {step} lacks {counted(len(left), 'entry')} that a damaged newer checkpoint has "
            f"already written to: {some_of(left)}; load step {step} into a fresh state"
        )


def _not_requested(
    files: CheckpointFiles, state: Mapping[str, object], requests: Sequence[PartRequest]
) -> tuple[str, ...]:
    """Parts of the checkpoint of which the state requests nothing."""
    parts = files.manifest.parts
    sources = {request.source for request in requests}
    stored = StoredPart(parts, {})
    requested = {each if each in parts else stored.name_in(each) for each in sources} | set(state)
    return tuple(sorted(set(parts) - requested))


def warn_of_kept(result: MatchResult, rank: int) -> None:
    """Say once that values of this rank's coordinates are not stored and stay as they are."""
    if result.kept:
        logging.getLogger("holdfast").warning(
            "rank %s: the checkpoint has nothing for this rank's coordinates in %s; what the rank "
            "has stays",
            rank,
            some_of(sorted(result.kept)),
        )


def warn_of_unversioned(parts: Sequence[PartRequest]) -> None:
    """Say once which modules could not know whether to convert what is stored."""
    names = [
        f"{each.name}: {name}"
        for each in parts
        if isinstance(each.part, ModuleState)
        for name in each.part.unversioned
    ]
    if names:
        logging.getLogger("holdfast").warning(
            "the checkpoint states no versions of modules; these convert entries of earlier ones, "
            "and took what is stored as of their own version: %s",
            some_of(names),
        )


def _schedules_of_other_rates(parts: Sequence[PartRequest], rank: int) -> tuple[str, ...]:
    """Return the schedules that continue by another rule than the saved run's; say so once."""
    others: dict[str, str] = {}
    for each in parts:
        if isinstance(each.part, StatefulPart) and not each.part.applies_later:
            others |= other_rates(each.part.owner, each.name)
    if others:
        logging.getLogger("holdfast").warning(
            "rank %s: a schedule computes another learning rate than that of the saved run (%s): "
            "no checkpoint has the function of a LambdaLR, and training continues by the one that "
            "is there now",
            rank,
            some_of([*others.values()]),
        )
    return tuple(others)


def _objects_of_other_kinds(parts: Sequence[PartRequest], rank: int) -> tuple[str, ...]:
    """Return the objects that took the state of another class; say so once."""
    others: dict[str, str] = {}
    for each in parts:
        if isinstance(each.part, StatefulPart | OptimizerState):
            others |= each.part.other_kinds()
    if others:
        logging.getLogger("holdfast").warning(
            "rank %s: the state was saved from other classes (%s): what is stored fits, and "
            "training continues by the class that is there now",
            rank,
            some_of([f"{path}: {words}" for path, words in others.items()]),
        )
    return tuple(others)


def describe_fallbacks(failed: Sequence[FellBack]) -> str:
    """Which checkpoints were damaged, and how."""
    return "; ".join(f"step {each.step} is damaged: {each.why}" for each in failed)


def raise_mismatch(
    result: MatchResult, step: int, stored: Iterable[str], unexpected: Sequence[str]
) -> None:
    """Raise MismatchError with everything that does not fit and what to do; nothing if all fits.

    Args:
        result: What was matched.
        step: The step of the checkpoint.
        stored: The names of its parts: one that is misspelled in the state is missing here.
        unexpected: What no rank requests, and nobody has agreed to leave.
    """
    sentences = []
    if result.missing:
        sentences.append(
            f"the checkpoint lacks {counted(len(result.missing), 'entry')} that the state asks "
            f"for: {some_of(result.missing)} (allow_missing=[patterns] agrees to that)"
        )
        starts = tuple(f"{name}{end}" for name in stored for end in (".", "["))
        if not all(f"{path}.".startswith(starts) for path in result.missing):
            names = [start.removesuffix(".") for start in starts[::2]]
            sentences[-1] += f"; its parts are {some_of(names)}"
        if any(path.endswith("]") for path in result.missing):
            sentences[-1] += (
                "; a value per rank may have a policy for coordinates that are not stored: "
                "PerRank(..., missing='keep'), or merge=callable"
            )
    if result.mismatched:
        verb = "does" if len(result.mismatched) == 1 else "do"
        sentences.append(
            f"{counted(len(result.mismatched), 'entry')} {verb} not fit: "
            f"{some_sentences(result.mismatched, most=MAX_NAMED)}"
        )
        if result.may_be_padding:
            sentences[-1] += (
                "; where shapes differ by padding alone, declare the real shape both for the save "
                "and for the load: declare_padding(module, name, shape), Padded(value, shape)"
            )
    if result.unagreed:
        sentences.append(
            f"{counted(len(result.unagreed), 'entry')} would start fresh: "
            f"{some_of(result.unagreed)} (allow_missing=[patterns] agrees to that, as in "
            f"{_patterns(result.unagreed)})"
        )
    if unexpected:
        sentences.append(
            f"the checkpoint holds {counted(len(unexpected), 'entry')} that the state does not ask "
            f"for: {some_of(unexpected)} (ignore_unexpected=[patterns], or True for all, on every "
            f"rank that asks for their part leaves them)"
        )
    if sentences:
        raise MismatchError(
            f"step {step}: " + "; ".join(sentences),
            details={
                "missing": result.missing,
                "unexpected": list(unexpected),
                "mismatched": result.mismatched,
                "unagreed": result.unagreed,
                "steps": [step],
            },
        )


def _patterns(unagreed: Sequence[str]) -> str:
    """Return what `allow_missing` could be for these entries."""
    return str([f"{each.split(' (')[0]}*" for each in unagreed[:MAX_NAMED]])
