"""The state of a process that a test may change: taken before a rank's first job, compared after.

A rank that differs in anything is thrown away, so a test sees what it would see in a new process.
What many tests change is put back instead: random streams, variables of the environment, handlers
of the log, patched functions and constants, and the test's own modules, which the next job imports
again with their globals as they are in the file.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import resource
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

_PATCHED = ("holdfast", "holdfast_trainer", "tests")
"""Rooms whose modules, and the classes defined there, are compared attribute by attribute."""
_MODULES = (
    "builtins",
    "multiprocessing",
    "numpy",
    "os",
    "posix",
    "random",
    "select",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "torch",
    "torch.nn.functional",
    "torch.nn.modules.module",
    "torch.optim.optimizer",
)
"""Other modules that tests patch."""
_ASSIGNED = {
    "os.environ",
    "sys.last_exc",
    "sys.stderr",
    "sys.stdout",
    "torch.distributed.distributed_c10d._backend",  # the kind of the last default group
}
"""Attributes that may be another object after a job: os.environ is compared by value."""
_MAX_RESIDENT_NBYTES = 1 << 30
_SETTLE_S = 0.1
"""How long threads and descriptors of what was closed may take to go."""


_Attributes = list[tuple[str, Any, dict[str, Any]]]
"""Of modules and of classes: the name, the owner, and its attributes."""


class _Kept:
    """Attributes of many owners, most of which no job changes: all of those are compared at once.

    There are fifty thousand. A comparison of two lists takes a third of what one of as many entries
    of dictionaries does.
    """

    def __init__(self, attributes: _Attributes) -> None:
        self._changing: _Attributes = []
        """Of owners that some job has changed, even if it was put back."""
        self._keep(attributes)

    def changed(self) -> _Attributes:
        """Return the attributes, as they were, of the owners that have others now."""
        if [*itertools.chain.from_iterable(self._values)] != self._expected:
            quiet: _Attributes = []
            for row in self._quiet:
                _, owner, before = row
                (quiet if vars(owner) == before else self._changing).append(row)
            self._keep(quiet)
        return [row for row in self._changing if vars(row[1]) != row[2]]

    def _keep(self, attributes: _Attributes) -> None:
        self._quiet = attributes
        self._values = [vars(owner).values() for _, owner, _ in attributes]
        self._expected = [*itertools.chain.from_iterable(self._values)]


_INHERITED: list[_Kept] = []
"""Attributes of `_PATCHED` rooms in the fork server: no job has run there."""


def keep_attributes() -> None:
    """Note the attributes with which every process starts that is forked from this one.

    A rank that looks for itself copies the pages of thousands of classes, which it would otherwise
    share with the server: most of a tenth of a second.
    """
    _INHERITED[:] = [_Kept(_attributes(_is_patched))]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What a rank was before its first job."""

    settings: dict[str, Any]
    attributes: tuple[_Kept, ...]
    modules: frozenset[str]
    threads: frozenset[int]
    descriptors: dict[int, str]
    random_streams: tuple[Any, ...]

    @classmethod
    def take(cls) -> ProcessState:
        """Return the state of this process."""
        gc.collect()
        return cls(
            settings=_settings(),
            # Python itself differs after a fork (`sys.argv`, locks of `threading`).
            attributes=(
                *(_INHERITED or [_Kept(_attributes(_is_patched))]),
                _Kept(_attributes(_MODULES.__contains__)),
            ),
            modules=frozenset(sys.modules),
            threads=frozenset(map(id, threading.enumerate())),
            descriptors=_descriptors(),
            random_streams=(np.random.get_state(), torch.get_rng_state()),
        )

    def changes(self) -> list[str]:
        """Return what is no longer as it was; drop the modules that the job's test imported.

        Put back what can be: the environment, the log's handlers, and patched attributes.
        """
        for name in set(sys.modules) - self.modules:
            if name.startswith(("tests.", "trainer.tests")):
                del sys.modules[name]
        if os.environ != self.settings["os.environ"]:
            os.environ.clear()
            os.environ.update(self.settings["os.environ"])
        logging.getLogger("holdfast").handlers[:] = self.settings["log of holdfast"][0]
        now = _settings()
        found = [name for name in self.settings if now[name] != self.settings[name]]
        found += self._put_back()
        if not found:
            found += self._left_open()
        if _resident_nbytes() > _MAX_RESIDENT_NBYTES:
            found.append("resident memory")
        return found

    def restore_random_streams(self) -> None:
        """Set the streams of torch and numpy to what they are in a new process."""
        np.random.set_state(self.random_streams[0])
        torch.set_rng_state(self.random_streams[1])

    def _put_back(self) -> list[str]:
        """Undo patches; return those that stay."""
        # What the job imported is not compared: nothing can have patched it before.
        found = []
        for name, owner, before in [row for kept in self.attributes for row in kept.changed()]:
            now = vars(owner)
            # A module may gain attributes: those are its submodules, imported late.
            added = now.keys() - before.keys() if isinstance(owner, type) else ()
            for key in [*before, *added]:
                old, new = before.get(key, _GONE), now.get(key, _GONE)
                if new is old or _may_change(name, key, old, new):
                    continue
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(owner, key, old) if old is not _GONE else delattr(owner, key)
                if vars(owner).get(key, _GONE) is not old:
                    found.append(f"{name}.{key}")
        return found

    def _left_open(self) -> list[str]:
        """Return threads, descriptors and children that do not go in time."""
        end = time.monotonic() + _SETTLE_S
        collected = False
        while True:
            found = [f"thread {t.name}" for t in threading.enumerate() if id(t) not in self.threads]
            found += [
                f"descriptor {number}: {what}"
                for number, what in _descriptors().items()
                if self.descriptors.get(number) != what
            ]
            found += [f"child {pid}" for pid in _children()]
            if not found or time.monotonic() > end:
                return found
            if not collected:
                gc.collect()  # a group in a cycle of references keeps its connections
                collected = True
            else:
                time.sleep(0.01)


_GONE = object()


def _may_change(owner: str, key: str, old: Any, new: Any) -> bool:
    # Names with double underscores are the import system's. The first optimizer of a class makes
    # torch wrap the class's step once, for its profiler, also a step that the class inherits.
    wrapped = getattr(new, "__wrapped__", None) if getattr(new, "hooked", False) else None
    profiled = key == "step" and wrapped is not None and old in (_GONE, wrapped)
    dunder = key.startswith("__") and key.endswith("__")
    return profiled or dunder or f"{owner}.{key}" in _ASSIGNED


def _is_patched(name: str) -> bool:
    return name.split(".")[0] in _PATCHED or name.startswith("torch.distributed")


def _attributes(is_compared: Callable[[str], bool]) -> _Attributes:
    """Return those of some modules, and of the classes defined in them."""
    return [(name, owner, dict(vars(owner))) for name, owner in _owners(is_compared)]


def _owners(is_compared: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or not is_compared(name):
            continue
        yield name, module
        for key, value in list(vars(module).items()):
            # The type, not isinstance: torch.distributed.reduce_op warns when it is asked.
            if issubclass(type(value), type) and vars(value).get("__module__") == name:
                yield f"{name}.{key}", value


def _settings() -> dict[str, Any]:
    limits = ("RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NOFILE")
    module = torch.nn.modules.module
    # torch.optim deletes the name of its submodule.
    optimizer = sys.modules["torch.optim.optimizer"]
    return {
        "os.environ": dict(os.environ),
        "working directory": os.getcwd(),
        "umask": _umask(),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "signal mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "interval timer": signal.getitimer(signal.ITIMER_REAL),
        "limits": [resource.getrlimit(getattr(resource, name)) for name in limits],
        "warning filters": list(warnings.filters),
        "log handlers": (list(logging.root.handlers), logging.root.level, logging.root.disabled),
        "log of holdfast": _log_settings("holdfast"),
        "sys.path": list(sys.path),
        "sys.meta_path": list(sys.meta_path),
        "hooks": (sys.excepthook, sys.gettrace(), sys.getprofile(), threading.excepthook),
        "gc": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "torch default dtype": torch.get_default_dtype(),
        "torch default device": str(torch.get_default_device()),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        ),
        "torch grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "torch anomaly": torch.is_anomaly_enabled(),
        "torch autocast": torch.is_autocast_enabled("cpu"),
        "torch modes": torch._C._len_torch_dispatch_stack(),
        "torch function modes": torch._C._len_torch_function_stack(),
        "torch subclass loading": torch.__future__.get_swap_module_params_on_conversion(),
        "torch hooks of modules": [
            len(getattr(module, name))
            for name in dir(module)
            if name.startswith("_global_") and isinstance(getattr(module, name), dict)
        ],
        "torch hooks of optimizers": (
            len(optimizer._global_optimizer_pre_hooks),
            len(optimizer._global_optimizer_post_hooks),
        ),
        "process groups": _process_groups(),
        "plans kept by DCP": _num_plans_of_dcp(),
    }


def _num_plans_of_dcp() -> int:
    """Count the plans that DCP keeps in class attributes, by a name that a later job may use."""
    planner = sys.modules.get("torch.distributed.checkpoint.planner")
    if planner is None:
        return 0
    kept = vars(planner.SavePlanner)
    return sum(len(each) for name, each in kept.items() if name.startswith("_cached_"))


def _process_groups() -> tuple[object, ...]:
    world = dist.distributed_c10d._world
    return (
        world.default_pg,
        *(len(kept) for kept in (world.pg_map, world.pg_names, world.pg_group_ranks)),
        *(len(kept) for kept in (world.pg_coalesce_state, world.tags_to_pg, world.pg_to_tag)),
        world.group_count,
    )


def _log_settings(name: str) -> tuple[object, ...]:
    log = logging.getLogger(name)
    return list(log.handlers), log.level, log.disabled, log.propagate


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return {number: what for number, what in found.items() if number > 2}


def _children() -> list[int]:
    pids = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                pids += [int(pid) for pid in file.read().split()]
        except FileNotFoundError:
            continue
    return pids


def _resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
