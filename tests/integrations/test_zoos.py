"""Each framework's own registry: what is saved with any of it goes on in a twin, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.forks import TITAN_PYTHON, ForkServer
from tests.integrations.zoos import answer, check_goes_on, unknown_names

LIGHTNING = "tests.integrations.lightning_zoo"
CALLBACKS = (
    "BackboneFinetuning", "BatchSizeFinder", "DeviceStatsMonitor", "EMAWeightAveraging",
    "EarlyStopping", "GradientAccumulationScheduler", "LambdaCallback", "LearningRateFinder",
    "LearningRateMonitor", "ModelCheckpoint", "ModelPruning", "ModelPruning, masks kept",
    "ModelSummary", "OnExceptionCheckpoint", "RichModelSummary", "RichProgressBar",
    "StochasticWeightAveraging", "StochasticWeightAveraging, linear", "TQDMProgressBar",
    "ThroughputMonitor", "Timer", "WeightAveraging",
)  # fmt: skip
WITHOUT_STATE = (
    "DeviceStatsMonitor", "LearningRateMonitor", "ModelSummary", "RichModelSummary",
    "RichProgressBar", "TQDMProgressBar",
)  # fmt: skip
"""They only show something: nightly is often enough."""
EVERY_FEW = pytest.mark.parametrize(
    "every",
    [pytest.param(8, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)],
)
"""How far apart are the members of a registry that are trained; all of them are known each time."""
DIFFER = (
    "Timer.time_elapsed",
    ".current_score",
    ".trainer.state",
    "_logged_metrics.train/",
    "_logged_metrics.validate/time",
)
"""Times that runs took, a score that `ModelCheckpoint` reads again before it uses it, and what
`ThroughputMonitor` counts since a start."""


@pytest.fixture(scope="module")
def lightning() -> Iterator[ForkServer]:
    pytest.importorskip("lightning.pytorch")
    server = ForkServer(LIGHTNING)
    yield server
    server.close()


@pytest.mark.slow
def test_every_callback_of_lightning_is_known(lightning: ForkServer, tmp_path: Path) -> None:
    assert unknown_names(lightning, LIGHTNING, tmp_path) == []


PLACES = (8, 12, -1)
"""Steps to go on from: within an epoch, at its end, and at the end of the run."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "at"),
    [
        *(
            pytest.param(name, PLACES[number % 3 :][:1], marks=pytest.mark.slow)
            for number, name in enumerate(CALLBACKS)
            if name not in WITHOUT_STATE and number % 2
        ),
        *(pytest.param(name, PLACES, marks=pytest.mark.nightly) for name in CALLBACKS),
    ],
)
def test_callbacks_of_lightning_go_on(
    lightning: ForkServer, tmp_path: Path, name: str, at: tuple[int, ...]
) -> None:
    check_goes_on(lightning, LIGHTNING, name, tmp_path, at=at, differ=DIFFER)


HABITS = "tests.integrations.lightning_habits"


def check_habits(lightning: ForkServer, directory: Path, name: str, at: tuple[int, ...]) -> None:
    check_goes_on(lightning, HABITS, name, directory, at=at, differ=DIFFER)


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, pytest.param(7, marks=pytest.mark.nightly)])
def test_hooks_means_and_schedules_of_lightning_go_on(
    lightning: ForkServer, tmp_path: Path, at: int
) -> None:
    """X27. Within an epoch, and from the end of one in a run that ends by steps."""
    check_habits(lightning, tmp_path, "hooks, means and a schedule that follows one", (at,))


HABITS_AT = (
    ("validation while gradients are accumulated", (1, 2)),
    ("accumulation by hand", (2, 1)),
    ("saved with the validation", (7, 14)),
    ("two loaders, made for each epoch", (7, 5)),
    ("a loader that has ended before a longer one", (5, 7)),
    ("a stream and a loader that begins again", (6, 3)),
    ("a loader with a state and a generator of its own", (7, 3)),
    ("a stream with a state of its own", (3, 7)),
    ("stopped by the module", (9,)),
    ("weights of 64 bits", (12,)),
    ("adapters with other ranks", (5,)),
    ("modes that a hook sets", (3, 14)),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "at"),
    [
        *(pytest.param(name, at[:1], marks=pytest.mark.slow) for name, at in HABITS_AT[::2]),
        *(pytest.param(name, at[:1], marks=pytest.mark.nightly) for name, at in HABITS_AT[1::2]),
        *(
            pytest.param(name, at[1:], marks=pytest.mark.nightly)
            for name, at in HABITS_AT
            if at[1:]
        ),
    ],
)
def test_habits_of_users_of_lightning_go_on(
    lightning: ForkServer, tmp_path: Path, name: str, at: tuple[int, ...]
) -> None:
    """X27. Gradients that no step has used, loaders that begin again or not, runs that stop.

    Lightning converts a module to its precision only when it is loaded.
    """
    check_habits(lightning, tmp_path, name, at)


ACCELERATE = "tests.integrations.accelerate_zoo"


@pytest.fixture(scope="module")
def accelerate() -> Iterator[ForkServer]:
    pytest.importorskip("accelerate")
    server = ForkServer("accelerate", "torchdata.stateful_dataloader", ACCELERATE)
    yield server
    server.close()


@pytest.mark.timeout(1200)
@EVERY_FEW
def test_loaders_wrappers_and_plugins_of_accelerate_go_on(
    accelerate: ForkServer, tmp_path: Path, every: int
) -> None:
    """X26. Each class of its modules: loaders from the end of an epoch and within the next."""
    assert unknown_names(accelerate, ACCELERATE, tmp_path) == []
    names = answer(accelerate, ACCELERATE, "names", tmp_path)
    for number, (name, num_ranks) in enumerate([*names.items()][::every]):
        directory = tmp_path / str(number)
        directory.mkdir()
        end, within = (6, 8) if num_ranks == 1 else (3, 5)
        is_loader = name.startswith(("shard", "seedable", "dispatcher"))
        at = (end, within) if is_loader else (4,)
        check_goes_on(accelerate, ACCELERATE, name, directory, at=at, num_ranks=num_ranks)


@pytest.mark.slow
def test_what_accelerate_would_lose_is_refused_by_name(
    accelerate: ForkServer, tmp_path: Path
) -> None:
    """X26."""
    program = (
        f"import sys\nfrom pathlib import Path\nfrom {ACCELERATE} import train\n"
        "train(sys.argv[1], Path(sys.argv[1]), 1)\n"
    )
    for name, (words, ranks) in answer(accelerate, ACCELERATE, "refusals", tmp_path).items():
        ends = accelerate.run(program, name, directory=tmp_path, num_ranks=ranks)
        assert words in ends[0].output, (name, ends[0].output)


TRAINER = "tests.integrations.trainer_zoo"


@pytest.fixture(scope="module")
def trainer() -> Iterator[ForkServer]:
    pytest.importorskip("transformers")
    server = ForkServer(TRAINER)
    yield server
    server.close()


@pytest.mark.timeout(1200)
@EVERY_FEW
def test_optimizers_schedules_and_callbacks_of_the_trainer_go_on(
    trainer: ForkServer, tmp_path: Path, every: int
) -> None:
    """X26. Each that its enumerations and modules have; within an epoch."""
    names = answer(trainer, TRAINER, "names", tmp_path)
    assert len(names) > 30
    for name in [*names][::every]:
        directory = tmp_path / name.replace(" ", "-")
        directory.mkdir()
        at = (4,) if name.startswith("callback") else (8,)
        check_goes_on(trainer, TRAINER, name, directory, at=at, root="holdfast", differ=DIFFER)


@pytest.mark.slow
def test_states_of_torchao_are_refused_by_name(trainer: ForkServer, tmp_path: Path) -> None:
    """Several tensors in the place of one, of which a load would make another object."""
    program = (
        "from pathlib import Path\n"
        "import torch\n"
        f"from {TRAINER} import REFUSED, train\n"
        "torch.compiler.set_stance('force_eager')  # a C++ compiler would take minutes\n"
        "for name in REFUSED:\n"
        "    try:\n"
        "        train(f'optimizer {name}', Path(name), 1)\n"
        "    except Exception as error:\n"
        "        print(error)\n"
    )
    output = trainer.run(program, directory=tmp_path)[0].output
    for kind in ("OptimState4bit", "OptimState8bit"):
        assert f"a tensor subclass {kind} cannot be stored" in output


TITAN = "tests.integrations.titan_zoo"


@pytest.mark.timeout(900)
@EVERY_FEW
def test_components_and_models_of_torchtitan_go_on(tmp_path: Path, every: int) -> None:
    """X26. Optimizers, schedules, loaders with workers, adapters, experts; within a run."""
    if not TITAN_PYTHON.exists():
        pytest.skip("torchtitan is not installed: make test-integrations")
    server = ForkServer(
        "tests.integrations.titan_on_cpu", "torchtitan.trainer", TITAN, python=TITAN_PYTHON
    )
    try:
        assert unknown_names(server, TITAN, tmp_path) == []
        for number, name in enumerate([*answer(server, TITAN, "names", tmp_path)][::every]):
            directory = tmp_path / str(number)
            directory.mkdir()
            check_goes_on(server, TITAN, name, directory, at=(3,), root="checkpoint")
    finally:
        server.close()


MEGATRON = "tests.integrations.megatron_zoo"


@pytest.mark.timeout(600)
@EVERY_FEW
def test_optimizers_and_states_of_megatron_go_on(tmp_path: Path, every: int) -> None:
    """X26. Optimizers, scalers, schedules, streams, experts, MTP, the rerun machine; two ranks."""
    pytest.importorskip("megatron.core")
    server = ForkServer(
        "megatron.core.models.gpt", "megatron.core.optimizer", "holdfast.integrations.megatron",
        MEGATRON,
    )  # fmt: skip
    # The pickle of common values; their values are compared.
    differ = (".files.common",)
    try:
        assert unknown_names(server, MEGATRON, tmp_path) == []
        for number, name in enumerate([*answer(server, MEGATRON, "names", tmp_path)][::every]):
            directory = tmp_path / str(number)
            directory.mkdir()
            check_goes_on(server, MEGATRON, name, directory, at=(2,), num_ranks=2, differ=differ)
    finally:
        server.close()
