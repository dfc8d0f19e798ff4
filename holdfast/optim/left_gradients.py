"""Notices what other code does to gradients before they are equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from holdfast._torch import call_after_backward, write_counter
from holdfast.optim.in_flight import HeldHook, MadeHook


class LeftGradients(MadeHook):
    """Gradients of some parameters as the last backward, or the microbatch around it, left them.

    Looked at when a backward ends, not when it makes a gradient: hooks at the parameter, which are
    part of the backward, may come after that.

    Args:
        name: the optimizer's.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._handles: dict[nn.Parameter, RemovableHandle] = {}
        self._left: dict[nn.Parameter, tuple[int, int]] = {}
        """Identity and version of each."""
        self._is_in_backward = False

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Look at the gradients of these parameters, and of no others; may be called again.

        Cost: in each backward a call for each parameter, and a look at each.
        """
        before, self._handles = self._handles, {}
        for parameter in parameters:
            handle = before.pop(parameter, None)
            if handle is None and parameter.requires_grad:
                untyped: Any = parameter
                handle = untyped.register_post_accumulate_grad_hook(HeldHook(self))
            if handle is not None:
                self._handles[parameter] = handle
        for handle in before.values():
            handle.remove()

    def on_made(self, parameter: Tensor) -> None:
        """Look at all gradients once the backward is over."""
        if not self._is_in_backward:
            self._is_in_backward = True
            call_after_backward(self.note)

    def note(self) -> None:
        """Take gradients as they are now."""
        self._is_in_backward = False
        self._left = {p: _version(g) for p in self._handles if (g := p.grad) is not None}

    def forget(self) -> None:
        """Forget them; also after an error in a backward."""
        self._is_in_backward = False
        self._left = {}

    def were_changed(self) -> bool:
        """Return True if some were changed since then, and forget them."""
        left, self._left = self._left, {}
        return any(
            (gradient := parameter.grad) is not None and _version(gradient) != version
            for parameter, version in left.items()
        )


def _version(gradient: Tensor) -> tuple[int, int]:
    return id(gradient), write_counter(gradient)
