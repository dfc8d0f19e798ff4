"""Devices, the report, injected errors, statistics, and what is brought back."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from holdfast import Codecs
from holdfast.errors import ConfigError, CorruptionError
from holdfast.rerun import (
    DeterminismStatistics,
    DeviceIdentity,
    Replayed,
    read_report,
)
from holdfast.rerun.journal import Journal

A, B = DeviceIdentity(host="h", uuid="A"), DeviceIdentity(host="h", uuid="B")


def test_devices_are_the_same_by_their_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers change the names of hosts; processors have no other name than their host's."""
    assert A.is_same(DeviceIdentity(host="other", uuid="A"))
    assert not A.is_same(B)
    cpu = DeviceIdentity(host="h", uuid="cpu")
    assert cpu.is_same(DeviceIdentity(host="h", uuid="cpu"))
    assert not cpu.is_same(DeviceIdentity(host="other", uuid="cpu"))
    assert DeviceIdentity.from_dict(A.to_dict()) == A
    monkeypatch.delenv("HOLDFAST_DEVICE", raising=False)
    assert DeviceIdentity.of(torch.device("cpu")).uuid == "cpu"
    monkeypatch.setenv("HOLDFAST_DEVICE", "GPU-7")
    assert DeviceIdentity.of(torch.device("cpu")).uuid == "GPU-7"


class Accelerator:
    """`torch.accelerator` of a host with several devices of a kind."""

    def __init__(self, kind: str, index: int = 0) -> None:
        self.kind, self.index = kind, index

    def is_available(self) -> bool:
        return True

    def current_accelerator(self) -> torch.device:
        return torch.device(self.kind)

    def current_device_index(self) -> int:
        return self.index


@pytest.mark.parametrize("kind", ["xpu", "hpu", "mps"])
def test_other_accelerators_are_known_by_host_and_index(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The current one, or one that is passed; the variable goes before all of it."""
    monkeypatch.delenv("HOLDFAST_DEVICE", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "h")
    monkeypatch.setattr(torch, "accelerator", Accelerator(kind, 2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    current = DeviceIdentity.of()
    assert current == DeviceIdentity(host="h", uuid=f"{kind}:2")
    assert DeviceIdentity.of(torch.device(kind)) == current
    assert DeviceIdentity.of(torch.device(kind, 0)).uuid == f"{kind}:0"
    assert DeviceIdentity.of(torch.device("cpu")).uuid == "cpu"
    assert current.key != DeviceIdentity(host="other", uuid=f"{kind}:2").key
    assert current.key != DeviceIdentity(host="h", uuid=f"{kind}:3").key
    monkeypatch.setenv("HOLDFAST_DEVICE", "card-7")
    assert DeviceIdentity.of().uuid == "card-7"


def test_a_list_of_names_has_one_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rank on the host, as launchers give it; none is guessed."""
    monkeypatch.setenv("HOLDFAST_DEVICE", "A, B")
    for local_rank, name in (("0", "A"), ("1", "B")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert DeviceIdentity.of().uuid == name
    for local_rank in ("2", "-1", ""):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(ConfigError, match="HOLDFAST_DEVICE=A, B has no device for"):
            DeviceIdentity.of()
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError, match="HOLDFAST_DEVICE"):
        DeviceIdentity.of()
    monkeypatch.setenv("HOLDFAST_DEVICE", "A")
    assert DeviceIdentity.of().uuid == "A"


def test_an_index_is_that_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process may see one device only, as its number 0: they are not one device."""
    monkeypatch.delenv("HOLDFAST_DEVICE", raising=False)
    monkeypatch.setattr(torch, "accelerator", Accelerator("xpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "1.0, 3")
    assert DeviceIdentity.of().uuid == "xpu:1.0"
    assert DeviceIdentity.of(torch.device("xpu", 1)).uuid == "xpu:3"
    assert DeviceIdentity.of(torch.device("xpu", 2)).uuid == "xpu:2"  # the mask does not have it
    mine = DeviceIdentity(host="h", uuid="xpu:1.0")
    assert mine.key != DeviceIdentity(host="other", uuid="xpu:1.0").key


def test_cuda_devices_are_known_by_their_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_DEVICE", raising=False)
    seen: list[torch.device] = []

    class Properties:
        uuid = "1234-5678"

    def properties_of(device: torch.device) -> Properties:
        seen.append(device)
        return Properties()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of)
    assert DeviceIdentity.of().uuid == "GPU-1234-5678"
    assert DeviceIdentity.of(torch.device("cuda", 1)).uuid == "GPU-1234-5678"
    assert seen == [torch.device("cuda", 3), torch.device("cuda", 1)]


def test_the_key_of_a_device() -> None:
    """Hashable, and equal exactly for the same device."""
    identities = [
        DeviceIdentity(host=host, uuid=uuid)
        for host in ("h1", "h2")
        for uuid in ("GPU-1", "GPU-2", "cpu", "xpu:0", "xpu:1")
    ]
    for first in identities:
        for second in identities:
            is_same = first.uuid == second.uuid and (
                first.host == second.host or first.uuid.startswith("GPU")
            )
            assert (first.key == second.key) is is_same
            assert first.is_same(second) is is_same
    assert len({each.key for each in identities}) == 8


def judged(journal: Journal, step: int, verdict: str) -> None:
    """Record a verdict as a machine does."""
    value = {"coordinate": "dp=0", "call": "loss", "occurrence": 1}
    fields = {"step": step, "fault": f"{step}", "verdict": verdict, "values": [value]}
    journal.append("verdict", fields)


def test_only_verdicts_leave_steps_out(tmp_path: Path) -> None:
    """D18, D20, D22: a step is skipped where its data was proved bad, and no other one."""
    journal = Journal(tmp_path / "deep")
    assert journal.past().skipped == []
    for job in "ab":
        value = {"rank": 0, "coordinate": "dp=0", "call": "loss", "occurrence": 0}
        journal.append("rejected", {"job": job, "step": 5, "fault": job, "values": [value]})
    for step, verdict in enumerate(
        ("transient_error", "persistent_error", "undecided", "correct_result", "spoiled_state")
    ):
        judged(journal, step, verdict)
    past = journal.past()
    assert past.skipped == [3]
    assert past.spoiled == [4]
    assert past.faults == ["0", "1", "2", "3", "4"]
    assert past.points == [f"{step}:dp=0" for step in range(5)]
    fed_by = [{"coordinate": f"dp=1,tp={rank}"} for rank in range(2)]
    value = {"coordinate": "dp=1,tp=0", "call": "loss", "occurrence": 0, "first_fed_by": fed_by}
    fields = {"step": 5, "fault": "5", "verdict": "transient_error", "values": [value]}
    journal.append("verdict", fields)
    assert journal.past().points[5:] == ["5:dp=1,tp=0", "5:dp=1,tp=1"]


def test_a_torn_line_of_the_report_is_left_and_another_one_named(tmp_path: Path) -> None:
    """What a dying process leaves does no harm; a line that is not an event is refused."""
    journal = Journal(tmp_path)
    judged(journal, 5, "correct_result")
    with journal.path.open("a") as file:
        file.write('{"event": "rejec\n{"ev\n\0\0\0')
    judged(journal, 6, "correct_result")
    assert journal.past().skipped == [5, 6]
    assert len(read_report(tmp_path)) == 2
    whole = journal.path.read_text()
    for line in ("skip 17", '{"event": ' + "[" * 99_999 + "]" * 99_999 + "}"):
        journal.path.write_text(f"{whole}{line}\n")
        with pytest.raises(CorruptionError, match=f"line 6 .*{re.escape(line[:12])}"):
            journal.past()


@pytest.mark.parametrize("kind", ["verdict", "restart", "rerun_from_checkpoint"])
def test_an_event_that_lacks_what_a_start_reads_is_an_error_by_name(
    tmp_path: Path, kind: str
) -> None:
    """D24: it was one of the coordinator alone, and the other ranks waited for it."""
    journal = Journal(tmp_path)
    journal.append(kind, {"fault": "5", "values": [{"call": "loss"}]})
    with pytest.raises(CorruptionError, match=r"report.jsonl is not as this version writes it"):
        journal.history_of("5")
    if kind == "verdict":
        with pytest.raises(CorruptionError, match=r"KeyError.*use another directory"):
            journal.past()


def test_statistics_of_ranks_add_up() -> None:
    """D13: counts, the largest, the mean and decades, as if one rank had seen it all."""
    rng = random.Random(0)
    parts = [DeterminismStatistics() for _ in range(3)]
    whole = DeterminismStatistics()
    differences = [0.0, math.inf, 5e-324, 1.0, 2.0, *(10 ** rng.uniform(-20, 0) for _ in range(60))]
    for number, difference in enumerate(differences):
        parts[number % 3].add("loss", difference)
        whole.add("loss", difference)
    merged = DeterminismStatistics.merged([part.report() for part in parts]).report()["loss"]
    expected = whole.report()["loss"]
    assert merged.pop("mean") == pytest.approx(expected.pop("mean"))
    assert merged.pop("total") == pytest.approx(expected.pop("total"))
    assert merged == expected
    assert (expected["num_compared"], expected["num_identical"]) == (65, 1)
    assert (expected["largest"], expected["largest_finite"]) == ("inf", 2.0)
    assert sum(expected["decades"].values()) == 63
    assert whole.table().splitlines()[1].split()[:3] == ["loss", "65", "1"]
    assert not whole.is_identical


class Odd(nn.Module):
    """Buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.register_buffer("queue", torch.arange(4.0), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("short", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("alias", self.queue)
        self.register_buffer("waves", torch.arange(4.0).view(2, 2) * (1 + 1j))
        self.count = 0


def test_odd_buffers_streams_and_hooks_are_brought_back() -> None:
    """Twice: the same tensor objects with the same values, and nothing that came meanwhile."""
    model = Odd()
    replayed = Replayed(
        modules=[model], hooks=[(lambda: model.count, lambda n: setattr(model, "count", n))]
    )
    with pytest.raises(ConfigError, match="before take"):
        replayed.restore()
    replayed.take()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    objects = {name: id(buffer) for name, buffer in model.named_buffers()}
    draws = [random.random(), np.random.rand(), torch.rand(2)]
    for _ in range(2):
        model.inner(torch.randn(5, 2))
        model.queue.add_(1)
        model.short.data = torch.zeros(7)
        model.register_buffer("none", torch.ones(1))
        model.register_buffer("new", torch.ones(1))
        del model._buffers["alias"]
        model.count += 5
        replayed.restore()
        after = dict(model.named_buffers(remove_duplicate=False))
        assert set(after) == {*before, "alias"}
        assert model.none is None
        assert model.alias is model.queue
        for name, buffer in before.items():
            assert id(after[name]) == objects[name]
            assert torch.equal(after[name], buffer)
            assert after[name].dtype == buffer.dtype
        assert model.count == 0
        assert "queue" not in model.state_dict()
        now = [random.random(), np.random.rand(), torch.rand(2)]
        assert now[:2] == draws[:2]
        assert torch.equal(now[2], draws[2])


def test_streams_and_unsaved_buffers_reach_another_process() -> None:
    """What no state dict has is kept with the fault."""
    model, other = Odd(), Odd()
    model.queue.fill_(7)
    replayed, elsewhere = Replayed(modules=[model]), Replayed(modules=[other])
    replayed.take()
    kept = replayed.kept(codecs=Codecs())
    draw = torch.rand(3)
    elsewhere.replay_kept(kept, codecs=Codecs())
    assert torch.equal(torch.rand(3), draw)
    assert torch.equal(other.queue, model.queue)


def test_hooks_may_return_what_the_step_changes() -> None:
    """A state dict refers to the tensors themselves: it is copied."""
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    replayed = Replayed(hooks=[(model.state_dict, model.load_state_dict)])
    replayed.take()
    for _ in range(2):
        with torch.no_grad():
            model.weight.add_(1)
        replayed.restore()
        assert torch.equal(model.weight, before)


def test_buffers_without_memory_of_their_own() -> None:
    """Expanded, replaced through `.data`, and released ones have their values again."""
    model = nn.Module()
    model.register_buffer("wide", torch.ones(1).expand(4))
    model.register_buffer("moved", torch.arange(3.0))
    model.register_buffer("released", torch.arange(5.0))
    where = model.moved.data_ptr()
    replayed = Replayed(modules=[model])
    replayed.take()
    model.wide.data = torch.zeros(4)
    model.moved.data = torch.zeros(3)
    model.released.untyped_storage().resize_(0)
    replayed.restore()
    assert torch.equal(model.wide, torch.ones(4))
    assert torch.equal(model.moved, torch.arange(3.0))
    assert model.moved.data_ptr() == where
    assert torch.equal(model.released, torch.arange(5.0))


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "mkldnn", "nested"])
def test_buffers_of_other_layouts_are_brought_back(layout: str) -> None:
    """Changed in place, replaced, or of another number of stored elements."""
    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "coo": torch.Tensor.to_sparse,
        "csr": torch.Tensor.to_sparse_csr,
        "csc": torch.Tensor.to_sparse_csc,
        "bsr": lambda each: each.to_sparse_bsr((2, 2)),
        "mkldnn": torch.Tensor.to_mkldnn,
        "nested": lambda each: torch.nested.nested_tensor([each, each[:1]]),
    }
    make = forms[layout]

    def elements() -> torch.Tensor:
        return torch.cat([each.reshape(-1) for each in model.form.unbind()]) if (
            layout == "nested"
        ) else model.form.to_dense()  # fmt: skip

    model = nn.Module()
    model.register_buffer("form", make(torch.eye(4)), persistent=False)
    buffer, expected = model.form, elements().clone()
    replayed = Replayed(modules=[model])
    replayed.take()
    for number in range(3):
        if number == 0:
            model.form.mul_(2)
        elif number == 1 and layout in ("coo", "csr", "csc", "bsr"):
            other = make(torch.ones(4, 4))
            model.form.resize_as_sparse_(other).copy_(other)
        else:
            model.form = make(torch.zeros(4, 4))
        assert not torch.equal(elements(), expected)
        replayed.restore()
        assert model.form is buffer
        assert torch.equal(elements(), expected)
    if layout in ("mkldnn", "nested"):
        with pytest.raises(ConfigError, match=r"buffer 'form' of a Module: a tensor .*Codec"):
            replayed.kept(codecs=Codecs())
        return
    kept = replayed.kept(codecs=Codecs())
    model.form = make(torch.zeros(4, 4))
    Replayed(modules=[model]).replay_kept(kept, codecs=Codecs())
    assert torch.equal(elements(), expected)


CHANGES: dict[str, Callable[[Odd], object]] = {
    "nothing": lambda model: None,
    "in place": lambda model: model.queue.add_(3),
    "replaced": lambda model: setattr(model, "short", torch.full((2,), 5.0)),
    "removed": lambda model: model._buffers.pop("alias"),
    "added": lambda model: model.register_buffer("new", torch.ones(3)),
    "filled": lambda model: model.register_buffer("none", torch.ones(3)),
    "emptied": lambda model: setattr(model, "short", None),
    "other memory": lambda model: setattr(model.queue, "data", torch.full((4,), 9.0)),
    "other shape": lambda model: model.queue.resize_(2),
    "other strides": lambda model: setattr(model.waves, "data", model.waves.data.t()),
    "other dtype, same memory": lambda model: setattr(
        model.short, "data", model.short.data.view(torch.float16)
    ),
    "conjugate": lambda model: setattr(model.waves, "data", model.waves.data.conj()),
    "other dtype": lambda model: model.bfloat16(),
    "persistent": lambda model: model._non_persistent_buffers_set.clear(),
    "module": lambda model: setattr(model, "inner", nn.BatchNorm1d(3)),
    "in a module": lambda model: model.inner(torch.randn(5, 2)),
}


@pytest.mark.parametrize("num_takes", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_taken_next_is_what_there_is_then(change: str, num_takes: int) -> None:
    """Whatever has changed a buffer before, and whatever changes it afterwards.

    From the second one on, buffers are compared with those of the take before by one call.
    """

    def buffers() -> dict[str, Any]:
        return {
            name: None if each is None else (each, each.clone(), each.shape, each.stride())
            for module in model.modules()
            for name, each in [(f"{id(module)}.{name}", b) for name, b in module._buffers.items()]
        }

    model = Odd()
    if num_takes > 1:  # tensors that come twice are always compared one by one
        model.alias = model.alias.clone()
    replayed = Replayed(modules=[model])
    for _ in range(num_takes):
        model.queue.add_(1)
        replayed.take()
    CHANGES[change](model)
    replayed.take()
    before, unsaved = buffers(), set(model._non_persistent_buffers_set)
    for again in (CHANGES[name] for name in CHANGES if name != "module"):
        # What does not fit after another change is left out.
        with suppress(RuntimeError, KeyError, AttributeError):
            again(model)
        replayed.restore()
        after = buffers()
        assert list(after) == list(before)
        assert model._non_persistent_buffers_set == unsaved
        for name, expected in before.items():
            if expected is None:
                assert after[name] is None
                continue
            assert after[name][0] is expected[0]
            assert torch.equal(after[name][0], expected[1])
            assert after[name][0].dtype == expected[1].dtype
            assert after[name][2:] == expected[2:]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("form", ["script", "trace", "compile", "fx", "spectral", "average"])
def test_models_of_other_kinds_are_brought_back(form: str) -> None:
    """Scripted and traced ones keep their buffers in a mapping of their own."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    forms: dict[str, Callable[[], nn.Module]] = {
        "script": lambda: torch.jit.script(plain),
        "trace": lambda: torch.jit.trace(plain, torch.randn(3, 4)),
        "compile": lambda: torch.compile(plain, backend="eager"),
        "fx": lambda: torch.fx.symbolic_trace(plain),
        "spectral": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
        "average": lambda: AveragedModel(plain),
    }
    model = forms[form]()
    replayed = Replayed(modules=[model])
    replayed.take()
    before = {name: each.clone() for name, each in model.named_buffers()}
    assert before
    for _ in range(2):
        if isinstance(model, AveragedModel):
            model.update_parameters(plain)
        model(torch.randn(5, 4))
        holder = next(each for each in model.modules() if list(each.buffers(recurse=False)))
        name = next(iter(dict(holder.named_buffers(recurse=False))))
        setattr(holder, name, torch.zeros_like(getattr(holder, name)))
        assert any(not torch.equal(each, before[name]) for name, each in model.named_buffers())
        replayed.restore()
        after = dict(model.named_buffers())
        assert list(after) == list(before)
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_lazy_model_has_to_run_once_before_its_first_step() -> None:
    model = nn.LazyBatchNorm1d()
    replayed = Replayed(modules=[model])
    with pytest.raises(ConfigError, match=r"'running_mean' of a LazyBatchNorm1d.*run the model"):
        replayed.take()
    model(torch.randn(4, 3))
    replayed.take()


def test_what_cannot_be_brought_back_is_refused() -> None:
    """By its type, with the fix."""
    with pytest.raises(ConfigError, match=r"dict is not a module.*hooks"):
        Replayed(modules=[{}])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="pair of functions"):
        Replayed(hooks=[(print,)])  # type: ignore[list-item]
