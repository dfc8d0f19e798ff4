"""Learning rate and weight decay over the steps."""

from __future__ import annotations

import math

import pytest
import torch

from holdfast.errors import MismatchError
from holdfast_trainer.train.schedule import Schedule, ScheduleSettings

SETTINGS = ScheduleSettings(
    lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=12, weight_decay=0.2, end_weight_decay=0.4
)


def make(settings: ScheduleSettings = SETTINGS, heard: list[str] | None = None) -> Schedule:
    weight, bias = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    groups = [
        {"params": [weight], "weight_decay": settings.weight_decay},
        {"params": [bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=123.0)
    return Schedule(
        optimizer, settings=settings, on_override=None if heard is None else heard.append
    )


def groups_of(schedule: Schedule) -> list[tuple[float, float]]:
    return [(g["lr"], g["weight_decay"]) for g in schedule._optimizer.param_groups]


def test_curves_rise_fall_and_stay() -> None:
    schedule = make()
    seen = []
    for _ in range(16):
        seen.append((schedule.lr, schedule.weight_decay))
        schedule.step()
    rates = [rate for rate, _ in seen]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4:12] == pytest.approx(
        [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]
    )
    assert rates[12:] == pytest.approx([0.1] * 4)
    decays = [decay for _, decay in seen]
    assert decays[0] == pytest.approx(0.2)
    assert decays[6] == pytest.approx(0.3)
    assert decays[12:] == pytest.approx([0.4] * 4)
    assert decays == sorted(decays)


def test_the_optimizer_follows_and_norms_have_no_decay() -> None:
    schedule = make()
    for _ in range(7):
        assert groups_of(schedule) == [(schedule.lr, schedule.weight_decay), (schedule.lr, 0.0)]
        schedule.step()


def test_a_loaded_schedule_goes_on_along_its_own_curve_and_says_so() -> None:
    ours = make()
    for _ in range(6):
        ours.step()
    heard: list[str] = []
    other_settings = ScheduleSettings(
        lr=9.0, min_lr=0.1, warmup_steps=4, decay_steps=99, weight_decay=0.2, end_weight_decay=0.4
    )
    other = make(other_settings, heard)
    other.load_state_dict(ours.state_dict())
    assert (other.lr, other.weight_decay) == (ours.lr, ours.weight_decay)
    assert groups_of(other) == groups_of(ours)
    assert len(heard) == 1
    assert "lr 1 (not 9)" in heard[0]
    assert "decay_steps 12 (not 99)" in heard[0]
    assert "min_lr" not in heard[0]


def test_no_warmup_and_no_length_are_fine() -> None:
    flat = ScheduleSettings(
        lr=1.0, min_lr=0.5, warmup_steps=3, decay_steps=3, weight_decay=0.0, end_weight_decay=0.0
    )
    assert [flat.lr_at(step) for step in (0, 2, 3, 9)] == pytest.approx([1 / 3, 1, 0.5, 0.5])


def test_another_schedulers_state_is_refused() -> None:
    with pytest.raises(MismatchError, match="--no-load-scheduler"):
        make().load_state_dict({"last_epoch": 3, "_step_count": 4})
