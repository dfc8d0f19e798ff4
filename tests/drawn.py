"""Property tests with few examples in the short tests, and with many in the long ones.

    @drawn(quick=40, slow=150, spec=SPECS)
    def test_it(tmp_path: Path, spec: Spec) -> None:

is `@given(spec=SPECS)` as two cases.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

_COUNT = "num_examples"


def drawn(
    *, quick: int, slow: int, **strategies: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Draw the named arguments of a test, and take the others from its fixtures.

    Args:
        quick: Examples in the short tests.
        slow: Examples in the long tests.
        strategies: By the name of an argument.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**fixtures: Any) -> None:
            count = fixtures.pop(_COUNT)

            def check(**values: Any) -> None:
                test(**fixtures, **values)

            # Examples are drawn by the name of what they are for: each test has its own.
            check.__name__ = check.__qualname__ = test.__name__
            settings(max_examples=count)(given(**strategies)(check))()

        run.__name__, run.__qualname__ = test.__name__, test.__qualname__
        run.__doc__, run.__module__ = test.__doc__, test.__module__
        vars(run).update(vars(test))  # its marks
        kept = [p for p in inspect.signature(test).parameters.values() if p.name not in strategies]
        kept.append(inspect.Parameter(_COUNT, inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        counts = [quick, pytest.param(slow, marks=pytest.mark.slow)]
        return pytest.mark.parametrize(_COUNT, counts)(run)

    return decorate
