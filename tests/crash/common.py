"""Small states with a version inside, and what must hold under a root whatever happened to it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from holdfast import Checkpointer, PosixStorage, Sharded, Stored
from holdfast.checkpoint.plan.kept_plans import PLANS_DIR
from holdfast.format.names import LATEST, ROOT_ID, list_steps, step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.verifier import verify_snapshot
from holdfast.format.versions import LEASES_DIR
from holdfast.writer.leftovers import repair

ROWS = 600


def whole(version: int) -> dict[str, torch.Tensor]:
    """The tensors of a version: every byte of two versions differs somewhere in each page."""
    a = torch.arange(ROWS * 8, dtype=torch.float64).reshape(ROWS, 8) + version * 0.37
    return {"a": a, "b": torch.full((17,), version, dtype=torch.int32), "c": torch.tensor(version)}


def state_of(version: int, *, index: int = 0, size: int = 1) -> dict[str, object]:
    """What the rank at `index` of `size` data-parallel ranks holds of a version."""
    tensors = whole(version)
    held: dict[str, object] = dict(tensors)
    if size > 1:
        rows = ROWS // size
        local = tensors["a"].narrow(0, rows * index, rows).clone()
        held["a"] = Sharded(local, (ROWS, 8), dims={0: "dp"})
    return {"t": held, "v": {"version": version, "list": [1, 2.5, None]}}


def version_of(root: Path, step: int) -> int:
    """Load a step and prove that it is one version, bitwise, and that nothing in it is damaged."""
    loaded = Checkpointer(root, settle_s=0.0).load({"t": Stored(), "v": Stored()}, step=step)
    values, tensors = loaded.values["v"], loaded.values["t"]
    assert isinstance(values, dict)
    assert isinstance(tensors, dict)
    version = values["version"]
    truth = whole(version)
    assert sorted(tensors) == sorted(truth)
    for name, tensor in truth.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), f"step {step}: {name} is not of {version}"
    damages = verify_snapshot(PosixStorage(root), step_dir(step))
    assert damages == [], damages
    with Snapshot.open(PosixStorage(root), step_dir(step)) as snapshot:
        is_torch = any(file.envelope == "torch_dist" for file in snapshot.manifest.files)
    assert (root / step_dir(step) / ".metadata").exists() == is_torch
    if is_torch:
        assert version_in_torch(root / step_dir(step)) == version
    return version


def version_in_torch(place: Path) -> int:
    """Load a step by PyTorch's own reader and prove that it is one version, bitwise."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in whole(0).items()}
    state = {"t": tensors, "v": {"version": -1, "list": []}}
    dcp.load(state, checkpoint_id=place, no_dist=True)
    version = state["v"]["version"]
    assert isinstance(version, int)
    assert state["v"]["list"] == [1, 2.5, None]
    for name, tensor in whole(version).items():
        assert torch.equal(tensors[name], tensor), f"{place}: {name} is not of {version}"
    return version


def versions(root: Path) -> dict[int, int]:
    """Step -> version of everything committed; each is whole, for PyTorch's reader, too."""
    if not root.is_dir():
        return {}
    named = {path.parent.name for path in root.glob("iter_*/.metadata")}
    assert named <= {step_dir(step) for step in list_steps(PosixStorage(root))}
    return {step: version_of(root, step) for step in list_steps(PosixStorage(root))}


def leftovers(root: Path) -> list[str]:
    """Names under the root that are not checkpoints, nor the pointer, plans or marks of readers."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    return sorted(
        n
        for n in names
        if n not in (LATEST, LEASES_DIR, PLANS_DIR, ROOT_ID, "lost+found")
        and not n.startswith("iter_")
    )


def assert_recovers(
    root: Path, *, step: int, version: int, before: dict[int, int] | None = None
) -> None:
    """The next save works, the pointer names it, and a repair leaves nothing behind.

    `before`: what `versions` has just returned, if the caller knows it; each look loads every step.
    """
    before = versions(root) if before is None else before
    with Checkpointer(root, settle_s=0.0) as checkpointer:
        checkpointer.save(step, state_of(version), overwrite=True)
        assert checkpointer.latest() == max([*before, step])
    fates = repair(PosixStorage(root), alive_s=0.0)
    assert not [leftover for leftover in fates if leftover.fate == "kept"], fates
    assert leftovers(root) == []
    # A repair may finish a save that was to replace an older one, never one that has been replaced
    # since: versions grow with time.
    after = versions(root)
    assert after[step] == version
    for old, was in before.items():
        assert after[old] >= was
    pointer = (root / LATEST).read_text()
    assert pointer == f"{max(after)}\n"
