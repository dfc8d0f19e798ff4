"""`nn.Module` as a part of the state: parameters, persistent buffers, extra state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from holdfast.errors import PlacementError
from holdfast.state.markers import Padded, Stored
from holdfast.state.names import logical_names, walk, without_wrappers
from holdfast.state.padding import declarations


class ModulePart:
    """Saves and restores a module under the names of its logical tree.

    Tensors come from `state_dict(keep_vars=True)`, so that hooks of the module (FSDP2 reshards in
    one) run; a load writes into the module's own parameters and buffers, in place. Those whose
    padding is declared (`declare_padding`) are stored without it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def tree(self) -> dict[str, object]:
        """Logical name -> tensor, marked where padding is declared, or extra state."""
        names = logical_names(self._module)
        found: dict[str, object] = {}
        state = self._module.state_dict(keep_vars=True)
        padded = declarations(self._module)  # after the hooks, which may replace parameters
        for name, value in state.items():
            logical = names.get(without_wrappers(name)) or self._hook_name(name)
            if logical in found:
                raise PlacementError(
                    f"two tensors of {type(self._module).__name__} are both named '{logical}'"
                )
            declared = padded.find(value, logical) if isinstance(value, torch.Tensor) else None
            found[logical] = value if declared is None else declared.mark(value)
        return found

    def template(self, stored: object) -> dict[str, object]:
        """The module's own tensors as targets; extra state as whatever the checkpoint holds."""
        del stored
        return {
            name: value if isinstance(value, torch.Tensor | Padded) else Stored()
            for name, value in self.tree().items()
        }

    def restore(self, tree: object) -> None:
        """Run load hooks and give back extra state; tensors are in place already."""
        if not isinstance(tree, Mapping):
            raise PlacementError(f"the stored state of {type(self._module).__name__} is no mapping")
        extras = {n: v for n, v in tree.items() if not isinstance(v, torch.Tensor)}
        if not extras and not self._has_load_hooks():
            return
        state = self._module.state_dict(keep_vars=True)
        names = logical_names(self._module)
        for name in list(state):
            logical = names.get(without_wrappers(name)) or self._hook_name(name)
            if logical in extras:
                state[name] = extras[logical]
        with torch.no_grad():
            self._module.load_state_dict(state, strict=False)

    def _hook_name(self, name: str) -> str:
        """The logical name of an entry that is neither parameter nor buffer (extra state)."""
        plain = without_wrappers(name)
        for logical, actual, _ in sorted(walk(self._module), key=lambda w: -len(w[1])):
            prefix = without_wrappers(actual)
            if plain.startswith(prefix):
                return logical + plain[len(prefix) :]
        return name

    def _has_load_hooks(self) -> bool:
        for module in self._module.modules():
            if module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:
                return True
            overridden = type(module)._load_from_state_dict
            if overridden is not nn.Module._load_from_state_dict and not type(
                module
            ).__module__.startswith("torch."):
                return True
        return False
