"""What ranks write with Megatron-core, and beside it what they hold, in plain pieces.

`save` writes a checkpoint, and per rank a file with every `ShardedTensor` that went into it: its
key, its place in the whole, and its elements. `whole_tensors` joins these pieces, so that the
reader is compared with what the ranks held, not with what another reader makes of the files.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.foreign.megatron_on_cpu import megatron_on_cpu
from tests.harness import RankContext

DENSE = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
SPARSE = {"expert_model_parallel_size": 2}
LR = 0.01
STEPS = 2
ITERATION = 10
PROGRAM = """
import sys
import torch.distributed as dist
from tests.foreign import megatron_writing
from tests.harness import RankContext
dist.init_process_group("gloo")
context = RankContext(rank=dist.get_rank(), num_ranks=dist.get_world_size())
getattr(megatron_writing, sys.argv[1])(context, *sys.argv[2:])
dist.destroy_process_group()
"""
"""Calls a function of this module on each rank; the command line is its name and its arguments."""


def write_all(context: RankContext, root: str) -> None:
    """Write every checkpoint of the tests."""
    base = Path(root)
    with megatron_on_cpu():
        _write_by_hand(context, base)
    forms = ["fully_reshardable", "dp_reshardable", "dp_zero_gather_scatter"]
    _write_trained(context, base / "dense", DENSE, forms, is_bf16=False)
    _write_trained(context, base / "sparse", SPARSE, forms[:2], is_bf16=True)
    _write_trained(context, base / "whole", SPARSE, [""], is_bf16=True)


def save(context: RankContext, path: Path, state: dict[str, Any], **options: Any) -> None:
    """Write a checkpoint, and the pieces of this rank."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedTensor,
        apply_factories,
        is_main_replica,
    )

    apply_factories(state)
    pieces = [
        (each.key, each.global_shape, each.global_offset, each.data.detach().clone())
        for each in nested_values(state)
        if isinstance(each, ShardedTensor) and is_main_replica(each.replica_id)
    ]
    if context.rank == 0:
        path.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(path), **options)
    torch.save(pieces, f"{path}.rank{context.rank}")
    dist.barrier()


def whole_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, joined from the pieces that the ranks held."""
    whole: dict[str, Tensor] = {}
    for file in sorted(path.parent.glob(f"{path.name}.rank*")):
        for key, shape, offset, data in torch.load(file):
            if key not in whole:
                whole[key] = torch.empty(shape, dtype=data.dtype)
            local = (1,) * (len(shape) - data.ndim) + tuple(data.shape)
            box = tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))
            whole[key][box] = data.reshape(local)
    return whole


def load_and_write(context: RankContext, path: str, to: str) -> None:
    """Load the part `model` of a checkpoint of ours in a model of tensor parallelism alone.

    What the model then holds is written again, with the pieces of each rank.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    with megatron_on_cpu(tensor_model_parallel_size=2):
        model = _gpt(context, is_sparse=False, is_bf16=False).module
        tensors = {
            name: each
            for name, each in model.sharded_state_dict().items()
            if not isinstance(each, ShardedObject)
        }
        add_prefix_for_sharding(tensors, "model.")
        found = dist_checkpointing.load({"model": tensors}, path)
        assert found["opt_param_scheduler"] == {"num_steps": 7}
        left = model.load_state_dict(found["model"], strict=False)
        assert not left.unexpected_keys
        assert all(name.endswith("._extra_state") for name in left.missing_keys)
        save(context, Path(to), {"model": model.sharded_state_dict()})


# ---- by hand ----


def _write_by_hand(context: RankContext, base: Path) -> None:
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    run = base / "run"
    directory = run / f"iter_{ITERATION:07d}"
    # With the metadata that is kept for the next save, which has the plans of all ranks in it.
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    save(context, directory, _by_hand(context.rank), sharded_strategy=strategy)
    save(context, base / "drifted", dict(_copies(context.rank, drift=context.rank == 2)))
    save(context, base / "flat", dict(_flat(context.rank)), validate_access_integrity=False)
    (run / "latest_checkpointed_iteration.txt").write_text(f"{ITERATION}\n")


def _by_hand(rank: int) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine
    from megatron.core.transformer.enums import AttnBackend

    torch.manual_seed(rank)
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    tensor = ShardedTensor.from_rank_offsets
    row, column = divmod(rank, 2)
    same = torch.arange(15.0).reshape(3, 5)
    generators = [
        {
            "random_rng_state": random.Random(rank).getstate(),
            "np_rng_state": np.random.RandomState(rank).get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "rng_tracker_states": {"model-parallel-rng": torch.full((5,), rank)},
        }
    ]
    return {
        "grid": tensor("grid", torch.randn(3, 4), (0, row, 2), (1, column, 2)),
        "stack": tensor(
            "decoder.layers.norm.weight", torch.randn(6), (0, rank, 4), prepend_axis_num=1
        ),
        "half": tensor("half", torch.randn(2, 3).bfloat16(), (1, rank, 4)),
        "same": tensor("same", same, replica_id=rank),
        **dict(_copies(rank)),
        "rng_state": ShardedObject("rng_state", generators, (2, 2), (row, column)),
        "none": ShardedObject("layers.0.core._extra_state", None, (4,), (rank,)),
        "some": ShardedObject(
            "layers.1.core._extra_state", torch.arange(rank + 1, dtype=torch.uint8), (4,), (rank,)
        ),
        "iteration": ITERATION,
        "args": argparse.Namespace(
            lr=LR, names=["a"], params_dtype=torch.bfloat16, attention_backend=AttnBackend.auto
        ),
        "rerun_state_machine": machine.state_dict(None, "torch_dist", force=True),
        "opt_param_scheduler": {"max_lr": LR, "num_steps": 7},
        "checkpoint_version": 3.0,
    }


def _copies(rank: int, *, drift: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield copies of one tensor under a key per rank: of all ranks, and of some."""
    from megatron.core.dist_checkpointing import ShardedTensor

    for name, ranks in {"norm.weight": (0, 1, 2, 3), "router.weight": (1, 3)}.items():
        if rank in ranks:
            data = torch.arange(12.0).reshape(3, 4)
            data[1, 2] += drift
            key = f"{name}.__tp_replica_{rank}"
            yield name, ShardedTensor.from_rank_offsets(key, data)


FLAT = {"w": (8, 12), "layers.0.b": (8,), "unknown": (8, 12)}
"""Parameters whose state is stored in flattened ranges; the last one is not in the model."""


def flat_state(name: str) -> Tensor:
    """Return the state of such a parameter."""
    shape = FLAT[name]
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + len(name)


def _flat(rank: int) -> Iterator[tuple[str, Any]]:
    """Yield state as releases before 0.14 stored it: a grid of blocks, each cut by elements.

    This release refuses `flattened_range`; the form is that of a tensor with a grid as its leading
    dims, which it writes.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    row, column = divmod(rank, 2)
    for name, shape in FLAT.items():
        grid = (2, 2)[: len(shape)] if len(shape) > 1 else (4,)
        place = (row, column) if len(shape) > 1 else (rank,)
        rows = [
            slice(i * n // g, (i + 1) * n // g) for i, n, g in zip(place, shape, grid, strict=True)
        ]
        if name != "unknown":
            model = torch.zeros(shape)
            yield name, ShardedTensor.from_rank_offsets(name, model, replica_id=rank)
        block = flat_state(name)[tuple(rows)].reshape(-1)
        cut = block.numel() // 3 + 1
        for start, stop in ((0, cut), (cut, block.numel())):
            if stop > start:
                data = block[start:stop].reshape(*(1 for _ in grid), -1)
                key = f"optimizer.state.exp_avg.{name}"
                yield (
                    f"{name} {start}",
                    ShardedTensor(
                        key,
                        data,
                        data.dtype,
                        tuple(data.shape),
                        (*grid, block.numel()),
                        (*place, start),
                        None,
                    ),
                )


# ---- trained ----


def _write_trained(
    context: RankContext, path: Path, sizes: dict[str, int], forms: list[str], *, is_bf16: bool
) -> None:
    """Train Megatron's GPT for some steps, and save it once in each form of the optimizer."""
    with megatron_on_cpu(**sizes):
        model = _gpt(context, is_sparse="expert_model_parallel_size" in sizes, is_bf16=is_bf16)
        optimizer = _trained(model, is_distributed=forms != [""], is_bf16=is_bf16)
        for form in forms:
            options: dict[str, Any] = (
                {"distrib_optim_sharding_type": form, "chained_optim_avoid_prefix": True}
                if form
                else {}
            )
            weights = model.module.sharded_state_dict(metadata=options)
            state = {"model": weights, "iteration": STEPS}
            state["optimizer"] = optimizer.sharded_state_dict(weights, metadata=options)
            save(context, path / (form or "whole"), state, content_metadata=options)


def _gpt(context: RankContext, *, is_sparse: bool, is_bf16: bool) -> Any:
    from megatron.core import parallel_state as groups
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(context.rank)
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 2}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        tensor_model_parallel_size=groups.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=groups.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=is_bf16,
        use_cpu_initialization=True,
        add_bias_linear=not is_sparse,
        gated_linear_unit=not is_sparse,
        **(experts if is_sparse else {}),
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=4 if is_sparse else None),
        vocab_size=64,
        max_sequence_length=8,
        pre_process=groups.is_pipeline_first_stage(),
        post_process=groups.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    ).to(dtype)
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )


def _trained(model: Any, *, is_distributed: bool, is_bf16: bool) -> Any:
    """Return the optimizer after some steps with gradients that are drawn at random."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=LR,
        min_lr=0.0,
        weight_decay=0.1,
        bf16=is_bf16,
        params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
        use_distributed_optimizer=is_distributed,
        clip_grad=0.0,
    )
    optimizer = get_megatron_optimizer(config, [model])
    for _ in range(STEPS):
        for parameter in model.module.parameters():
            parameter.main_grad.copy_(torch.randn_like(parameter.main_grad))
        optimizer.step()
    return optimizer
