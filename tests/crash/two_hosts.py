"""Two hosts on one machine: network namespaces joined by a link that can be cut.

`python -m tests.crash.two_hosts` runs in namespaces of its own (`unshare -rn`): a bridge is host A,
and a pair of virtual interfaces leads from it to host B. Taking B's port off the bridge drops every
packet in both directions, and no end is told: no reset, no carrier lost, as when a switch fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

from holdfast import Checkpointer, HoldfastError, Layout, OptimizerState, ProcessGroups
from holdfast.optim import ShardedOptimizer
from tests.harness import RankContext, run_ranks

NUM_RANKS = 4
DEADLINE_S = 8.0
"""What is done before the cut keeps it too, on a busy machine."""
STORE = "10.77.0.1"
_NEW_NETWORK = 0x40000000
_WIDTH = 256
ACTIONS = ("save", "load", "step")


@dataclass(frozen=True, kw_only=True)
class End:
    """How an action ended on one rank."""

    error: str
    """Class and text; empty if it worked."""
    seconds: float


def _ip(*words: str, inside: int | None = None) -> None:
    enter = ["nsenter", f"--net=/proc/{inside}/ns/net"] if inside is not None else []
    subprocess.run([*enter, "ip", *words], check=True)


@contextlib.contextmanager
def linked_hosts() -> Iterator[int]:
    """Yield a process in the namespace of host B; this process is on host A."""
    holder = subprocess.Popen(["unshare", "-n", "sleep", "3600"])
    try:
        own = os.stat("/proc/self/ns/net").st_ino
        while os.stat(f"/proc/{holder.pid}/ns/net").st_ino == own:
            time.sleep(0.01)
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "a0", "type", "bridge")
        _ip("addr", "add", f"{STORE}/24", "dev", "a0")
        _ip("link", "set", "a0", "up")
        _ip("link", "add", "port", "type", "veth", "peer", "name", "b0", "netns", str(holder.pid))
        _ip("link", "set", "port", "up", "master", "a0")
        _ip("link", "set", "lo", "up", inside=holder.pid)
        _ip("addr", "add", "10.77.0.2/24", "dev", "b0", inside=holder.pid)
        _ip("link", "set", "b0", "up", inside=holder.pid)
        yield holder.pid
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()


def _enter_host(context: RankContext, holder: int) -> None:
    """Move a rank of host B there; before it has a socket."""
    is_a = context.rank < NUM_RANKS // 2
    if not is_a:
        file = os.open(f"/proc/{holder}/ns/net", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(file, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)
    os.environ["GLOO_SOCKET_IFNAME"] = "a0" if is_a else "b0"
    os.environ["HOLDFAST_HOST_ID"] = "a" if is_a else "b"


def run_rank(
    context: RankContext, holder: int, port: int, root: str, action: str, after_s: float | None
) -> End:
    """Do an action; with `after_s` the link is cut so long after its start."""
    _enter_host(context, holder)
    store = TCPStore(STORE, port, NUM_RANKS, context.rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=NUM_RANKS)
    layout = Layout(dp=NUM_RANKS)
    with ProcessGroups.create(layout, timeout_s=DEADLINE_S, data_timeout_s=DEADLINE_S) as groups:
        do = _prepare(action, groups, root)
        began = time.monotonic()
        error = ""
        try:
            # The cut may come before the last message of the barrier has reached every rank.
            groups.control.barrier(phase="test")
            if after_s is not None and context.rank == 0:
                threading.Timer(after_s, _ip, ("link", "set", "port", "nomaster")).start()
            began = time.monotonic()
            do()
        except HoldfastError as raised:
            error = f"{type(raised).__name__}: {raised}"
        return End(error=error, seconds=time.monotonic() - began)


def _prepare(action: str, groups: ProcessGroups, root: str) -> Callable[[], object]:
    """Return the action, ready to run."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(8)))
    optimizer = ShardedOptimizer(
        model, [{"params": [*model.parameters()]}],
        make=torch.optim.AdamW, groups=groups, over="dp_cp", divisor=NUM_RANKS,
        elementwise=True, bucket_nbytes=1 << 18,
    )  # fmt: skip

    def step() -> None:
        with optimizer.microbatch(is_last=True):
            model(torch.randn(8, _WIDTH)).square().mean().backward()
        optimizer.step()

    step()
    state = {"model": model, "optimizer": OptimizerState(optimizer, model)}
    checkpointer = Checkpointer(root, groups=groups)
    if checkpointer.latest() is None:
        checkpointer.save(1, state)
    actions: dict[str, Callable[[], object]] = {
        "save": lambda: checkpointer.save((checkpointer.latest() or 0) + 1, state),
        "load": lambda: checkpointer.load(state, exchange=True),
        "step": step,
    }
    return actions[action]


def main(root: str, num_instants: int) -> None:
    """Print, for each action, how it ended on each rank: uncut, then cut at so many instants."""
    found: dict[str, list[list[dict[str, object]]]] = {}
    port = 29_500
    with linked_hosts() as holder:
        for action in ACTIONS:
            runs: list[list[End]] = []
            length = 0.0
            for number in range(-2, num_instants):  # the first only warms
                after = None if number < 0 else length * number / num_instants
                _ip("link", "set", "port", "master", "a0")
                port += 1
                place = str(Path(root) / action)
                ends = run_ranks(
                    NUM_RANKS, run_rank, holder, port, place, action, after,
                    init=False, fresh=True, timeout_s=90,
                ).results  # fmt: skip
                if number >= -1:
                    runs.append(ends)
                if number == -1:
                    length = max(end.seconds for end in ends)
            found[action] = [[asdict(end) for end in ends] for ends in runs]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
