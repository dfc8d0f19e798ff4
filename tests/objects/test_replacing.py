"""A load replaces: nothing stays of what was there, and what starts fresh does so by consent."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, Adamax, AdamW

from holdfast import Checkpointer, ConfigError, MismatchError, OptimizerState
from holdfast.optim import ShardedOptimizer
from holdfast.parallel import Layout, ProcessGroups
from tests.harness import RankContext, run_ranks
from tests.objects.optimizers import differences, net, parts, train, tree_of


def trained(kind: Any = Adam, steps: int = 2, **options: Any) -> tuple[Any, Any]:
    model = net(0)
    optimizer = kind(model.parameters(), **options)
    train(model, optimizer, range(steps))
    return model, optimizer


def test_going_back_to_a_step_without_moments_leaves_none(tmp_path: Path) -> None:
    model, optimizer = trained(steps=0)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, optimizer))
    train(model, optimizer, range(2))
    report = checkpointer.load(parts(model, optimizer), step=1)
    assert not optimizer.state
    assert report.fresh == ()


def test_an_unused_parameter_has_no_state_again(tmp_path: Path) -> None:
    """The saved run knew it and had nothing for it: nothing is exact, and needs no consent."""
    model = net(0)
    optimizer = Adam(model.parameters())
    for p in [model.first.weight, model.scale]:  # type: ignore[union-attr]
        p.grad = torch.ones_like(p)  # type: ignore[arg-type]
    optimizer.step()
    optimizer.zero_grad()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, optimizer))
    at_save = tree_of(optimizer)
    train(model, optimizer, range(2))
    assert checkpointer.load(parts(model, optimizer)).fresh == ()
    assert not list(differences(at_save, tree_of(optimizer)))


def test_stale_entries_and_settings_go(tmp_path: Path) -> None:
    model, optimizer = trained(AdamW, lr=0.01)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, optimizer))
    twin = net(1)
    other = AdamW(twin.parameters(), lr=0.5, amsgrad=True)
    train(twin, other, range(3))
    other.param_groups[0]["mine"] = 7
    held = other.param_groups[0]
    checkpointer.load(parts(twin, other))
    assert not list(differences(tree_of(optimizer), tree_of(other)))
    assert other.param_groups[0] is held
    assert "mine" not in held
    assert set(other.state[twin.scale]) == {"step", "exp_avg", "exp_avg_sq"}  # type: ignore[index]


@pytest.mark.parametrize("kind", [Adam, Adafactor])  # which has other state of one dim than of two
def test_a_setting_outside_the_class_stays_only_when_asked(kind: Any, tmp_path: Path) -> None:
    model, optimizer = trained(kind)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, optimizer))
    optimizer.param_groups[0]["mine"] = 7
    report = checkpointer.load(parts(model, optimizer), allow_missing=["optimizer.groups.*.mine"])
    assert report.fresh == ("optimizer.groups.0.mine",)
    assert "1 started fresh" in report.summary()
    assert optimizer.param_groups[0]["mine"] == 7


class Newer(Adam):
    """The same optimizer one version later: it needs a setting more."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.defaults["cautious"] = True
        for group in self.param_groups:
            group["cautious"] = True


class Older(Newer):
    """As torch does it: the class fills in what an older checkpoint lacks."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("cautious", False)


def test_a_setting_that_the_class_needs_takes_consent(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, optimizer))
    newer, older = Newer(model.parameters()), Older(model.parameters())
    with pytest.raises(MismatchError, match=r"optimizer\.groups\.0\.cautious.*allow_missing"):
        checkpointer.load(parts(model, newer))
    checkpointer.load(parts(model, newer), allow_missing=["*.cautious"])
    assert newer.param_groups[0]["cautious"] is True
    assert checkpointer.load(parts(model, older)).fresh == ()
    assert older.param_groups[0]["cautious"] is False


@pytest.mark.parametrize(
    ("saved", "built", "lacking"),
    [
        (partial(SGD, lr=0.1, momentum=0.9), Adam, "exp_avg, exp_avg_sq, step"),
        (Adam, partial(SGD, lr=0.1, momentum=0.9), "momentum_buffer"),
        (Adam, Adamax, "exp_inf"),  # which has no setting that `Adam` lacks
        (Adam, Adafactor, "variance"),  # whose `eps` is a pair
    ],
)
def test_another_kind_of_optimizer_is_refused_at_the_load(
    saved: Any, built: Any, lacking: str, tmp_path: Path
) -> None:
    """O4: whatever the caller agrees to, since its next step would fail for want of an entry."""
    model, optimizer = trained(saved)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, optimizer))
    twin, other = trained(built)
    before = copy.deepcopy(twin.state_dict()), tree_of(other)
    with pytest.raises(MismatchError, match=rf"another kind of optimizer.*needs {lacking};"):
        checkpointer.load(parts(twin, other), allow_missing=["*"])
    assert not list(differences(before, (twin.state_dict(), tree_of(other))))


def test_a_setting_that_the_class_replaces_takes_consent(tmp_path: Path) -> None:
    """O4: `AdamW` finds all that it has in a checkpoint of `Adam`, and decays weights otherwise."""
    model, optimizer = trained(Adam, weight_decay=0.1)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, optimizer))
    twin, other = trained(AdamW, lr=0.01)
    before = copy.deepcopy(twin.state_dict()), tree_of(other)
    with pytest.raises(
        MismatchError, match=r"groups\.0\.decoupled_w.*stored is False, AdamW has T"
    ):
        checkpointer.load(parts(twin, other))
    assert not list(differences(before, (twin.state_dict(), tree_of(other))))
    report = checkpointer.load(parts(twin, other), allow_missing=["*.decoupled_weight_decay"])
    assert report.fresh == ("optimizer.groups.0.decoupled_weight_decay",)
    assert other.param_groups[0]["weight_decay"] == 0.1
    assert other.param_groups[0]["decoupled_weight_decay"] is True
    checkpointer.save(2, parts(twin, other))
    back = Adam(model.parameters())
    assert checkpointer.load(parts(model, back), step=2).fresh == ()
    assert back.param_groups[0]["decoupled_weight_decay"] is True


@pytest.mark.parametrize("is_listed", [True, False])
def test_unfreezing_takes_consent(tmp_path: Path, is_listed: bool) -> None:
    """M9: an encoder that was frozen when it was saved, in the optimizer's groups or not."""
    model = net(0)
    model.first.requires_grad_(False)  # type: ignore[union-attr,operator]

    def optimizer_of(module: nn.Module) -> Adam:
        return Adam([p for p in module.parameters() if is_listed or p.requires_grad])

    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, optimizer))
    frozen = net(1)
    frozen.first.requires_grad_(False)  # type: ignore[union-attr,operator]
    same = optimizer_of(frozen)
    assert checkpointer.load(parts(frozen, same)).fresh == ()
    assert not list(differences(tree_of(optimizer), tree_of(same)))

    twin = net(2)
    other = optimizer_of(twin)
    train(twin, other, range(3))
    before = copy.deepcopy(twin.state_dict()), tree_of(other)
    with pytest.raises(MismatchError, match=r"2 entries would start fresh.*first\.weight.*allow_m"):
        checkpointer.load(parts(twin, other))
    assert not list(differences(before, (twin.state_dict(), tree_of(other))))
    report = checkpointer.load(parts(twin, other), allow_missing=["optimizer.state.first.*"])
    assert report.fresh == ("optimizer.state.first.weight", "optimizer.state.first.bias")
    assert twin.first.weight not in other.state  # type: ignore[union-attr]
    assert other.state[twin.scale]["step"] == 2  # type: ignore[index]
    train(twin, other, range(2, 3))
    assert other.state[twin.first.weight]["step"] == 1  # type: ignore[index,union-attr]


def test_state_made_at_construction_starts_as_constructed(tmp_path: Path) -> None:
    """Adagrad relies on state from its construction; a fresh start has that, not an earlier one."""
    model = net(0)
    model.first.requires_grad_(False)  # type: ignore[union-attr,operator]
    kept = [p for p in model.parameters() if p.requires_grad]
    optimizer = Adagrad(kept, lr=0.1, initial_accumulator_value=0.5)
    train(model, optimizer, range(2))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, optimizer))
    twin = net(1)
    other = Adagrad(twin.parameters(), lr=0.1, initial_accumulator_value=0.5)
    train(twin, other, range(3))
    checkpointer.load(parts(twin, other), allow_missing=["optimizer.state.first*"])
    state = other.state[twin.first.weight]  # type: ignore[index,union-attr]
    assert state["step"] == 0
    assert bool((state["sum"] == 0.5).all())
    train(twin, other, range(1))


def test_a_new_group_takes_consent(tmp_path: Path) -> None:
    model = net(0)
    optimizer = Adam([model.first.weight], lr=0.1)  # type: ignore[union-attr,list-item]
    train(model, optimizer, range(2))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, optimizer))
    optimizer.add_param_group({"params": [model.scale], "lr": 0.7})
    consent = ["optimizer.state.scale", "optimizer.groups.1"]
    for given in ([], consent[:1], consent[1:]):
        with pytest.raises(MismatchError, match="would start fresh"):
            checkpointer.load(parts(model, optimizer), allow_missing=given)
    report = checkpointer.load(parts(model, optimizer), allow_missing=consent)
    assert sorted(report.fresh) == sorted(consent)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.7]


def test_groups_that_became_one_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    model = net(0)
    first, *rest = model.parameters()
    optimizer = Adam([{"params": [first], "lr": 0.1}, {"params": rest}])
    train(model, optimizer, range(2))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, optimizer))
    twin, other = trained()
    before = copy.deepcopy(twin.state_dict()), tree_of(other)
    with pytest.raises(
        MismatchError, match=r"group 0 of 1 .* in groups \[0, 1\], whose settings d"
    ):
        checkpointer.load(parts(twin, other))
    assert not list(differences(before, (twin.state_dict(), tree_of(other))))
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"]
    checkpointer.save(2, parts(model, optimizer))
    checkpointer.load(parts(twin, other))
    assert other.state[twin.scale]["step"] == 2


def test_a_moment_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Without the module's own part, which would say so, too; into a fresh and a used optimizer."""
    model = nn.Linear(3, 4)
    optimizer = Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"optimizer": OptimizerState(optimizer, model)})
    other = nn.Linear(3, 5)
    fresh = Adam(other.parameters())
    for _ in range(2):
        with pytest.raises(MismatchError, match=r"optimizer\.state\.weight .* shape \[4, 3\]"):
            checkpointer.load({"optimizer": OptimizerState(fresh, other)})
        other(torch.ones(1, 3)).sum().backward()
        fresh.step()


def test_an_old_checkpoint_without_facts_still_loads(tmp_path: Path) -> None:
    """What earlier versions stored: no shapes, no frozen parameters."""
    model, optimizer = trained()
    checkpointer = Checkpointer(tmp_path)
    tree = OptimizerState(optimizer, model).tree()
    del tree["parameters"]
    checkpointer.save(1, {"optimizer": tree})
    twin = net(1)
    other = Adam(twin.parameters())
    train(twin, other, range(3))
    checkpointer.load({"optimizer": OptimizerState(other, twin)})
    assert not list(differences(tree_of(optimizer), tree_of(other)))


def test_tensors_that_were_one_are_one_again(tmp_path: Path) -> None:
    model, optimizer = trained()
    shared = torch.tensor(2.0)
    for entries in optimizer.state.values():
        entries["step"] = shared
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, optimizer))
    twin = net(1)
    other = Adam(twin.parameters())
    for stale in (0, 2):
        train(twin, other, range(stale))
        checkpointer.load(parts(twin, other))
        assert len({id(entries["step"]) for entries in other.state.values()}) == 1
    for entries in optimizer.state.values():
        entries["step"] = entries["step"].clone()
    checkpointer.save(2, parts(model, optimizer))
    checkpointer.load(parts(twin, other))
    assert len({id(entries["step"]) for entries in other.state.values()}) == 5
    assert all(entries["step"] == 2 for entries in other.state.values())


def test_state_of_a_tensor_in_no_group_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    optimizer.state[torch.ones(3)] = {"moment": torch.ones(3)}
    with pytest.raises(Exception, match=r"shape \[3\].*in none of its parameter groups"):
        Checkpointer(tmp_path).save(1, parts(model, optimizer))


def test_one_optimizer_over_several_modules(tmp_path: Path) -> None:
    """Names begin with the module's; a module by itself is refused."""
    made = []
    for seed in (0, 5):
        generator, critic = net(seed), net(seed + 1)
        optimizer = Adam([*generator.parameters(), *critic.parameters()])
        made.append((generator, critic, optimizer))

    def state(generator: nn.Module, critic: nn.Module, optimizer: Adam) -> dict[str, object]:
        held = OptimizerState(optimizer, {"generator": generator, "critic": critic})
        return {"generator": generator, "critic": critic, "optimizer": held}

    for module in made[0][:2]:
        train(module, made[0][2], range(2))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state(*made[0]))
    report = checkpointer.load(state(*made[1]))
    assert "optimizer.state.critic.first.weight.exp_avg" in report.loaded
    assert not list(differences(tree_of(made[0][2]), tree_of(made[1][2])))
    with pytest.raises(ConfigError, match="pass a dict of them by name"):
        OptimizerState(made[0][2], made[0][0]).tree()
    inner = nn.ModuleDict({"b": nn.Linear(1, 1)})
    same = OptimizerState(SGD(inner.parameters()), {"a": inner, "a.b": nn.Linear(1, 1)})
    with pytest.raises(ConfigError, match=r"two parameters are named 'a\.b\.weight'"):
        same.tree()


def test_an_optimizer_of_a_copy_is_refused(tmp_path: Path) -> None:
    model = net(0)
    copied = copy.deepcopy(model)
    optimizer = Adam(copied.parameters())
    with pytest.raises(ConfigError, match="build the optimizer again"):
        Checkpointer(tmp_path).save(1, parts(model, optimizer))
    with pytest.raises(ConfigError, match="is not an optimizer"):
        OptimizerState(object(), model)  # type: ignore[arg-type]


def sharded(context: RankContext, root: str) -> list[str]:
    """Going back and unfreezing with a sharded optimizer."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[0].requires_grad_(False)

        def made() -> ShardedOptimizer:
            return ShardedOptimizer(
                model,
                model.parameters(),
                make=Adam,
                groups=groups,
                over="dp_cp",
                divisor=2,
                elementwise=True,
            )

        def step(optimizer: ShardedOptimizer) -> None:
            with optimizer.microbatch(is_last=True):
                model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.synchronize()

        checkpointer = Checkpointer(root, groups=groups)
        optimizer = made()
        state = {"model": model, "optimizer": OptimizerState(optimizer, model)}
        checkpointer.save(0, state)
        step(optimizer)
        checkpointer.save(1, state)
        checkpointer.load(state, step=0)
        assert not optimizer.inner.state
        optimizer.close()
        model[0].requires_grad_(True)
        thawed = made()
        step(thawed)
        state = {"model": model, "optimizer": OptimizerState(thawed, model)}
        with pytest.raises(MismatchError, match=r"optimizer\.state\.0\.weight .*allow_missing"):
            checkpointer.load(state, step=1)
        report = checkpointer.load(state, step=1, allow_missing=["optimizer.state.0.*"])
        known = {
            held.parameter.shape
            for held in thawed.optimizer_parameters()
            if held.updated is not None and held.updated in thawed.inner.state
        }
        assert torch.Size((4, 4)) not in known
        step(thawed)
        thawed.close()
        return list(report.fresh)


def test_a_sharded_optimizer_is_replaced_too(tmp_path: Path) -> None:
    for fresh in run_ranks(2, sharded, str(tmp_path)).results:
        assert fresh == ["optimizer.state.0.weight", "optimizer.state.0.bias"]


def renamed(context: RankContext, root: str) -> list[str]:
    """Rank 0 asks for its stage under another name; returns what it is told."""
    stages = ["first", "second"]
    mine = stages[context.rank]
    with ProcessGroups.create(Layout(pp=2)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        checkpointer.save(1, {"model": nn.ModuleDict({mine: nn.Linear(2, 2)})})
        messages = []
        for exchange, ignored in ((True, False), (False, False), (True, True), (False, True)):
            model = nn.ModuleDict({"begin" if context.rank == 0 else mine: nn.Linear(2, 2)})
            before = copy.deepcopy(model.state_dict())
            with pytest.raises(MismatchError) as caught:
                checkpointer.load({"model": model}, exchange=exchange, ignore_unexpected=ignored)
            assert not list(differences(before, model.state_dict()))
            messages.append(str(caught.value))
        checkpointer.load({"model": nn.ModuleDict({mine: nn.Linear(2, 2)})})
        return messages


def test_a_refusal_names_both_names_of_what_was_renamed(tmp_path: Path) -> None:
    """E9: what no rank asks for, with what one rank lacks; no other rank has begun to read."""
    first, second = run_ranks(2, renamed, str(tmp_path)).results
    for message in (*first, *second):
        assert "lacks 2 entries that the state asks for: model.begin.weight" in message
    for message in (*first[:2], *second[:2]):
        assert "holds 2 entries that the state does not ask for: model.first.weight" in message
        assert "second" not in message


def test_optimizers_that_share_a_tensor_keep_their_own_rate(tmp_path: Path) -> None:
    """O4: a tensor for two was filled twice; both continued with the last one's rate."""

    def built(model: nn.Module) -> dict[str, Any]:
        rate = torch.tensor(0.1)
        halves = [each.parameters() for each in (model.first, model.second)]
        pair = [Adam(half, lr=rate, foreach=False) for half in halves]
        return {name: OptimizerState(each, model) for name, each in zip("ab", pair, strict=True)}

    def rates(state: dict[str, Any]) -> list[Any]:
        return [part.torch_optimizers()[0].param_groups[0]["lr"] for part in state.values()]

    checkpointer = Checkpointer(tmp_path)
    saved = built(net(0))
    checkpointer.save(1, saved)
    saved["b"].torch_optimizers()[0].param_groups[0]["lr"] = torch.tensor(0.5)
    checkpointer.save(2, saved)
    for step, right in ((1, [0.1, 0.1]), (2, [0.1, 0.5])):
        for order in ("ab", "ba"):
            twin = built(net(1))
            checkpointer.load({name: twin[name] for name in order}, step=step)
            assert torch.equal(torch.stack(rates(twin)), torch.tensor(right))
            assert (rates(twin)[0] is rates(twin)[1]) == (step == 1)
