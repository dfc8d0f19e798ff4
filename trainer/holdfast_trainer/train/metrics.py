"""What a person and a program see of a run: progress lines, JSON lines, TensorBoard."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.text import Text

from holdfast.errors import ConfigError, StorageError
from holdfast_trainer.train.config import LogConfig

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What one optimizer step did; the same numbers on every rank, but for the time."""

    step: int
    """Finished steps, this one included."""
    loss: float
    """Mean cross entropy of the global batch, in nats per token, before the update."""
    lr: float
    """Learning rate of the update."""
    weight_decay: float
    """Weight decay of the update."""
    grad_norm: float
    """Global gradient norm before clipping; NaN for a step that was left out."""
    num_tokens: int
    """Tokens of the global batch."""
    seconds: float
    """Wall time of the step on this rank."""
    loss_scale: float | None = None
    """What the loss was multiplied by; None without scaling."""
    skipped: bool = False
    """True if nothing was updated, because a scaled gradient overflowed or, without a loss scale
    here, because a step is not to be trained on."""


class Reporter:
    """Writes to the terminal, a JSON lines file and TensorBoard; used by one rank.

    The JSON lines file is appended to and flushed line by line, so that a reader sees a killed
    run's last step, and a resumed run continues the same file.
    """

    def __init__(self, log: LogConfig, *, num_steps: int, console: Console | None = None) -> None:
        """Open the files.

        Args:
            log: what is reported, and where.
            num_steps: optimizer steps of the whole run.
            console: where a person reads; default this process's terminal.

        Raises:
            StorageError: a file cannot be written.
            ConfigError: TensorBoard is asked for and not installed.
        """
        self._num_steps = num_steps
        self._log_interval = log.log_interval
        self._console = console or Console(highlight=False, soft_wrap=True)
        self.has_reader = True
        """True if what is printed still arrives; False once the reader of a pipe has left."""
        self._tensorboard = None if log.tensorboard is None else _open_tensorboard(log.tensorboard)
        self._jsonl = None if log.jsonl is None else _open_jsonl(log.jsonl)

    def __enter__(self) -> Reporter:
        """Itself; the files are open already."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files."""
        if self._jsonl is not None:
            self._jsonl.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def note(self, text: str, *, style: str = "") -> None:
        """One line for the person."""
        self._print(Text(text, style=style))

    def _print(self, text: Text) -> None:
        """Print a line unless the reader has left."""
        if not self.has_reader:
            return
        try:
            self._console.print(text)
        except (BrokenPipeError, SystemExit):
            # Newer versions of rich would end this one rank.
            self.has_reader = False
            # What is left in the buffer goes nowhere, now and when the process ends.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._console.file.fileno())

    def step(self, metrics: StepMetrics) -> None:
        """Report a finished step; on the terminal only every `log_interval` and the last."""
        rate = metrics.num_tokens / metrics.seconds if metrics.seconds > 0 else 0.0
        values: dict[str, float | None] = {
            "step": metrics.step,
            "loss": metrics.loss if math.isfinite(metrics.loss) else None,
            "lr": metrics.lr,
            "weight_decay": metrics.weight_decay,
            "grad_norm": metrics.grad_norm if math.isfinite(metrics.grad_norm) else None,
            "tokens_per_s": round(rate, 1),
            "seconds": round(metrics.seconds, 4),
        }
        if metrics.loss_scale is not None:
            values |= {"loss_scale": metrics.loss_scale}
        if metrics.loss_scale is not None or metrics.skipped:
            values |= {"skipped": metrics.skipped}
        self.event("step", values)
        if self._tensorboard is not None:
            for name, value in values.items():
                if name != "step" and value is not None:
                    self._tensorboard.add_scalar(f"train/{name}", value, metrics.step)
        if metrics.step % self._log_interval and metrics.step != self._num_steps:
            return
        width = len(str(self._num_steps))
        line = Text()
        line.append(f"step {metrics.step:>{width}}/{self._num_steps}", style="bold")
        for name, shown in (
            ("loss", f"{metrics.loss:.4f}"),
            ("lr", f"{metrics.lr:.2e}"),
            ("norm", f"{metrics.grad_norm:.3f}"),
            ("tokens/s", f"{rate:>7,.0f}"),
        ):
            line.append(f"  {name} ", style="dim")
            line.append(shown)
        if metrics.skipped:
            scale = metrics.loss_scale
            why = "" if scale is None else f": overflow at loss scale {scale:,.0f}"
            line.append(f"  left out{why}", style="yellow")
        self._print(line)

    def event(self, name: str, values: Mapping[str, object]) -> None:
        """Append a JSON object with the event's name, the wall clock and these values.

        Raises:
            StorageError: the file cannot be written any more.
        """
        if self._jsonl is None:
            return
        try:
            self._jsonl.write(event_line(name, values))
            self._jsonl.flush()
        except OSError as error:
            raise StorageError(
                f"--jsonl {self._jsonl.name}: cannot be written ({error.strerror}); make room or "
                f"name another file"
            ) from error


def event_line(name: str, values: Mapping[str, object]) -> str:
    """A JSON object with the event's name, the wall clock and these values, as one line."""
    return json.dumps({"event": name, "time": round(time.time(), 3), **values}) + "\n"


def readable_nbytes(nbytes: float) -> str:
    """1234567 -> '1.2 MB'; decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def _open_jsonl(path: Path) -> TextIO:
    """The file of `--jsonl`; StorageError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"--jsonl {path}: cannot be written ({error.strerror}); name a file in a directory "
            f"that can"
        ) from error


def _open_tensorboard(path: Path) -> SummaryWriter:
    """The writer of `--tensorboard`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "--tensorboard needs a package that is not installed: "
            "pip install 'holdfast-trainer[tensorboard]'"
        ) from error
    try:
        path.mkdir(parents=True, exist_ok=True)
        return SummaryWriter(str(path))
    except OSError as error:
        raise StorageError(
            f"--tensorboard {path}: cannot be written ({error.strerror}); name another directory"
        ) from error
