"""The command run inside this process, as for the verbs that look."""

from __future__ import annotations

from tests.cli_inspect.conftest import holdfast

__all__ = ["holdfast"]
