"""The examples that the library's tests draw are drawn here, too, in the same way."""

from __future__ import annotations

import tests.conftest  # noqa: F401
