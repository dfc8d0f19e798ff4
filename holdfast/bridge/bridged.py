"""The result of a bridge: the destination's tokens, and the anchor of the backward exchange."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.bridge.crossing import Crossing
from holdfast.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bridged:
    """The result of one forward of a `Bridge` on one rank.

    Autograd runs the backward exchange, and has to reach it on every rank of the edge: each rank
    adds `anchor` to its loss, or calls `backward` of this object or of `anchor` itself.
    """

    tokens: Tensor | None
    """(number of tokens, *features): the packed tokens of this destination data rank's samples, on
    every rank with the destination's first pipeline stage; None elsewhere. In memory that nothing
    else sees, also where this rank has the source: either module may change its own in place."""
    counts: Tensor | None
    """int64 on the CPU: the number of tokens of each of these samples; None if `tokens` is."""
    anchor: Tensor
    """A scalar zero to add to this rank's loss. Its gradient is of no interest; its backward runs
    the backward exchange, even if no token was used."""
    crossing: Crossing
    """The sizes and messages of this forward."""

    def backward(self, gradient: Tensor | None = None) -> None:
        """Run the backward exchange and, on source ranks, continue into the source.

        For a gradient that was gathered elsewhere, as after a pipeline schedule on a detached leaf:

            leaf = bridged.tokens.detach().requires_grad_()
            ...
            bridged.backward(leaf.grad)

        Called by all ranks of the edge. Nothing happens if no source rank needs a gradient.

        Args:
            gradient: of `tokens`, in their shape and dtype; None for none, and on ranks without
                tokens.

        Raises:
            ConfigError: The gradient does not fit, on any rank; raised on all of them.
            HoldfastError: As for the backward exchange itself: a rank is missing, or in another
                phase.
        """
        failure = self._misfit(gradient)
        if not self.anchor.grad_fn:
            if failure is not None:
                raise failure
            return
        if failure is not None:
            # The agreement of the backward carries it to all ranks, which raise it together.
            self.crossing.failure = failure
        if gradient is None or failure is not None or self.tokens is None:
            torch.autograd.backward([self.anchor])
        else:
            torch.autograd.backward(
                [self.tokens, self.anchor], [gradient, torch.zeros_like(self.anchor)]
            )

    def _misfit(self, gradient: Tensor | None) -> ConfigError | None:
        """Return an error if a gradient cannot be that of the tokens here."""
        where = self.crossing.describe_destination()
        if gradient is None:
            return None
        if self.tokens is None:
            return ConfigError(
                f"{where} took no tokens, and has no gradient of them: call backward() without one."
            )
        tokens = self.tokens
        is_like = gradient.dtype == tokens.dtype and gradient.device == tokens.device
        if gradient.shape != tokens.shape or not is_like or isinstance(gradient, DTensor):
            got, expected = (
                f"a {type(each).__name__} of {each.dtype} on {each.device}, with shape "
                f"{tuple(each.shape)}"
                for each in (gradient, tokens)
            )
            return ConfigError(f"{where}: the gradient is {got}, the tokens are {expected}.")
        return None
