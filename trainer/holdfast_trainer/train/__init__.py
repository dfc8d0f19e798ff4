"""The reference trainer: configuration, data, schedules, the loop, and how it is launched."""

from __future__ import annotations
