"""Who writes what: one writer for each box, which holds it; all experts are there (M5, M6)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from holdfast import Checkpointer, Layout, ModuleGroups, ModuleLayouts, PosixStorage, module_parts
from holdfast.format.reader import Snapshot
from tests.harness import RankContext, run_ranks
from tests.modules.common import Trained

LAYOUTS = {
    1: Layout(tp=2, cp=2, dp=2),
    2: Layout(tp=2, cp=2, dp=2, ep=2),
    4: Layout(tp=2, cp=2, dp=2, ep=4, expt_tp=1),
}
"""By ep, on eight ranks."""


def _save(context: RankContext, root: str, ep: int) -> dict[str, list[tuple[int, ...]]]:
    """The parts of each parameter that this rank holds: offset and shape."""
    layouts = ModuleLayouts({"language": LAYOUTS[ep], "vision": Layout(dp=8)})
    held = {}
    with (
        ModuleGroups.create(layouts) as groups,
        Checkpointer(root, groups=groups.union) as checkpointer,
    ):
        modules = {name: Trained(name, groups[name], 0.1) for name in groups.modules}
        parts = {name: module.parts() for name, module in modules.items()}
        checkpointer.save(1, module_parts(groups, parts))
        for name, module in modules.items():
            for key, parameter in module.net.named_parameters():
                assert isinstance(parameter, DTensor)
                shape, offset = _box(parameter)
                held[f"{name}.model.{key}"] = [offset, shape]
    return held


def _box(parameter: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(shape), tuple(offset)


@pytest.mark.parametrize(
    "ep", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 4]
)
def test_each_box_has_one_writer_which_holds_it(tmp_path: Path, ep: int) -> None:
    held = run_ranks(8, _save, str(tmp_path), ep).results
    with Snapshot.open(PosixStorage(tmp_path), "iter_0000001") as snapshot:
        manifest, index = snapshot.manifest, snapshot.index
        writer_of = [each.writer for each in manifest.files]
        for info in manifest.tensors:
            rows = snapshot.rows_of(info.key)
            covered = torch.zeros(info.shape, dtype=torch.int64)
            for row in rows.tolist():
                begin = index.offset[row][: len(info.shape)].tolist()
                size = index.extent[row][: len(info.shape)].tolist()
                box = tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))
                assert int(index.copy[row]) == 0
                covered[box] += 1
                writer = writer_of[int(index.file[row])]
                if info.key in held[writer]:
                    offset, shape = held[writer][info.key]
                    inside = [
                        o <= b and b + n <= o + s
                        for o, s, b, n in zip(offset, shape, begin, size, strict=True)
                    ]
                    assert all(inside), f"{info.key}: rank {writer} wrote what it does not hold"
            assert torch.equal(covered, torch.ones_like(covered)), info.key
        experts = [info for info in manifest.tensors if info.key.endswith(".experts")]
        assert len(experts) == 4
        writers = {
            writer_of[int(index.file[row])]
            for info in experts
            for row in snapshot.rows_of(info.key).tolist()
        }
        assert len(writers) > 1
