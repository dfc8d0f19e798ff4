"""Hooks on modules that complete parameters before a forward, save or load uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from holdfast._torch import parameter_table
from holdfast.errors import ConfigError
from holdfast.optim.buckets import Bucket
from holdfast.optim.in_flight import ModuleHook


class ParameterWatch:
    """Watches the modules that parameters are registered in: forward, save, load, replacement.

    A module's forward waits for each bucket that holds one of its parameters, as soon as *any* of
    the modules that share the bucket is entered. A bucket may stay in flight after a step only if
    *all* of them were entered through their hooks since the last one: a module that is called
    without its hooks (compiled, scripted, or its forward called directly) would not wait.

    Args:
        module: the model.
        buckets: hold the watched parameters.
        names: of the parameters, for messages.
        before_read: called before forwards and saves, on all ranks.
        after_load: called with the buckets of a module whose weights were loaded.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[Bucket],
        *,
        names: Mapping[nn.Parameter, str],
        before_read: Callable[[], None],
        after_load: Callable[[Sequence[Bucket], nn.Module], None],
    ) -> None:
        self._module = module
        self._buckets = buckets
        self._names = names
        self._before_read = before_read
        self._after_load = after_load
        home = {p: i for i, bucket in enumerate(buckets) for p in bucket.parameters}
        self._places = [
            (inner, name, parameter)
            for inner in module.modules()
            for name, parameter in parameter_table(inner).items()
            if parameter is not None and parameter in home
        ]
        self._owners: list[set[nn.Module]] = [set() for _ in buckets]
        for inner, _, parameter in self._places:
            self._owners[home[parameter]].add(inner)
        self._called: set[nn.Module] = set()
        self._handles: list[RemovableHandle] = []
        self._hook()

    def was_entered(self, position: int) -> bool:
        """Return True if hooks saw a call of every module of a bucket since `restart`."""
        owners = self._owners[position]
        return bool(owners) and owners <= self._called

    def restart(self) -> None:
        """Forget the calls so far: parameters change now."""
        self._called.clear()

    def check(self) -> None:
        """Raise ConfigError that names a parameter which its module does not have any more."""
        for inner, name, parameter in self._places:
            if parameter_table(inner).get(name) is not parameter:
                raise ConfigError(
                    f"{self._names[parameter]}: the module has another parameter there since the "
                    f"sharded optimizer was built (an assignment, load_state_dict(assign=True), "
                    f"a conversion?), which would not be trained; change the model first, then "
                    f"build the optimizer"
                )

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self) -> None:
        for owner in dict.fromkeys(inner for inner, _, _ in self._places):
            mine = [b for b, o in zip(self._buckets, self._owners, strict=True) if owner in o]
            untyped: Any = owner
            before_forward = partial(self._before_forward, mine)
            before_load = partial(self._before_load, mine)
            self._handles += [
                owner.register_forward_pre_hook(ModuleHook(before_forward)),
                untyped.register_state_dict_pre_hook(ModuleHook(self._before_state)),
                untyped.register_load_state_dict_pre_hook(ModuleHook(before_load)),
            ]
            if any(bucket.has_main for bucket in mine):
                hook = ModuleHook(partial(self._when_loaded, mine))
                self._handles.append(untyped.register_load_state_dict_post_hook(hook))

    def _before_forward(self, buckets: Sequence[Bucket], owner: nn.Module, *_: Any) -> None:
        self._called.add(owner)
        self._before_read()
        for bucket in buckets:
            bucket.finish_gather()

    def _before_state(self, *_: Any) -> None:
        self._before_read()
        for bucket in self._buckets:
            bucket.finish_gather()

    def _before_load(self, buckets: Sequence[Bucket], *_: Any) -> None:
        for bucket in buckets:
            bucket.finish_gather()

    def _when_loaded(self, buckets: Sequence[Bucket], owner: nn.Module, *_: Any) -> None:
        self._after_load(buckets, owner)
