"""Saves and loads inside frameworks: `python -m bench.integrations`.

One process, in turns within one run, on the same module and its AdamW: Holdfast through each
integration, the native call of a `Checkpointer`, and the framework's own checkpoint. A save counts
until it is durable, files of the frameworks included. Where a framework loads only as part of a
start (`Trainer.train`, `Trainer.fit`), what counts is the time from that call to the first step,
and a start without a load is a row of its own, taken off in the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.timing import Arms, Measured, Series, interleave, median_of, timed_with_cpu
from holdfast import RNG, Checkpointer, OptimizerState

BAR = 1.1
"""At most so many times the native call; and ahead of the framework's own."""
PLAIN, NATIVE, HELD, OWN = "start alone", "native", "holdfast", "own"
WITH_FOLDER = "holdfast, and the model's folder"

Calls = dict[str, Callable[[int], object]]
"""Arm -> what is measured, in a round of some number."""
Measure = Callable[[str, Arms], None]


class Stack(nn.Module):
    """So many square layers, with the loss that every framework here takes."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of `[batch, width]`."""
        return {"loss": self.layers(rows).square().mean()}


@dataclass(frozen=True)
class Setting:
    """The module's size, and where checkpoints go."""

    directory: Path
    num_layers: int
    width: int

    def stack(self) -> Stack:
        """Return a module with the same weights each time."""
        torch.manual_seed(0)
        return Stack(self.num_layers, self.width)

    def trained(self) -> tuple[Stack, torch.optim.AdamW]:
        """Return a module and its optimizer after one step."""
        module = self.stack()
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.randn(1, self.width))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        return module, optimizer

    @property
    def rows(self) -> list[dict[str, torch.Tensor]]:
        """Data of one row a batch."""
        return [{"rows": torch.randn(self.width)} for _ in range(8)]


class LeftError(Exception):
    """Ends a training in which all is measured."""


def _until_left(training: Callable[[], object]) -> None:
    """Train until what is measured inside is done."""
    with contextlib.suppress(LeftError):
        training()


def _make_durable(path: Path) -> None:
    """Synchronize all files below a path: what a framework's own save leaves to the kernel."""
    for each in (path, *path.rglob("*")):
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _timed(calls: Calls) -> Arms:
    """Return arms that measure whole calls."""

    def arm(number: int, *, name: str) -> Measured:
        return timed_with_cpu(lambda: calls[name](number))

    return {name: partial(arm, name=name) for name in calls}


class Native:
    """Saves and loads by a `Checkpointer`, without a framework."""

    def __init__(self, setting: Setting) -> None:
        self._checkpointer = Checkpointer(setting.directory / "native")

    def save(self, module: nn.Module, optimizer: Any) -> None:
        """Replace a step in the background, as the integrations do, and wait for its commit."""
        self._checkpointer.save_async(1, _parts(module, optimizer), overwrite=True).result()

    def load(self, module: nn.Module, optimizer: Any) -> None:
        """Load the newest."""
        self._checkpointer.load(_parts(module, optimizer))


def _parts(module: nn.Module, optimizer: Any) -> dict[str, object]:
    """Return the parts of a native call."""
    return {"model": module, "optimizer": OptimizerState(optimizer, module), "rng": RNG()}


def _measure_calls(
    setting: Setting,
    measure: Measure,
    trained: tuple[Any, Any],
    checkpoints: Any,
    own: Path,
    save_own: Callable[[], object],
    load_own: Callable[[], object],
) -> None:
    """Measure a framework whose saves and loads are calls of their own."""
    native = Native(setting)

    def save(number: int) -> None:
        checkpoints.step = 1
        checkpoints.save(overwrite=True).result()

    def save_own_durably(number: int) -> None:
        save_own()
        _make_durable(own)

    saves: Calls = {NATIVE: lambda _: native.save(*trained), HELD: save}
    measure("save", _timed({**saves, OWN: save_own_durably}))
    loads: Calls = {NATIVE: lambda _: native.load(*trained), HELD: lambda _: checkpoints.load()}
    measure("load", _timed({**loads, OWN: lambda _: load_own()}))
    checkpoints.close()


def measure_accelerate(setting: Setting, measure: Measure) -> None:
    """Accelerate next to `save_state` and `load_state`."""
    from accelerate import Accelerator

    from holdfast.integrations.accelerate import AccelerateCheckpoints

    accelerator: Any = Accelerator(cpu=True)
    trained = accelerator.prepare(*setting.trained())
    root, own = setting.directory / "held", setting.directory / "own"
    checkpoints = AccelerateCheckpoints(accelerator, root)
    _measure_calls(
        setting,
        measure,
        trained,
        checkpoints,
        own,
        lambda: accelerator.save_state(str(own)),
        lambda: accelerator.load_state(str(own)),
    )


def measure_fabric(setting: Setting, measure: Measure) -> None:
    """Fabric next to its `save` and `load`."""
    from lightning_fabric import Fabric

    from holdfast.integrations.fabric import FabricCheckpoints

    fabric: Any = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    trained = fabric.setup(*setting.trained())
    state = dict(zip(("model", "optimizer"), trained, strict=True))
    root, own = setting.directory / "held", setting.directory / "own.ckpt"
    checkpoints = FabricCheckpoints(fabric, root, state)
    _measure_calls(
        setting,
        measure,
        trained,
        checkpoints,
        own,
        lambda: fabric.save(own, state),
        lambda: fabric.load(own, state),
    )


def measure_dcp(setting: Setting, measure: Measure) -> None:
    """The functions with DCP's signatures next to DCP's; each makes a `Checkpointer` of its own."""
    import torch.distributed.checkpoint as torch_dcp

    from holdfast.integrations import dcp

    module, optimizer = setting.trained()
    native, held, own = (setting.directory / name for name in ("native", "held", "own"))

    def state() -> dict[str, Any]:
        return {"model": module.state_dict(), "moments": optimizer.state_dict()["state"]}

    def save_native(number: int) -> None:
        with Checkpointer(native) as checkpointer:
            checkpointer.save(0, state(), overwrite=True)

    def load_native(number: int) -> None:
        with Checkpointer(native) as checkpointer:
            checkpointer.load(state())

    def save_own(number: int) -> None:
        torch_dcp.save({"all": state()}, checkpoint_id=own, no_dist=True)
        _make_durable(own)

    def save(number: int) -> None:
        dcp.save(state(), checkpoint_id=held / "step-0", overwrite=True)

    measure("save", _timed({NATIVE: save_native, HELD: save, OWN: save_own}))
    loads: Calls = {
        NATIVE: load_native,
        HELD: lambda _: dcp.load(state(), checkpoint_id=held),
        OWN: lambda _: torch_dcp.load({"all": state()}, checkpoint_id=own, no_dist=True),
    }
    measure("load", _timed(loads))


def measure_megatron(setting: Setting, measure: Measure) -> None:
    """`dist_checkpointing` through the strategies and Megatron's own; a load opens the root."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.process_groups_config import ProcessGroupCollection

    from holdfast.integrations.megatron import HoldfastLoad, HoldfastSave, groups_of

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    saving = HoldfastSave(groups_of(ProcessGroupCollection.use_mpu_process_groups()))
    loading = HoldfastLoad(saving.groups)
    module, optimizer = setting.trained()
    names = [name for name, _ in module.named_parameters()]
    tensors = {f"model.{name}": each for name, each in module.state_dict().items()} | {
        f"optimizer.{names[index]}.{name}": each
        for index, moments in optimizer.state_dict()["state"].items()
        for name, each in moments.items()
        if each.dim()
    }
    own = setting.directory / "own" / "iter_0000001"
    held = setting.directory / "held" / "iter_0000001"
    for path in (own, held):
        path.mkdir(parents=True)
    native = Checkpointer(setting.directory / "native")

    def state() -> dict[str, Any]:
        sharded = {
            name: ShardedTensor.from_rank_offsets(name, each) for name, each in tensors.items()
        }
        return {**sharded, "iteration": 1}

    def save_own(number: int) -> None:
        shutil.rmtree(own)
        own.mkdir()
        # Megatron asks for these without a GPU, too.
        current_device = mock.patch("torch.cuda.current_device", return_value="cpu")
        with mock.patch("torch.cuda.synchronize"), current_device:
            dist_checkpointing.save(state(), str(own))
        _make_durable(own)

    def save(number: int) -> None:
        common = saving.common
        dist_checkpointing.save(
            state(), str(held), saving, preprocess_common_before_consistancy_check=common
        )

    def save_native(number: int) -> None:
        native.save(1, {"all": tensors}, overwrite=True)

    measure("save", _timed({NATIVE: save_native, HELD: save, OWN: save_own}))

    def load_native(number: int) -> None:
        with Checkpointer(setting.directory / "native") as checkpointer:
            checkpointer.load({"all": tensors})

    loads: Calls = {
        NATIVE: load_native,
        HELD: lambda _: dist_checkpointing.load(state(), str(held), **loading.strategies),
        OWN: lambda _: dist_checkpointing.load(state(), str(own)),
    }
    measure("load", _timed(loads))
    saving.close()
    native.close()
    saving.groups.close()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def measure_trainer(setting: Setting, measure: Measure) -> None:
    """The Trainer of Hugging Face next to its own folders."""
    from transformers.trainer import Trainer
    from transformers.trainer_callback import TrainerCallback
    from transformers.training_args import TrainingArguments

    from holdfast.integrations.transformers import HoldfastCallback

    native = Native(setting)
    folder = setting.directory / "trainer"

    class Leaves(TrainerCallback):  # type: ignore[misc]
        """Does something at the beginning of a training, and leaves it at a step's beginning."""

        def __init__(self, *, step: int, work: Any = None, at_start: Any = None) -> None:
            self._step, self._work, self._at_start = step, work, at_start

        def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            """Load."""
            if self._at_start is not None:
                self._at_start(named["model"], named["optimizer"])

        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            """Leave."""
            if state.global_step >= self._step:
                if self._work is not None:
                    self._work(args, state, control, named["model"], named["optimizer"])
                raise LeftError

    def make() -> Any:
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=8, per_device_train_batch_size=1,
            save_steps=100, use_cpu=True, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        return Trainer(model=setting.stack(), args=arguments, train_dataset=setting.rows)

    trainer = make()
    callback = HoldfastCallback.attach(trainer)

    def saves(args: Any, state: Any, control: Any, model: Any, optimizer: Any) -> None:
        def save(number: int) -> None:
            callback.on_save(args, state, control)
            assert callback.last_save is not None
            callback.last_save.result()

        def save_own(number: int, *, only_model: bool = False) -> None:
            args.save_only_model = only_model
            trainer._save_checkpoint(model, None)
            _make_durable(folder / "checkpoint-1")

        def save_both(number: int) -> None:
            save_own(number, only_model=True)
            save(number)

        calls: Calls = {NATIVE: lambda _: native.save(model, optimizer), HELD: save}
        calls |= {WITH_FOLDER: save_both, OWN: save_own}
        measure("save", _timed(calls))
        shutil.rmtree(folder / "checkpoint-1")
        save_own(0)

    trainer.add_callback(Leaves(step=1, work=saves))
    _until_left(trainer.train)

    def start(number: int, *, arm: str) -> Measured:
        new, resume = make(), None
        if arm == HELD:
            resume = HoldfastCallback.attach(new).latest()
        elif arm == OWN:
            # A folder whose step Holdfast has is resumed from there: no callback is attached.
            resume = str(folder / "checkpoint-1")
        new.add_callback(Leaves(step=0, at_start=native.load if arm == NATIVE else None))
        return timed_with_cpu(lambda: _until_left(lambda: new.train(resume)))

    measure("load", {arm: partial(start, arm=arm) for arm in (PLAIN, NATIVE, HELD, OWN)})


def measure_lightning(setting: Setting, measure: Measure) -> None:
    """Lightning's Trainer next to its own files."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback

    from holdfast.integrations.lightning import HoldfastCheckpoint

    native = Native(setting)
    held, own = setting.directory / "lightning", setting.directory / "own.ckpt"

    class Module(LightningModule):  # type: ignore[misc]
        """The stack."""

        def __init__(self) -> None:
            super().__init__()
            self.stack = setting.stack()

        def training_step(self, batch: Any, index: int) -> Any:
            """Return the loss."""
            return self.stack(**batch)

        def configure_optimizers(self) -> Any:
            """Return the optimizer."""
            return torch.optim.AdamW(self.parameters())

    class Leaves(Callback):  # type: ignore[misc]
        """Does something at the beginning of a training, and leaves it at a step's beginning."""

        def __init__(self, *, step: int, work: Any = None, at_start: Any = None) -> None:
            self._step, self._work, self._at_start = step, work, at_start

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Load."""
            if self._at_start is not None:
                self._at_start(pl_module, trainer.optimizers[0])

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            """Leave."""
            if trainer.global_step >= self._step:
                if self._work is not None:
                    self._work(trainer, pl_module, trainer.optimizers[0])
                raise LeftError

    def make(*callbacks: Any) -> Any:
        return Trainer(
            callbacks=list(callbacks), max_steps=8, accelerator="cpu", devices=1, logger=False,
            enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=any(isinstance(each, HoldfastCheckpoint) for each in callbacks),
        )  # fmt: skip

    def loader() -> Any:
        return torch.utils.data.DataLoader(setting.rows, batch_size=1)  # type: ignore[arg-type]

    checkpoints = HoldfastCheckpoint(held, every_n_train_steps=100)

    def saves(trainer: Any, module: Any, optimizer: Any) -> None:
        def save(number: int) -> None:
            checkpoints._save(trainer)
            assert checkpoints.last_save is not None
            checkpoints.last_save.result()

        def save_own(number: int) -> None:
            trainer.save_checkpoint(own)
            _make_durable(own)

        calls: Calls = {NATIVE: lambda _: native.save(module, optimizer), HELD: save}
        measure("save", _timed({**calls, OWN: save_own}))

    trainer = make(checkpoints, Leaves(step=1, work=saves))
    _until_left(lambda: trainer.fit(Module(), loader()))

    def start(number: int, *, arm: str) -> Measured:
        leaves = Leaves(step=0, at_start=native.load if arm == NATIVE else None)
        new = make(*([HoldfastCheckpoint(held)] if arm == HELD else []), leaves)
        module, path = Module(), {HELD: "last", OWN: str(own)}.get(arm)
        return timed_with_cpu(
            lambda: _until_left(lambda: new.fit(module, loader(), ckpt_path=path))
        )

    measure("load", {arm: partial(start, arm=arm) for arm in (PLAIN, NATIVE, HELD, OWN)})


FRAMEWORKS: dict[str, Callable[[Setting, Measure], None]] = {
    "Trainer": measure_trainer,
    "Accelerate": measure_accelerate,
    "Lightning": measure_lightning,
    "Fabric": measure_fabric,
    "DCP": measure_dcp,
    "Megatron-core": measure_megatron,
}


def _add_row(table: Table, framework: str, what: str, series: Series) -> None:
    """Add what one framework took."""
    for quantity in ("seconds", "cpu"):
        times = {arm: median_of(series, arm, quantity) for arm in series}
        base = times.get(PLAIN, 0.0)
        native, held, own = (max(times[arm] - base, 1e-9) for arm in (NATIVE, HELD, OWN))
        cells = [times.get(arm) for arm in (PLAIN, NATIVE, HELD, WITH_FOLDER, OWN)]
        milliseconds = ["" if each is None else f"{each * 1000:.0f}" for each in cells]
        is_met = held <= BAR * native and held < own
        table.add_row(
            framework, f"{what}, {'wall' if quantity == 'seconds' else 'CPU'}", *milliseconds,
            f"{held / native:.2f}", f"{held / own:.2f}", "met" if is_met else "missed",
        )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.integrations", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="small: a check, no claim")
    parser.add_argument("--only", choices=sorted(FRAMEWORKS))
    options = parser.parse_args(arguments)
    num_layers, width, rounds = (2, 64, 1) if options.quick else (24, 1024, 8)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    size = num_layers * width * width * 12 / 1e6
    table = Table(
        "framework", "ms", PLAIN, NATIVE, HELD, WITH_FOLDER, OWN, "x native", "x own", "bar",
        title=f"{size:.0f} MB; load of the machine {os.getloadavg()[0]:.1f}",
    )  # fmt: skip
    for name, framework in FRAMEWORKS.items():
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:

            def measure(what: str, arms: Arms, name: str = name) -> None:
                series = interleave(arms, repeats=rounds, before_each=lambda: None)
                _add_row(table, name, what, series)

            framework(Setting(Path(directory), num_layers, width), measure)
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
