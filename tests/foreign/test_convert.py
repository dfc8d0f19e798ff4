"""`holdfast convert`: streamed, proven, named last; nothing half-written ever has the name."""

from __future__ import annotations

import gc
import json
import os
import signal
import tracemalloc
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from holdfast import RNG, Checkpointer, CorruptionError, OptimizerState, StorageError
from holdfast.arrays.boxes import Box
from holdfast.cli.commands.convert import parse_size
from holdfast.errors import ConfigError
from holdfast.foreign import output as output_module
from holdfast.foreign.catalog import Catalog, CatalogTensor, Chunk, FileBytes, HeldBytes
from holdfast.foreign.convert import ConvertOptions, TargetFormat, open_any, plan_conversion
from holdfast.format.dtypes import TORCH_DTYPES
from holdfast.format.names import INDEX, MANIFEST, list_steps
from holdfast.format.values import tensor_node
from holdfast.storage import PosixStorage
from tests.cli.conftest import Holdfast, holdfast
from tests.crash.boundaries import BROKEN, FULL, Act, Boundaries
from tests.foreign.contract import check_format, raw, sample_tensors
from tests.foreign.name_map_oracle import read

__all__ = ["holdfast"]


def save_own(root: Path, tensors: dict[str, torch.Tensor], step: int = 7) -> None:
    """Save tensors, values and a tie as a checkpoint of our own."""
    state = {"model": {**tensors, "tied": tensors["half"]}, "args": {"lr": 0.1, "when": (1, 2)}}
    with Checkpointer(root) as checkpointer:
        checkpointer.save(step, state, metadata={"why": "test"})


def test_there_and_back_equals_the_source(holdfast: Holdfast, tmp_path: Path) -> None:
    tensors = sample_tensors()
    save_own(tmp_path / "run", tensors)
    to = tmp_path / "hf"
    done = holdfast("convert", tmp_path / "run", to, "--to", "huggingface", "--json")
    assert done.code == 0, done.err
    assert done.json["left_out"] == [
        "part 'args' was not asked for",
        "the number of the step, 7, is left out; a folder named iter_0000007 states it",
    ]
    assert done.json["num_tensors"] == len(tensors) + 1  # with the tie, and the empty one
    check_format(to, "model", {**tensors, "tied": tensors["half"]})
    back = holdfast("convert", to, tmp_path / "again", "--to", "holdfast")
    assert back.code == 0, back.err
    assert "compared with the source" in back.out
    values = Checkpointer(tmp_path / "again").load_all().values["model"]
    assert {name: raw(each) for name, each in values.items()} == {
        name: raw(each) for name, each in {**tensors, "tied": tensors["half"]}.items()
    }
    assert holdfast("verify", tmp_path / "again").code == 0
    assert (tmp_path / "again/latest_checkpointed_iteration.txt").read_text() == "0\n"


def test_our_own_format_keeps_everything(holdfast: Holdfast, tmp_path: Path) -> None:
    save_own(tmp_path / "run", sample_tensors())
    done = holdfast("convert", tmp_path / "run", tmp_path / "copy", "--to", "holdfast")
    assert done.code == 0, done.err
    assert holdfast("diff", tmp_path / "run", tmp_path / "copy").code == 0
    report = Checkpointer(tmp_path / "copy").load_all()
    assert (report.step, report.metadata) == (7, {"why": "test"})
    assert report.values["args"] == {"lr": 0.1, "when": (1, 2)}
    assert report.values["model"]["tied"] is report.values["model"]["half"]


def test_a_folder_is_split_and_carries_its_config(holdfast: Holdfast, tmp_path: Path) -> None:
    save_own(tmp_path / "run", sample_tensors())
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text("{}")
    (config / "tokenizer.json").write_text("[]")
    (config / "model.safetensors").write_text("old weights")
    words = ("--max-shard-size", "1kB", "--config-from", config)
    done = holdfast("convert", tmp_path / "run", tmp_path / "hf", "--to", "huggingface", *words)
    assert done.code == 0, done.err
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= set(names)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "hf" / file)
    shards = [load_file(path) for path in sorted((tmp_path / "hf").glob("model-*"))]
    assert sum(map(len, shards)) == len(index["weight_map"]) == len(sample_tensors()) + 1
    for shard in shards:
        assert len(shard) == 1 or sum(each.nbytes for each in shard.values()) <= 1000


def test_a_dry_run_writes_nothing(holdfast: Holdfast, tmp_path: Path) -> None:
    save_own(tmp_path / "run", sample_tensors())
    done = holdfast(
        "convert", tmp_path / "run", tmp_path / "hf", "--to", "huggingface", "--dry-run"
    )
    assert done.code == 0
    assert "model.safetensors" in done.out
    assert "would be written" in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_exists_is_never_overwritten(holdfast: Holdfast, tmp_path: Path) -> None:
    save_own(tmp_path / "run", sample_tensors())
    (tmp_path / "hf").mkdir()
    done = holdfast("convert", tmp_path / "run", tmp_path / "hf", "--to", "huggingface")
    assert (done.code, list((tmp_path / "hf").iterdir())) == (2, [])
    assert "exists already" in done.err
    done = holdfast("convert", tmp_path / "run", tmp_path / "run", "--to", "holdfast")
    assert done.code == 2
    assert "iter_0000007 exists already" in done.err


def test_a_tensor_without_a_name_of_its_own_is_never_dropped(
    holdfast: Holdfast, tmp_path: Path
) -> None:
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, tmp_path / "clash.pt")
    torch.save([torch.ones(1), torch.ones(2)], tmp_path / "list.pt")
    torch.save({"w": torch.ones(1), "rest": [torch.ones(2)]}, tmp_path / "rest.pt")
    for name, why in (
        ("clash", "two tensors would have the name 'a.b', as ('a.b',) and as ('a', 'b')"),
        ("list", "its tensors (2)"),
    ):
        done = holdfast("convert", tmp_path / f"{name}.pt", tmp_path / "hf", "--to", "huggingface")
        assert (done.code, (tmp_path / "hf").exists()) == (2, False)
        assert why in done.err
    words = ("--to", "huggingface", "--json")
    torch.save({"a.b": {"c": torch.ones(1)}, "a": {"b": {"c": torch.ones(2)}}}, tmp_path / "two.pt")
    done = holdfast(
        "convert", tmp_path / "two.pt", tmp_path / "again.pt", "--whole-tree", "--to", "torch_save"
    )
    assert done.code == 0, done.err
    two = torch.load(tmp_path / "again.pt")
    assert [two["a.b"]["c"].numel(), two["a"]["b"]["c"].numel()] == [1, 2]
    done = holdfast("convert", tmp_path / "rest.pt", tmp_path / "hf", *words)
    assert done.json["num_tensors"] == 1
    assert "no names for its tensors (1)" in done.json["left_out"][0]


def test_a_folder_of_another_program_does_not_become_a_run(
    holdfast: Holdfast, tmp_path: Path
) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    done = holdfast("convert", tmp_path, tmp_path, "--to", "holdfast")
    assert done.code == 2
    assert "would hide" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(("to", "options"), [("dcp", []), ("torch_save", ["--whole-tree"])])
def test_pytorchs_formats_keep_everything(
    holdfast: Holdfast, tmp_path: Path, to: str, options: list[str]
) -> None:
    tensors = sample_tensors()
    save_own(tmp_path / "run", tensors)
    words = ("--to", to, "--json", *options)
    done = holdfast("convert", tmp_path / "run", tmp_path / "out", *words)
    assert done.code == 0, done.err
    assert done.json["num_tensors"] == len(tensors) + (to == "dcp")  # there a tie is two tensors
    back = holdfast("convert", tmp_path / "out", tmp_path / "again", "--to", "holdfast")
    assert back.code == 0, back.err
    values = Checkpointer(tmp_path / "again").load_all().values
    assert values["args"] == {"lr": 0.1, "when": (1, 2)}
    assert {name: raw(each) for name, each in values["model"].items()} == {
        name: raw(each) for name, each in {**tensors, "tied": tensors["half"]}.items()
    }


def test_what_a_format_has_no_place_for_is_listed_once(holdfast: Holdfast, tmp_path: Path) -> None:
    """X4: classes, tags and the number of a step were lost without a word."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    state = {"model": model, "optimizer": OptimizerState(optimizer, model), "rng": RNG()}
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(7, state, metadata={"why": "test"})
    assert holdfast("tag", tmp_path / "run", 7, "best").code == 0
    versions = "the versions of modules are left out: model.1 (2)"
    kinds = "the classes of objects are left out: optimizer.groups.0 (torch.optim.sgd:SGD); "
    rng, words = "rng is left out: it is a value per rank", "the user's metadata is left out: why"
    step, tags = (
        "the number of the step, 7, is left out",
        "tags of the step, which its root has: best",
    )
    others = [f"part {name!r} was not asked for" for name in ("optimizer", "rng")]
    expected = {
        ("huggingface", "hf"): [*others, versions, step, tags],
        ("dcp", "dcp"): [rng, "optimizer.state is", versions, kinds, words, step, tags],
        ("dcp", "iter_0000007"): [rng, "optimizer.state is", versions, kinds, words, tags],
        ("torch_save", "all.pt", "--whole-tree"): [rng, kinds, words, step, tags],
        ("torch_save", "one.pt"): [*others, words, step, tags],
        ("holdfast", "copy"): [tags],
    }
    for (to, name, *options), starts in expected.items():
        args = ("convert", tmp_path / "run", tmp_path / name, "--to", to, "--json", "--dry-run")
        found = holdfast(*args, *options).json
        if to == "torch_save":  # of a format that is one file, the file that is made
            assert [file["name"] for file in found["files"]] == [name]
        left_out = found["left_out"]
        assert [
            each for each, start in zip(left_out, starts, strict=True) if not each.startswith(start)
        ] == [], left_out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["huggingface", "--whole-tree"], "cannot be written as huggingface"),
        (["dcp", "--parts", "model"], "cannot be chosen"),
        (["torch_save", "--whole-tree", "--parts", "model"], "cannot be chosen"),
        (["torch_save", "--flat-optimizer"], "no flat form"),
        (["holdfast", "--flat-optimizer"], "no flat form"),
        (["dcp", "--config-from", "."], "no place for the files"),
        (["safetensors", "--max-shard-size", "1GB"], "cannot be chosen for safetensors"),
        (["huggingface", "--max-shard-size", "0GB"], "files of 0 bytes"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    holdfast: Holdfast, tmp_path: Path, words: list[str], why: str
) -> None:
    save_own(tmp_path / "run", {"a": torch.ones(1), "half": torch.ones(1)})
    done = holdfast("convert", tmp_path / "run", tmp_path / "out", "--to", *words)
    assert done.code == 2
    assert why in done.err


@pytest.mark.parametrize("kind", get_args(TargetFormat))
def test_a_model_without_tensors_is_one(tmp_path: Path, kind: TargetFormat) -> None:
    save_file({}, tmp_path / "x.safetensors")
    with open_any(tmp_path / "x.safetensors") as catalog:
        plan_conversion(catalog, tmp_path / "out", ConvertOptions(to=kind)).run()
    with open_any(tmp_path / "out") as result:
        assert not result.tensors


def test_a_part_that_is_not_there_is_named(holdfast: Holdfast, tmp_path: Path) -> None:
    save_own(tmp_path / "run", sample_tensors())
    words = ("--to", "safetensors", "--parts", "modle")
    done = holdfast("convert", tmp_path / "run", tmp_path / "x", *words)
    assert done.code == 2
    assert "choose one with --parts: model" in done.err
    done = holdfast("convert", tmp_path / "nothing", tmp_path / "x", "--to", "safetensors")
    assert (done.code, "does not exist" in done.err) == (2, True)


@pytest.mark.parametrize("to", ["huggingface", "safetensors", "holdfast", "dcp", "torch_save"])
def test_a_flipped_bit_of_the_source_leaves_nothing(
    holdfast: Holdfast, tmp_path: Path, to: str
) -> None:
    save_own(tmp_path / "run", sample_tensors())
    (file,) = (tmp_path / "run").rglob("data/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    done = holdfast("convert", tmp_path / "run", tmp_path / "out/x", "--to", to)
    assert done.code == 1
    assert "model." in done.err
    left = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert left == []


@pytest.mark.parametrize("to", ["huggingface", "safetensors", "holdfast", "dcp", "torch_save"])
def test_bytes_that_change_on_their_way_are_noticed(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the disk gives back is compared with the source, and not what was handed to it."""
    save_file({"a": torch.arange(100.0)}, tmp_path / "x.safetensors")
    original = PosixStorage.rename_dir
    prove = output_module._Copier.prove

    def spoil(self: output_module._Copier, result: Catalog) -> None:
        (file,) = [
            path
            for path in tmp_path.rglob("*")
            if ".tmp-" in str(path)
            and path.is_file()
            and path.name not in (INDEX, MANIFEST, ".metadata")
        ]
        data = bytearray(file.read_bytes())
        data[data.index(raw(torch.arange(100.0))) + 9] ^= 1
        file.write_bytes(data)
        prove(self, result)

    monkeypatch.setattr(output_module._Copier, "prove", spoil)
    options = ConvertOptions(to=to)  # type: ignore[arg-type]
    with (
        open_any(tmp_path / "x.safetensors") as catalog,
        pytest.raises(CorruptionError),
    ):
        plan_conversion(catalog, tmp_path / "out/y", options).run()
    assert PosixStorage.rename_dir is original
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []


def convert_small(source: Path, to: Path, kind: TargetFormat) -> None:
    """Convert a small folder into several files, and carry its config along."""
    options = ConvertOptions(to=kind)
    if kind == "huggingface":
        options = ConvertOptions(to=kind, max_file_nbytes=1300, config_from=source)
    with open_any(source) as catalog:
        plan_conversion(catalog, to, options).run()


def succeeds(source: Path, folder: Path, kind: TargetFormat, boundaries: Boundaries) -> bool:
    """Convert with something done at a boundary; False if that made it fail."""
    with pytest.MonkeyPatch.context() as monkey:
        boundaries.install(monkey)
        try:
            convert_small(source, folder / "out", kind)
        except StorageError:
            return False
    return True


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    tensors = {"a": torch.arange(300.0), "b": torch.ones(2, 3), "none": torch.zeros(0, 3)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def is_whole(small: Path, folder: Path) -> bool:
    """True for an equal result; False if there is none, and nothing is left of it."""
    if not any(path.is_file() for path in folder.rglob("*")):
        return False
    with open_any(small) as source, open_any(folder / "out") as result:
        assert result.tensors.keys() == source.tensors.keys()
        for key in source.tensors:
            assert read(result, key).tobytes() == read(source, key).tobytes()
    return True


@pytest.mark.parametrize(
    ("kind", "act"),
    [
        pytest.param(kind, act, marks=() if kind in quick else pytest.mark.slow)
        for act, quick in ((FULL, ("huggingface",)), (BROKEN, ("safetensors", "holdfast")))
        for kind in get_args(TargetFormat)
    ],
)
def test_what_fails_at_any_call_leaves_nothing(
    tmp_path: Path, small: Path, kind: TargetFormat, act: Act
) -> None:
    """X3: a sync that failed after the rename left what was reported as not there."""
    results = []
    boundaries = Boundaries(act)
    while len(boundaries.names) >= boundaries.at:
        boundaries = Boundaries(act, at=boundaries.at + 1, torn=True)
        folder = tmp_path / str(boundaries.at)
        results.append(succeeds(small, folder, kind, boundaries))
        assert results[-1] == is_whole(small, folder), boundaries
    # When it is there durably no failure matters: of the pointer, of tidying up.
    assert results == sorted(results)
    assert results.count(False) > 10


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", get_args(TargetFormat))
def test_killed_at_any_call_it_has_no_name_or_is_whole(
    tmp_path: Path, small: Path, kind: TargetFormat
) -> None:
    """X3: and the next conversion to the name removes what is left, and is whole."""
    at, is_reached = 0, True
    while is_reached:
        at += 1
        folder = tmp_path / str(at)
        child = os.fork()
        if child == 0:
            try:
                os._exit(
                    not succeeds(small, folder, kind, Boundaries(_kill_self, at=at, torn=True))
                )
            finally:
                os._exit(2)
        _, status = os.waitpid(child, 0)
        is_reached = os.WIFSIGNALED(status)
        assert is_reached or os.WEXITSTATUS(status) == 0
        for left in folder.rglob(".tmp-*"):
            os.utime(left, (0, 0))  # a process that has just started may not have its lock yet
        is_named = (folder / "out").exists()
        if kind == "holdfast" and is_named:
            is_named = bool(list_steps(PosixStorage(folder / "out")))
        if not is_named:
            convert_small(small, folder / "out", kind)
            assert list(folder.rglob(".tmp-*")) == []
        assert is_whole(small, folder)


def test_memory_stays_within_its_budget(tmp_path: Path) -> None:
    rows = 6 << 20
    with (tmp_path / "data").open("wb") as file:
        file.truncate(rows * 8)
    half = rows // 2
    tensor = CatalogTensor(
        key="model.a",
        dtype="F32",
        shape=(rows, 2),
        chunks=(
            Chunk(Box((0, 0), (half, 2)), FileBytes("data", 0)),
            Chunk(Box((half, 0), (half, 1)), FileBytes("data", half * 8)),
            Chunk(Box((half, 1), (half, 1)), FileBytes("data", half * 12)),
        ),
    )
    catalog = Catalog(
        format="test",
        storage=PosixStorage(tmp_path),
        label="test",
        identity=b"x",
        tensors={"model.a": tensor},
        parts={"model": {"a": tensor_node("model.a")}},
    )
    conversion = plan_conversion(catalog, tmp_path / "out", ConvertOptions(to="huggingface"))
    tracemalloc.start()
    try:
        conversion.run(memory_nbytes=16 << 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    with pytest.raises(ConfigError, match="budget"):
        plan_conversion(catalog, tmp_path / "more", ConvertOptions(to="huggingface")).run(
            memory_nbytes=1000
        )


@pytest.mark.parametrize("kind", ["huggingface", "dcp"])
def test_few_boxes_of_many_wait_for_their_turn(tmp_path: Path, kind: TargetFormat) -> None:
    num_tensors = 1000
    (tmp_path / "data").write_bytes(bytes(4 * num_tensors))
    keys = [f"model.w{i}" for i in range(num_tensors)]
    catalog = Catalog(
        format="test",
        storage=PosixStorage(tmp_path),
        label="test",
        identity=b"x",
        tensors={
            key: CatalogTensor(
                key=key,
                dtype="F32",
                shape=(1,),
                chunks=(Chunk(Box((0,), (1,)), FileBytes("data", 4 * i)),),
            )
            for i, key in enumerate(keys)
        },
        parts={"model": {key.removeprefix("model."): tensor_node(key) for key in keys}},
    )
    conversion = plan_conversion(catalog, tmp_path / "out", ConvertOptions(to=kind))
    calls, waiting = 0, []

    def count(nbytes: int) -> None:
        nonlocal calls
        calls += 1
        if calls in (num_tensors - 1, 2 * num_tensors - 1):  # near the ends of copy and proof
            waiting.append(sum(isinstance(each, Future) for each in gc.get_objects()))

    conversion.run(on_progress=count)
    assert calls == 2 * num_tensors
    assert max(waiting) < 100


def test_types_that_the_format_lacks_are_named(holdfast: Holdfast, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": {"wave": torch.ones(3, dtype=torch.complex128)}})
    done = holdfast("convert", tmp_path / "run", tmp_path / "x", "--to", "safetensors")
    assert done.code == 2
    assert "'wave' is C128" in done.err


@pytest.mark.parametrize("kind", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_types_that_only_newer_programs_know_are_written_and_named(
    holdfast: Holdfast, tmp_path: Path, kind: torch.dtype
) -> None:
    """T6: safetensors has them from 0.8 on, and earlier releases refuse them."""
    weights = torch.arange(6, dtype=torch.uint8).view(kind)
    torch.save({"w": weights, "b": torch.ones(2)}, tmp_path / "x.pt")
    done = holdfast("convert", tmp_path / "x.pt", tmp_path / "x.st", "--to", "safetensors")
    assert (done.code, done.err) == (0, "")
    assert (
        f"w: of the type {TORCH_DTYPES[str(kind)[6:]]}, which programs read with safetensors 0.8"
        in done.out
    )
    result = Checkpointer(tmp_path / "run").load_all(source=tmp_path / "x.st").values["model"]
    assert raw(result["w"]) == raw(weights)
    if tuple(map(int, version("safetensors").split(".")[:2])) >= (0, 8):
        assert raw(load_file(tmp_path / "x.st")["w"]) == raw(weights)


def test_sizes_are_read_as_people_write_them() -> None:
    sizes = {"5GB": 5 * 10**9, "256MiB": 256 << 20, "1kB": 1000, "7": 7, "1.5 GiB": 3 << 29}
    assert {text: parse_size(text, option="--x") for text in sizes} == sizes
    for text in ("", "GB", "5XB", "-1MB", "five", "9" * 400):
        with pytest.raises(ConfigError, match="--x needs a size"):
            parse_size(text, option="--x")


def test_held_bytes_are_written_like_others(tmp_path: Path) -> None:
    chunk = Chunk(Box((0,), (2,)), HeldBytes(b"\x01\x02", "here"))
    tensor = CatalogTensor(key="model.a", dtype="U8", shape=(2,), chunks=(chunk,))
    catalog = Catalog(
        format="test", storage=PosixStorage(tmp_path), label="test", identity=b"x",
        tensors={"model.a": tensor}, parts={"model": {"a": tensor_node("model.a")}},
    )  # fmt: skip
    plan_conversion(catalog, tmp_path / "x", ConvertOptions(to="safetensors")).run()
    assert load_file(tmp_path / "x")["a"].tolist() == [1, 2]


def test_what_a_user_may_mistake_is_one_clear_line(tmp_path: Path, holdfast: Holdfast) -> None:
    """Names of presets, variables, a target that exists (in a dry run, too), a file to list."""
    source = tmp_path / "x.safetensors"
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4)}, source)
    words = ["convert", source, tmp_path / "out", "--to", "dcp", "--map"]
    near = "did you mean gpt-to-llama-hf, gpt-to-llama-megatron"
    assert near in holdfast(*words, "gpt-to-llama").err
    error = holdfast(*words, "gpt2-hf-to-gpt2-megatron").err
    assert "no rule matches 1 names: model.layers.0.self_attn.q_proj.weight" in error
    (tmp_path / "map.toml").write_text(
        "[variables]\nn = ''\n[[rule]]\nsplit = '{x:path}'\nto = ['{x}.a', '{x}.b']\n"
        "shares = ['n', 1]\n"
    )
    assert "pass variables={'n': …}, or --set n=…" in holdfast(*words, tmp_path / "map.toml").err
    (tmp_path / "out").mkdir()
    assert "exists already" in holdfast(*words[:-1], "--dry-run").err
    assert "safetensors" in holdfast("ls", source).out
    (line,) = holdfast("ls", source, "--json").json["foreign"]
    assert line["num_tensors"] == 1
