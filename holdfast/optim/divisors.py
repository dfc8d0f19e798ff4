"""The divisors of modules that get gradients of the same losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.errors import ConfigError
from holdfast.parallel import Layout


def refuse_unequal_divisors(
    layouts: Mapping[str, Layout],
    divisors: Mapping[str, int],
    *,
    edges: Sequence[tuple[str, str]],
    name: str,
) -> None:
    """Raise ConfigError if modules divide gradients of the same losses by different numbers.

    A gradient that comes over an edge is that of the sum of the losses at its end. An optimizer
    adds up those of its module's data ranks, each of which has rows of its own: the result is the
    gradient of the sum of all losses, whatever the module's width. So one number makes it that of
    their mean, in every module: the number of losses.

    Args:
        layouts: of all modules.
        divisors: by trained module.
        edges: along which gradients came.
        name: of the optimizer, for messages.
    """
    if not edges:
        return
    sources = {source for source, _ in edges}
    for end in (module for module in layouts if module not in sources):
        trained = {m: divisors[m] for m in layouts if m in divisors and m in _leading(end, edges)}
        layout = layouts[end]
        num_losses = layout.dp * layout.cp
        # The divisor of a module with the loss says how many losses it has; without one, only what
        # follows from its layout makes sense: means of data ranks, or sums.
        allowed = {divisors[end]} if end in divisors else {1, layout.dp, num_losses}
        values = set(trained.values())
        if len(values) < 2 and values <= allowed:
            continue
        listed = ", ".join(f"by {divisor} in '{module}'" for module, divisor in trained.items())
        raise ConfigError(
            f"{name}: the gradient of the losses of '{end}' is divided {listed}. What comes over a "
            f"bridge is the gradient of the sum of all losses, so each module divides by their "
            f"number, whatever its own width: divisor={num_losses}, the data ranks of '{end}', if "
            f"a loss is a mean over the rows of a rank. If losses are sums, pass "
            f"step(num_tokens=), which undoes every divisor; so do with a fully sharded model, "
            f"whose divisor is fixed. Nothing was updated"
        )


def _leading(end: str, edges: Iterable[tuple[str, str]]) -> set[str]:
    """Return the modules from which a path leads to `end`, which is one of them."""
    result = {end}
    while more := {a for a, b in edges if b in result} - result:
        result |= more
    return result
