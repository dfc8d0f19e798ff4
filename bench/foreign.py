"""Formats of other programs next to the programs: `python -m bench.foreign`.

One process, in turns within one run: a module loaded from a PyTorch DCP directory and from a
Hugging Face folder, by Holdfast and by `dcp.load` and by safetensors' `load_file` with
`load_state_dict`; and a conversion, with its proof, next to a program that reads and writes the
same bytes in pieces. Files are read from the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn

from bench.timing import Measured, Series, interleave, median_of, timed_with_cpu
from holdfast import Checkpointer
from holdfast.foreign import ConvertOptions, open_any, plan_conversion

_PIECE_NBYTES = 16 << 20
BARS = {"convert": 1.3}
"""At most so many times the other program's time."""


def _copy(source: Path, to: Path) -> None:
    """Read and write the files of a folder, durably."""
    to.mkdir()
    memory = memoryview(bytearray(_PIECE_NBYTES))
    for path in sorted(source.iterdir()):
        with path.open("rb", buffering=0) as file, (to / path.name).open("wb") as copy:
            while count := file.readinto(memory):
                copy.write(memory[:count])
            copy.flush()
            os.fdatasync(copy.fileno())


def measure(directory: Path, *, num_layers: int, width: int, num_rounds: int) -> Series:
    """All arms in turns."""
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(width, width) for _ in range(num_layers))
    weights = {name: each.detach() for name, each in model.named_parameters()}
    folder, sharded = directory / "folder", directory / "dcp"
    folder.mkdir()
    names = list(weights)
    for number in range(4):
        own = {name: weights[name] for name in names[number::4]}
        save_file(own, folder / f"model-{number}.safetensors")
    dcp.save({"model": weights}, checkpoint_id=sharded)
    expected = [each.clone() for each in weights.values()]
    checkpointer = Checkpointer(directory / "run")

    def check() -> None:
        assert all(map(torch.equal, weights.values(), expected)), "a load gave other bytes"
        for each in weights.values():
            each.zero_()

    def loaded(work: Callable[[], object]) -> Callable[[int], Measured]:
        def arm(number: int) -> Measured:
            measured = timed_with_cpu(work)
            check()
            return measured

        return arm

    def by_dcp() -> None:
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=sharded)
        model.load_state_dict(state["model"])

    def by_safetensors() -> None:
        state: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            state |= load_file(path)
        model.load_state_dict(state)

    def converted(number: int) -> Measured:
        to = directory / "converted"

        def work() -> None:
            with open_any(folder) as catalog:
                plan_conversion(catalog, to, ConvertOptions(to="huggingface")).run()

        measured = timed_with_cpu(work)
        shutil.rmtree(to)
        return measured

    def copied(number: int) -> Measured:
        to = directory / "copied"
        measured = timed_with_cpu(lambda: _copy(folder, to))
        shutil.rmtree(to)
        return measured

    return interleave(
        {
            "dcp.load": loaded(by_dcp),
            "load from DCP": loaded(lambda: checkpointer.load({"model": model}, source=sharded)),
            "safetensors": loaded(by_safetensors),
            "load from a folder": loaded(
                lambda: checkpointer.load({"model": model}, source=folder)
            ),
            "copy": copied,
            "convert": converted,
        },
        repeats=num_rounds,
        before_each=lambda: None,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.foreign", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="small: a check, no claim")
    options = parser.parse_args(arguments)
    num_layers, width, rounds = (8, 512, 2) if options.quick else (32, 4096, 5)
    warnings.filterwarnings("ignore", message="torch.distributed is")
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        series = measure(Path(directory), num_layers=num_layers, width=width, num_rounds=rounds)
    pairs = [("load from DCP", "dcp.load"), ("load from a folder", "safetensors"),
             ("convert", "copy")]  # fmt: skip
    table = Table("", "seconds", "CPU", "next to", "seconds", "CPU", "ratio", "bar",
                  title=f"{num_layers * width * width * 4 / 1e9:.2f} GB")  # fmt: skip
    for ours, theirs in pairs:
        row = [
            f"{median_of(series, name, quantity):.3f}"
            for name in (ours, theirs)
            for quantity in ("seconds", "cpu")
        ]
        ratio = median_of(series, ours, "seconds") / median_of(series, theirs, "seconds")
        bar = BARS.get(ours, 1.0)
        table.add_row(
            ours, *row[:2], theirs, *row[2:], f"{ratio:.2f}",
            f"{bar}: {'met' if ratio <= bar else 'missed'}",
        )  # fmt: skip
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
