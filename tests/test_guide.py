"""The programs of guide and README run as printed, and so do the short ones of other pages."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import holdfast
from holdfast.foreign import open_catalog
from tests import programs

DOCS = Path(__file__).parent.parent / "docs"
GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"


def last_words(text: str) -> dict[str, str]:
    """What each rank prints at its end; ranks may share one pipe, and one may interrupt another."""
    return dict(re.findall(r"(rank \d+): (step \d+, loss \d+\.\d{9})", text))


def launch(program: str, num_ranks: int, root: Path, steps: int) -> dict[str, str]:
    """Run the program; each rank's last words."""
    outputs = programs.launch(program, root, steps, num_ranks=num_ranks, directory=root.parent)
    return last_words("".join(outputs))


def printed(name: str) -> str:
    """The guide's program of that name."""
    program = re.search(rf"guide: {name} -->\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert program is not None
    assert len([line for line in program[1].splitlines() if line.strip()]) < 40
    return program[1]


@pytest.mark.slow
def test_the_guide_trains_resumes_and_changes_layout(tmp_path: Path) -> None:
    program = printed("begin")
    straight = launch(program, 4, tmp_path / "a", 10)
    assert len(straight) == 4
    assert all(words.startswith("step 10, ") for words in straight.values())
    launch(program, 4, tmp_path / "b", 5)
    assert launch(program, 4, tmp_path / "b", 10) == straight
    launch(program, 4, tmp_path / "c", 5)
    other = launch(program, 2, tmp_path / "c", 10)
    loss = float(straight["rank 0"].split("loss ")[1])
    assert float(other["rank 0"].split("loss ")[1]) == pytest.approx(loss, rel=1e-5)


README = Path(__file__).parent.parent / "README.md"
IN_THE_README = """
import sys, torch, torch.distributed as dist, holdfast
dist.init_process_group("gloo")
total_steps = int(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
"""
ONE_STEP = """
            print("rank", groups.rank, "makes", progress["step"], end=";", flush=True)
            model(torch.randn(2, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
"""


def test_what_the_readme_prints_goes_on_where_it_was(tmp_path: Path) -> None:
    block = re.search(r"## In your own loop\n\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    program, places = re.subn(r"\n +\.\.\. +# one step.*\n", ONE_STEP, block[1])
    assert places == 1  # the other one is the model, which is made here beforehand
    for stop, steps in ((2, ["0", "1"]), (4, ["2", "3"])):
        outputs = programs.launch(IN_THE_README + program, stop, num_ranks=2, directory=tmp_path)
        for rank in range(2):
            assert re.findall(rf"rank {rank} makes (\d+);", "".join(outputs)) == steps


@pytest.mark.slow
def test_whole_and_sharded_optimizers_go_on_from_each_other(tmp_path: Path) -> None:
    whole, sharded = printed("begin"), printed("sharded begin")
    straight = launch(whole, 4, tmp_path / "a", 15)
    launch(whole, 4, tmp_path / "b", 5)
    launch(sharded, 4, tmp_path / "b", 10)
    mixed = launch(whole, 2, tmp_path / "b", 15)
    loss = float(straight["rank 0"].split("loss ")[1])
    assert float(mixed["rank 0"].split("loss ")[1]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_torchrun_runs_the_guide_as_it_is_printed(tmp_path: Path) -> None:
    """The command in the guide, in processes of torchrun; it does what the tests' ranks do."""
    script = tmp_path / "train.py"
    script.write_text(printed("begin"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", "2", str(script), str(tmp_path / "a"), "10"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert last_words(done.stdout) == launch(script.read_text(), 2, tmp_path / "b", 10)


def blocks(page: str) -> list[str]:
    """Return the Python on a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


FRAGMENTS = {
    "getting-started.md": [0],
    "guide.md": [1, 2],
    "view.md": [0],
    "object-stores.md": [0],
    "formats.md": [0, 1],
    "name-maps.md": [0],
}
"""Programs that need nothing but the names below; by page, their places on it."""
ELSEWHERE = {
    "guide.md": 2,  # above
    "recipes.md": 7,  # tests/test_recipes.py
    "fsdp.md": 1,  # tests/test_fsdp_page.py
    "multi-module.md": 1,  # tests/test_multi_module_page.py
    "rerun.md": 3,  # tests/test_rerun_page.py
}
"""Programs that other tests run, by page."""


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A trained model in an empty directory, under the names that the pages use."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": holdfast.OptimizerState(optimizer, model)}
    with holdfast.ProcessGroups.single() as groups, holdfast.Checkpointer("x") as checkpointer:
        public = {name: getattr(holdfast, name) for name in holdfast.__all__}
        yield {
            "__name__": "page", "holdfast": holdfast, "torch": torch, **public, "groups": groups,
            "checkpointer": checkpointer, "model": model, "optimizer": optimizer, "state": state,
            "step": 3,
        }  # fmt: skip


def execute(page: str, place: int, names: dict[str, Any], *, until: str = "\0") -> dict[str, Any]:
    """Run a fragment, up to a line that starts with `until`; return its names."""
    own = dict(names)
    exec(compile(blocks(page)[place].split(f"\n{until}")[0], page, "exec"), own)
    return own


def test_every_program_on_a_page_is_run() -> None:
    """Those of the integrations have marks, by which their tests find them."""
    counts = {page.name: len(blocks(page.name)) for page in DOCS.glob("*.md")}
    run = {page: len(FRAGMENTS.get(page, ())) + ELSEWHERE.get(page, 0) for page in counts}
    assert counts == run
    for page in (DOCS / "integrations").glob("*.md"):
        text = page.read_text()
        assert text.count("```python") == len(re.findall(r": begin -->\n```python", text)), page


def test_getting_started_trains_and_is_started_again(names: dict[str, Any]) -> None:
    assert execute("getting-started.md", 0, {})["progress"] == {"step": 100}
    assert execute("getting-started.md", 0, {})["progress"] == {"step": 100}
    with holdfast.Checkpointer("checkpoints") as checkpointer:
        assert checkpointer.steps() == list(range(10, 101, 10))


def test_the_fragments_of_the_guide_save(names: dict[str, Any]) -> None:
    names["checkpointer"].save(1, execute("guide.md", 1, names)["state"])
    progress = {"step": 0}
    state = {**names["state"], "progress": progress}
    loop = names | {"state": state, "progress": progress, "total_steps": 4, "root": "loop"}
    execute("guide.md", 2, loop)
    with holdfast.Checkpointer("loop") as checkpointer:
        assert checkpointer.steps() == [4]


def test_the_log_of_a_run_and_a_bucket_are_written(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute("view.md", 0, names)
    assert '"event":"save"' in Path("runs/a/events/00000.jsonl").read_text()
    monkeypatch.setitem(
        names, "Checkpointer", lambda url: holdfast.Checkpointer(Path(url.split("//")[1]))
    )
    execute("object-stores.md", 0, names)
    assert Path("bucket/team/run/iter_0000003/manifest.json").is_file()


def test_the_formats_are_read_and_written(names: dict[str, Any]) -> None:
    Path("path/to/folder").mkdir(parents=True)
    saved = {name: value.detach() + 1 for name, value in names["model"].state_dict().items()}
    safetensors.torch.save_file(saved, "path/to/folder/model.safetensors")
    assert not execute("formats.md", 0, names)["report"].is_verified
    assert torch.equal(names["model"].weight, saved["weight"])
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    target = {"model": {name: torch.zeros_like(value) for name, value in saved.items()}}
    more = {"state_dict": target, "dcp_to_torch_save": dcp_to_torch_save}
    execute("formats.md", 1, names | more, until="tensors =")  # the rest is Megatron's
    assert torch.equal(target["model"]["weight"], saved["weight"])
    assert torch.load("all.pt")["model"].keys() == saved.keys()


def test_a_preset_maps_a_folder_and_back(tmp_path: Path) -> None:
    """As on the page of name maps."""
    shapes = {
        "model.embed_tokens": (8, 64), "lm_head": (8, 64), "model.norm": (64,),
        "layers.0.input_layernorm": (64,), "layers.0.post_attention_layernorm": (64,),
        **{f"layers.0.self_attn.{name}_proj": (64, 64) for name in "qkvo"},
        **{f"layers.0.mlp.{name}_proj": (96, 64) for name in ("gate", "up")},
        "layers.0.mlp.down_proj": (64, 96),
    }  # fmt: skip
    tensors = {
        f"{'model.' if name.startswith('layers') else ''}{name}.weight": torch.rand(shape)
        for name, shape in shapes.items()
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    names = execute("name-maps.md", 0, {"catalog": open_catalog(tmp_path)})
    mapped = names["mapped"].catalog
    assert "model.decoder.layers.0.mlp.linear_fc1.weight" in mapped.tensors
    returned = names["back"].apply(mapped, variables={"num_heads": 32}).catalog
    assert returned.tensors.keys() == {f"model.{name}" for name in tensors}
