"""Options of the rerun machine of a training run, and the checks between them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.errors import ConfigError
from holdfast.storage import is_url

RERUN_DIR = "rerun"
"""Directory of a run, below that of --save, with the machine's report and fault checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunConfig:
    """What happens where a loss or a gradient is not finite: is it the data, the code, a device?"""

    rerun_mode: Literal["disabled", "validate_results", "report_determinism_stats"] = "disabled"
    """validate_results: run a step with a bad value again, in place and then on another device, and
    end with an exit code that names the cause. report_determinism_stats: run every step twice and
    compare. disabled: a bad value ends the run."""
    rerun_skip_rejected: bool = False
    """Leave out a step whose data was proved bad, by the machine's report: the same value on two
    sets of devices that have none in common."""
    rerun_max_restarts: int = 3
    """Starts from one fault checkpoint after which its fault stays undecided."""
    rerun_report_interval: int = 100
    """With report_determinism_stats: steps between two reports."""
    rerun_spike_factor: float = 0.0
    """Also run a step again whose loss is so many times the usual one, and end with exit code 16 if
    it comes out twice; 0 means not to."""
    rerun_tolerance: float = 0.0
    """Largest relative difference of two values that count as the same; 0 means bitwise equal."""
    error_injection_rate: int = 0
    """To try it out: spoil an activation in one of so many steps of each rank; 0 means none."""
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = (
        "transient_error"
    )
    """With --error-injection-rate: whose fault the spoiled activations look like."""

    @property
    def is_on(self) -> bool:
        """Return True if there is a machine that does anything."""
        return self.rerun_mode != "disabled"


def rerun_dir(save: Path) -> Path:
    """The machine's directory in that of --save or --load."""
    return save / RERUN_DIR


def check_rerun(rerun: RerunConfig, *, save: Path | None) -> None:
    """Refuse options that have no meaning without another one; ConfigError with the fix."""
    mode = rerun.rerun_mode
    if mode == "validate_results" and (save is None or is_url(save)):
        raise ConfigError(
            "--rerun-mode validate_results needs a directory for its report and for the state at a "
            "fault: add --save DIR"
        )
    if mode == "report_determinism_stats" and rerun.error_injection_rate:
        raise ConfigError(
            "--error-injection-rate with --rerun-mode report_determinism_stats, which looks for no "
            "errors: leave it out, or set --rerun-mode validate_results"
        )
    needs = {
        "--rerun-skip-rejected": rerun.rerun_skip_rejected,
        "--rerun-spike-factor": rerun.rerun_spike_factor > 0,
        "--rerun-tolerance": rerun.rerun_tolerance > 0,
        "--error-injection-rate": rerun.error_injection_rate > 0,
    }
    for flag, is_set in needs.items():
        if is_set and not rerun.is_on:
            raise ConfigError(
                f"{flag} has no meaning without a rerun machine: add --rerun-mode validate_results"
            )
    if 0 < rerun.rerun_spike_factor <= 1:
        raise ConfigError(
            f"--rerun-spike-factor {rerun.rerun_spike_factor:g} would reject ordinary losses: set "
            f"it above 1, such as 10, or to 0"
        )
