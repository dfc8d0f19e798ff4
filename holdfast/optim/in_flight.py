"""Classes of parameters whose values or gradients are not at the place that plain code reads.

Two states of a parameter must not be read as if they were ordinary: between `step` and the end of
the gather its memory is partly old, and between backward and `step` its gradient is not in `.grad`.
In both the parameter object stays the same and gets another class temporarily, as torch's lazy
parameters do; plain code never notices, and nothing is left of it afterwards.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast._torch import (
    local_tensor,
    local_tensor_slot,
    mark_eager,
    set_local_tensor,
    without_torch_function,
)

_tensor: Any = torch.Tensor
_HARMLESS = frozenset(
    {
        *(
            getattr(_tensor, name).__get__
            for name in (
                *("dtype", "device", "layout", "shape", "ndim", "requires_grad", "grad", "is_leaf"),
                *("is_cuda", "is_meta", "is_sparse", "is_quantized", "grad_fn", "_version"),
            )
        ),
        _tensor.grad.__set__,
        _tensor.grad.__delete__,
        _tensor.requires_grad_,
        _tensor.size,
        _tensor.dim,
        _tensor.numel,
        _tensor.nelement,
        _tensor.element_size,
        _tensor.is_floating_point,
        _tensor.is_complex,
        _tensor.register_hook,
        _tensor.register_post_accumulate_grad_hook,
    }
)
"""Functions that read neither the values nor the memory of a parameter."""


def storage_of(parameter: nn.Parameter) -> Tensor:
    """Return the local tensor itself, not a view of it."""
    return local_tensor(parameter) if isinstance(parameter, DTensor) else parameter.data


def set_storage(parameter: nn.Parameter, local: Tensor) -> None:
    """Make a parameter be `local`, a tensor of its local shape."""
    if isinstance(parameter, DTensor):
        set_local_tensor(parameter, local)
    else:
        parameter.data = local


gradient_of: Callable[[Tensor], Tensor | None] = _tensor.grad.__get__
"""Return what is in `.grad`, whatever class the parameter has at the moment."""


write_gradient: Callable[[Tensor, Tensor | None], None] = _tensor.grad.__set__
"""Write `.grad`, whatever class the parameter has at the moment."""


def in_flight_class(base: type[Tensor], finish: Callable[[], None]) -> type[Tensor]:
    """Make a class whose tensors call `finish` before anything reads or writes their values.

    Args:
        base: the tensors' own class.
        finish: waits for the values, and gives the tensors their own class back.
    """

    def wait() -> None:
        finish()

    def torch_function(
        cls: type, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        del cls
        if func in _HARMLESS:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        for kind in types:
            finish_gather = getattr(kind, "_holdfast_finish", None)
            if finish_gather is not None:
                finish_gather()
        return func(*args, **(kwargs or {}))

    def deepcopy(self: Tensor, memo: dict[int, object]) -> object:
        finish()
        return copy.deepcopy(self, memo)

    def reduce_ex(self: Tensor, protocol: Any) -> object:
        finish()
        untyped: Any = self
        return untyped.__reduce_ex__(protocol)

    members: dict[str, Any] = {
        "__slots__": (),
        "__module__": base.__module__,
        "__torch_function__": classmethod(mark_eager(torch_function)),
        "__deepcopy__": mark_eager(deepcopy),
        "__reduce_ex__": mark_eager(reduce_ex),
        "_holdfast_finish": staticmethod(mark_eager(wait)),
    }
    if issubclass(base, DTensor):
        span: Any = local_tensor_slot()

        def local(self: DTensor) -> Tensor:
            finish()
            return cast("Tensor", span.__get__(self))

        members["_local_tensor"] = property(mark_eager(local))
    return type(f"InFlight{base.__name__}", (base,), members)


class Hiding:
    """Exchanges the class and the memory of parameters in flight, and gives them back.

    Args:
        parameters: those of a bucket.
        kinds: the class of each.
        views: the memory of each.
        finish: waits for the parameters, and calls `show`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        kinds: Sequence[type[Tensor]],
        views: Sequence[Tensor],
        *,
        finish: Callable[[], None],
    ) -> None:
        in_flight = {kind: in_flight_class(kind, finish) for kind in set(kinds)}
        # One NaN, expanded: native code that reads the memory without the class (an extension) gets
        # NaN, not a mixture of old and new values.
        self._nan = torch.full((), torch.nan, dtype=views[0].dtype, device=views[0].device)
        self._members = [
            (parameter, kind, view, in_flight[kind], self._nan.expand(view.shape))
            for parameter, kind, view in zip(parameters, kinds, views, strict=True)
        ]
        self._is_hidden = False

    def hide(self) -> None:
        """Make every read wait; raise TypeError or RuntimeError if a class cannot be exchanged."""
        self._nan.fill_(torch.nan)  # native code can write to it if it has no dims
        self._is_hidden = True
        for parameter, _, _, in_flight, placeholder in self._members:
            set_storage(parameter, placeholder)
            change_class(parameter, in_flight)

    def show(self) -> None:
        """Give parameters their class and their memory back, if they were hidden."""
        if self._is_hidden:
            for parameter, kind, view, _, _ in self._members:
                change_class(parameter, kind)
                set_storage(parameter, view)
            self._is_hidden = False


class MadeHook:
    """Is notified of gradients that autograd makes."""

    name: str
    """The optimizer's, or what keeps the gradient."""

    def on_made(self, parameter: Tensor) -> None:
        """Called after autograd has put the gradient into `.grad`."""


class GradientHook(MadeHook):
    """Knows the gradient of one parameter that is not in `.grad`."""

    def on_read(self) -> None:
        """Called before `.grad` of a parameter of a bucketed class is read."""

    def on_clear(self) -> None:
        """Called before it is set to None, or read by a `zero_grad`, which then does nothing."""

    def on_zero(self) -> None:
        """Called instead of `on_clear` if `zero_grad(set_to_none=False)` reads it."""
        self.on_clear()


class HeldHook:
    """What stands at a parameter for a `MadeHook`, and does not keep it.

    Python's collector does not see what torch keeps at a parameter: a hook there from which a
    reference leads back would keep the model and its communicators, with their threads and
    descriptors, to the end of the process.
    """

    def __init__(self, hook: MadeHook) -> None:
        self._hook = weakref.ref(hook)

    @property
    def hook(self) -> MadeHook | None:
        """The hook, or None if what made it is gone."""
        return self._hook()

    @mark_eager
    def __call__(self, parameter: Tensor) -> None:
        """Torch calls it after autograd has put a gradient into `.grad`."""
        hook = self._hook()
        if hook is not None:
            hook.on_made(parameter)


def gradient_hook(parameter: Tensor) -> GradientHook | None:
    """Return the hook by which a sharded optimizer takes the gradients of a parameter, or None."""
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    held = (each.hook for each in hooks.values() if isinstance(each, HeldHook))
    return next((hook for hook in held if isinstance(hook, GradientHook)), None)


_MACHINERY = ("torch._", "torch.distributed.pipelining", "torch.distributed.fsdp")
"""Modules of torch that use `.grad` and work whether it is None or not: compilers, schedules."""


def _user_of(parameter: Tensor) -> tuple[GradientHook | None, FrameType | None]:
    """Return the hook to call for an access to `.grad`, and the frame of a `zero_grad` in it."""
    frame = sys._getframe(2)  # this function, the property of the class, the code that uses it
    if str(frame.f_globals.get("__name__", "")).startswith(_MACHINERY):
        return None, None
    return gradient_hook(parameter), frame if frame.f_code.co_name == "zero_grad" else None


def _read_gradient(self: Any) -> Tensor | None:
    hook, clearing = _user_of(self)
    if hook is not None and clearing is None:
        hook.on_read()
    elif hook is not None and clearing is not None:
        # It finds None, and would leave the gradient where it is.
        (hook.on_clear if clearing.f_locals.get("set_to_none", True) else hook.on_zero)()
    return gradient_of(self)


def _write_gradient(self: Any, value: Tensor | None) -> None:
    hook, _ = _user_of(self)
    if value is None and hook is not None:
        hook.on_clear()
    _tensor.grad.__set__(self, value)


def _delete_gradient(self: Any) -> None:
    hook, _ = _user_of(self)
    if hook is not None:
        hook.on_clear()
    _tensor.grad.__delete__(self)


class Bucketed:
    """What reading `.grad` does, and copies, where the gradient is in a bucket."""

    __slots__ = ()
    grad = property(_read_gradient, _write_gradient, _delete_gradient)

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        return self._in_own_class(lambda p: copy.deepcopy(p, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._in_own_class(lambda p: p.__reduce_ex__(protocol))

    def _in_own_class(self: Any, action: Callable[[Any], object]) -> object:
        kind: Any = type(self)
        change_class(self, kind.__base__)
        try:
            return action(self)
        finally:
            change_class(self, kind)


class BucketedParameter(Bucketed, nn.Parameter):
    """A parameter whose gradient is in a bucket: reading `.grad` calls its optimizer."""

    __slots__ = ()


class BucketedDTensor(Bucketed, DTensor):
    """A parameter that is a DTensor and whose gradient is in a bucket."""

    __slots__ = ()


class BucketedShare(Tensor):
    """The elements of a parameter that a rank updates, while its gradient is in a bucket."""

    __slots__ = ()
    # As nn.Parameter: what is computed of it is a plain tensor.
    __torch_function__ = nn.Parameter.__torch_function__
    grad = property(_read_gradient, _write_gradient, _delete_gradient)


BUCKETED: Mapping[type[Tensor], type[Tensor]] = MappingProxyType(
    {nn.Parameter: BucketedParameter, DTensor: BucketedDTensor}
)
"""Class of parameters whose `.grad` must not be read, by their own class; not for users' classes.

It does not affect autograd, which writes gradients, and torch.compile finds it by name.
"""


def change_class(parameter: Tensor, kind: type[Tensor]) -> None:
    """Give a tensor another class of the same layout; raise TypeError if the layout differs."""
    parameter.__class__ = kind


@mark_eager  # a call inside a compiled graph must not count as a call
class ModuleHook:
    """A hook on a module that belongs to one optimizer: copies of the module get none.

    Copied or pickled with its module it becomes a hook that does nothing, so that the copy is an
    independent plain model, without process groups.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Torch calls the hook."""
        self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        return no_hook

    def __copy__(self) -> ModuleHook:
        return self

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _give_no_hook, ()


def no_hook(*args: Any, **kwargs: Any) -> None:
    """Do nothing: the hook of a copied model."""


def _give_no_hook() -> object:
    return no_hook
