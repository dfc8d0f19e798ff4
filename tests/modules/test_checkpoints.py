"""Checkpoints of several modules: M1-M4, M7, M9, M11, M20, M21, A5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from holdfast import (
    Checkpointer,
    ConfigError,
    GroupError,
    HoldfastError,
    Layout,
    LayoutError,
    MismatchError,
    ModuleGroups,
    ModuleLayouts,
    ModuleRNG,
    ProcessGroups,
    module_parts,
)
from tests.checkpoint.common import files_of
from tests.harness import RankContext, run_ranks
from tests.modules.common import PLACEMENTS, Trained, assert_same_checkpoints, placement, trained


def _parts(groups: ModuleGroups, modules: dict[str, Trained]) -> dict[str, object]:
    return {
        **module_parts(groups, {name: module.parts() for name, module in modules.items()}),
        "progress": {"step": 3},
    }


def _move(context: RankContext, root: str, names: list[str]) -> None:
    """Train, save, and then load and save under each placement in turn."""
    for number, where in enumerate(names):
        with (
            ModuleGroups.create(placement(where)) as groups,
            Checkpointer(f"{root}/{number}", groups=groups.union) as checkpointer,
        ):
            modules = trained(groups)
            if number == 0:
                for step in range(3):
                    for module in modules.values():
                        module.step(step)
            else:
                for module in modules.values():
                    module.blank()
                before = Checkpointer(f"{root}/{number - 1}", groups=groups.union)
                report = before.load(_parts(groups, modules), step=3)
                assert report.values["progress"] == {"step": 3}
                for name, module in modules.items():
                    assert report.values[f"{name}.notes"] == module.parts()["notes"]
                everywhere = report.of_all_ranks(groups.control)
                assert everywhere.not_requested == ()
                assert {path.split(".")[0] for path in everywhere.loaded} == set(groups.layouts)
            checkpointer.save(3, _parts(groups, modules))
            checkpointer.save_async(4, _parts(groups, modules)).result(60)
            for module in modules.values():
                module.step(4)
            checkpointer.save(5, _parts(groups, modules))


@pytest.mark.slow
def test_modules_move_between_any_placements(tmp_path: Path) -> None:
    """M2, M3, M7: the same bytes and values under every placement, whichever rank is 0."""
    names = ["language first", *(name for name in PLACEMENTS if name != "language first")]
    run_ranks(4, _move, str(tmp_path), names)
    for number in range(1, len(names)):
        for step in (3, 4, 5):
            assert_same_checkpoints(
                tmp_path / "0" / f"iter_{step:07}", tmp_path / str(number) / f"iter_{step:07}"
            )


def _alone(context: RankContext, root: str, module: str) -> None:
    layouts = ModuleLayouts({module: Layout()})
    with ModuleGroups.create(layouts) as groups, Checkpointer(root, groups=groups.union) as own:
        modules = trained(groups)
        for step in range(3):
            modules[module].step(step)
        own.save(3, module_parts(groups, {module: modules[module].parts()}))


def test_each_module_is_what_it_is_alone(tmp_path: Path) -> None:
    """M1: the parts of a module are those of one process that trains it and nothing else."""
    run_ranks(4, _move, str(tmp_path), ["encoder first"])
    for module in ("vision", "language"):
        alone = tmp_path / module
        run_ranks(1, _alone, str(alone), module)
        _assert_part_of(alone / "iter_0000003", tmp_path / "0" / "iter_0000003")


def _assert_part_of(part: Path, whole: Path) -> None:
    """Every tensor and value of a checkpoint is in another one, bitwise."""
    small, large = (Checkpointer(each.parent).load_all(step=3) for each in (part, whole))
    assert set(small.values) <= set(large.values)
    for name in small.values:
        if not name.endswith(".rng"):
            _assert_equal(small.values[name], large.values[name])


def _assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert set(one) == set(other)
        for key in one:
            _assert_equal(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _assert_equal(a, b)
    else:
        assert one == other


def _local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _twice(context: RankContext, root: str) -> None:
    with (
        ModuleGroups.create(placement("colocated")) as groups,
        Checkpointer(root, groups=groups.union) as checkpointer,
    ):
        modules = trained(groups)
        for module in modules.values():
            module.step(0)
        checkpointer.save(1, _parts(groups, modules))
        checkpointer.save(2, _parts(groups, modules))
        assert checkpointer.stats.num_plans == 1


def test_a_second_save_has_the_same_bytes(tmp_path: Path) -> None:
    """M21."""
    run_ranks(4, _twice, str(tmp_path))
    one, two = (files_of(tmp_path / f"iter_000000{step}" / "data") for step in (1, 2))
    assert one == two


def _freeze(context: RankContext, root: str) -> list[str]:
    messages = []
    with (
        ModuleGroups.create(placement("encoder first")) as groups,
        Checkpointer(root, groups=groups.union) as checkpointer,
    ):
        modules = trained(groups, frozen=("vision",))
        for module in modules.values():
            module.step(0)
        checkpointer.save(1, _parts(groups, modules))
        for module in modules.values():
            module.blank()
        report = checkpointer.load(_parts(groups, modules))
        if groups.has("vision"):
            assert report.values["vision.optimizer"] == {}

        unfrozen = trained(groups)
        if groups.has("vision"):
            unfrozen["vision"].blank()
        with pytest.raises(MismatchError) as caught:
            checkpointer.load(_parts(groups, unfrozen))
        messages.append(str(caught.value))
        report = checkpointer.load(
            _parts(groups, unfrozen), allow_missing=["vision.optimizer*", "vision.schedule*"]
        )
        own = report.of("vision")
        messages.append(" ".join((*own.fresh, *own.missing)))
        for module in unfrozen.values():
            module.step(1)
        checkpointer.save(2, _parts(groups, unfrozen))
        frozen_again = trained(groups, frozen=("vision",))
        with pytest.raises(MismatchError, match=r"does not ask for: vision\.optimizer\.state"):
            checkpointer.load(_parts(groups, frozen_again))
        report = checkpointer.load(
            _parts(groups, frozen_again), ignore_unexpected=["vision.optimizer*"]
        )
        assert not report.of("vision.optimizer").loaded
        assert checkpointer.steps() == [1, 2]
    return messages


def test_a_frozen_module_takes_consent_to_unfreeze(tmp_path: Path) -> None:
    """M9, R1: an empty optimizer entry comes back; state that is missing starts fresh when asked,
    and state of a module that has been frozen since is left when asked."""
    for rank, (refused, fresh) in enumerate(run_ranks(4, _freeze, str(tmp_path)).results):
        assert "vision.optimizer" in refused
        assert ("vision.optimizer" in fresh) == (rank < 2)


def _lacking(context: RankContext, root: str) -> list[Any]:
    results: list[Any] = []
    small = {"language": Layout(tp=2), "vision": Layout(dp=2, ranks=(2, 3))}
    with (
        ModuleGroups.create(ModuleLayouts(small)) as groups,
        Checkpointer(root, groups=groups.union) as checkpointer,
    ):
        modules = trained(groups)
        for module in modules.values():
            module.step(0)
        checkpointer.save(1, _parts(groups, modules))
        expected = {
            name: value.detach().clone()
            for module in modules.values()
            for name, value in module.net.named_parameters()
        }
    large = {**small, "projector": Layout(dp=2, ranks=(2, 3))}
    with (
        ModuleGroups.create(ModuleLayouts(large)) as groups,
        Checkpointer(root, groups=groups.union) as checkpointer,
    ):
        modules = trained(groups)
        for name in set(modules) - {"projector"}:
            modules[name].blank()
        before = {
            name: value.detach().clone()
            for name, value in (
                modules["projector"].net.named_parameters() if "projector" in modules else ()
            )
        }
        with pytest.raises(MismatchError) as caught:
            checkpointer.load(_parts(groups, modules))
        results.append(str(caught.value))
        report = checkpointer.load(_parts(groups, modules), allow_missing=["projector.*"])
        report = report.of_all_ranks(groups.control)
        results.append({name: report.of(name) for name in groups.layouts})
        for name, value in before.items():
            parameter = modules["projector"].net.get_parameter(name)
            assert torch.equal(_local(value), _local(parameter))
        for each in set(modules) - {"projector"}:
            for name, value in modules[each].net.named_parameters():
                assert torch.equal(_local(value), _local(expected[name]))
        # Leaving a module out is a choice, and stated.
        chosen = {name: each.parts() for name, each in modules.items() if name != "projector"}
        report = checkpointer.load(module_parts(groups, chosen, without=["projector"]))
        report = report.of_all_ranks(groups.control)
        results.append(report.not_requested)
        # A save of the larger model, loaded by the smaller one: what is left out is named.
        checkpointer.save(2, _parts(groups, modules))
        report = checkpointer.load(module_parts(groups, chosen, without=["projector"]), step=2)
        results.append(report.of_all_ranks(groups.control).not_requested)
    return results


def test_a_checkpoint_that_lacks_a_module(tmp_path: Path) -> None:
    """M11: an error by default; by policy the rest is loaded, and each module is reported."""
    for refused, reports, left_out, more in run_ranks(4, _lacking, str(tmp_path)).results:
        assert "projector.model" in refused
        assert "allow_missing" in refused
        assert not reports["projector"].loaded
        assert any(name.startswith("projector.model") for name in reports["projector"].missing)
        for module in ("vision", "language"):
            assert not reports[module].missing
            assert not reports[module].unexpected
            assert f"{module}.model.layers.1.column" in reports[module].loaded
        assert left_out == ("progress",)
        assert "projector.model" in more


def _swap(context: RankContext, root: str) -> str:
    """Another encoder under the old one's name: what fits no more is refused, or left by name."""
    with (
        ModuleGroups.create(placement("encoder first")) as groups,
        Checkpointer(root, groups=groups.union) as checkpointer,
    ):
        modules = trained(groups)
        checkpointer.save(1, _parts(groups, modules))
        parts = {name: {"model": module.net} for name, module in modules.items()}
        if groups.has("vision"):
            del modules["vision"].net.layers["1"]
        with pytest.raises(MismatchError) as caught:
            checkpointer.load(module_parts(groups, parts))
        with pytest.raises(MismatchError, match="vision"):
            checkpointer.load(module_parts(groups, parts), ignore_unexpected=["language.*"])
        report = checkpointer.load(
            module_parts(groups, parts), ignore_unexpected=["vision.model.layers.1.*"]
        )
        assert all(name.startswith("vision.model.layers.1.") for name in report.unexpected)
        return str(caught.value)


def test_another_encoder_under_the_same_name(tmp_path: Path) -> None:
    for message in run_ranks(4, _swap, str(tmp_path)).results:
        assert "vision.model.layers.1.column" in message
        assert "ignore_unexpected" in message


def _mistakes(context: RankContext) -> None:
    with ModuleGroups.create(placement("encoder first")) as groups:
        mine: dict[str, dict[str, object]] = {name: {"model": {}} for name in groups.modules}
        other = "language" if context.rank < 2 else "vision"
        with pytest.raises(GroupError, match=f"does not have module '{other}'"):
            module_parts(groups, {**mine, other: {}})
        with pytest.raises(LayoutError, match="Unknown module 'audio'"):
            module_parts(groups, {**mine, "audio": {}})
        with pytest.raises(LayoutError, match="Unknown module 'audio'"):
            module_parts(groups, mine, without=["audio"])
        with pytest.raises(ConfigError, match="would be lost"):
            module_parts(groups, dict(list(mine.items())[1:]))
        with pytest.raises(ConfigError, match="choose one"):
            module_parts(groups, mine, without=list(mine)[:1])
        with pytest.raises(ConfigError, match="needs a name"):
            module_parts(groups, {name: {"": 1} for name in mine})
        # What is wrong on one rank is an error on all, and the next call works.
        with pytest.raises(ConfigError, match=r"rank 3: rank 3 has module '.*would be lost"):
            module_parts(groups, mine if context.rank < 3 else {})
        module_parts(groups, {name: {"rng": ModuleRNG(seed=1)} for name in mine})


def test_what_would_lose_a_module_is_refused() -> None:
    run_ranks(4, _mistakes)


def _two_models(context: RankContext, root: str) -> None:
    """Actor and reference: other layouts on the same ranks, saves of both in flight at once."""
    rank = context.rank
    layouts = {"actor": Layout(tp=2, dp=2, name="actor"), "critic": Layout(dp=4, name="critic")}
    with (
        ProcessGroups.create(layouts["actor"]) as first,
        ProcessGroups.create(layouts["critic"]) as second,
        Checkpointer(f"{root}/actor", groups=first) as one,
        Checkpointer(f"{root}/critic", groups=second) as other,
    ):
        nets = {
            name: Trained("language", groups, 0.1 + i)
            for i, (name, groups) in enumerate({"actor": first, "critic": second}.items())
        }
        for step in range(1, 4):
            nets["actor"].step(step)
            pending = one.save_async(step, nets["actor"].parts())
            nets["critic"].step(step)
            also = other.save_async(step, nets["critic"].parts())
            also.result(60)
            pending.result(60)
        with pytest.raises(HoldfastError, match="no such thing"):
            one.save(9, {**nets["actor"].parts(), "bad": _Fails() if rank == 1 else {}})
        other.save(9, nets["critic"].parts())
        assert one.steps() == [1, 2, 3]
        assert other.steps() == [1, 2, 3, 9]
        for name, checkpointer in (("actor", one), ("critic", other)):
            before = [p.detach().clone() for p in nets[name].net.parameters()]
            nets[name].blank()
            report = checkpointer.load(nets[name].parts(), step=3)
            assert report.values["notes"] == nets[name].parts()["notes"]
            for old, new in zip(before, nets[name].net.parameters(), strict=True):
                assert torch.equal(_local(old), _local(new))


class _Fails:
    def state_dict(self) -> dict[str, object]:
        raise RuntimeError("no such thing")

    def load_state_dict(self, state: dict[str, object]) -> None:
        del state


@pytest.mark.slow
def test_two_models_in_one_process_do_not_touch_each_other(tmp_path: Path) -> None:
    run_ranks(4, _two_models, str(tmp_path))
