"""Every optimizer of Megatron-core that a CPU runs, its schedule, scalers and rerun machine."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import (
    dist_checkpointing,
    optimizer,
    optimizer_param_scheduler,
    parallel_state,
    rerun_state_machine,
)
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    layer_wise_optimizer,
    muon,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as random_states
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig

from holdfast.integrations.megatron import HoldfastLoad, HoldfastSave, groups_of, latest
from tests.foreign.megatron_on_cpu import cuda_on_cpu

STEPS = 4
_EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "add_bias_linear": False,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
}

CASES: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": {"decoupled_weight_decay": False}},
    "adamw": {},
    "sgd": {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.9}},
    "bf16": {"dtype": torch.bfloat16, "optimizer": {"bf16": True}},
    "fp16": {
        "dtype": torch.float16,
        "optimizer": {"fp16": True, "initial_loss_scale": 2.0**14, "loss_scale_window": 2},
    },
    "fp16, constant scale": {
        "dtype": torch.float16, "optimizer": {"fp16": True, "loss_scale": 128.0},
    },
    "layer-wise, bf16": {
        "layer_wise": True, "dtype": torch.bfloat16, "optimizer": {"bf16": True},
    },
    "experts with bias, chained": {"experts": True, "sizes": {"expert_model_parallel_size": 2}},
    "MTP": {"model": {"mtp_num_layers": 1}},
    "rerun": {"rerun": True},
}  # fmt: skip


class _Run:
    """A model of two layers, its optimizer and everything that Megatron's training keeps."""

    def __init__(self, case: dict[str, Any]) -> None:
        dtype = case.get("dtype", torch.float32)
        sizes = case.get("sizes", {})
        config: Any = TransformerConfig(
            num_layers=2, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True,
            attention_dropout=0.0, hidden_dropout=0.1, params_dtype=dtype,
            bf16=dtype is torch.bfloat16, fp16=dtype is torch.float16, **sizes,
            **(_EXPERTS if case.get("experts") else {}), **case.get("model", {}),
        )  # fmt: skip
        self.experts = bool(case.get("experts"))
        spec = get_gpt_layer_local_spec(
            num_experts=4 if self.experts else None,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        extra = {}
        if config.mtp_num_layers:
            extra["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, False)
        model = GPTModel(
            config, spec, vocab_size=64, max_sequence_length=8, pg_collection=groups,
            **extra,
        ).to(dtype)  # fmt: skip
        self.model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        chosen = OptimizerConfig(
            **{
                "optimizer": "adam", "lr": 0.01, "min_lr": 0.001, "params_dtype": dtype,
                "clip_grad": 1.0, **case.get("optimizer", {}),
            }
        )  # fmt: skip
        self.optimizer: Any
        if case.get("layer_wise"):
            self.optimizer = _layer_wise(chosen, self.model, groups)
        else:
            self.optimizer = get_megatron_optimizer(chosen, [self.model])
        if chosen.optimizer == "sgd":  # Megatron itself makes no moments of it before a load
            self.optimizer.chained_optimizers[0].init_state_fn = _make_moments
        self.schedule = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=0.01, min_lr=0.001, lr_warmup_steps=2,
            lr_decay_steps=8, lr_decay_style="cosine", start_wd=0.0, end_wd=0.1, wd_incr_steps=8,
            wd_incr_style="linear",
        )  # fmt: skip
        self.rerun: Any = None
        if case.get("rerun"):
            self.rerun = rerun_state_machine.RerunStateMachine(
                mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS
            )
        self.step = 0

    def _rng(self) -> Any:
        """What Megatron-LM saves of random streams; each rank its own."""
        states = {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "rng_tracker_states": get_cuda_rng_tracker().get_states(),
        }
        return ShardedObject("rng_state", [states], (dist.get_world_size(),), (dist.get_rank(),))

    def state(self, *, is_loading: bool = False) -> dict[str, Any]:
        """What Megatron saves, and what it loads into."""
        weights = self.model.module.sharded_state_dict()
        state = {
            "model": weights,
            "optimizer": self.optimizer.sharded_state_dict(weights, is_loading=is_loading),
            "opt_param_scheduler": self.schedule.state_dict(),
            "rng_state": self._rng(),
            "iteration": self.step,
        }
        if self.rerun is not None:
            kept = self.rerun.state_dict(None, "torch_dist", force=True)
            state["rerun_state_machine"] = kept
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Take what was loaded."""
        self.model.module.load_state_dict(state["model"])
        with torch.no_grad():
            self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["opt_param_scheduler"])
        (states,) = state["rng_state"]
        random.setstate(states["random_rng_state"])
        np.random.set_state(states["np_rng_state"])
        torch.set_rng_state(states["torch_rng_state"])
        get_cuda_rng_tracker().set_states(states["rng_tracker_states"])
        self.step = state["iteration"]
        if self.rerun is not None:
            self.rerun.load_state_dict(state["rerun_state_machine"])

    def train(self) -> None:
        """Make a step."""
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
        tokens, positions = torch.randint(0, 64, (2, 9)), torch.arange(8).expand(2, 8)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()
        self.optimizer.scale_loss(loss).backward()
        finalize_model_grads([self.model])
        self.optimizer.step()
        self.schedule.step(increment=1)
        self.step += 1
        if self.rerun is not None:
            self._suspect()

    def _suspect(self) -> None:
        """What a machine has of a step that it will run again."""
        machine = rerun_state_machine
        caller = machine.Caller(message="loss", rank=dist.get_rank())
        self.rerun.state = machine.RerunState.RERUNNING_FROM_CHECKPOINT
        self.rerun.current_iteration = self.step
        self.rerun.failed_validation_call = machine.Call(caller=caller, sequence=self.step)
        self.rerun.initial_result = float(self.step)
        self.rerun.large_value_counts[caller] = self.step
        self.rerun.max_values[caller] = 0.5 * self.step


def _make_moments(each: Any, config: Any = None) -> None:
    for group in each.param_groups:
        for p in group["params"]:
            each.state[p]["momentum_buffer"] = torch.zeros_like(p.data)


def _layer_wise(config: OptimizerConfig, model: Any, groups: Any) -> Any:
    is_bf16, config.bf16 = config.bf16, False  # as for Muon: main weights are made of its shard
    inner = get_megatron_optimizer(config, [model])
    config.bf16 = is_bf16

    def init(each: Any, config: Any = None) -> None:
        for group in each.param_groups:
            for p in group["params"]:
                if not each.state[p]:
                    each.state[p]["exp_avg"] = torch.zeros_like(p.data)
                    each.state[p]["exp_avg_sq"] = torch.zeros_like(p.data)

    kind = layer_wise_optimizer.LayerWiseDistributedOptimizer
    kind.allgather_params = kind.broadcast_params  # gloo gathers tensors of one size alone
    made = inner.chained_optimizers if hasattr(inner, "chained_optimizers") else [inner]
    return kind(list(made), config, groups, [init] * len(made))


_TRAINED = {
    "Call", "Caller", "ChainedOptimizer", "ConstantGradScaler", "CudaRNGStatesTracker",
    "DynamicGradScaler", "FP32Optimizer", "Float16OptimizerWithFloat16Params",
    "LayerWiseDistributedOptimizer", "OptimizerParamScheduler", "RerunDiagnostic",
    "RerunErrorInjector", "RerunMode", "RerunState", "RerunStateMachine", "RerunValidationStatus",
}  # fmt: skip
_NOT_TRAINED = {
    "CheckpointFunction": "no state",
    "CheckpointWithoutOutput": "no state",
    "CheckpointWithoutOutputFunction": "no state",
    "DistributedOptimizer": "test_megatron.py; its load needs a step of Transformer Engine's Adam",
    "HybridDeviceOptimizer": "needs CUDA streams",
    "MegatronGradScaler": "abstract",
    "MegatronOptimizer": "abstract",
    "MixedPrecisionOptimizer": "abstract",
    "ParamGroupOverride": "no state",
    "ProxyDict": "a view of several states",
    "QuickStats": "not saved by the machine",
    "Range": "no state",
    "RerunDataIterator": "test_every_kind_of_entry saves such objects",
    "TensorParallelMuon": "needs emerging_optimizers",
}


def names() -> list[str]:
    """Return what is trained with here."""
    return list(CASES)


def unknown_names() -> list[str]:
    """Return the classes of Megatron-core that are in no table, and those that it has no more."""
    modules = (
        optimizer.distrib_optimizer,
        optimizer.grad_scaler,
        optimizer.optimizer,
        optimizer.cpu_offloading.hybrid_optimizer,
        layer_wise_optimizer,
        muon,
        optimizer_param_scheduler,
        random_states,
        rerun_state_machine,
    )
    own = {
        name
        for module in modules
        for name, each in inspect.getmembers(module, inspect.isclass)
        if each.__module__ == module.__name__
    }
    return sorted(own ^ (_TRAINED | _NOT_TRAINED.keys()))


def train(name: str, root: Path, seed: int) -> str:
    """Train with one of them, from the newest checkpoint if there is one.

    Returns:
        The step and the rates, the weights, and what is drawn next.
    """
    with cuda_on_cpu():
        return _train(name, root, seed)


def _train(name: str, root: Path, seed: int) -> str:
    case = CASES[name]
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**case.get("sizes", {}))
    torch.manual_seed(seed)
    random.seed(seed + dist.get_rank())
    np.random.seed(seed + dist.get_rank())
    run = _Run(case)
    torch.manual_seed(seed + dist.get_rank())
    saving = HoldfastSave(groups_of(ProcessGroupCollection.use_mpu_process_groups()))
    newest = latest(saving.groups, root)
    if newest is not None:
        both = HoldfastLoad(saving.groups).strategies
        run.load(dist_checkpointing.load(run.state(is_loading=True), newest, **both))
    while run.step < STEPS:
        run.train()
        path = root / f"iter_{run.step:07d}"
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(
            run.state(), str(path), saving, preprocess_common_before_consistancy_check=saving.common
        )
    saving.close()
    rates = sorted({group["lr"] for group in run.optimizer.param_groups})
    state = {
        key: float(each.double().abs().sum())
        for key, each in run.model.module.state_dict().items()
        if isinstance(each, torch.Tensor)
    }
    draws = torch.rand(1).item(), random.random(), float(np.random.rand())
    return f"step {run.step} rates {rates} draws {draws} {state}"
