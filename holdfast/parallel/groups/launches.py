"""A record of every collective that a rank launches, and of its communicator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from holdfast._torch import TorchDispatchMode, argument_names, launched_as
from holdfast.parallel.groups import _torch
from holdfast.parallel.groups.process_groups import ProcessGroups

_NAMESPACES = ("c10d", "_c10d_functional")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One collective, as it was launched."""

    order: int
    """Number of launches that the recorder saw before this one."""
    op: str
    """The operation: `reduce_scatter`, `all_gather`, `all_reduce`, `broadcast`, ..."""
    purpose: str
    """The name under which the groups hold the communicator; its own name if they do not.

    If several names share it, the first of them in the order of creation: `tp` for `tp_cp`.
    """
    ranks: tuple[int, ...]
    """The communicator's members, in its order."""
    nbytes: int
    """Bytes of the tensors that this rank passes, outputs included."""


class LaunchRecorder(TorchDispatchMode):
    """Records collectives launched inside of it, in order; a context manager.

        with LaunchRecorder(groups) as recorder:
            loss.backward()
        assert all(launch.purpose == "tp" for launch in recorder.launches)

    Sees what goes through torch's dispatcher on this thread and in the backward it runs: calls of
    torch.distributed, of DTensor, and of `Control`. Waiting is not recorded. The computation is not
    changed.

    Cost: microseconds for each operator inside, of any kind.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._groups = groups
        self._launches: list[Launch] = []

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The launches, in order."""
        return tuple(self._launches)

    def of(self, op: str) -> tuple[Launch, ...]:
        """Return the launches of one kind, in order."""
        return tuple(launch for launch in self._launches if launch.op == op)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note a collective and run it; a DTensor operator is noted as what it launches."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        call: Callable[..., Any] = func
        if func.namespace in _NAMESPACES:
            named = dict(zip(argument_names(func), args, strict=False))
            self._note(func.__name__.partition(".")[0], named | dict(kwargs or {}))
        return call(*args, **dict(kwargs or {}))

    def _note(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Keep a launch, if the operator has a communicator."""
        group = _group(arguments)
        if group is None:
            return
        tensors = [t for value in arguments.values() for t in _tensors(value)]
        marks = (mark for tensor in tensors if (mark := launched_as(tensor)))
        self._launches.append(
            Launch(
                order=len(self._launches),
                op=next(marks, None) or _plain(name),
                purpose=self._purpose(group),
                ranks=tuple(_torch.group_ranks(group)),
                nbytes=sum(t.numel() * t.element_size() for t in tensors),
            )
        )

    def _purpose(self, group: dist.ProcessGroup) -> str:
        """Return the `Launch.purpose` of a communicator."""
        name = _torch.group_name(group)
        for purpose in self._groups.held():
            if _torch.group_name(self._groups.group(purpose)) == name:
                return purpose
        made_here = name.split("/")
        return made_here[-2] if len(made_here) > 2 and made_here[0] == "holdfast" else name


def _group(arguments: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the communicator among an operator's arguments; None if it launches nothing."""
    value = arguments.get("process_group", arguments.get("group_name"))
    if value is None or isinstance(value, dist.ProcessGroup):
        return value
    if isinstance(value, str):
        from torch.distributed import distributed_c10d as c10d

        resolve: Any = getattr(c10d, "_resolve_process_group")  # noqa: B009  (not exported)
        resolved: dist.ProcessGroup = resolve(value)
        return resolved
    unboxed: dist.ProcessGroup = dist.ProcessGroup.unbox(value)
    return unboxed


def _plain(name: str) -> str:
    """Return one name for torch's several of a collective (`_allgather_base_`, `allgather_`)."""
    for part, plain in (
        ("reduce_scatter", "reduce_scatter"),
        ("allgather", "all_gather"),
        ("all_gather", "all_gather"),
        ("allreduce", "all_reduce"),
        ("all_reduce", "all_reduce"),
        ("alltoall", "all_to_all"),
        ("all_to_all", "all_to_all"),
        ("broadcast", "broadcast"),
        ("recv", "receive"),
    ):
        if part in name:
            return plain
    return name.strip("_")


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for item in value for t in _tensors(item)]
    return []
