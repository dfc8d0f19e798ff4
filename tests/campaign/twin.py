"""The same program in one process: the truth that every way is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import Layout
from tests.campaign.models import generate
from tests.campaign.programs import OPTIMIZERS, Program, Way
from tests.campaign.ways import param_groups, rows_of


@dataclass(frozen=True, kw_only=True)
class TwinStep:
    """A step, and the parameters after it."""

    losses: list[float]
    """Of each data rank's rows, their mean."""
    norm: float
    num_zeros: int
    clipped: bool
    parameters: dict[str, Tensor]


class Twin:
    """One process that trains on the whole batch; narrow parameters have main ones in float32."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.model = generate(program.seed, program.traits).model
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self._mains = [
            nn.Parameter(p.detach().float()) if p.dtype == torch.bfloat16 else p
            for p in self._trained
        ]
        make = OPTIMIZERS[program.optimizer]
        self._optimizer = make(param_groups(self._mains, decays="weight_decay" in make.keywords))

    def step(self, step: int, way: Way) -> TwinStep:
        """Take a step on the rows of all data ranks, microbatch by microbatch."""
        layout = Layout(**way.layout)
        shares = layout.dp * layout.cp
        sums: dict[int, Tensor] = {}
        losses = []
        for index in range(shares):
            parts = rows_of(step, index=index, shares=shares, parts=way.num_microbatches)
            losses.append(0.0)
            for rows in parts:
                loss = self.model(rows).mean() / len(parts)
                loss.backward()
                losses[-1] += float(loss.detach())
                for i, (p, main) in enumerate(zip(self._trained, self._mains, strict=True)):
                    if p.grad is not None:
                        sums[i] = sums.get(i, torch.zeros(())) + p.grad.to(main.dtype)
                        p.grad = None
        for i, total in sums.items():
            self._mains[i].grad = total / shares
        return self._update(losses)

    @torch.no_grad()
    def _update(self, losses: list[float]) -> TwinStep:
        limit = self.program.max_norm
        gradients: list[Any] = [main.grad for main in self._mains if main.grad is not None]
        norm = math.sqrt(sum(float(g.to(torch.complex128).abs().square().sum()) for g in gradients))
        num_zeros = sum(
            main.numel() if main.grad is None else int((main.grad == 0).sum())
            for main in self._mains
        )
        clipped = 0 < limit < norm
        if clipped:
            for gradient in gradients:
                gradient.mul_(limit / norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for p, main in zip(self._trained, self._mains, strict=True):
            if p is not main:
                p.copy_(main)
        return TwinStep(
            losses=losses,
            norm=norm,
            num_zeros=num_zeros,
            clipped=clipped,
            parameters={n: p.detach().clone() for n, p in self.model.named_parameters()},
        )


def run_twin(program: Program) -> list[TwinStep]:
    """Run the whole program in this process."""
    twin = Twin(program)
    done: list[TwinStep] = []
    for way in program.ways:
        for _ in range(way.num_steps):
            done.append(twin.step(len(done), way))
    return done
