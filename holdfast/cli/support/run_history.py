"""The history of a run's faults, by fault and by device, from the report of its machine. No torch.

A fault is *open* from the rerun that could not explain it until its verdict. It lies between the
devices that the machine has recorded last; in reports of older versions, whose values have no
`fed_by`, that is the device of the value itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.format.rerun_report import device_key

OPEN, UNFINISHED, DROPPED = "open", "unfinished", "dropped"
"""A fault without a verdict: it is to be run again; the process ended during the rerun; the run
that loaded it could not run it again."""
OPEN_CODE = 16
"""The exit code of a start that leaves a fault open."""
PERSISTENT, TRANSIENT, UNDECIDED = "persistent_error", "transient_error", "undecided"
_RERUNS = ("rerun_in_place", "second_opinion", "rerun_from_checkpoint")
_AFTERWARDS = ("dropped", "retired")
"""Events of a later job, which add nothing to what is known of a fault."""
_ODD_ONES = {"drift": "values", "vouch": "odd"}
"""Events of replicas that differ, and the field with the places of the odd ones."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device, as the report names it."""

    host: str
    device: str

    @property
    def key(self) -> str:
        """Return what is equal exactly for the same device."""
        return device_key(self.host, self.device)


@dataclass(slots=True, kw_only=True)
class Fault:
    """One fault, or one comparison of replicas that differed, after all its events."""

    id: str
    """Of the fault; empty for a comparison of replicas."""
    machine: str
    job: str
    """The job of the last event that it was run or judged in."""
    step: int | None
    time: float = 0.0
    """Of that event, in seconds since the epoch."""
    verdict: str = UNFINISHED
    """In the words of the report, or one of `OPEN`, `UNFINISHED`, `DROPPED`, "drift", "vouch"."""
    exit_code: int | None = None
    """Of the last decision about it; None if the run continued, or nothing was decided."""
    convicted: list[Device] = field(default_factory=list)
    suspects: list[Device] = field(default_factory=list)
    """Devices that it lies between while it has no verdict that tells."""
    transient: list[Device] = field(default_factory=list)
    """Devices that have fed values with a transient error."""
    odd: list[Device] = field(default_factory=list)

    @property
    def devices(self) -> list[Device]:
        """Return the devices that matter for what it is now."""
        if self.verdict == TRANSIENT:
            return self.transient
        return self.convicted or self.suspects or self.odd


@dataclass(slots=True, kw_only=True)
class DeviceHistory:
    """How often a device had to do with faults; each fault counts once."""

    host: str
    """The last one that it was seen on."""
    device: str
    num_convicted: int = 0
    num_suspected: int = 0
    """Faults without a verdict, or undecided ones, that lie between this and other devices."""
    num_transient: int = 0
    num_odd: int = 0
    """Comparisons of replicas in which it was the odd one."""
    time: float = 0.0
    """Of the last event that it counts in."""
    diagnostics: list[str] = field(default_factory=list)

    @property
    def weight(self) -> tuple[int, ...]:
        """Return the counts, the gravest first."""
        return (self.num_convicted, self.num_suspected, self.num_odd, self.num_transient)


class RunHistory:
    """Faults in the order of their first event, and devices with the most suspicious first.

    Args:
        events: of the report, in order. Fields that an older version did not write may be missing.
    """

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self._faults: dict[str, Fault] = {}
        self._decided: dict[str, Fault | None] = {}
        """By job, the newest last: the fault of its last decision; None if it has gone on."""
        for event in events:
            self._take(event)
        self._devices: dict[str, DeviceHistory] = {}
        self._count(events)

    @property
    def faults(self) -> list[Fault]:
        """Return all faults, in the order of their first event."""
        return list(self._faults.values())

    @property
    def devices(self) -> list[DeviceHistory]:
        """Return the devices that count in any event, the most suspicious first."""
        order = sorted(self._devices.values(), key=lambda each: (each.host, each.device))
        return sorted(order, key=lambda each: each.weight, reverse=True)

    @property
    def pending(self) -> Fault | None:
        """Return the fault that the newest job ended with; None if nothing asks for anything."""
        if not self._decided:
            return None
        fault = self._decided[next(reversed(self._decided))]
        return None if fault is None or fault.exit_code is None else fault

    def _take(self, event: Mapping[str, Any]) -> None:
        """Take one event, in the order of the report."""
        job, kind = str(event.get("job", "")), event["event"]
        # A job without a decision has gone on, whatever the jobs before it ended with.
        self._decide(event, self._decided.get(job))
        if kind in _ODD_ONES:
            odd = _devices(event.get(_ODD_ONES[kind]))
            suspects = _each_once(map(_device, _within(event.get("disagree"))))
            if odd or suspects or kind == "drift":
                fault = self._fault(f"{kind} {len(self._faults)}", event)
                fault.id, fault.verdict = "", kind
                fault.odd, fault.suspects = odd, [] if odd else suspects
            return
        if not event.get("fault"):
            return
        fault = self._fault(str(event["fault"]), event)
        values = _dicts(event.get("values"))
        if kind == "rejected":
            fault.suspects = _closest(values)
        elif kind in _RERUNS:
            _take_transient(fault, values)
            still = [value for value in values if value.get("verdict") is None]
            if still:
                fault.verdict, fault.exit_code = OPEN, OPEN_CODE
                fault.suspects = _devices(event.get("suspects")) or _closest(still)
                self._decide(event, fault)
        elif kind == "restart":
            self._decide(event, fault)
        elif kind == "verdict":
            _take_transient(fault, values)
            _judge(fault, event, values)
            self._decide(event, fault)
        elif kind == "dropped":
            fault.verdict = DROPPED if fault.verdict in (OPEN, UNFINISHED) else fault.verdict
            self._decide(event, None)

    def _decide(self, event: Mapping[str, Any], fault: Fault | None) -> None:
        """Note what the job of an event has decided last."""
        if event.get("job"):
            self._decided[str(event["job"])] = fault

    def _fault(self, name: str, event: Mapping[str, Any]) -> Fault:
        """Return the fault of an event, with its time."""
        step, job = event.get("step"), str(event.get("job", ""))
        fault = self._faults.get(name)
        if fault is None:
            fault = Fault(
                id=name,
                machine=str(event.get("machine", "")),
                job=job,
                step=step if isinstance(step, int) else None,
            )
            self._faults[name] = fault
        if event["event"] not in _AFTERWARDS:
            fault.time, fault.job = _time(event), job
        return fault

    def _count(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Count faults by device."""
        for fault in self._faults.values():
            is_suspect = fault.verdict not in (UNFINISHED, *_ODD_ONES)
            for device in fault.convicted:
                self._history(device, fault.time).num_convicted += 1
            for device in fault.suspects if is_suspect else ():
                self._history(device, fault.time).num_suspected += 1
            for device in fault.transient:
                self._history(device, fault.time).num_transient += 1
            for device in fault.odd:
                self._history(device, fault.time).num_odd += 1
        for event in events:
            if event["event"] == "diagnostics":
                for result in _dicts(event.get("results")):
                    history = self._history(_device(result), _time(event))
                    history.diagnostics.append(str(result.get("text", "")))

    def _history(self, device: Device, time: float) -> DeviceHistory:
        """Return the history of a device that has to do with an event at this time."""
        history = self._devices.setdefault(
            device.key, DeviceHistory(host=device.host, device=device.device)
        )
        if time >= history.time:
            history.time, history.host = time, device.host
        return history


def _judge(fault: Fault, event: Mapping[str, Any], values: list[Mapping[str, Any]]) -> None:
    """Take a verdict, and the devices that it convicts or leaves in doubt."""
    verdict, code = event.get("verdict"), event.get("exit_code")
    fault.verdict = verdict if isinstance(verdict, str) and verdict else OPEN
    fault.exit_code = code if isinstance(code, int) else None
    convicted = [each for each in values if each.get("verdict") == PERSISTENT]
    fault.convicted = _devices(event.get("convicted")) or _each_once(map(_first, convicted))
    named = _devices(event.get("suspects"))
    # A verdict after the last start that may be tried has no values: it lies where it lay before.
    fault.suspects = named or (fault.suspects if fault.verdict in (OPEN, UNDECIDED) else [])


def _take_transient(fault: Fault, values: list[Mapping[str, Any]]) -> None:
    """Add the devices of values that were a transient error."""
    mine = [each for each in values if each.get("verdict") == TRANSIENT]
    fault.transient = _each_once([*fault.transient, *_closest(mine)])


def _closest(values: Iterable[Mapping[str, Any]]) -> list[Device]:
    """Return the devices that fed bad values of one fault, as few as can be.

    One device explains a loss and the gradient that was reduced over all ranks: what fed the loss
    is closer. So a value counts only if no other one was fed by some of its devices alone.
    """
    fed = [_fed_by(value) for value in values]
    keys = [{device.key for device in devices} for devices in fed]
    return _each_once(
        device
        for devices, mine in zip(fed, keys, strict=True)
        for device in devices
        if not any(other < mine for other in keys)
    )


def _fed_by(value: Mapping[str, Any]) -> list[Device]:
    """Return the devices that a value was computed on when it was bad first."""
    return _devices(value.get("first_fed_by")) or _devices(value.get("fed_by")) or [_first(value)]


def _first(value: Mapping[str, Any]) -> Device:
    """Return the device of the rank whose value was bad first."""
    host, device = (value.get(f"first_{name}", value.get(name)) for name in ("host", "device"))
    return _device({"host": host, "device": device})


def _device(place: Mapping[str, Any]) -> Device:
    """Return the device of a place; "?" for what is missing."""
    host, device = place.get("host"), place.get("device")
    return Device("?" if host is None else str(host), "?" if device is None else str(device))


def _devices(places: object) -> list[Device]:
    """Return the devices of places, each once."""
    return _each_once(map(_device, _dicts(places)))


def _each_once(devices: Iterable[Device]) -> list[Device]:
    """Return devices in their order, each once."""
    return list({each.key: each for each in devices}.values())


def _dicts(values: object) -> list[Mapping[str, Any]]:
    """Return the mappings in a list; nothing of what is not a list."""
    return [each for each in _list(values) if isinstance(each, Mapping)]


def _within(values: object) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings in lists of lists of any depth."""
    for each in _list(values):
        if isinstance(each, Mapping):
            yield each
        else:
            yield from _within(each)


def _list(values: object) -> list[Any]:
    """Return a list as it is, and an empty one for anything else."""
    return values if isinstance(values, list) else []


def _time(event: Mapping[str, Any]) -> float:
    """Return the time of an event; 0 if it is missing."""
    time = event.get("time")
    return float(time) if isinstance(time, int | float) else 0.0
