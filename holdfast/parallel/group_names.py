"""Names of groups: the layout's own, and what other code calls them. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Mapping

NAMED_AXES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("cp", "dp"),
    "tp_cp": ("tp", "cp"),
    "mp": ("tp", "pp"),
    "ep": ("ep",),
    "expt_tp": ("expt_tp",),
    "expt_dp": ("expt_dp",),
    "tp_ep": ("expt_tp", "ep"),
    "tp_ep_pp": ("expt_tp", "ep", "pp"),
}
CLONED = {
    "dp_cp_ag": "dp_cp",
    "expt_dp_ag": "expt_dp",
    "dp_cp_intra_ag": "dp_cp_intra",
    "expt_dp_intra_ag": "expt_dp_intra",
}
"""The group that each is a second communicator of."""
SLICED = {
    "dp_cp_intra": "dp_cp",
    "dp_cp_inter": "dp_cp",
    "expt_dp_intra": "expt_dp",
    "expt_dp_inter": "expt_dp",
}
GROUP_NAMES = (*NAMED_AXES, "embd", *SLICED, *CLONED)
"""Every named group but `control`, in the order in which communicators are created."""


def axes_of(name: str) -> tuple[str, ...]:
    """The axes that a group runs along, as its name says; `embd` and the like give themselves."""
    name = CLONED.get(name, name)
    return NAMED_AXES.get(SLICED.get(name, name)) or tuple(name.split("-"))


def runs_along_data(name: str) -> bool:
    """Whether a group is over data ranks, and so has a communicator of its own.

    Gradients and parameters travel on it while the model computes. Their collectives have no fixed
    place among those of other groups: a gradient may come later on one rank, or not at all.
    """
    return not {"dp", "expt_dp", "intra_dist_opt"}.isdisjoint(axes_of(name))


ALIASES: Mapping[str, str] = {
    "tensor_model_parallel": "tp",
    "pipeline_model_parallel": "pp",
    "context_parallel": "cp",
    "data_parallel": "dp",
    "data_parallel_with_cp": "dp_cp",
    "model_parallel": "mp",
    "embedding": "embd",
    "position_embedding": "pos_embd",
    "tensor_and_context_parallel": "tp_cp",
    "tp_dp": "tp-dp",
    "tensor_and_data_parallel": "tp-dp",
    "tp_dp_cp": "tp-cp-dp",
    "tensor_and_data_parallel_with_cp": "tp-cp-dp",
    "expert_model_parallel": "ep",
    "expert_tensor_parallel": "expt_tp",
    "expert_data_parallel": "expt_dp",
    "ep_dp": "expt_dp",
    "expert_tensor_and_model_parallel": "tp_ep",
    "expert_tensor_model_pipeline_parallel": "tp_ep_pp",
    "expt_tp_pp": "expt_tp-pp",
    "intra_dp_cp": "dp_cp_intra",
    "intra_expt_dp": "expt_dp_intra",
    "intra_distributed_optimizer_instance": "intra_dist_opt",
    "inter_distributed_optimizer_instance": "inter_dist_opt",
}
"""Names that other code has for groups, mostly Megatron's. One that is not here is its own."""


def _ends(pipeline: tuple[int, ...]) -> tuple[int, ...]:
    """Its first and its last stage."""
    return pipeline if len(pipeline) <= 2 else (pipeline[0], pipeline[-1])


def _first(pipeline: tuple[int, ...]) -> tuple[int, ...]:
    """Its first stage."""
    return pipeline[:1]


STAGES = {"embd": _ends, "pos_embd": _first}
"""Which ranks of a pipeline hold what: by the token of the group."""
