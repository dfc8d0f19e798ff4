"""Whatever is validated is judged, compared and kept in one plain form, from the first step on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.device_mesh import DeviceMesh

from holdfast import Checkpointer, ProcessGroups
from holdfast.errors import ConfigError
from holdfast.rerun import DeviceIdentity, ExitCode, NotFinite, Rejects, RerunMachine, Verdict
from holdfast.rerun.values import host_value, relative_difference

NAN = float("nan")


class Marked(torch.Tensor):
    """A subclass that is its elements."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def make_value(form: str, number: float, mesh: DeviceMesh) -> Any:
    """A value of a form with one element that may be bad."""
    matrix = torch.tensor([[1.0, 0.0], [number, 0.0]])
    forms: dict[str, Callable[[], Any]] = {
        "number": lambda: number,
        "NumPy scalar": lambda: np.float32(number),
        "array without dims": lambda: np.array(number),
        "array of another byte order": lambda: matrix.numpy().astype(">f8"),
        "parameter": lambda: nn.Parameter(matrix),
        "with a backward": lambda: nn.Parameter(matrix) * 1,
        "subclass": lambda: matrix.as_subclass(Marked),
        "DTensor": lambda: DTensor.from_local(matrix, mesh, [Shard(0)]),
        "float8": lambda: matrix.to(torch.float8_e5m2),
        "expanded": lambda: torch.tensor(number).expand(3),
    }
    return forms[form]()


FORMS = [
    "number", "NumPy scalar", "array without dims", "array of another byte order", "parameter",
    "with a backward", "subclass", "DTensor", "float8", "expanded",
]  # fmt: skip


@pytest.mark.parametrize("elsewhere", [NAN, 1.5])
@pytest.mark.parametrize("form", FORMS)
def test_a_value_of_any_form_is_judged_kept_and_compared_after_a_restart(
    form: str, elsewhere: float, mesh: DeviceMesh, tmp_path: Path
) -> None:
    """Bad twice on one device; the same or a good one on another decides."""

    def run(device: str, values: list[float], *, loads: bool) -> RerunMachine:
        with ProcessGroups.single() as groups:
            machine = RerunMachine(
                groups, directory=tmp_path, device=DeviceIdentity(host="h", uuid=device)
            )
            numbers = iter(values)
            with Checkpointer(machine.checkpoints, groups=groups) as checkpointer:
                state = {"step": 0, "rerun": machine}
                if loads:
                    checkpointer.load(state)
                for _ in machine.attempts(0):
                    machine.validate("x", make_value(form, next(numbers), mesh), NotFinite())
                if machine.decision.save:
                    checkpointer.save(0, state)
            return machine

    assert run("A", [1.5], loads=False).decision.exit_code is None
    first = run("A", [NAN, NAN], loads=False)
    assert first.decision.exit_code is ExitCode.RESUME_TO_DISAMBIGUATE
    assert "nan" in first.decision.message
    verdict = Verdict.CORRECT_RESULT if elsewhere != elsewhere else Verdict.PERSISTENT_ERROR
    assert run("B", [elsewhere], loads=True).decision.verdict is verdict


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1.0", "a str"),
        (None, "NoneType"),
        ({"loss": 1.0}, "a dict"),
        ([1.0, [2.0]], "a list"),
        (1j, "a complex"),
        (2**53 + 1, "9007199254740993 cannot be validated: no float64 is equal to it"),
        (10**400, "no float64 is equal to it"),
        (torch.tensor([2**53 + 1, 0]), "no float64 is equal to it"),
        (np.array(["x"]), "a str"),
        (np.ma.masked_array([1.0, 2.0], [False, True]), "NoneType"),
        (np.ones(65), "65 numbers cannot be validated: pass a number"),
        (
            torch.ones(13, 5),
            r"of shape \(13, 5\) cannot be .* up to 64 .*torch.linalg.vector_norm",
        ),
        (torch.ones(2, dtype=torch.complex64), "of dtype torch.complex64"),
        (torch.eye(2).to_sparse(), "of layout torch.sparse_coo"),
        (torch.nested.nested_tensor([torch.ones(2)]), "that is nested"),
        (torch.empty(2, device="meta"), "without data"),
        (FakeTensorMode().from_tensor(torch.ones(2)), "of type FakeTensor cannot be validated"),
    ],
)
def test_what_cannot_be_looked_at_is_refused_at_once(value: Any, message: str) -> None:
    """Also if nothing is wrong with it: not only when a fault needs it."""
    with ProcessGroups.single() as groups:
        machine = RerunMachine(groups, mode="report_determinism_stats")
        with pytest.raises(ConfigError, match=message):
            [machine.validate("x", value, NotFinite()) for _ in machine.attempts(0)]
    with pytest.raises(ConfigError, match=message):
        relative_difference(value, 1.0)


def test_large_integers_that_a_float_holds_are_values() -> None:
    assert host_value(2**60) == 2.0**60
    assert host_value(torch.tensor([-(2**62), 1])) == (-(2.0**62), 1.0)


class Untidy:
    """A rule that gives its reason in another form."""

    window = 0

    def rejects(self, value: object, accepted: object) -> Any:
        del value, accepted
        return False


@pytest.mark.parametrize(
    ("step", "arguments", "message"),
    [
        (1.0, {}, r"step must be an integer in \[-9223372036854775808, .*, got 1\.0"),
        (None, {}, "must be an integer"),
        (True, {}, "must be an integer"),
        (2**63, {}, "got 9223372036854775808"),
        (0, {"name": 3}, r"validate\(3\): the name must be a valid Unicode string"),
        (0, {"name": "\ud800"}, "the name must be a valid Unicode string"),
        (0, {"rule": lambda value: False}, r"a function is not a rule; wrap.*Rejects\(function"),
        (0, {"rule": NotFinite}, r"a type is not a rule"),
        (0, {"rule": Untidy()}, r"Untidy.rejects returned False; return None, or"),
        (0, {"tolerance": NAN}, "tolerance must be a number of at least 0, got nan"),
        (0, {"tolerance": -1}, "tolerance must be a number of at least 0, got -1"),
        (0, {"compare": 0.1}, r"validate\('x'\): compare must be a function, got 0\.1"),
    ],
)
def test_arguments_that_a_fault_could_not_be_recorded_with_are_refused_at_once(
    step: Any, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """In a step in which nothing is wrong."""

    def call(machine: RerunMachine) -> None:
        machine.validate(**({"name": "x", "value": 1.0, "rule": NotFinite()} | arguments))

    with ProcessGroups.single() as groups:
        machine = RerunMachine(groups, directory=tmp_path)
        if "rule" in arguments:
            with pytest.raises(ConfigError, match=message):
                machine.observe("x", 1.0, **arguments)
        with pytest.raises(ConfigError, match=message):
            [call(machine) for _ in machine.attempts(step)]
        with pytest.raises(ConfigError, match="step must be an integer"):
            machine.skips(NAN)  # type: ignore[arg-type]
        for name in ("limits", "policy", "note", "on_verdict", "diagnose"):
            with pytest.raises(ConfigError, match=rf"RerunMachine: {name} must be .*, got 3"):
                RerunMachine(groups, directory=tmp_path, **{name: 3})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a function of the value and a string"):
        Rejects(lambda value: True, 7)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7)])
def test_numbers_of_other_libraries_are_taken_as_numbers(step: Any, tmp_path: Path) -> None:
    for load, device, number in ((False, "A", 2), (True, "B", 1)):
        with ProcessGroups.single() as groups:
            machine = RerunMachine(
                groups, directory=tmp_path, skip_rejected=True,
                device=DeviceIdentity(host="h", uuid=device),
            )  # fmt: skip
            with Checkpointer(machine.checkpoints, groups=groups) as checkpointer:
                state = {"rerun": machine}
                if load:
                    checkpointer.load(state)
                    assert machine.skips(step) is False
                for _ in machine.attempts(step):
                    number -= 1
                    machine.validate(
                        "x", NAN, NotFinite(), fatal=np.bool_(True), tolerance=np.float32(0.5)
                    )  # fmt: skip
                assert number == 0
                if machine.decision.save:
                    checkpointer.save(int(step), state)
            assert machine.decision.exit_code in (16, 19)
