"""States to save: a sharded GPT with Adam's moments, and many tiny tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast import ProcessGroups

_PATTERN_NUMEL = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GptSize:
    """A decoder of `num_layers` layers of `width` channels over `vocab` words."""

    num_layers: int
    width: int
    vocab: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
        """Key, global shape and the dim that tensor parallelism splits (None: replicated)."""
        w = self.width
        yield "embedding", (self.vocab, w), 0
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            yield f"{name}.attention.qkv.weight", (3 * w, w), 0
            yield f"{name}.attention.qkv.bias", (3 * w,), 0
            yield f"{name}.attention.out.weight", (w, w), 1
            yield f"{name}.mlp.up.weight", (4 * w, w), 0
            yield f"{name}.mlp.up.bias", (4 * w,), 0
            yield f"{name}.mlp.down.weight", (w, 4 * w), 1
            for norm in ("norm1", "norm2"):
                yield f"{name}.{norm}.weight", (w,), None
                yield f"{name}.{norm}.bias", (w,), None
        yield "norm.weight", (w,), None


def gpt_size(megabytes: int) -> GptSize:
    """The size whose weights and moments in float32 take about this many MB."""
    params = megabytes * 1e6 / 12
    width = 128
    while 12 * (2 * width) ** 2 * 4 + 16 * (2 * width) ** 2 <= params:
        width *= 2
    vocab = 16 * width
    num_layers = max(1, round((params - vocab * width) / (12 * width**2)))
    return GptSize(num_layers=num_layers, width=width, vocab=vocab)


def gpt_state(groups: ProcessGroups, size: GptSize, *, blank: bool = False) -> dict[str, object]:
    """Weights and both moments as DTensors on (dp, tp), replicated along dp; a few values."""
    mesh = groups.mesh("dp", "tp")
    tp, index = groups.size("tp"), groups.index("tp")
    generator = torch.Generator().manual_seed(1)
    pattern = torch.randn(_PATTERN_NUMEL, generator=generator)
    state: dict[str, dict[str, object]] = {}
    for part in ("weight", "moment1", "moment2"):
        entries: dict[str, object] = {}
        for key, shape, dim in size.shapes():
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
    return {**state, "values": {"step": 1, "lr": 0.5}}


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


def tiny_state(num_tensors: int) -> dict[str, object]:
    """Plain tensors of 64 to 256 bytes."""
    return {"tiny": {f"t{i:06d}": torch.full((16 + i % 49,), float(i)) for i in range(num_tensors)}}


def sharded_tiny_state(groups: ProcessGroups, num_tensors: int) -> dict[str, object]:
    """DTensors cut along dim 0 over dp, a few hundred bytes each."""
    mesh = groups.mesh("dp")
    return {
        "tiny": {
            f"t{i:06d}": DTensor.from_local(
                torch.full((16,), float(i)), mesh, [Shard(0)], run_check=False
            )
            for i in range(num_tensors)
        }
    }


def local_tensors(state: dict[str, object]) -> list[torch.Tensor]:
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


def local_nbytes(state: dict[str, object]) -> int:
    """Bytes of the tensors that this rank holds."""
    return sum(tensor.nbytes for tensor in local_tensors(state))
