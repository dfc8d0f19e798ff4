"""DeepSpeed's ZeRO: weights and optimizer by parameter, strictly, and nothing of it is run.

`golden/zero` was written by DeepSpeed 0.19.8 on CPUs: AdamW with two groups, a tied head, frozen
parameters, buffers. Next to each run is what its own `zero_to_fp32` returns, of the weights and, by
putting them in the place of the weights, of the moments. `write` makes others after that layout.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from holdfast import Checkpointer, ConfigError, CorruptionError, ModuleState, OptimizerState
from holdfast.cli.main import main
from holdfast.foreign import open_catalog
from tests.foreign.contract import check_catalog, check_format

GOLDEN = Path(__file__).parent / "golden" / "zero"
RUNS = [path.stem for path in sorted(GOLDEN.glob("*.safetensors"))]


def expected_of(run: str) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """What DeepSpeed's own script makes of a run: weights, and moments by parameter."""
    weights: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(GOLDEN / f"{run}.safetensors").items():
        entry, _, name = key.partition(":")
        if entry == "model":
            weights[name] = tensor
        else:
            state.setdefault(name, {})[entry] = tensor
    return weights, state


@pytest.mark.parametrize("run", RUNS)
def test_what_deepspeed_wrote(tmp_path: Path, run: str) -> None:
    """X30: weights, moments, steps, groups and values; what is not read is named."""
    weights, state = expected_of(run)
    report = Checkpointer(tmp_path / "none").load_all(source=GOLDEN / run)
    model, optimizer = report.values["model"], report.values["optimizer"]
    if run == "bf16":
        # Of stage 1 the script loses what is frozen; all runs started from the same values.
        frozen = {n: each for n, each in expected_of("stage2")[0].items() if "frozen" in n}
        assert not set(frozen) & set(weights)
        weights |= frozen
    assert sorted(model) == sorted(weights)
    for name, tensor in weights.items():
        # The script makes float32 of buffers.
        assert torch.equal(model[name].to(tensor.dtype), tensor), name
    assert sorted(optimizer["state"]) == sorted(state)
    for name, entries in state.items():
        own = dict(optimizer["state"][name])
        assert own.pop("step") == 3
        assert sorted(own) == sorted(entries)
        assert all(torch.equal(own[entry], tensor) for entry, tensor in entries.items()), name
    assert [group["weight_decay"] for group in optimizer["groups"]] == [0.1, 0.0]
    assert optimizer["membership"] == {name: int(weights[name].ndim < 2) for name in state}
    assert report.values["epoch"] == 3
    assert open_catalog(GOLDEN / run / "global_step3").step == 3
    assert any(each.startswith("values of ranks 1 to ") for each in report.left_out)


def test_verify_compares_the_checksums_of_all_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(GOLDEN / RUNS[0], tmp_path / "run")
    assert main(["verify", str(tmp_path / "run")]) == 0
    catalog = open_catalog(tmp_path / "run")
    payload: Any = catalog.tensors["optimizer.state.l1.weight.exp_avg"].chunks[-1].payload
    path = tmp_path / "run" / "global_step3" / payload.file
    data = bytearray(path.read_bytes())
    data[payload.start] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert payload.file in capsys.readouterr().out


class Model(nn.Module):
    """The model of the golden runs."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 7)
        self.l1, self.bn = nn.Linear(7, 13), nn.LayerNorm(13)
        self.l2, self.head = nn.Linear(13, 7, bias=False), nn.Linear(7, 11, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(13))
        self.head.weight = self.emb.weight


def test_training_goes_on_from_it(tmp_path: Path) -> None:
    """X30: a model and an optimizer of PyTorch load from the sub-groups of stage 3."""
    weights, state = expected_of("stage3")
    model = Model()
    model.frozen.bfloat16()
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    groups = [
        [each for _, each in named if (each.ndim > 1) is is_matrix] for is_matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW([{"params": each} for each in groups])
    parts = {"model": ModuleState(model), "optimizer": OptimizerState(optimizer, model)}
    Checkpointer(tmp_path / "none").load(parts, source=GOLDEN / "stage3", ignore_unexpected=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.to(weights[name].dtype), weights[name]), name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for name, each in named:
        assert torch.equal(optimizer.state[each]["exp_avg_sq"], state[name]["exp_avg_sq"])
        assert optimizer.state[each]["step"] == 3


@pytest.mark.slow
def test_a_run_under_every_layout(tmp_path: Path) -> None:
    """X1: each rank reads the runs of flat tensors that it needs."""
    weights, _ = expected_of("stage2")
    stored = Checkpointer(tmp_path / "none").load_all(source=GOLDEN / "stage2").values["model"]
    assert sorted(stored) == sorted(weights)
    shutil.copytree(GOLDEN / "stage2" / "global_step3", tmp_path / "run")
    check_format(tmp_path / "run", "model", stored)


# ---- made after the layout ----

Edit = Callable[[dict[str, Any]], object]


def flat(tensors: Sequence[torch.Tensor], paddings: Sequence[int]) -> torch.Tensor:
    pieces = zip(tensors, paddings, strict=True)
    return torch.cat(
        [torch.cat([t.reshape(-1), torch.zeros(n)]) for t, n in pieces] or [torch.zeros(0)]
    )


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    stage: int,
    num_ranks: int,
    paddings: Sequence[int] | None = None,
    edit: Edit = lambda files: None,
) -> Path:
    """Write one group of parameters, with a moment that is minus the weights."""
    shapes = {name: each.shape for name, each in tensors.items()}
    model = {
        "module": {name: torch.zeros(0) for name in tensors},
        "param_shapes": [shapes],
        "buffer_names": [],
        "shared_params": {},
        "global_steps": 9,
    }
    files: dict[str, Any] = {}
    for rank in range(num_ranks):
        state: dict[str, Any] = {"zero_stage": stage, "partition_count": num_ranks}
        if stage == 3:
            runs = []
            for each in tensors.values():
                size = -(-each.numel() // num_ranks)
                whole = torch.cat([each.reshape(-1), torch.zeros(size * num_ranks - each.numel())])
                runs.append(whole[rank * size : (rank + 1) * size])
            own = flat(runs, [0] * len(runs))
            moment = -own
        else:
            is_last = rank == num_ranks - 1
            whole = flat([*tensors.values()], paddings or [0] * len(tensors))
            size = -(-whole.numel() // (2 * num_ranks)) * 2
            padded = torch.cat([whole, torch.zeros(size * num_ranks - whole.numel())])
            own = padded[rank * size : (rank + 1) * size].clone()
            moment = -own
            if is_last:
                own = own[: max(size - (len(padded) - len(whole)), 0)].clone()
            state["partition_count"] = [num_ranks]
            state["group_paddings"] = [len(padded) - len(whole) if is_last else 0]
            if paddings:
                state["param_alignment_paddings"] = [list(paddings)]
        base = {
            "state": {0: {"step": torch.tensor(9.0), "exp_avg": moment}},
            "param_groups": [{"lr": 0.5, "params": [0]}],
        }
        key, base_key = (
            ("fp32_flat_groups", "optimizer_state_dict")
            if stage == 3
            else ("single_partition_of_fp32_groups", "base_optimizer_state")
        )
        state |= {key: [own], base_key: base, "loss_scaler": None}
        files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer_state_dict": state}
        if stage == 3:
            files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = {**model}
    if stage != 3:
        files["mp_rank_00_model_states.pt"] = model
    edit(files)
    folder.mkdir(parents=True)
    for name, value in files.items():
        torch.save(value, folder / name)
    return folder


@pytest.mark.parametrize("seed", range(6))
def test_any_shapes_and_ranks(tmp_path: Path, seed: int) -> None:
    """X30: parameters across partitions, 0-d, empty; a last rank that has nothing but padding."""
    draw = np.random.default_rng(seed)
    for stage in (1, 2, 3):
        num_ranks = int(draw.integers(1, 6))
        shapes = [
            tuple(map(int, draw.integers(0 if draw.random() < 0.1 else 1, 6, draw.integers(0, 4))))
            for _ in range(int(draw.integers(1, 7)))
        ]
        tensors = {f"p.{i}": torch.rand(shape) for i, shape in enumerate(shapes)}
        paddings = (
            [int(n) for n in draw.integers(0, 4, len(shapes))] if draw.random() < 0.5 else None
        )
        folder = write(
            tmp_path / str(stage), tensors, stage=stage, num_ranks=num_ranks, paddings=paddings
        )
        check_catalog(folder, "model", tensors)
        values = Checkpointer(tmp_path / "none").load_all(source=folder).values
        for name, tensor in tensors.items():
            entries = values["optimizer"]["state"][name]
            assert torch.equal(entries["exp_avg"], -tensor)
            assert entries["step"] == 9


def in_optimizer(rank: int, change: Edit) -> Edit:
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    return lambda files: change(files[name]["optimizer_state_dict"])


def in_model(change: Edit) -> Edit:
    return lambda files: change(next(each for n, each in files.items() if "model_states" in n))


def cut(key: str) -> Edit:
    return lambda state: state.update({key: [state[key][0][:-1].clone()]})


PARTITION, CUT = "single_partition_of_fp32_groups", "fp32_flat_groups"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
LIES: dict[str, tuple[int, Edit, str]] = {
    "a rank is missing": (2, lambda f: f.pop(OPTIM.format(1)), "files of ranks 1 are missing"),
    "the last rank is missing": (
        2,
        lambda f: f.pop(OPTIM.format(2)),
        "saved by 3 ranks, and there are 2",
    ),
    "a rank of another save": (
        2,
        lambda f: f.update({f"bf16_{OPTIM.format(0)}": f[OPTIM.format(0)]}),
        "of two saves",
    ),
    "model parallel": (
        2,
        lambda f: f.update({"mp_rank_01_model_states.pt": {}}),
        "model parallelism, a pipeline or experts is not read; load it with DeepSpeed",
    ),
    "a pipeline": (2, lambda f: f.update({"layer_00-model_states.pt": {}}), "a pipeline"),
    "no model state of a rank": (
        3,
        lambda f: f.pop("zero_pp_rank_1_mp_rank_00_model_states.pt"),
        "zero_pp_rank_1_mp_rank_00_model_states.pt is missing",
    ),
    "a short partition": (2, in_optimizer(1, cut(PARTITION)), "not equal runs of one flat tensor"),
    "a short part": (3, in_optimizer(1, cut(CUT)), "each rank's part of the parameters"),
    "a shape too large": (
        2,
        in_model(lambda m: m["param_shapes"][0].update(w=torch.Size([2**40]))),
        "its partitions have",
    ),
    "a shape too small": (
        1,
        in_model(lambda m: m["param_shapes"][0].update(w=torch.Size([4]))),
        "its partitions have",
    ),
    "another shape of the module": (
        2,
        in_model(lambda m: m["module"].update(v=torch.zeros(6, 4))),
        r"'v' is \[6, 4\] in the module, and \[4, 6\] in the optimizer",
    ),
    "a group too many": (2, in_model(lambda m: m["param_shapes"].append({})), "2 groups"),
    "other shapes on a rank": (
        3,
        in_model(
            lambda m: m.update(param_shapes=[{"v": torch.Size([4, 6]), "w": torch.Size([5])}])
        ),
        "state different param_shapes",
    ),
    "an odd stage": (2, in_optimizer(0, lambda s: s.update(zero_stage=7)), "one stage"),
    "two stages": (2, in_optimizer(2, lambda s: s.update(zero_stage=1)), "one stage"),
    "experts": (
        3,
        in_optimizer(0, lambda s: s.update(ds_zero_partition_groups=[])),
        "cut over other ranks",
    ),
    "two types": (
        2,
        in_optimizer(1, lambda s: s.update({PARTITION: [s[PARTITION][0].double()]})),
        "several element types",
    ),
    "a partition with strides": (
        2,
        in_optimizer(0, lambda s: s.update({PARTITION: [s[PARTITION][0][::2]]})),
        "not a flat tensor",
    ),
    "a text": (2, in_optimizer(0, lambda s: s.update({PARTITION: ["x"]})), "not a flat tensor"),
    "frozen without values": (
        3,
        in_model(lambda m: m["module"].update(frozen=torch.zeros(0))),
        "the values of frozen are in no file",
    ),
    "another step on a rank": (
        2,
        in_optimizer(
            2, lambda s: s["base_optimizer_state"]["state"][0].update(step=torch.tensor(10.0))
        ),
        "step of w, v: it differs between the files of the ranks",
    ),
    "another step of a rank's settings": (
        2,
        lambda f: [
            f[OPTIM.format(rank)]["optimizer_state_dict"]["base_optimizer_state"].update(
                state={0: {}}, param_groups=[{"params": [0], "step": 9 - rank}]
            )
            for rank in range(3)
        ],
        "step of w, v: it differs between the files of the ranks",
    ),
    "another step of a rank's model state": (
        3,
        in_model(lambda m: m.update(global_steps=4)),
        r"of the steps \[4, 9\], so of several saves",
    ),
    "groups of others": (
        2,
        in_optimizer(0, lambda s: s["base_optimizer_state"]["param_groups"][0].update(params=[4])),
        "not those of its partitions",
    ),
    "paddings that lie": (
        2,
        in_optimizer(0, lambda s: s.update(param_alignment_paddings=[[-3, 3]])),
        "not a checkpoint of ZeRO",
    ),
    "no module": (2, in_model(lambda m: m.update(module=None)), "module is not a dict"),
}


@pytest.mark.parametrize("lie", LIES)
def test_files_that_lie_are_refused(tmp_path: Path, lie: str) -> None:
    """X30: what is missing, of another save, or contradicts itself is never read as a model."""
    stage, edit, message = LIES[lie]
    tensors = {"w": torch.rand(5), "v": torch.rand(4, 6)}
    folder = write(tmp_path / "step", tensors, stage=stage, num_ranks=3, edit=edit)
    with pytest.raises(CorruptionError, match=message):
        open_catalog(folder)


def test_a_value_never_takes_the_place_of_a_weight(tmp_path: Path) -> None:
    """X30: a part `model.w` of the user's has the path of the weight `w`."""
    own = torch.ones(5)
    edit = in_model(lambda m: m.update({"model.w": own, "model": 3, "other": own}))
    tensors = {"w": torch.rand(5)}
    folder = write(tmp_path / "step", tensors, stage=2, num_ranks=2, edit=edit)
    check_catalog(folder, "model", tensors)
    catalog = open_catalog(folder)
    assert catalog.parts["model_common"] == 3
    values = Checkpointer(tmp_path / "none").load_all(source=folder).values
    # It was left out, and the tensor that is tied to it was the weight.
    assert torch.equal(values["other"], own)
    assert values["other"] is values["model.w_common"]


def test_state_that_has_no_element_for_each_of_the_parameter_is_named(tmp_path: Path) -> None:
    """X4: one entry of an optimizer that cannot be read does not take the others along."""

    def edit(files: dict[str, Any]) -> None:
        for rank in range(2):
            entries = files[OPTIM.format(rank)]["optimizer_state_dict"]["base_optimizer_state"]
            entries["state"][0] |= {"row": torch.ones(3), "count": rank, "step": 9}
            entries["state"][0] |= {"scale": torch.tensor(float(rank)), "beta": torch.tensor(0.5)}

    tensors = {"w": torch.rand(5), "v": torch.rand(4, 6)}
    folder = write(tmp_path / "step", tensors, stage=2, num_ranks=2, edit=edit)
    report = Checkpointer(tmp_path / "none").load_all(source=folder)
    state = report.values["optimizer"]["state"]
    assert {name: sorted(each) for name, each in state.items()} == {
        name: ["beta", "exp_avg", "step"] for name in tensors
    }
    assert state["w"]["step"] == 9
    for entry in ("row", "count", "scale"):
        assert any(each.startswith(f"optimizer: {entry} of w, v: ") for each in report.left_out)
    assert math.prod(state["v"]["exp_avg"].shape) == 24


def test_where_a_step_is_found(tmp_path: Path) -> None:
    """X4: a run without `latest` names its steps; files of another stage in a step are named."""
    tensors = {"w": torch.rand(5)}
    step = write(tmp_path / "run" / "global_step7", tensors, stage=2, num_ranks=2)
    with pytest.raises(ConfigError, match=r"holds some: name global_step7 \(DeepSpeed ZeRO\)"):
        open_catalog(tmp_path / "run")
    stray = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save({}, step / stray)
    torch.save({}, step / "extra.pt")
    for name in ("../run/global_step7", "global_step8", ""):
        (tmp_path / "run" / "latest").write_text(name)
        with pytest.raises(ConfigError):
            open_catalog(tmp_path / "run")
    (tmp_path / "run" / "latest").write_text("global_step7\n")
    catalog = open_catalog(tmp_path / "run")
    assert catalog.label == str(step)
    notes = " ".join(catalog.left_out)
    assert f"{stray}: it is not of this save" in notes
    assert "extra.pt: name this file to read it" in notes
