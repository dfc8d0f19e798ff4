"""Trial that an optimizer that joins elements joins those of all shards, not only local ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from holdfast.errors import ConfigError
from holdfast.optim.checks import is_known_elementwise
from holdfast.optim.elementwise import make_trial, random_states_kept, take_step

_NUM_STEPS = 4
_TOLERANCE = 0.1
"""Of the updates: Muon computes in bf16, and norms of one of two shards differ by a third."""


def check_joins(optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    """Raise ConfigError if an optimizer updates shards in another way than whole tensors.

    Operations on DTensors see all shards, so Muon is right on them; a number that is taken out of
    one (`.item()`, `.to_local()`) is that of this rank's shard. Another optimizer of its class
    makes a few steps with a small matrix, whole and in shards. One that cannot be made of parameter
    groups alone is not tried.

    Args:
        optimizer: a plain torch optimizer.
        mesh: data ranks; shards are along its last dim.

    Cost: collective over the mesh, some milliseconds, once; none for torch's elementwise classes.
    """
    kind = type(optimizer)
    if mesh.size(mesh.ndim - 1) == 1 or is_known_elementwise(kind):
        return
    group = optimizer.param_groups[0]
    settings = {key: group[key] for key in optimizer.defaults if key in group}
    if isinstance(settings.get("lr"), int | float | torch.Tensor):
        settings["lr"] = (
            0.01  # at the start of a warm-up an update may be smaller than its rounding
        )
    placements: list[Placement] = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]

    def run(*, in_shards: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(21)
        values = [
            torch.randn(4 * mesh.size(mesh.ndim - 1), 6, generator=generator).to(mesh.device_type)
            for _ in range(1 + _NUM_STEPS)
        ]
        start = values[0].clone()
        if in_shards:
            values = [distribute_tensor(v, mesh, placements, src_data_rank=None) for v in values]
        untyped: Any = kind
        trial = make_trial(untyped, [settings], [values[0].clone()])
        for gradient in values[1:]:
            take_step(trial, [gradient])
        after = trial.tensors[0]
        assert after is not None
        whole = after.full_tensor() if isinstance(after, DTensor) else after
        return whole.detach() - start

    with random_states_kept(torch.device(mesh.device_type)), torch.enable_grad():
        before = torch.get_rng_state()
        try:
            expected = run(in_shards=False)
        except Exception:  # it needs more than groups, or more than gradients: not to be tried here
            return
        if not torch.equal(before, torch.get_rng_state()):
            return
        try:
            change = run(in_shards=True)
        except Exception as error:
            raise ConfigError(
                f"step: a {kind.__name__} cannot update shards, which are DTensors: "
                f"{type(error).__name__}: {error}"
            ) from error
    if not float((change - expected).norm()) <= _TOLERANCE * float(expected.norm()):
        raise ConfigError(
            f"step: a {kind.__name__} joins elements of this rank's shards alone, so it does not "
            f"update them like whole tensors; compute norms and products on DTensors, and take no "
            f"number out of them before full_tensor(), or keep the model whole, in a "
            f"ReducedOptimizer"
        )
