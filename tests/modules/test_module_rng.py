"""Random streams of modules: nobody else draws from them, and a resume continues them (M20)."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import RNG, Checkpointer, ConfigError, Layout, ModuleGroups, ModuleLayouts, ModuleRNG
from holdfast import module_parts as parts_of
from tests.harness import RankContext, run_ranks


def draw() -> list[float]:
    """From each of the process's generators."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_a_module_draws_the_same_whatever_others_draw() -> None:
    alone = ModuleRNG(seed=5)
    with alone:
        expected = [draw() for _ in range(3)]
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    outside = [draw() for _ in range(3)]

    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    first, second = ModuleRNG(seed=5), ModuleRNG(seed=6)
    inside, others, seen = [], [], []
    for _ in range(3):
        with first:
            inside.append(draw())
        seen.append(draw())
        with second:
            others.append(draw())
    assert inside == expected
    assert seen == outside
    assert not {x for row in others for x in row} & {x for row in inside for x in row}


def test_streams_are_given_back_after_an_error_and_entered_once() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    streams = ModuleRNG(seed=9)
    with pytest.raises(ZeroDivisionError), streams:
        _ = torch.rand(5) / (1 // 0)
    assert torch.equal(torch.rand(2), expected)
    with streams, pytest.raises(ConfigError, match="twice"), streams:
        pass
    assert not streams.is_entered
    for seed in (-1, True, 1.5, 2**64):
        with pytest.raises(ConfigError, match="seed"):
            ModuleRNG(seed=seed)  # type: ignore[arg-type]


def _masks(streams: dict[str, ModuleRNG]) -> dict[str, torch.Tensor]:
    """What dropout of each module drops next."""
    masks = {}
    for name, own in streams.items():
        with own:
            masks[name] = nn.functional.dropout(torch.ones(64))
    return masks


def _placed(name: str) -> ModuleLayouts:
    if name == "disjoint":
        return ModuleLayouts({"vision": Layout(dp=2), "language": Layout(tp=2, ranks=(2, 3))})
    return ModuleLayouts({"language": Layout(tp=2, dp=2), "vision": Layout(dp=4)})


def _streams(groups: ModuleGroups) -> dict[str, ModuleRNG]:
    """Equal along tp, different on data ranks and in each module."""
    return {
        name: ModuleRNG(seed=100 * len(name) + groups[name].index("dp_cp"), shared=("tp",))
        for name in groups.modules
    }


def _resume(context: RankContext, root: str, name: str) -> None:
    with (
        ModuleGroups.create(_placed(name)) as groups,
        Checkpointer(root, groups=groups.union) as checkpointer,
    ):
        streams = _streams(groups)
        for _ in range(3):
            _masks(streams)
        state = parts_of(groups, {each: {"rng": own} for each, own in streams.items()})
        with streams[groups.modules[0]]:  # a save may come while a module runs
            checkpointer.save(1, state)
        expected = [_masks(streams) for _ in range(2)]
        fresh = _streams(groups)
        torch.manual_seed(4)
        outside = torch.random.get_rng_state()
        checkpointer.load(parts_of(groups, {each: {"rng": own} for each, own in fresh.items()}))
        assert torch.equal(torch.random.get_rng_state(), outside)
        for masks in expected:
            again = _masks(fresh)
            assert all(torch.equal(again[each], mask) for each, mask in masks.items())
            first = list(again.values())
            assert len(first) == 1 or not torch.equal(first[0], first[1])


@pytest.mark.parametrize("name", ["disjoint", "colocated"])
def test_dropout_after_a_resume_is_that_of_the_uninterrupted_run(tmp_path: Path, name: str) -> None:
    """M20, A11."""
    run_ranks(4, _resume, str(tmp_path), name)


def _moved(context: RankContext, root: str, name: str) -> dict[tuple[str, int], list[float]]:
    """The next draws by module and data coordinate."""
    with (
        ModuleGroups.create(_placed(name)) as groups,
        Checkpointer(root, groups=groups.union) as checkpointer,
    ):
        streams = _streams(groups)
        state = parts_of(groups, {each: {"rng": own} for each, own in streams.items()})
        if checkpointer.latest() is None:
            _masks(streams)
            checkpointer.save(1, state)
        else:
            report = checkpointer.load(state)
            assert not any("dp=0" in path for path in report.kept)
        return {
            (each, groups[each].index("dp_cp")): mask.tolist()
            for each, mask in _masks(streams).items()
        }


def test_streams_follow_a_module_to_other_ranks(tmp_path: Path) -> None:
    """By coordinates, not by ranks: a rank that is new to a module keeps a stream of its own."""
    before = run_ranks(4, _moved, str(tmp_path), "disjoint").results
    after = run_ranks(4, _moved, str(tmp_path), "colocated").results
    old = {key: mask for result in before for key, mask in result.items()}
    new: dict[tuple[str, int], list[float]] = {}
    for result in after:
        for key, mask in result.items():
            assert new.setdefault(key, mask) == mask, "ranks along tp draw alike"
    assert {key: new[key] for key in old} == old
    assert len({tuple(mask) for mask in new.values()}) == len(new)


def _shared(context: RankContext, root: str) -> None:
    layouts = ModuleLayouts({"vision": Layout(dp=2), "language": Layout(dp=2)})
    with (
        ModuleGroups.create(layouts) as groups,
        Checkpointer(root, groups=groups.union) as checkpointer,
    ):

        def both(vision: RNG, language: RNG) -> dict[str, object]:
            return parts_of(groups, {"vision": {"rng": vision}, "language": {"rng": language}})

        own, other = ModuleRNG(seed=1), ModuleRNG(seed=2)
        match = r"'vision\.rng' and 'language\.rng' are the same streams \(%s\)"
        same_on_one = own if context.rank else other
        for one, two, stream in (
            (RNG(), RNG(), "python"),
            (own, own, "its own"),
            (own, same_on_one, "its own"),
        ):
            with pytest.raises(ConfigError, match=match % stream):
                both(one, two)
        state = both(own, RNG())
        checkpointer.save(1, state)
        with own:  # what the process draws from is the module's now
            with pytest.raises(ConfigError, match=match % "python"):
                checkpointer.save(2, state)
            with pytest.raises(ConfigError, match=match % "python"):
                checkpointer.load(state)
        with pytest.raises(ConfigError, match=r"'more' are the same streams \(its own\)"):
            checkpointer.save(2, {**both(own, other), "more": own})
        checkpointer.save(2, both(own, other))


def test_two_modules_never_share_a_stream(tmp_path: Path) -> None:
    """M20: refused where the parts are named, and by saves and loads of an entered one."""
    run_ranks(2, _shared, str(tmp_path))
