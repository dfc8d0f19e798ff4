"""Whether the forms in a module's state dict are made from the tensors that it does not show.

A hook may show a parameter in another form, or drop it and show something else. Names cannot tell;
the trial does: other bytes in the parameter give other bytes in a form that is made from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from holdfast.state.arrival import differences, recorded
from holdfast.state.module_tree import (
    RegisteredTensor,
    StateDictEntry,
    overrides,
    read_state_dict,
    walk_all,
)
from holdfast.state.tensor_elements import element_bytes, local_of

_TRIED = "_holdfast_tried_forms"
"""Attribute of a module: the tensors that were tried, with the names of the forms next to them."""


def inverted(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that differs from this one in every element."""
    if tensor.dtype is torch.bool:
        return tensor.logical_not()
    return element_bytes(tensor).bitwise_not().view(tensor.dtype).reshape(tensor.shape)


def unrelated_to_forms(module: nn.Module, hidden: Sequence[RegisteredTensor]) -> list[str]:
    """Return the names of tensors that no form of the module's state dict is made from.

    Each tensor has other bytes for one call of `state_dict`, and then its own again. What was tried
    once is not tried again while the forms have the same names.

    Cost: two calls of `state_dict` and a digest of the forms for each tensor, at its first save.
    """
    tried: set[tuple[str, tuple[str, ...]]] = vars(module).setdefault(_TRIED, set())
    unrelated = []
    for held in hidden:
        scope, prefix = _scope(module, held.name)
        names = tuple(sorted(each.name for each in _forms(scope)))
        if (held.name, names) in tried:
            continue
        before = _values(scope)
        with _other_bytes(held.tensor):
            try:
                after = _values(scope)
            except Exception:  # its code met bytes that it does not take: it reads them
                after = None
        if after is None or any(differences(before, after, prefix, owner="")):
            tried.add((held.name, names))
        else:
            unrelated.append(held.name)
    return unrelated


def _scope(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the outermost module around a tensor that has code for its state dict."""
    for prefix, _, inner, _ in walk_all(module):
        has_code = getattr(inner, "_state_dict_hooks", None) or overrides(
            inner, nn.Module, ("state_dict", "_save_to_state_dict")
        )
        if name.startswith(prefix) and has_code:
            return inner, prefix
    return module, ""


def _forms(scope: nn.Module) -> Iterable[StateDictEntry]:
    """Return the entries that are not tensors of the module's own."""
    return [each for each in read_state_dict(scope).entries.values() if each.backing is None]


def _values(scope: nn.Module) -> object:
    """Return the record of the forms."""
    return recorded({each.name: each.value for each in _forms(scope)})


@contextmanager
def _other_bytes(tensor: torch.Tensor) -> Iterator[None]:
    """Give a tensor other bytes, past autograd's counter of writes: a backward may be to come."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        local = local_of(tensor.data)
        kept = local.clone()
        local.copy_(inverted(kept))
        try:
            yield
        finally:
            local.copy_(kept)
