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
from holdfast.rerun.rules import magnitude
from holdfast.rerun.values import plain_value

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
        "coo": matrix.to_sparse,
        "coo not coalesced": lambda: torch.sparse_coo_tensor(
            torch.tensor([[0, 0], [0, 0]]), torch.tensor([1.0, number]), (2, 2)
        ),
        "csr": matrix.to_sparse_csr,
        "csc": matrix.to_sparse_csc,
        "bsr": lambda: matrix.to_sparse_bsr((1, 2)),
        "nested": lambda: torch.nested.nested_tensor([matrix, matrix[:1]]),
        "jagged": lambda: torch.nested.nested_tensor([matrix[0], matrix[1]], layout=torch.jagged),
        "expanded": lambda: torch.tensor(number).expand(3),
        "complex": lambda: torch.tensor([complex(1, number)]).conj(),
    }
    return forms[form]()


FORMS = [
    "number", "NumPy scalar", "array without dims", "array of another byte order", "parameter",
    "with a backward", "subclass", "DTensor", "coo", "coo not coalesced", "csr", "csc", "bsr",
    "nested", "jagged", "expanded", "complex",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
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
        ([1.0], "a list"),
        (np.array(["x"]), "ndarray of dtype <U1"),
        (np.ma.masked_array([1.0]), "MaskedArray of dtype float64"),
        (torch.empty(2, device="meta"), "without data"),
        (FakeTensorMode().from_tensor(torch.ones(2)), "FakeTensor cannot be validated"),
    ],
)
def test_what_cannot_be_looked_at_is_refused_at_once(value: Any, message: str) -> None:
    """Also where nothing is wrong with it: not only when a fault needs it."""
    with pytest.raises(ConfigError, match=message):
        plain_value(value)


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
        with pytest.raises(ConfigError, match=message):
            [call(machine) for _ in machine.attempts(step)]
        with pytest.raises(ConfigError, match="step must be an integer"):
            machine.skips(NAN)  # type: ignore[arg-type]
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


def test_a_sparse_value_is_never_made_dense() -> None:
    """A gradient of an embedding may have 10**18 elements of which two are stored."""
    places = torch.tensor([[5, 10**9 - 1], [0, 7]])
    gradient = torch.sparse_coo_tensor(places, torch.tensor([1.0, -3.0]), (10**9, 10**9))
    with ProcessGroups.single() as groups:
        machine = RerunMachine(groups, mode="report_determinism_stats")
        for _ in machine.attempts(0):
            machine.validate("gradient", gradient, NotFinite())
    assert machine.statistics.is_identical
    assert "gradient" in machine.statistics.report()
    assert magnitude(gradient) == 3.0
