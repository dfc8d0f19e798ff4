"""Holdfast: the whole training state of a distributed PyTorch run, kept safe.

Public names are resolved on first use, so that importing a torch-free room never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from holdfast.version import __version__

if TYPE_CHECKING:
    from holdfast.bridge import Bridge, Bridged
    from holdfast.checkpoint import (
        Checkpointer,
        CheckpointerStats,
        LoadReport,
        PendingSave,
        RankLog,
        SaveReport,
    )
    from holdfast.errors import (
        ConfigError,
        CorruptionError,
        DeadlineError,
        DriftError,
        FaultError,
        GroupError,
        HoldfastError,
        LayoutError,
        MismatchError,
        PlacementError,
        PlanError,
        StorageError,
    )
    from holdfast.format.inventory import CheckpointInfo, PartInfo
    from holdfast.format.values import Codec, Codecs
    from holdfast.fsdp import ShardedModel, fully_shard_model
    from holdfast.optim import (
        ChainedOptimizer,
        LossScaler,
        MultiModuleOptimizer,
        ReducedOptimizer,
        ShardedOptimizer,
        StepOutcome,
    )
    from holdfast.parallel import (
        Control,
        Layout,
        ModuleGroups,
        ModuleLayouts,
        ModuleRole,
        ProcessGroups,
        current_groups,
    )
    from holdfast.policies.keep import KeepBest, KeepEvery, KeepLast, KeepTagged, KeepWithin
    from holdfast.policies.save import (
        AtDeadline,
        AtStep,
        EveryMinutes,
        EverySteps,
        Moment,
        OnFile,
        OnSignal,
        SavePolicy,
    )
    from holdfast.policies.schedule import SaveSchedule
    from holdfast.state import (
        RNG,
        AppliesLater,
        FlatShard,
        FromPart,
        Gradients,
        ModuleRNG,
        ModuleState,
        OnLayout,
        OptimizerState,
        Padded,
        PerRank,
        PerRankValues,
        Replicated,
        Sharded,
        Stored,
        Stream,
        Transient,
        Union,
        declare_padding,
        declare_wrapper,
        module_parts,
    )
    from holdfast.storage import PosixStorage, Storage
    from holdfast.storage.objects import ObjectStorage

__all__ = [
    "RNG",
    "AppliesLater",
    "AtDeadline",
    "AtStep",
    "Bridge",
    "Bridged",
    "ChainedOptimizer",
    "CheckpointInfo",
    "Checkpointer",
    "CheckpointerStats",
    "Codec",
    "Codecs",
    "ConfigError",
    "Control",
    "CorruptionError",
    "DeadlineError",
    "DriftError",
    "EveryMinutes",
    "EverySteps",
    "FaultError",
    "FlatShard",
    "FromPart",
    "Gradients",
    "GroupError",
    "HoldfastError",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepTagged",
    "KeepWithin",
    "Layout",
    "LayoutError",
    "LoadReport",
    "LossScaler",
    "MismatchError",
    "ModuleGroups",
    "ModuleLayouts",
    "ModuleRNG",
    "ModuleRole",
    "ModuleState",
    "Moment",
    "MultiModuleOptimizer",
    "ObjectStorage",
    "OnFile",
    "OnLayout",
    "OnSignal",
    "OptimizerState",
    "Padded",
    "PartInfo",
    "PendingSave",
    "PerRank",
    "PerRankValues",
    "PlacementError",
    "PlanError",
    "PosixStorage",
    "ProcessGroups",
    "RankLog",
    "ReducedOptimizer",
    "Replicated",
    "SavePolicy",
    "SaveReport",
    "SaveSchedule",
    "Sharded",
    "ShardedModel",
    "ShardedOptimizer",
    "StepOutcome",
    "Storage",
    "StorageError",
    "Stored",
    "Stream",
    "Transient",
    "Union",
    "__version__",
    "current_groups",
    "declare_padding",
    "declare_wrapper",
    "fully_shard_model",
    "module_parts",
]

_ROOMS = {
    "holdfast.checkpoint": (
        "Checkpointer",
        "CheckpointerStats",
        "LoadReport",
        "PendingSave",
        "RankLog",
        "SaveReport",
    ),
    "holdfast.errors": tuple(n for n in __all__ if n.endswith("Error") or n == "FaultError"),
    "holdfast.format.inventory": ("CheckpointInfo", "PartInfo"),
    "holdfast.fsdp": ("ShardedModel", "fully_shard_model"),
    "holdfast.policies.keep": (
        "KeepBest",
        "KeepEvery",
        "KeepLast",
        "KeepTagged",
        "KeepWithin",
    ),
    "holdfast.policies.save": (
        "AtDeadline",
        "AtStep",
        "EveryMinutes",
        "EverySteps",
        "Moment",
        "OnFile",
        "OnSignal",
        "SavePolicy",
    ),
    "holdfast.policies.schedule": ("SaveSchedule",),
    "holdfast.format.values": ("Codec", "Codecs"),
    "holdfast.bridge": ("Bridge", "Bridged"),
    "holdfast.optim": (
        "ChainedOptimizer",
        "LossScaler",
        "MultiModuleOptimizer",
        "ReducedOptimizer",
        "ShardedOptimizer",
        "StepOutcome",
    ),
    "holdfast.parallel": (
        "Control",
        "Layout",
        "ModuleGroups",
        "ModuleLayouts",
        "ModuleRole",
        "ProcessGroups",
        "current_groups",
    ),
    "holdfast.state": (
        "RNG",
        "AppliesLater",
        "FlatShard",
        "FromPart",
        "Gradients",
        "ModuleRNG",
        "ModuleState",
        "OnLayout",
        "OptimizerState",
        "Padded",
        "PerRank",
        "PerRankValues",
        "Replicated",
        "Sharded",
        "Stored",
        "Stream",
        "Transient",
        "Union",
        "declare_padding",
        "declare_wrapper",
        "module_parts",
    ),
    "holdfast.storage": ("PosixStorage", "Storage"),
    "holdfast.storage.objects": ("ObjectStorage",),
}


def __getattr__(name: str) -> object:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(room), name)
    raise AttributeError(f"module 'holdfast' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
