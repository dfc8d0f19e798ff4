"""Rules reject what they say, and learn each accepted step once (D15)."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError, CorruptionError
from holdfast.rerun.rules import (
    IsInf,
    IsNaN,
    Learned,
    NotFinite,
    Rejects,
    RejectsAny,
    Rule,
    Spike,
)
from holdfast.rerun.values import Value, magnitude

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("value", "is_nan", "is_inf"),
    [
        (1.0, False, False),
        (NAN, True, False),
        (INF, False, True),
        (-INF, False, True),
        ((), False, False),
        ((1.0, 2.0), False, False),
        ((1.0, -INF, 2.0), False, True),
        ((INF, NAN), True, True),
    ],
)
def test_nan_and_infinities(value: Value, is_nan: bool, is_inf: bool) -> None:
    assert (IsNaN().rejects(value, ()) is not None) == is_nan
    assert (IsInf().rejects(value, ()) is not None) == is_inf
    assert (NotFinite().rejects(value, ()) is not None) == (is_nan or is_inf)


def test_the_reason_says_what_is_wrong_and_how_often() -> None:
    assert NotFinite().rejects(NAN, ()) == "it is NaN"
    assert NotFinite().rejects(-INF, ()) == "it is infinite"
    assert NotFinite().rejects((1.0, NAN, INF), ()) == "1 of its 3 elements is NaN"
    assert IsInf().rejects((-INF, NAN, INF), ()) == "2 of its 3 elements are infinite"


def test_a_spike_is_far_above_the_median_of_accepted_values() -> None:
    rule = Spike(factor=10.0, num_samples=3, window=5)
    assert rule.rejects(1e9, [1.0, 1.0]) is None  # too few to know
    assert rule.rejects(10.0, [1.0, 1.0, 1.0]) is None
    reason = rule.rejects(-10.1, [1.0, 1.0, 1.0])
    assert reason is not None
    assert "10.1" in reason
    assert rule.rejects(11.0, [1.0] * 9 + [2.0] * 5) is None  # the last five alone
    assert rule.rejects((0.0, -11.0), [1.0] * 3) is not None
    assert rule.rejects((NAN, 11.0), [1.0] * 3) is not None
    for other in (NAN, INF, (INF, 1.0), ()):
        assert rule.rejects(other, [1.0] * 3) is None
    assert rule.rejects(5.0, [0.0] * 3) is None  # no scale


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=30),
    st.floats(-1e9, 1e9),
    st.integers(1, 10),
    st.integers(0, 10),
)
def test_spikes_by_the_definition(
    accepted: list[float], value: float, num_samples: int, more: int
) -> None:
    rule = Spike(factor=3.0, num_samples=num_samples, window=num_samples + more)
    usual = statistics.median(accepted[-rule.window :])
    expected = len(accepted) >= num_samples and usual > 0 and abs(value) > 3.0 * usual
    assert (rule.rejects(value, accepted) is not None) == expected
    assert (rule.rejects((0.0, value), accepted) is None) != expected


@pytest.mark.parametrize(
    "settings", [{"factor": 1.0}, {"factor": NAN}, {"num_samples": 0}, {"window": 99}]
)
def test_spike_settings_that_contradict_themselves_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Spike(**settings)


def test_functions_and_several_rules() -> None:
    negative = Rejects(lambda x: x < 0, "a negative loss")  # type: ignore[operator]
    assert negative.rejects(-1.0, ()) == "a negative loss"
    assert negative.rejects(1.0, ()) is None
    uneven = Rejects(lambda x: len(x) % 2, "an odd number")  # type: ignore[arg-type]
    assert uneven.rejects((1.0, 1.0, 1.0), ()) == "an odd number"
    rule = RejectsAny(NotFinite(), negative, Spike(num_samples=1, window=7))
    assert rule.window == 7
    assert rule.rejects(NAN, ()) == "it is NaN"
    assert rule.rejects(-1.0, ()) == "a negative loss"
    assert "median" in (rule.rejects(11.0, [1.0]) or "")
    assert rule.rejects(1.0, [1.0]) is None
    with pytest.raises(ConfigError):
        RejectsAny()
    for each in (rule, negative, NotFinite(), IsNaN(), IsInf(), Spike()):
        assert isinstance(each, Rule)
        assert hash(each) == hash(each)
    assert NotFinite() == NotFinite()


def test_a_rerun_does_not_learn_twice() -> None:
    learned = Learned()
    learned.accept("loss", 1.0, window=3)
    assert list(learned.of("loss")) == []
    learned.discard()
    learned.accept("loss", -1.0, window=3)
    learned.accept("loss", NAN, window=3)
    learned.accept("loss", (2.0, INF), window=3)
    learned.accept("norm", (2.0, -4.0), window=3)
    learned.accept("unlearned", 5.0, window=0)
    learned.commit()
    learned.commit()
    assert list(learned.of("loss")) == [1.0]
    assert list(learned.of("norm")) == [4.0]
    assert list(learned.of("unlearned")) == []
    for x in (2.0, 3.0, 4.0):
        learned.accept("loss", x, window=3)
        learned.commit()
    assert list(learned.of("loss")) == [2.0, 3.0, 4.0]


def test_what_is_learned_survives_a_restart() -> None:
    learned = Learned()
    for x in (1.0, 0.1, 1e-300):
        learned.accept("loss", x, window=3)
    learned.commit()
    learned.accept("loss", 9.0, window=3)
    state = learned.state_dict()
    assert [each.shape for each in state.values()] == [(3,)]
    after = Learned()
    after.load_state_dict(state)
    assert list(after.of("loss")) == [1.0, 0.1, 1e-300]
    with pytest.raises(CorruptionError, match="loss"):
        after.load_state_dict({"norm": torch.ones(1, dtype=torch.float64), "loss": ["1"]})
    assert torch.equal(after.state_dict()["loss"], state["loss"])


def test_the_magnitude_of_a_value() -> None:
    assert magnitude(-3.0) == 3.0
    assert magnitude((1.0, -4.0)) == 4.0
    assert magnitude((INF, 2.0)) == 2.0
    assert magnitude((INF, 2.0), only_finite=True) is None
    assert magnitude(NAN) is None
    assert magnitude(()) is None
