"""What every foreign format owes: the same checks, whatever wrote the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from holdfast import Checkpointer, Layout, ProcessGroups, Replicated, Sharded
from holdfast.arrays.boxes import Box
from holdfast.cli.main import main
from holdfast.foreign.catalog import OpenFiles, TensorReader, read_flat
from holdfast.foreign.formats import open_catalog
from holdfast.foreign.weights import weights_of
from holdfast.state.tensor_elements import TORCH_TO_NAME
from tests.harness import RankContext, run_ranks

Tensors = Mapping[str, torch.Tensor]

LAYOUTS = (
    Layout(tp=1),
    Layout(tp=2, dp=2),
    Layout(tp=1, pp=2),
)


def sample_tensors() -> dict[str, torch.Tensor]:
    """Tensors of every kind of shape and type that all formats can hold."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "layers.0.weight": random(12, 8),
        "layers.0.bias": random(12),
        "layers.1.weight": random(16, 12).to(torch.bfloat16),
        "cube": random(4, 6, 10).to(torch.float64),
        "half": random(8, 6).to(torch.float16),
        "count": torch.tensor(7),
        "bytes": torch.arange(24, dtype=torch.uint8).reshape(4, 6),
        "mask": random(8, 4) > 0,
        "none": torch.zeros(0, 3),
        "eighth": random(16, 8).to(torch.float8_e4m3fn),
    }


def raw(tensor: torch.Tensor) -> bytes:
    """Return the row-major bytes of a tensor."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def check_format(path: Path, part: str, expected: Tensors, *, fraction: float = 1.05) -> None:
    """Check all that is promised of a foreign checkpoint whose part holds these tensors."""
    check_catalog(path, part, expected)
    assert main(["show", str(path)]) == 0
    assert main(["verify", str(path)]) == 0
    for layout in LAYOUTS:
        size = len(layout.ranks)
        run_ranks(size, load_part, str(path), part, packed(expected), layout, fraction)


Packed = dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]


def packed(tensors: Tensors) -> Packed:
    """Return tensors in a form that plain pickle takes to ranks; it cannot with 8-bit floats."""
    return {name: (each.dtype, tuple(each.shape), raw(each)) for name, each in tensors.items()}


def unpacked(tensors: Packed) -> dict[str, torch.Tensor]:
    """Return the tensors of `packed`."""
    return {
        name: torch.tensor(list(data), dtype=torch.uint8).view(dtype).reshape(shape)
        for name, (dtype, shape, data) in tensors.items()
    }


def check_catalog(path: Path, part: str, expected: Tensors) -> None:
    """Names, types, shapes, bytes; and boxes at random, against slices."""
    catalog = open_catalog(path)
    keys = weights_of(catalog, part).keys  # of tied tensors several names have one
    assert sorted(keys) == sorted(expected)
    draw = np.random.default_rng(5)
    with OpenFiles(catalog.storage) as files:
        for name, tensor in expected.items():
            entry = catalog.tensors[keys[name]]
            assert (entry.dtype, entry.shape) == (TORCH_TO_NAME[tensor.dtype], tuple(tensor.shape))
            reader = TensorReader(entry, files)
            data = bytearray(entry.nbytes)
            read_flat(reader, memoryview(data), start=0)
            assert bytes(data) == raw(tensor), name
            for _ in range(4 if tensor.numel() else 0):
                offset = tuple(int(draw.integers(0, size)) for size in tensor.shape)
                shape = tuple(
                    int(draw.integers(1, size - at + 1))
                    for at, size in zip(offset, tensor.shape, strict=True)
                )
                box = Box(offset, shape)
                out = bytearray(box.numel * entry.itemsize)
                reader.read_box(box, memoryview(out))
                assert bytes(out) == raw(tensor[box.relative_to((0,) * len(shape))]), (name, box)


def load_part(
    context: RankContext,
    path: str,
    part: str,
    packed_tensors: Packed,
    layout: Layout,
    fraction: float,
) -> None:
    """Load all tensors, sharded over tp along each dim, a half of them on each pipeline stage."""
    expected = unpacked(packed_tensors)
    with ProcessGroups.create(layout) as groups:
        names = [n for i, n in enumerate(expected) if i % layout.pp == groups.index("pp")]
        for dim in (0, 1):
            state = {n: target(expected[n], dim, groups) for n in names}
            report = Checkpointer(Path(path).parent / "never", groups=groups).load(
                {part: state}, source=path, ignore_unexpected=True
            )
            assert not report.is_verified
            assert report.nbytes_read <= fraction * report.nbytes_needed + 4096
            for name, value in state.items():
                got = value.local if isinstance(value, Sharded | Replicated) else value
                assert raw(got) == raw(share(expected[name], dim, groups)), (name, dim)
    assert not (Path(path).parent / "never").exists()


def share(tensor: torch.Tensor, dim: int, groups: ProcessGroups) -> torch.Tensor:
    """Return the rows, or columns, of this rank's place in tp."""
    if groups.layout.tp == 1 or tensor.ndim <= dim or tensor.shape[dim] < groups.layout.tp:
        return tensor
    return tensor.chunk(groups.layout.tp, dim)[groups.index("tp")]


def target(tensor: torch.Tensor, dim: int, groups: ProcessGroups) -> object:
    """Return what the share of this rank is loaded into."""
    own = share(tensor, dim, groups)
    blank = torch.zeros_like(own, memory_format=torch.contiguous_format)
    if own is tensor:
        return Replicated(blank)
    return Sharded(blank, tuple(tensor.shape), dims={dim: "tp"})
