"""What users of Lightning do in hooks, schedules and loops, several habits in one run each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric

from holdfast.integrations.lightning import HoldfastCheckpoint
from tests.integrations.lightning_zoo import ROWS

CASES: dict[str, dict[str, Any]] = {
    "hooks, means and a schedule that follows one": {"max_steps": 17},
    "validation while gradients are accumulated": {
        "accumulate_grad_batches": 4, "val_check_interval": 3, "when": {"monitor": "held_out"},
    },
    "accumulation by hand": {"by_hand": True},
    "saved with the validation": {
        "when": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
    },
    "two loaders, made for each epoch": {"reload_dataloaders_every_n_epochs": 1, "second": True},
    "a loader that has ended before a longer one": {"second": True, "mode": "max_size"},
    "a stream and a loader that begins again": {"second": True, "stream": True},
    "a loader with a state and a generator of its own": {"own": torch.Generator},
    "a stream with a state of its own": {"own": None},
    "stopped by the module": {"stops": True},
    "weights of 64 bits": {"precision": "64-true"},
    "adapters with other ranks": {"adapted": True},
    "modes that a hook sets": {"modes": True},
}  # fmt: skip


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the rows in their order."""
        yield from ROWS[:14]


class Drained(Stream):
    """A stream that says where it is, and is empty then."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the rows that are left; the next pass has all of them."""
        while self.at < 14:
            self.at += 1
            yield ROWS[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a place."""
        self.at = state["at"]


class Network(LightningModule):
    """Averages its own weights after each batch, and draws in its hooks."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.case = case
        self.automatic_optimization = "by_hand" not in case
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.2))
        if "adapted" in case:
            ranks: dict[str, Any] = {"init_r": 4, "target_r": 2, "tinit": 2, "tfinal": 4}
            adapted = peft.AdaLoraConfig(**ranks, total_step=21, target_modules=["0"])
            self.layers = peft.get_peft_model(self.layers, adapted)
        self.head = torch.nn.Linear(6, 1)
        self.average = torch.nn.Linear(6, 1).requires_grad_(False)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Return the loss; log its mean and its largest value over the epoch."""
        given = batch if isinstance(batch, list) else [batch]
        rows = sum(each for each in given if each is not None)
        loss: torch.Tensor = (self.head(self.layers(rows)) - 1).square().mean()
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("worst", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            if index % 3 == 2:
                optimizer: Any = self.optimizers()
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        """Average, and draw."""
        for mine, theirs in zip(self.average.parameters(), self.head.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        torch.rand(1)
        if "adapted" in self.case:
            self.layers.base_model.update_and_allocate(self.global_step)

    def on_train_epoch_start(self) -> None:
        """Draw, and let dropout begin in the second epoch, after which it stays."""
        torch.rand(2)
        if "modes" in self.case and self.current_epoch <= 1:
            self.layers.train(self.current_epoch == 1)

    def on_train_epoch_end(self) -> None:
        """Change something, once for each epoch."""
        self.average.bias.data.add_(1.0)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        """Log a loss."""
        loss = (self.head(self.layers(batch)) - 1).square().mean()
        self.log("held_out", loss)
        if "stops" in self.case and self.current_epoch == 1:
            self.trainer.should_stop = True

    def train_dataloader(self) -> Any:
        """Return rows in another order at each pass; a second loader is shorter."""
        if "own" in self.case:
            if self.case["own"] is None:
                return StatefulDataLoader(Drained(), batch_size=2)
            drawn = self.case["own"]().manual_seed(torch.initial_seed())
            return StatefulDataLoader(ROWS[:14], batch_size=2, shuffle=True, generator=drawn)
        sizes = (14, 6) if "second" in self.case else (14,)
        loaders = [torch.utils.data.DataLoader(ROWS[:n], batch_size=2, shuffle=True) for n in sizes]
        if "stream" in self.case:
            loaders[0] = torch.utils.data.DataLoader(Stream(), batch_size=2)
        if "mode" in self.case:
            return CombinedLoader(loaders, self.case["mode"])
        return loaders if "second" in self.case else loaders[0]

    def val_dataloader(self) -> Any:
        """Return the other rows."""
        return torch.utils.data.DataLoader(ROWS[14:], batch_size=3)

    def configure_optimizers(self) -> Any:
        """Return an optimizer with a schedule that steps by the epoch's mean of the loss."""
        trained = [each for each in self.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.3
        )
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "loss_epoch"}


def train(name: str, root: Path, seed: int) -> str:
    """Train with some of these habits, from the newest checkpoint if there is one.

    Returns:
        The steps, rates, weights, and what was logged last.
    """
    case = CASES[name]
    seed_everything(seed, verbose=False)
    model = Network(case)
    when = case.get("when", {})
    if "every_n_epochs" not in when:
        when = {"every_n_train_steps": 1, **when}
    own = ("when", "by_hand", "own", "second", "mode", "stream", "stops", "adapted", "modes")
    settings = {key: each for key, each in case.items() if key not in own}
    trainer = Trainer(
        callbacks=[HoldfastCheckpoint(root, **when)],
        max_epochs=3, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, **settings,
    )  # fmt: skip
    trainer.fit(model, ckpt_path="last")
    rates = [group["lr"] for each in trainer.optimizers for group in each.param_groups]
    shown = sorted((key, float(each)) for key, each in trainer.callback_metrics.items())
    state = {key: each.tolist() for key, each in model.state_dict().items()}
    draw = torch.rand(1).item()
    return f"step {trainer.global_step} rates {rates} logged {shown} draw {draw} {state}"
