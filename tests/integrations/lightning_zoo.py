"""Every callback of Lightning, with arguments under which it acts within a few epochs."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks, seed_everything
from lightning.pytorch.loggers import CSVLogger

from holdfast.integrations.lightning import HoldfastCheckpoint

EPOCHS, EVERY = 4, 2
ROWS = torch.arange(80.0).reshape(20, 4).sin()


class Network(LightningModule):
    """A small network with dropout and batch statistics, and a backbone to freeze."""

    def __init__(self, lr: float = 1e-2, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        self.head = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return one number for each row."""
        loss: torch.Tensor = self.head(self.backbone(batch))
        return loss

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Return the loss, and log it."""
        loss = (self(batch) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        """Log a loss."""
        self.log("held_out", (self(batch) - 1).square().mean())

    def train_dataloader(self) -> Any:
        """Return half of the rows, in another order at each pass."""
        size = self.hparams["batch_size"]
        return torch.utils.data.DataLoader(ROWS[:12], batch_size=size, shuffle=True)

    def val_dataloader(self) -> Any:
        """Return the other half."""
        return torch.utils.data.DataLoader(ROWS[12:], batch_size=8)

    def configure_optimizers(self) -> Any:
        """Return an optimizer with a moment, and a schedule."""
        trained = [each for each in self.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.hparams["lr"], momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


CASES: dict[str, Callable[[Path], list[Any]]] = {
    "BackboneFinetuning": lambda _: [
        callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_lr=0.01)
    ],
    "BatchSizeFinder": lambda _: [callbacks.BatchSizeFinder(init_val=2, max_trials=1)],
    "DeviceStatsMonitor": lambda _: [callbacks.DeviceStatsMonitor(cpu_stats=False)],
    "EarlyStopping": lambda _: [callbacks.EarlyStopping("held_out", patience=2, min_delta=1e9)],
    "GradientAccumulationScheduler": lambda _: [callbacks.GradientAccumulationScheduler({1: 2})],
    "LambdaCallback": lambda _: [
        callbacks.LambdaCallback(on_train_batch_end=lambda *args: torch.rand(1))
    ],
    "LearningRateFinder": lambda _: [callbacks.LearningRateFinder(num_training_steps=8)],
    "LearningRateMonitor": lambda _: [callbacks.LearningRateMonitor(log_momentum=True)],
    "ModelCheckpoint": lambda root: [
        callbacks.ModelCheckpoint(root.parent / "own", monitor="held_out", save_last=True)
    ],
    "ModelPruning": lambda _: [callbacks.ModelPruning("l1_unstructured", amount=0.2)],
    "ModelPruning, masks kept": lambda _: [
        callbacks.ModelPruning(
            "random_unstructured",
            amount=2,
            use_global_unstructured=False,
            make_pruning_permanent=False,
            resample_parameters=True,
            parameter_names=["weight"],
        )
    ],
    "ModelSummary": lambda _: [callbacks.ModelSummary()],
    "OnExceptionCheckpoint": lambda root: [callbacks.OnExceptionCheckpoint(root.parent / "own")],
    "RichModelSummary": lambda _: [callbacks.RichModelSummary()],
    "RichProgressBar": lambda _: [callbacks.RichProgressBar()],
    "StochasticWeightAveraging": lambda _: [
        callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=3)
    ],
    "StochasticWeightAveraging, linear": lambda _: [
        callbacks.StochasticWeightAveraging(
            [0.05], swa_epoch_start=2, annealing_epochs=2, annealing_strategy="linear"
        )
    ],
    "StochasticWeightAveraging, accumulated": lambda _: [
        callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=2),
        callbacks.GradientAccumulationScheduler({1: 2}),
    ],
    "ThroughputMonitor": lambda _: [callbacks.ThroughputMonitor(len)],
    "Timer": lambda _: [callbacks.Timer(datetime.timedelta(days=1))],
    "TQDMProgressBar": lambda _: [callbacks.TQDMProgressBar()],
    "EMAWeightAveraging": lambda _: [callbacks.EMAWeightAveraging(decay=0.5)],
    "WeightAveraging": lambda _: [callbacks.WeightAveraging()],
}

NOT_TRAINED = {
    "BaseFinetuning": "abstract; BackboneFinetuning is one",
    "BasePredictionWriter": "abstract, and acts in predict alone",
    "Callback": "abstract",
    "Checkpoint": "abstract; HoldfastCheckpoint is one",
    "ProgressBar": "abstract; TQDMProgressBar is one",
    "SpikeDetection": "refused by name: Lightning cannot load its state",
}


def unknown_names() -> list[str]:
    """Return the callbacks of Lightning that are in neither table, and those it has no more."""
    known = {name.partition(",")[0] for name in CASES} | NOT_TRAINED.keys()
    return sorted(known ^ {*callbacks.__all__})


def train(name: str, root: Path, seed: int) -> str:
    """Train with a callback, from the newest checkpoint if there is one.

    Returns:
        The steps, and a digest of the weights, running statistics included.
    """
    seed_everything(seed, verbose=False)
    model = Network()
    checkpoints = HoldfastCheckpoint(root, every_n_train_steps=EVERY)
    has_bar = name.endswith("ProgressBar")
    trainer = Trainer(
        callbacks=[*CASES[name](root), checkpoints],
        max_epochs=EPOCHS, accelerator="cpu", devices=1, log_every_n_steps=1,
        logger=CSVLogger(root.parent / f"log{seed}"), enable_progress_bar=has_bar,
        enable_model_summary=name.endswith("ModelSummary"), num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, ckpt_path="last")
    state = {key: each.tolist() for key, each in model.state_dict().items()}
    return f"steps {trainer.global_step} epochs {trainer.current_epoch} {state}"
