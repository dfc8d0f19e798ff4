"""Every private name of torch.distributed that this package needs, in one place.

Why not `dist.new_group`: with `use_local_synchronization=True` (the only mode in which ranks
outside a group take no part) torch names the group after its ranks and the *number of groups this
rank is in*. Ranks of one group may be in different numbers of others, and then wait for each other
under different names until the timeout; a group made again after it was destroyed finds the stale
addresses of the first. So the communicator is made one level below, under a name that all members
have agreed on.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch import distributed as dist

from holdfast.errors import ConfigError, DeadlineError, GroupError
from holdfast.parallel.bounded_store import BoundedStore

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import ProcessGroup, Store

T = TypeVar("T")

_LATE_SHARE = 0.9
"""A failure after this share of the time to connect counts as a timeout: torch raises one class for
every reason, and gloo rounds its waits."""


_CUT_TAG = 1_887
"""Of a message that nothing sends."""


def is_initialized() -> bool:
    """Return True if torch.distributed has a default group in this process."""
    return dist.is_available() and dist.is_initialized()


def default_rank() -> int:
    """Return this process's rank; GroupError unless torch.distributed is initialised."""
    if not is_initialized():
        raise GroupError(
            "Communicators need torch.distributed, which is not initialised in this process. Call "
            "torch.distributed.init_process_group first, or use ProcessGroups.single() for one "
            "process."
        )
    return dist.get_rank()


def default_world_size() -> int:
    """Return the number of processes that torch.distributed was initialised with."""
    return dist.get_world_size()


def default_store() -> Store:
    """Return the store that init_process_group was given."""
    from torch.distributed import distributed_c10d as c10d

    return c10d._get_default_store()


def default_backend() -> str:
    """Return the default group's backend, as passed to `init_process_group`."""
    return str(dist.get_backend())


def kept_in_process(name: str, make: Callable[[], T]) -> T:
    """Return what all `ProcessGroups` of this process have in common; made at the first call.

    Torch's registry of communicators keeps it, as long as there may be any.
    """
    from torch.distributed import distributed_c10d as c10d

    kept: T = vars(c10d._world).setdefault(f"_holdfast_{name}", make())
    return kept


def new_group(
    ranks: Sequence[int],
    *,
    name: str,
    backend: str,
    timeout_s: float,
    data_timeout_s: float,
    store: Store,
) -> ProcessGroup:
    """Make a communicator of exactly `ranks`, in that order; called by its members only.

    Args:
        ranks: the members.
        name: unique per communicator and equal on its members.
        backend: NCCL connects on first use, gloo now.
        timeout_s: how long to wait here for all members to come.
        data_timeout_s: the limit of its collectives. Gloo has one limit for connections and for
            messages, so that members meet before they connect.
        store: where they meet.

    Raises:
        DeadlineError: A member does not come.
        GroupError: torch refuses for any other reason.
    """
    from torch.distributed import distributed_c10d as c10d

    _meet(len(ranks), name=name, timeout_s=timeout_s, store=store)
    index = list(ranks).index(default_rank())
    make: Any = c10d._new_process_group_helper
    bounded = BoundedStore.of(store, limit_s=data_timeout_s)
    late_after = time.monotonic() + _LATE_SHARE * data_timeout_s
    try:
        with _not_split_from_world(), _one_worker_of_gloo():
            group, _ = make(
                len(ranks),
                index,
                list(ranks),
                dist.Backend(backend),
                # Gloo connects now. NCCL keeps the store for threads of its own, which must not
                # enter Python.
                bounded if backend == "gloo" else bounded.raw,
                name,
                timeout=timedelta(seconds=data_timeout_s),
                group_desc=name,
            )
    except (RuntimeError, ValueError) as error:
        is_late = time.monotonic() >= late_after
        raise (DeadlineError if is_late else GroupError)(
            f"Could not connect the {backend} communicator {name!r} of ranks {list(ranks)} within "
            f"{data_timeout_s:g} s: {error}"
        ) from error
    # What `dist.new_group` records for its groups, by which collectives translate ranks.
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return cast("ProcessGroup", group)


def _meet(num_ranks: int, *, name: str, timeout_s: float, store: Store) -> None:
    """Return when all members of a communicator are about to connect; DeadlineError if not."""
    key = f"{name}/members"
    store = BoundedStore.of(store, limit_s=timeout_s)
    try:
        if store.add(key, 1) == num_ranks:
            store.set(f"{key}/all", "")
        store.wait([f"{key}/all"], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise DeadlineError(
            f"Could not connect the communicator {name!r}: not all of its {num_ranks} ranks came "
            f"within {timeout_s:g} s ({error})"
        ) from error


def group_ranks(group: object) -> list[int]:
    """Return the ordered ranks of a live communicator; GroupError for anything else."""
    if group is None or isinstance(group, int):
        raise GroupError(
            f"is {group!r}, not a communicator"
            + (": the handle new_group returns to ranks outside the group" if group == -100 else "")
        )
    if not isinstance(group, dist.ProcessGroup):
        raise GroupError(f"is a {type(group).__name__}, not a torch.distributed.ProcessGroup")
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        raise GroupError(
            "is a communicator that torch does not know: it may be destroyed"
        ) from None


def group_name(group: ProcessGroup) -> str:
    """Return the name under which a communicator's members found each other."""
    return str(getattr(group, "group_name", ""))


def backend_of(group: ProcessGroup) -> str:
    """Return a communicator's backend, in the form `new_group` takes."""
    return str(dist.get_backend(group))


def is_alive(group: ProcessGroup) -> bool:
    """Return False once a communicator is destroyed."""
    from torch.distributed import distributed_c10d as c10d

    return group in c10d._world.pg_map


def destroy(group: ProcessGroup) -> None:
    """Destroy a communicator, unless it is gone already."""
    with contextlib.suppress(ValueError, RuntimeError, AssertionError):
        if dist.is_initialized():
            dist.destroy_process_group(group)


def cut(group: ProcessGroup) -> None:
    """End the waits of other ranks for this one on a communicator of gloo; it is broken then.

    Gloo closes the connections of a rank whose wait is over the limit, and has no other call for
    that which other threads and ranks notice. NCCL has none at all.
    """
    with contextlib.suppress(RuntimeError, ValueError):  # it is broken or destroyed already
        if group.size() > 1 and dist.get_backend(group) == "gloo":
            other = 1 if group.rank() == 0 else 0
            message = torch.empty(1, device="cpu")
            group.recv([message], other, _CUT_TAG).wait(timedelta(milliseconds=1))


@contextlib.contextmanager
def _not_split_from_world() -> Iterator[None]:
    """Keep torch from splitting a communicator off the world's, which every rank would have to do.

    torch does so if `init_process_group` was given a `device_id`, and would then wait for the ranks
    outside the layout.
    """
    from torch.distributed import distributed_c10d as c10d

    world = c10d._get_default_group()
    bound: torch.device | None = world.bound_device_id
    if bound is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


_Gloo: Any = getattr(dist, "ProcessGroupGloo", object)  # not in every build


class _OneWorker(_Gloo):  # type: ignore[misc]
    """A communicator of gloo with one worker thread, where torch's has two.

    Both workers note the name of the collective that they have finished in one string, without a
    lock (`ProcessGroupGloo::runLoop`, `lastCompletedWorkName`). The name of a functional
    all-gather, by which a DTensor becomes whole, is so long that it has memory of its own: two
    workers that end at one moment free it twice, and the process crashes, then or later. With one
    worker the collectives of a communicator run one after another; those of several still run side
    by side.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # As torch fills them in if it is given none, but for the number of threads.
        options = _Gloo._Options()
        names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        devices = [_Gloo.create_device(interface=each) for each in names if each]
        options._devices = devices or [_Gloo.create_default_device()]
        options._timeout = timeout
        options._threads = 1
        super().__init__(store, rank, size, options)


@contextlib.contextmanager
def _one_worker_of_gloo() -> Iterator[None]:
    """Have torch make communicators of gloo with one worker; it takes no options for gloo."""
    from torch.distributed import distributed_c10d as c10d

    private: Any = c10d
    if getattr(private, "ProcessGroupGloo", None) is not _Gloo:
        yield
        return
    private.ProcessGroupGloo = _OneWorker
    try:
        yield
    finally:
        private.ProcessGroupGloo = _Gloo


def device_mesh(
    groups: Sequence[ProcessGroup],
    grid: Sequence[object],
    *,
    names: Sequence[str],
    device_type: str | None,
    mark: str,
) -> DeviceMesh:
    """Return the mesh of nested lists of ranks on these communicators, apart from other marks'."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh.from_group(
        groups[0] if len(groups) == 1 else list(groups),  # torch refuses a list of one
        device_type or _device_type(groups[0]),
        torch.tensor(grid, dtype=torch.int),
        mesh_dim_names=tuple(names),
    )
    return _set_apart(mesh, mark=mark)


def _device_type(group: ProcessGroup) -> str:
    """Return "cuda" for communicators with NCCL, else "cpu"."""
    from torch.distributed import distributed_c10d as c10d

    return "cuda" if "nccl" in c10d.get_backend_config(group) else "cpu"


def _set_apart(mesh: DeviceMesh, *, mark: str) -> DeviceMesh:
    """Make a mesh unequal to meshes with another mark, and its slices to theirs.

    Torch compares meshes by their ranks and names, not by their communicators, and caches what an
    operation on DTensors gives by that comparison. So a result on one mesh would be on another that
    was there before, and its collectives would run on communicators that the caller did not name,
    or that are destroyed. The field set here is the one by which torch distinguishes threads that
    simulate ranks.
    """
    private: Any = mesh
    private._thread_id = int.from_bytes(blake2b(mark.encode(), digest_size=7).digest(), "little")
    private._hash = None
    make_slice = private._create_sub_mesh

    def make_marked(*args: Any, **named: Any) -> DeviceMesh:
        return _set_apart(make_slice(*args, **named), mark=mark)

    def itself(memo: object = None) -> DeviceMesh:
        return mesh

    private._create_sub_mesh = make_marked
    private.__reduce_ex__ = _refuse_pickle
    private.__copy__ = private.__deepcopy__ = itself  # a copy of a model is on the same mesh
    return mesh


def _refuse_pickle(protocol: object) -> NoReturn:
    raise ConfigError(
        "tensors on the communicators of ProcessGroups (DTensors, such as sharded parameters, and "
        "optimizers that have them) cannot be pickled: no other process has these communicators. "
        "Save them with a Checkpointer; or pickle whole values, value.full_tensor() on all ranks, "
        "or those of this rank, value.to_local()"
    )


def forget_meshes() -> None:
    """Drop what torch has cached of operations on DTensors, and with it the meshes in there.

    FSDP joins slices into its own meshes, which `_set_apart` does not reach. A mesh that any of
    these caches keeps also keeps its communicators connected, destroyed or not: their sockets,
    pipes and threads would stay for as long as the process.
    """
    from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop, debug

    propagator = getattr(_sharding_prop, "ShardingPropagator", None)
    topology = getattr(_collective_utils, "MeshTopoInfo", None)
    for owner, name in (
        (debug, "_clear_sharding_prop_cache"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (getattr(_redistribute, "_gen_transform_infos", None), "cache_clear"),
        (getattr(propagator, "_propagate_tensor_meta_cached", None), "cache_clear"),
        (getattr(topology, "build_from_mesh", None), "cache_clear"),
    ):
        clear = getattr(owner, name, None)  # each is private, and some releases have no such cache
        if clear is not None:
            clear()
