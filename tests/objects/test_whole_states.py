"""Save, load into a twin that began and trained otherwise, save again: nothing differs (O1).

And the twin's next steps are bitwise those of the original. States are drawn from a zoo of modules,
optimizers, schedules, averages and values in any combination and order of parts.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from holdfast import RNG, Checkpointer, OptimizerState
from holdfast.arrays.boxes import Box
from holdfast.format.dtypes import DTYPES
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.storage import PosixStorage
from tests.drawn import drawn
from tests.objects import zoo


class Run:
    """One training run over a drawn combination; what it holds, it holds as a user would."""

    def __init__(self, spec: dict[str, Any], *, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.model = zoo.Head([zoo.MODULES[name]() for name in spec["modules"]])
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups: Any = trained
        if spec["two groups"] and spec["optimizer"] != "lbfgs":
            groups = [{"params": trained[::2]}, {"params": trained[1::2], "lr": 1e-3}]
        self.optimizer = zoo.OPTIMIZERS[spec["optimizer"]](groups)
        self.schedule = spec["schedule"] and zoo.SCHEDULES[spec["schedule"]](self.optimizer)
        self.average = zoo.average_of(self.model) if spec["average"] else None
        self.progress = {"step": 0, "losses": [], 1: "one", "best": (float("nan"), None)}
        parts: dict[str, object] = {
            "model": self.model,
            "optimizer": OptimizerState(self.optimizer, self.model),
            "progress": self.progress,
            "rng": RNG(),
        }
        if self.schedule:
            parts["schedule"] = self.schedule
        if self.average:
            parts["average"] = self.average
        self.state = {name: parts[name] for name in spec["order"] if name in parts}

    def train(self, count: int) -> list[Any]:
        """So many steps; losses, rates and draws, for comparison bit by bit."""
        seen = []
        for batch in zoo.batches(self.progress["step"], count):

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                self.optimizer.zero_grad()
                noise = torch.rand_like(batch) * random.random() * np.random.rand()
                loss = (self.model(batch + 0.1 * noise) - 1).square().mean()
                loss.backward()
                return loss

            loss = self.optimizer.step(closure).detach()
            if isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.schedule.step(loss)
            elif self.schedule:
                self.schedule.step()
            if self.average:
                self.average.update_parameters(self.model)
            self.progress["step"] += 1
            self.progress["losses"].append(loss.item())
            rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            seen.append((loss.numpy().tobytes(), rates))
        weights = [p.detach().numpy().tobytes() for p in self.model.parameters()
                   if p.dtype is not torch.bfloat16]  # fmt: skip
        return [*seen, *weights]

    def load(self, root: Path) -> None:
        report = Checkpointer(root).load(self.state)
        self.progress.clear()
        self.progress.update(report.values["progress"])  # type: ignore[call-overload]


def contents(root: Path, step: int) -> tuple[Any, dict[str, tuple[str, Any, bytes]]]:
    """Everything a checkpoint says, and every byte of its tensors."""
    with Snapshot.open(PosixStorage(root), step_dir(step)) as snapshot:
        tensors = {}
        for info in snapshot.manifest.tensors:
            shape = tuple(info.shape)
            out = bytearray(DTYPES[info.dtype].itemsize * int(np.prod(shape)))
            snapshot.read_box(info.key, Box((0,) * len(shape), shape), memoryview(out))
            tensors[info.key] = (info.dtype, info.shape, bytes(out))
        return snapshot.manifest.parts, tensors


PARTS = ("model", "optimizer", "progress", "rng", "schedule", "average")

SPECS = st.fixed_dictionaries(
    {
        "modules": st.lists(st.sampled_from(sorted(zoo.MODULES)), min_size=1, max_size=4),
        "optimizer": st.sampled_from(sorted(zoo.OPTIMIZERS)),
        "schedule": st.sampled_from([None, *sorted(zoo.SCHEDULES)]),
        "average": st.booleans(),
        "two groups": st.booleans(),
        "order": st.permutations(PARTS),
        "steps": st.integers(0, 4),
        "stale steps": st.integers(0, 3),
    }
    # torch's LBFGS takes no gradient of other strides.
).filter(lambda spec: spec["optimizer"] != "lbfgs" or "scalar" not in spec["modules"])


def hold_to_the_invariant(spec: dict[str, Any]) -> None:
    if {"pruned", "growing buffer"} & {*spec["modules"]}:
        # torch can neither copy a module that is being pruned nor average what changes its shape
        spec = {**spec, "average": False}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        original = Run(spec, seed=0)
        original.train(spec["steps"])
        Checkpointer(root / "a").save(1, original.state)
        expected = original.train(2)  # now: the global random streams are the process's
        twin = Run(spec, seed=1)
        twin.train(spec["stale steps"])
        twin.load(root / "a")
        Checkpointer(root / "b").save(1, twin.state)
        first, second = contents(root / "a", 1), contents(root / "b", 1)
        assert first[0] == second[0]
        assert first[1] == second[1]
        assert twin.train(2) == expected


@drawn(quick=6, slow=64, spec=SPECS)
def test_a_twin_goes_on_as_the_original(spec: dict[str, Any]) -> None:
    hold_to_the_invariant(spec)
