"""What is drawn from a seed: a layout, a fault, and where the job runs when it starts again."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast import Layout
from tests.rerun.spread.model import parameters_of, sites_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "CP2": {"cp": 2},
    "EP2": {"ep": 2, "dp": 2},
    "DP2": {"dp": 2},
    "DP3": {"dp": 3},
    "DP4": {"dp": 4},
    "TP2xPP2": {"tp": 2, "pp": 2},
    "TP2xCP2": {"tp": 2, "cp": 2},
    "PP2xCP2": {"pp": 2, "cp": 2},
    "PP2xEP2": {"pp": 2, "ep": 2, "dp": 2},
    "TP2xDP2": {"tp": 2, "dp": 2},
    "PP2xDP2": {"pp": 2, "dp": 2},
    "CP2xDP2": {"cp": 2, "dp": 2},
    "EP2xDP4": {"ep": 2, "dp": 4},
}
TURNS = (*list(LAYOUTS)[1:], "TP2", "PP2", "CP2", "EP2", "DP2")
"""The small ones take half of the turns: they are cheap, and most of what spreads does so there."""
WITH_REPLICA = ("DP2", "DP3", "DP4", "TP2xDP2", "PP2xDP2", "CP2xDP2", "EP2xDP4")
"""Layouts in which another data replica has a model of its own."""
OF_ONE_DEVICE = WITH_REPLICA[:3]
"""Layouts in which a replica is one device."""
NUM_STEPS, NUM_MICROBATCHES = 4, 2
SPIKE = 1e12
KINDS = ("transient", "persistent", "persistent in its role", "data", "state")
SPOILS = ("nan", "inf", "spike")
MOVES = {"same": 1, "other": 2, "rotated": 2, "part": 3, "shuffled part": 2, "one back": 3}
"""What a scheduler may do for the next start, with weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One job, its fault, and what a scheduler does when the job ends early."""

    seed: int
    layout_name: str
    kind: str
    """Of the fault. "state": in an update, or what an update leaves; "data": in the batch."""
    is_lasting: bool
    """Of a fault in the state: whether the device spoils the step whenever it computes it."""
    rank: int
    """The one that has the broken device first, or the bad batch."""
    step: int
    microbatch: int
    site: str
    spoil: str
    element: float
    fatal: bool
    program: str
    """"plain", "local" (one more value, local), "reduced" (one more, of the reduced gradient)."""
    is_rewound: bool
    save_interval: int
    moves: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        """The layout, under a name of its own."""
        return Layout(**LAYOUTS[self.layout_name], name=self.layout_name)

    @property
    def content_seed(self) -> int:
        """Of weights and batches: few, so that jobs without a fault can be shared."""
        return self.seed // len(TURNS) % 3

    def __str__(self) -> str:
        """Return it in words."""
        where = (
            f"bad data for rank {self.rank}"
            if self.kind == "data"
            else (f"{self.kind} error ({self.spoil}) of d{self.rank} at '{self.site}'")
        )
        words = "" if self.fatal else ", not fatal"
        words += ", lasting" if self.is_lasting and self.kind == "state" else ""
        return (
            f"seed {self.seed}: {self.layout_name}, {self.program}: {where}, step {self.step}, "
            f"microbatch {self.microbatch}{words}; saves every {self.save_interval}; "
            f"then {', '.join(self.moves)}"
        )


def draw(
    seed: int,
    *,
    layouts: Sequence[str] = TURNS,
    kinds: Sequence[str] = (*KINDS[:4], *KINDS[1:4], "state"),
    programs: Sequence[str] = ("plain", "plain", "local", "reduced"),
) -> Scenario:
    """Return the scenario of a seed.

    Args:
        seed: any integer.
        layouts: in turn, so that each has its share.
        kinds: to draw from.
        programs: to draw from.
    """
    random_ = random.Random(seed)
    layout_name = layouts[seed % len(layouts)]
    layout = Layout(**LAYOUTS[layout_name])
    kind = random_.choice(kinds)
    rank = random_.randrange(layout.world_size)
    program = random_.choice(programs)
    fatal = kind in ("data", "state") or random_.random() > 0.15
    parameters = parameters_of(layout, rank)
    if kind == "state":
        stems = ["momentum", "updated"] + ([] if program == "reduced" else ["reduced"])
        sites = [f"{stem} {each}, forward" for stem in stems for each in parameters]
    elif fatal:
        sites = sites_of(layout, rank)
        if program == "reduced":
            sites += [f"reduced {each}, forward" for each in parameters]
    else:
        # A value after which training may continue: it is wrong, and the gradients are right.
        last = [each for each in layout.ranks if layout.coordinate(each)["pp"] == layout.pp - 1]
        rank = random_.choice(last)
        sites = ["loss, forward"]
    return Scenario(
        seed=seed,
        layout_name=layout_name,
        kind=kind,
        is_lasting=random_.random() < 0.5,
        rank=rank,
        step=random_.randrange(NUM_STEPS - 2),
        microbatch=random_.randrange(NUM_MICROBATCHES),
        site=random_.choice(sites),
        # What is large and finite in a parameter is nothing that anybody could tell.
        spoil=random_.choice(SPOILS[:2] if kind == "state" else SPOILS),
        element=random_.random(),
        fatal=fatal,
        program=program,
        is_rewound=random_.random() < 0.5,
        save_interval=random_.randint(1, 3),
        moves=tuple(random_.choices([*MOVES], weights=[*MOVES.values()], k=4)),
    )


class Scheduler:
    """Where the job runs next; the same on all ranks.

    Args:
        scenario: of the job.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._random = random.Random(f"moves of {scenario.seed}")
        size = scenario.layout.world_size
        self.first = [f"d{rank}" for rank in range(size)]
        self.now = list(self.first)
        self._moves = [*scenario.moves, "other"]
        self._num_devices = size

    def move(self, exit_code: int, convicted: Sequence[str]) -> list[str]:
        """Return the devices for the next start, by rank."""
        if exit_code == 18:
            self.now = [self._fresh() if each in convicted else each for each in self.now]
        elif exit_code in (16, 20, 21):
            # At last on devices of its own, and then there again: a step that is good there counts.
            self.now = self._moved(self._moves.pop(0) if self._moves else "stay")
        return self.now

    def _fresh(self) -> str:
        self._num_devices += 1
        return f"d{self._num_devices - 1}"

    def _moved(self, how: str) -> list[str]:
        size = len(self.first)
        if how == "stay":
            return self.now
        if how == "one back":
            # What the machine advises: a suspect as the rank that it was, among others.
            index = self._random.randrange(size)
            device, devices = self.first[index], list(self.now)
            if device in devices:  # as another rank: these two change places
                devices[devices.index(device)] = devices[index]
            devices[index] = device
            return devices
        if how == "same":
            return list(self._random.choice((self.first, self.now)))
        if how == "other":
            return [self._fresh() for _ in range(size)]
        if how == "rotated":
            by = self._random.randrange(1, max(size, 2))
            return self.first[by:] + self.first[:by]
        devices = list(self._random.choice((self.first, self.now)))
        if how == "shuffled part":
            self._random.shuffle(devices)
        for index in self._random.sample(range(size), self._random.randrange(1, max(size, 2))):
            devices[index] = self._fresh()
        return devices


def generic(site: str) -> str:
    """Return a site without the number of its layer: a device in another role has others."""
    return re.sub(r"layer\d", "layer", site)


def host_of(device: str) -> str:
    """Return the host of a device: two of them share one."""
    return f"host{int(device[1:]) // 2}"


def role_of(layout: Layout, rank: int, *, replica: int) -> tuple[Any, ...]:
    """Return what a device computes on a rank that runs the batches of a data rank."""
    at = layout.coordinate(rank)
    return (replica, at["tp"], at["cp"], at["pp"])
