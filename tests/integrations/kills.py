"""Programs of pages that are killed and started again: at many steps, and on several ranks."""

from __future__ import annotations

import random
import shutil
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.integrations.forks import ForkServer

T = TypeVar("T")
_KILL_AT_STEP = """
import os, signal
from MODULE import NAME
step = NAME.step
count = 0
def kill(self, *args, **named):
    global count
    count += 1
    if count == {at} and rank == {rank}:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **named)
NAME.step = kill
"""


def kill_at_step_of(module: str, name: str) -> str:
    """Return a prelude that ends a rank at a step of its optimizer, to be formatted."""
    return _KILL_AT_STEP.replace("MODULE", module).replace("NAME", name)


KILL_AT_ADAMW = kill_at_step_of("torch.optim", "AdamW")
STEADY_BUCKETS = """
from torch.nn.parallel import DistributedDataParallel
made = DistributedDataParallel.__init__
def make(self, *args, **named):
    made(self, *args, **{**named, "find_unused_parameters": True})
DistributedDataParallel.__init__ = make
"""
"""Before a program: DDP keeps its first buckets.

It orders them by how gradients arrived in the first backward of a process, and so sums those of a
resumed run's first step in another order: of more than two ranks, with another rounding.
"""


def served_by(*modules: str) -> Any:
    """Return a fixture: for a file's tests, a server of programs that has imported these."""

    @pytest.fixture(scope="module")
    def server() -> Iterator[ForkServer]:
        server = ForkServer(*modules)
        yield server
        server.close()

    return server


def straight_of(program: str, epochs: int, prefix: str) -> Any:
    """Return a fixture: what a program prints that is not killed; `prefix` is how that starts."""

    @pytest.fixture(scope="module")
    def straight(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
        root = tmp_path_factory.mktemp("program") / "straight"
        lines = server.lines(program, root, epochs, directory=root.parent)
        assert lines[0].startswith(prefix)
        return lines

    return straight


Resumed = Callable[[int], list[str]]
"""Of a step: what a run prints that is killed there, and started again in its root."""


def resumed_by(run: Callable[[ForkServer, Path, int], list[str]]) -> Any:
    """Return a fixture, a `Resumed`: `run` in a root of its own, which is removed after it."""

    @pytest.fixture
    def resumed(server: ForkServer, tmp_path: Path) -> Resumed:
        return partial(in_new_root, partial(run, server), tmp_path / "run")

    return resumed


def in_new_root(run: Callable[[Path, int], list[str]], root: Path, at: int) -> list[str]:
    """Return what a run prints that makes its root, and remove that."""
    lines = run(root, at)
    shutil.rmtree(root)
    return lines


def killed_once(
    program: str, epochs: int, kill: str
) -> Callable[[ForkServer, Path, int], list[str]]:
    """Return a function for `resumed_by`: a program in one process is killed once."""

    def killed_and_resumed(server: ForkServer, root: Path, at: int) -> list[str]:
        named: dict[str, Any] = {"kill": kill.format(at=at, rank=0), "num_ranks": 1}
        return server.lines_after_kill(program, root, epochs, **named)

    return killed_and_resumed


_NIGHTLY = pytest.mark.nightly
_NUM_KILLS = pytest.mark.parametrize(
    "num_kills", [pytest.param(2, marks=pytest.mark.slow), pytest.param(20, marks=_NIGHTLY)]
)


def many_kills(test: T) -> T:
    """Mark a test of `num_kills`."""
    return pytest.mark.timeout(900)(_NUM_KILLS(test))


def on_four_ranks(program: str, sharded: str, *, nightly: str) -> Callable[[T], T]:
    """Mark a test of `program`: with DDP and with FSDP2, of which one runs at night only."""
    programs = {"DDP": program, "FSDP2": sharded}
    cases = [
        pytest.param(each, id=name, marks=_NIGHTLY if name == nightly else ())
        for name, each in programs.items()
    ]
    each_case = pytest.mark.parametrize("program", cases)
    return lambda test: pytest.mark.slow(pytest.mark.timeout(600)(each_case(test)))


def check_kills(
    resumed: Resumed, straight: list[str], num_kills: int, *, first: int, stop: int
) -> None:
    """Kill a run at random steps, one after the other, and at each if there are fewer.

    Args:
        resumed: What a run prints that is killed at a step and started again.
        straight: What a run prints that is not.
        num_kills: Runs.
        first: The first step to kill at.
        stop: The one after the last.
    """
    draws, steps = random.Random(28), range(first, stop)
    chosen = [*draws.sample(steps, min(num_kills, len(steps)))]
    chosen += draws.choices(steps, k=num_kills - len(chosen))
    for at in chosen:
        assert resumed(at) == straight, at


def check_variant(server: ForkServer, root: Path, program: str, *, kill: str, epochs: int) -> None:
    """A variant of a program prints the same lines if it is killed and resumed."""
    straight = server.lines(program, root / "a", epochs, directory=root)
    named: dict[str, Any] = {"kill": kill, "num_ranks": 1}
    assert server.lines_after_kill(program, root / "b", epochs, **named) == straight


def leaves_early(program: str, seed: str) -> str:
    """The program with a loop that seeds each epoch, and leaves it after four steps.

    Args:
        program: Its loop is over `loader`, in one over epochs.
        seed: The function that seeds.
    """
    epochs, batches = "for epoch in range(checkpoints.epoch, int(sys.argv[2])):", "in loader:\n"
    leaves = "        if checkpoints.step >= 4 * (epoch + 1):\n            break\n"
    before, found, after = program.partition(batches)
    assert found
    assert epochs in before
    before = before.replace("    for batch ", f"    {seed}(100 + epoch)\n    for batch ")
    counted = "assert checkpoints.epoch == epoch + 1\ncheckpoints.close()"
    return before + found + leaves + after.replace("checkpoints.close()", counted)


def in_two_loops(program: str, prepare: str) -> str:
    """The program with a second loop in each epoch, over `other`, that it continues in.

    Args:
        program: Its loop is over `loader`, in one over epochs.
        prepare: The function that prepares a loader.
    """
    begin, end = "    for batch in loader:\n", "checkpoints.close()"
    before, found, after = program.partition(begin)
    assert found
    body, _, last = after.partition(end)
    first = textwrap.indent(begin + body, "    ")
    made = "torch.utils.data.DataLoader(Samples(), batch_size=3, shuffle=True)"
    before = before.replace("checkpoints = ", f"other = {prepare}({made})\ncheckpoints = ")
    before = before.replace("loaders=[loader]", "loaders=[loader, other]")
    before = before.replace("checkpoints.epoch,", "checkpoints.epoch_of(other),")
    first = "    if checkpoints.epoch_of(loader) == epoch:\n" + first
    return before + first + begin.replace("loader", "other") + body + end + last


def check_refused_loops(server: ForkServer, root: Path, program: str, *, kill: str) -> None:
    """Two loops that take one's passes for epochs, or begin with the first one again, are refused.

    Args:
        program: As `in_two_loops` returns it.
        kill: In the second loop of the first epoch.
    """
    counts = program.replace("checkpoints.epoch_of(other),", "checkpoints.epoch,")
    ends = server.run(counts, root / "counts", 2, directory=root)
    assert "trains with several loaders one after the other" in ends[0].output
    again = program.replace("if checkpoints.epoch_of(loader) == epoch:", "if True:")
    assert again != program
    assert server.run(again, root / "again", 2, directory=root, prelude=kill)[0].code == -9
    ends = server.run(again, root / "again", 2, directory=root)
    assert "has begun the loop over loader 0 again" in ends[0].output
    looks = program.replace("for epoch in", "next(iter(other))\nfor epoch in")
    ends = server.run(looks, root / "again", 2, directory=root)
    assert "has taken a batch of its rest and left it" in ends[0].output


def beside_a_shorter_one(program: str, prepare: str) -> str:
    """The program with a shorter loader, `other`, next to its own, which stays ended.

    Args:
        program, prepare: as of `in_two_loops`.
    """
    made = "torch.utils.data.DataLoader(torch.utils.data.Subset(Samples(), range(6)), 2)"
    stays = "other if checkpoints.epoch_of(other) == epoch else ()"
    loop = f"    for more, batch in zip_longest({stays}, loader):\n"
    both = "        batch = batch if more is None else batch + more.flip(0)\n"
    assert "    for batch in loader:\n" in program
    program = program.replace("    for batch in loader:\n", loop + both)
    program = program.replace("checkpoints = ", f"other = {prepare}({made})\ncheckpoints = ")
    program = program.replace("loaders=[loader]", "loaders=[other, loader]")
    return "from itertools import cycle, zip_longest\n" + program


def check_shorter_loader(server: ForkServer, root: Path, program: str, *, kill: str) -> None:
    """A loader that had ended next to a longer one stays ended, or is refused by name.

    Args:
        program: As `beside_a_shorter_one` returns it.
        kill: In the second epoch, when the shorter loader has ended.
    """
    check_variant(server, root, program, kill=kill, epochs=3)
    again = program.replace("other if checkpoints.epoch_of(other) == epoch else ()", "other")
    for name, each in {
        "again": again,
        "cycle": again.replace("zip_longest(other, ", "zip(cycle(other), "),
    }.items():
        assert server.run(each, root / name, 3, directory=root, prelude=kill)[0].code == -9
        ends = server.run(each, root / name, 3, directory=root)
        assert "has begun it again, which would train on its data twice" in ends[0].output


def within_a_loop(program: str, prepare: str) -> str:
    """The program with its loop, of at most five batches, for each batch of another loader.

    Args:
        program, prepare: as of `in_two_loops`.
    """
    loop, end = "    for batch in loader:\n", "checkpoints.close()"
    before, found, after = program.partition(loop)
    assert found
    body, _, last = after.partition(end)
    made = "torch.utils.data.DataLoader(torch.arange(3.0), batch_size=1, shuffle=True)"
    before = before.replace("checkpoints = ", f"outer = {prepare}({made})\ncheckpoints = ")
    before = before.replace("loaders=[loader]", "loaders=[loader, outer]")
    before = before.replace("checkpoints.epoch,", "checkpoints.epoch_of(outer),")
    inner = textwrap.indent(loop + "        batch = batch + given\n" + body, "    ")
    saves = "        checkpoints.save(overwrite=True)\n"
    return before + "    for given in outer:\n" + inner + saves + end + last


def check_loop_within_a_loop(
    server: ForkServer, root: Path, program: str, *, every: str, kill: str
) -> None:
    """A save behind the inner loop goes on with the next outer batch; one inside of it is refused.

    So is the first step of all, when the next one tells it from loops side by side.

    Args:
        program: As `within_a_loop` returns it.
        every: The argument with which it saves, inside of the inner loop.
        kill: In the second pass of the inner loop.
    """
    outside = program.replace(every, "every=0")
    assert outside != program
    check_variant(server, root, outside, kill=kill, epochs=2)
    first = program.replace(every, "every=1").replace(
        "accumulation_steps=2", "accumulation_steps=1"
    )
    is_inside = "inside of the loop over loader 0"
    for name, each, words in [
        ("within", program, f"this save is {is_inside}"),
        ("of one batch", first.replace("batch_size=2", "batch_size=24"), f"save is {is_inside}"),
        ("first", first, f"the last checkpoint was made {is_inside}"),
        ("first", outside, f"the last checkpoint was made {is_inside}"),  # once it is mended
    ]:
        ends = server.run(each, root / name, 2, directory=root)
        assert words in ends[0].output, (name, ends[0].output)


def with_workers_that_stay(program: str) -> str:
    """The program with a loader's process that stays; its data draws nothing from it."""
    still = program.replace(" + torch.randn(8)\n", "\n")
    return still.replace("shuffle=True", "shuffle=True, num_workers=1, persistent_workers=True")


def check_four_ranks(
    server: ForkServer,
    directory: Path,
    program: str,
    *,
    silent: tuple[str, str],
    every: tuple[str, str],
    kill: str,
    steps: int,
) -> None:
    """Four ranks train, are killed at a random step and go on; two take what four have saved.

    Args:
        program: With `batch_size=2`, of which four ranks take half; its command line is a root and
            the number of epochs.
        silent: What to replace so that a run does not print the loss of each rank, and by what.
        every: What to replace so that the last step of each epoch is saved.
        kill: The prelude that ends a rank at a step, to be formatted.
        steps: Of an epoch.
    """
    halved = program.replace("batch_size=2", "batch_size=1")
    assert halved != program
    halved = STEADY_BUCKETS + halved
    draws = random.Random(program)
    at, rank = draws.randrange(3, 3 * steps), draws.randrange(4)
    straight = server.lines(halved, directory / "a", 3, directory=directory, num_ranks=4)
    named: dict[str, Any] = {"kill": kill.format(at=at, rank=rank), "num_ranks": 4}
    resumed = server.lines_after_kill(halved, directory / "b", 3, **named)
    assert resumed == straight, (at, rank)
    four, two = (each.replace(*silent).replace(*every) for each in (halved, program))
    saved = server.lines(four, directory / "c", 1, directory=directory, num_ranks=4)
    assert server.lines(two, directory / "c", 1, directory=directory, num_ranks=2) == saved[:2]
    lines = server.lines(two, directory / "c", 2, directory=directory, num_ranks=2)
    assert lines[0].startswith(f"step {2 * steps}, ")
    assert len(set(lines)) == 1


def check_killed_often(
    server: ForkServer,
    program: str,
    directory: Path,
    *words: object,
    num_kills: int,
    num_ranks: int,
) -> None:
    """Kill one run often, each time after a random number of steps, and let it end.

    Half as many starts as runs that are killed once; what one start resumes wrongly, the
    last one ends with.

    Args:
        program: its command line is a root, the number of steps, and `words`; it has one optimizer.
    """
    draws = random.Random(28)
    kills = [(draws.randrange(1, 6), draws.randrange(num_ranks)) for _ in range(num_kills)]
    steps = 1 + sum(at - 1 for at, _ in kills)  # what they reach if every step is saved, and one
    named: dict[str, Any] = {"directory": directory, "num_ranks": num_ranks}
    straight = server.lines(program, directory / "a", steps, *words, **named)
    for at, rank in kills:
        kill = KILL_AT_ADAMW.format(at=at, rank=rank)
        ends = server.run(program, directory / "b", steps, *words, prelude=kill, **named)
        assert -9 in {end.code for end in ends}, ends[0].output[-2000:]
    assert server.lines(program, directory / "b", steps, *words, **named) == straight
