"""`holdfast faults DIR`: which faults a run had, on which devices, and what to do. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

from holdfast.cli.support.arguments import POSITIONAL
from holdfast.cli.support.messages import moment
from holdfast.cli.support.run_history import OPEN, Device, DeviceHistory, Fault, RunHistory
from holdfast.cli.support.steps import open_root
from holdfast.cli.support.tables import make_console, print_json, print_rows
from holdfast.errors import ConfigError, HoldfastError, counted, some_sentences
from holdfast.format.names import RANK_LOG_DIR, list_steps, step_dir
from holdfast.format.rerun_report import REPORT_NAME, read_events
from holdfast.format.versions import read_manifest
from holdfast.storage import PosixStorage, is_url
from holdfast.storage.places import as_url

MACHINE = "rerun"
"""The machine's directory below a run's, as the reference trainer and the documents have it."""
ADVICE = {
    16: "start again, with other devices in place of some of {devices}",
    17: "start again; nothing has to be replaced",
    18: "take {devices} out of service, start again",
    19: "look at the data, the code and the settings",
    20: "the report has what is known; start again",
    21: "the state was bad before the step: start again from an older checkpoint",
}
"""By exit code, what a person or a scheduler does next."""
_REPLICAS = "replicas differ: load a checkpoint from before, and watch these devices"
_MAX_NAMED = 4
_MAX_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """Show the faults of a run by device, over all its jobs; exit code 0 if
    nothing is to be done, else 16 to 21, as of the newest job's last decision."""

    directory: Annotated[Path, POSITIONAL]
    """The directory of a run, or of its rerun machine."""

    json: bool = False
    """Print JSON instead of tables."""


def run(args: Args) -> int:
    """Print faults and devices; the exit code that the newest job ended with, 0 if it has gone on.

    Reads the report and the manifests of a few checkpoints.
    """
    report, checkpoints = _locate(args.directory)
    history = RunHistory(read_events(report))
    pending = history.pending
    if pending is not None and _has_gone_on(checkpoints, pending):
        pending = None
    exit_code = 0 if pending is None else int(pending.exit_code or 0)
    if args.json:
        print_json(
            {
                "report": str(report),
                "exit_code": exit_code,
                "next": "" if pending is None else _next(pending, pending, is_named=True),
                "faults": [
                    {
                        **asdict(each),
                        "devices": [asdict(device) for device in each.devices],
                        "next": _next(each, pending, is_named=True),
                    }
                    for each in history.faults
                ],
                "devices": [asdict(each) for each in history.devices],
            }
        )
    else:
        _print(args.directory, history, pending)
    return exit_code


def _locate(directory: Path) -> tuple[Path, Path]:
    """Return the path of the report, which need not exist, and the directory of checkpoints.

    Raises:
        ConfigError: the directory is neither a machine's nor a run's.
    """
    if is_url(directory):
        raise ConfigError(
            f"{as_url(directory)}: reports of faults are kept in directories, not in buckets: name "
            f"the directory that the run's rerun machine writes to"
        )
    storage = open_root(directory)
    if storage.exists(REPORT_NAME):
        return directory / REPORT_NAME, directory.resolve().parent
    report = directory / MACHINE / REPORT_NAME
    # The first fault creates the report: a run without one is known by what else it has stored.
    if report.exists() or list_steps(storage) or storage.exists(RANK_LOG_DIR):
        return report, directory
    raise ConfigError(
        f"{directory} has no {REPORT_NAME}, neither has {directory / MACHINE}, and no checkpoint "
        f"is in it: name the directory of a run, or of its rerun machine"
    )


def _has_gone_on(checkpoints: Path, fault: Fault) -> bool:
    """Return True if a run has saved a later step since a decision.

    A start that loads a good checkpoint, as after a transient error, adds nothing to the report.
    """
    storage = PosixStorage(checkpoints)
    step = -1 if fault.step is None else fault.step
    later = (each for each in reversed(list_steps(storage)) if each > step)
    return any(_created(storage, each) > fault.time for each in islice(later, _MAX_STEPS))


def _created(storage: PosixStorage, step: int) -> float:
    """Return when a step was saved, in seconds since the epoch; 0 if its manifest is unreadable."""
    try:
        created = read_manifest(storage, step_dir(step))[1].created
        return datetime.fromisoformat(created).timestamp()
    except (HoldfastError, ValueError):
        return 0.0


def _next(fault: Fault, pending: Fault | None, *, is_named: bool) -> str:
    """Return what to do about a fault, with the names of its devices or without."""
    if fault is not pending and fault.exit_code != 18:
        return _REPLICAS if fault.verdict in ("drift", "vouch") else ""
    advice = ADVICE.get(fault.exit_code or 0, "see the report")
    pronoun = "it" if len(fault.devices) == 1 else "them"
    return advice.format(devices=_named(fault.devices) if is_named else pronoun)


def _print(directory: Path, history: RunHistory, pending: Fault | None) -> None:
    """Print a line for each device and each fault, and what to do next."""
    console = make_console()
    if not history.faults:
        console.print(f"no faults in {directory}", soft_wrap=True)
        return
    columns = [
        ("host", "cyan"), ("device", "cyan"), ("convicted", "right"), ("suspected", "right"),
        ("odd one", "right"), ("transient", "right"), ("last time (UTC)", ""),
    ]  # fmt: skip
    print_rows(console, columns, history.devices, _device_cells, noun="device")
    columns = [
        ("step", "right"), ("time (UTC)", ""), ("job", ""), ("verdict", ""), ("devices", "cyan"),
        ("exit code", "right"), ("what to do", ""),
    ]  # fmt: skip
    print_rows(
        console, columns, history.faults[::-1], partial(_fault_cells, pending=pending), noun="fault"
    )
    for device in history.devices:
        for text in device.diagnostics:
            console.print(f"{device.host}, {device.device}: {text}", soft_wrap=True)
    if pending is None:
        console.print(f"{counted(len(history.faults), 'fault')}; nothing to do now")
    else:
        console.print(
            f"exit code {pending.exit_code}: {_next(pending, pending, is_named=True)}",
            soft_wrap=True,
        )


def _device_cells(each: DeviceHistory) -> list[str]:
    counts = (each.num_convicted, each.num_suspected, each.num_odd, each.num_transient)
    return [each.host, each.device, *map(str, counts), _when(each.time)]


def _fault_cells(fault: Fault, pending: Fault | None) -> list[str]:
    between = "between " if fault.verdict == OPEN and len(fault.devices) > 1 else ""
    return [
        "" if fault.step is None else f"{fault.step}",
        _when(fault.time),
        fault.job[:8],
        fault.verdict.replace("_", " "),
        f"{between}{_named(fault.devices)}",
        "" if fault.exit_code is None else f"{fault.exit_code}",
        _next(fault, pending, is_named=False),
    ]


def _named(devices: Sequence[Device]) -> str:
    """Name the first devices, and say how many more there are."""
    return some_sentences([f"{each.host}, {each.device}" for each in devices], most=_MAX_NAMED)


def _when(seconds: float) -> str:
    """Return a time of the report; empty if it states none."""
    return moment(seconds) if seconds else ""
