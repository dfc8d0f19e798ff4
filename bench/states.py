"""States to save: a sharded GPT with Adam's moments, and many small or tiny tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast import RNG, ProcessGroups

_PATTERN_NUMEL = 1 << 20


Shapes = tuple[tuple[str, tuple[int, ...], int | None], ...]
"""Key, global shape and the dim that tensor parallelism splits (None: replicated)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A state of DTensors: every part has a float32 tensor of each shape."""

    parts: tuple[str, ...]
    shapes: Shapes


def gpt_spec(megabytes: int) -> DenseSpec:
    """A decoder whose weights and Adam's moments in float32 take about this many MB."""
    params = megabytes * 1e6 / 12
    w = 128
    while 12 * (2 * w) ** 2 * 4 + 16 * (2 * w) ** 2 <= params:
        w *= 2
    vocab = 16 * w
    shapes: list[tuple[str, tuple[int, ...], int | None]] = [("embedding", (vocab, w), 0)]
    for layer in range(max(1, round((params - vocab * w) / (12 * w**2)))):
        name = f"layers.{layer}"
        shapes += [
            (f"{name}.attention.qkv.weight", (3 * w, w), 0),
            (f"{name}.attention.qkv.bias", (3 * w,), 0),
            (f"{name}.attention.out.weight", (w, w), 1),
            (f"{name}.mlp.up.weight", (4 * w, w), 0),
            (f"{name}.mlp.up.bias", (4 * w,), 0),
            (f"{name}.mlp.down.weight", (w, 4 * w), 1),
        ]
        for norm in ("norm1", "norm2"):
            shapes += [(f"{name}.{norm}.weight", (w,), None), (f"{name}.{norm}.bias", (w,), None)]
    shapes.append(("norm.weight", (w,), None))
    return DenseSpec(parts=("weight", "moment1", "moment2"), shapes=tuple(shapes))


def small_spec(num_tensors: int) -> DenseSpec:
    """Many small tensors of 10 kB each: 205 MB for 20,000."""
    shapes: Shapes = tuple((f"t{i:06d}", (64, 40), 0) for i in range(num_tensors))
    return DenseSpec(parts=("small",), shapes=shapes)


def dense_state(groups: ProcessGroups, spec: DenseSpec, *, blank: bool = False) -> dict[str, Any]:
    """DTensors on (dp, tp), replicated along dp; a few values, and the random streams."""
    mesh = groups.mesh("dp", "tp")
    tp, index = groups.size("tp"), groups.index("tp")
    generator = torch.Generator().manual_seed(1)
    pattern = torch.randn(_PATTERN_NUMEL, generator=generator)
    state: dict[str, Any] = {}
    for part in spec.parts:
        entries: dict[str, object] = {}
        for key, shape, dim in spec.shapes:
            local = list(shape)
            if dim is not None:
                local[dim] //= tp
            tensor = (
                torch.zeros(local)
                if blank
                else _filled(pattern, local, salt=0 if dim is None else index)
            )
            entries[key] = _distributed(tensor, mesh, dim)
        state[part] = entries
    return {**state, "values": {"step": 1, "lr": 0.5}, "rng": RNG()}


def _filled(pattern: torch.Tensor, shape: list[int], *, salt: int) -> torch.Tensor:
    out = torch.empty(shape)
    flat = out.view(-1)
    for start in range(0, flat.numel(), len(pattern)):
        piece = flat[start : start + len(pattern)]
        piece.copy_(pattern[: len(piece)])
    return out.add_(salt)


def _distributed(local: torch.Tensor, mesh: DeviceMesh, dim: int | None) -> DTensor:
    placements: list[Placement] = [Replicate(), Replicate() if dim is None else Shard(dim)]
    return DTensor.from_local(local, mesh, placements, run_check=False)


def tiny_state(num_tensors: int) -> dict[str, Any]:
    """Plain tensors of 64 to 256 bytes, and the random streams."""
    tensors = {f"t{i:06d}": torch.full((16 + i % 49,), float(i)) for i in range(num_tensors)}
    return {"tiny": tensors, "rng": RNG()}


def sharded_tiny_state(groups: ProcessGroups, num_tensors: int) -> dict[str, Any]:
    """DTensors cut along dim 0 over dp, a few hundred bytes each, and the random streams."""
    mesh = groups.mesh("dp")
    tensors = {
        f"t{i:06d}": DTensor.from_local(
            torch.full((16,), float(i)), mesh, [Shard(0)], run_check=False
        )
        for i in range(num_tensors)
    }
    return {"tiny": tensors, "rng": RNG()}


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a step of an optimizer, with the parameters as gradients: without a forward."""

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.detach()
        optimizer.step()

    return step


def local_tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that this rank holds of a state of two levels."""
    results: list[torch.Tensor] = []
    for entries in state.values():
        if isinstance(entries, dict):
            for value in entries.values():
                if isinstance(value, DTensor):
                    results.append(value.to_local())
                elif isinstance(value, torch.Tensor):
                    results.append(value)
    return results


def local_nbytes(state: dict[str, Any]) -> int:
    """Bytes of the tensors that this rank holds."""
    return sum(tensor.nbytes for tensor in local_tensors(state))


def digests(state: dict[str, Any]) -> list[int]:
    """A hash of each tensor that this rank holds."""
    return [xxhash.xxh3_64_intdigest(each.numpy().data) for each in local_tensors(state)]
