"""Looks at the state that a step starts with: parameters of the model, and of its optimizers.

A fault may be older than the step in which a value is rejected: an update, a reduction or a gather
has spoiled a parameter, and every run of the step is bad, on any device. And a loop may change the
state between two runs of a step, so that they cannot be compared.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from holdfast._torch import registrations, write_counter
from holdfast.errors import ConfigError
from holdfast.rerun.kept_trees import is_sparse, is_strided, members_of
from holdfast.state.optimizer_protocol import OptimizersByModule
from holdfast.state.tensor_elements import flat_copies, local_of, tensor_digest
from holdfast.state.unfinished import unfinished_on, workers_on

_GRADIENT: Any = torch.Tensor.grad
"""What `.grad` is of a parameter whose gradient is there. A class with a `.grad` of its own, as a
parameter has for a while whose gradient is in a bucket, must not be asked."""
_SETTINGS = frozenset((bool, int, float, str, tuple, torch.Tensor, np.float32, np.float64))
MAX_NAMED = 4
"""Tensors that a message names."""


class _DropsGradients(Protocol):
    def drop_gradients(self) -> None:
        """Forget all gradients."""


class TrainingState:
    """The parameters of some modules, and the states of some optimizers, on this rank.

    Args:
        modules: of the model.
        optimizers: of its parameters: torch's own, or those of `holdfast.optim`.

    Raises:
        ConfigError: an optimizer is of another type.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Any] = ()) -> None:
        self._modules = tuple(modules)
        self._given = tuple(optimizers)
        self._optimizers = tuple(_torch_optimizers(optimizers))
        # Sharded optimizers write to memory that parameters are views of, which autograd's counters
        # do not show.
        self._counted = [each for each in optimizers if hasattr(each, "num_updates")]
        self._num_updates: list[int] = []
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._num_registered = -1
        """How many parameters and modules had been registered anywhere when that was listed."""
        self._versions: list[int] = []
        self._without_gradient: list[nn.Parameter] = []
        self._droppable: list[_DropsGradients] = []
        """What keeps gradients elsewhere than in `.grad`: optimizers, fully sharded models."""
        self._idle: list[_DropsGradients] = []
        self._with_nan: set[str] = set()
        """Buffers that had a NaN at the first look."""
        self._with_infinity: set[str] = set()
        """Parameters without a gradient that had an infinity then, and no NaN: masks."""
        self._settings: list[list[dict[str, Any]]] = []
        self._added: set[str] = set()
        """Parameters to whose old gradients a rerun has added."""
        self._has_dropped = False
        """True if the loop has dropped the old gradient of some parameter."""
        self._hooks: list[RemovableHandle] = []
        self._at_forward: list[_OldGradient] = []

    @property
    def is_known(self) -> bool:
        """True if there are modules to look at."""
        return bool(self._modules)

    def note(self) -> None:
        """Note the versions of all parameters, and which have no gradient, before a step runs.

        Cost: some 150 ns for each parameter.
        """
        if self._num_registered != registrations():
            self._parameters = [*self._named_parameters()]
            self._droppable = [*_droppable(self._given, self._modules)]
            has_lazy = any(is_lazy(p) for each in self._modules for p in each.parameters())
            self._num_registered = -1 if has_lazy else registrations()
        self._versions = [write_counter(each) for _, each in self._parameters]
        self._without_gradient = [
            each
            for _, each in self._parameters
            if type(each).grad is _GRADIENT and each.grad is None
        ]
        self._idle = [each for each in self._droppable if unfinished_on(*_parts(each)) is None]
        self._num_updates = [each.num_updates for each in self._counted]
        self._settings = self._settings_now()

    def drop_gradients(self) -> None:
        """Drop the gradients that were not there at `note`: of the run before.

        A loop that has dropped gradients before its attempts would add those of the rerun to them.
        """
        before = [(each, each.grad) for _, each in self._with_gradient()]
        for idle in self._idle:
            idle.drop_gradients()
        for each, gradient in before:
            each.grad = gradient
        for each in self._without_gradient:
            if type(each).grad is _GRADIENT:
                each.grad = None

    def _with_gradient(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that had a gradient in `.grad` at `note`."""
        without = set(map(id, self._without_gradient))
        return [
            (name, each)
            for name, each in self._parameters
            if id(each) not in without and type(each).grad is _GRADIENT
        ]

    def has_hidden_gradients(self) -> bool:
        """Return True if there are gradients in buckets of an optimizer that is not known.

        They were not there at `note`; only the loop can drop them.
        """
        return any(type(each).grad is not _GRADIENT for each in self._without_gradient)

    def watch_gradients(self) -> None:
        """Watch a rerun for gradients that were there at `note` and that the loop does not drop.

        A loop that accumulates over several steps would have the step in them twice. Parameters
        that no optimizer has are often left alone, and count for nothing; if optimizers are not
        known, a loop that drops any gradient is one that drops those of its optimizer.
        """
        self.added()
        updated = {
            id(each)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        }
        for name, each in self._with_gradient():
            if each.grad is None or not (each.is_leaf and each.requires_grad):
                continue
            if self._given and id(each) not in updated:
                continue
            watch = _OldGradient(each, partial(self._take_sum, name))
            if isinstance(each, DTensor):  # fully sharded, it may have no backward of its own
                self._at_forward.append(watch)
            else:
                parameter: Any = each  # torch has no types for what follows
                self._hooks.append(parameter.register_hook(watch.before))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(watch.after))

    def _take_sum(self, name: str, is_added: bool) -> None:
        if is_added:
            self._added.add(name)
        else:
            self._has_dropped = True

    @property
    def waits_for_forward(self) -> bool:
        """True if `look_at_forward` has something to look at."""
        return bool(self._at_forward)

    def look_at_forward(self) -> None:
        """See before the first forward which gradients of DTensors the loop has not dropped."""
        watches, self._at_forward = self._at_forward, []
        for watch in watches:
            watch.before(None)
            watch.after(None)

    def added(self) -> list[str]:
        """Return the parameters that `watch_gradients` has found, and end the watch."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._at_forward = []
        is_stray = self._has_dropped and not self._given
        added = [] if is_stray else sorted(self._added)
        self._added.clear()
        self._has_dropped = False
        return added

    def changed_settings(self) -> list[str]:
        """Return the hyperparameters of optimizers that have changed since `note`."""
        now = self._settings_now()
        if now == self._settings:
            return []
        before, after = _by_name(self._settings), _by_name(now)
        return [
            name
            for name in before | after
            # A NaN is another one only if it is another object, as it was above.
            if name not in before or name not in after or [before[name]] != [after[name]]
        ]

    def _settings_now(self) -> list[list[dict[str, Any]]]:
        """Return numbers and the like, by optimizer and group of parameters.

        A tensor is shown as an object and how often it was written. Cost: some 3 µs for each group.
        """
        return [
            [
                {
                    name: (id(value), write_counter(value))
                    if type(value) is torch.Tensor
                    else value
                    for name, value in group.items()
                    if type(value) in _SETTINGS
                }
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]

    def changed(self) -> list[str]:
        """Return the names of parameters that were written to since `note`, and of optimizers."""
        for optimizer, number in zip(self._counted, self._num_updates, strict=False):
            if optimizer.num_updates != number:
                return [f"by a step of {type(optimizer).__name__}"]
        pairs = zip(self._parameters, self._versions, strict=True)
        return [name for (name, each), version in pairs if write_counter(each) != version]

    def not_finite(self, *, is_first: bool = False) -> list[str]:
        """Return the names of parameters and optimizer states with a NaN or an infinity.

        And of buffers with a NaN that they did not have at the first look: a mask of -inf is an
        ordinary one, and so may be a NaN for what was not observed yet. Frozen parameters may hold
        infinities that they had at the first look: some models keep a mask in one.

        Args:
            is_first: True if what buffers have now is what they are to have.

        Cost: one pass over all of them.
        """
        if is_first:
            self._with_nan.clear()
            self._with_infinity.clear()
        flags: list[torch.Tensor] = []
        names: list[str] = []
        buffers: set[str] = set()
        frozen: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, tensor, is_buffer in self._tensors():
                if is_buffer and name in self._with_nan:
                    continue
                for local in _floats(tensor):
                    names.append(name)
                    is_mask = is_buffer or name in self._with_infinity
                    flags.append(~local.isnan().any() if is_mask else local.isfinite().all())
                    buffers.update([name] if is_buffer else [])
                    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                        frozen[name] = tensor
        # One read for each device, however many tensors there are.
        flagged = zip(names, flat_copies(flags, on_host=True), strict=True)
        result = [*dict.fromkeys(name for name, is_good in flagged if not is_good)]
        if is_first:
            self._with_nan.update(buffers.intersection(result))
            self._with_infinity.update(
                name for name in result if name in frozen and not _has_nan(frozen[name])
            )
            result = [name for name in result if name not in self._with_infinity]
        return [name for name in result if name not in self._with_nan]

    def digest(self, *, is_sample: bool = False) -> str:
        """Return a digest of the bytes of all parameters; equal replicas have equal ones.

        Shards of one parameter never do, even if their bytes are equal now.

        Args:
            is_sample: True to read the first row of each parameter only: enough to tell replicas
                that are meant to differ. A few other elements are an accident, which has to be
                found later as a difference, and not to be taken as meant.
        """
        digest = hashlib.blake2b(digest_size=16)
        for name, parameter in self._named_parameters():
            local = local_of(parameter.detach())
            if is_sample:
                if type(local) not in (torch.Tensor, nn.Parameter) or not is_strided(local):
                    continue  # of a kind that may have no rows
                while local.dim() > 1 and local.numel():
                    local = local[0]
            parts = _plain_parts(local)
            elements = " ".join(map(tensor_digest, parts))
            shape = [tuple(each.shape) for each in parts]
            text = f"{name} {local.dtype} {shape} {elements} "
            text += f"{_shard_of(parameter)} "
            digest.update(text.encode())
        return digest.hexdigest()

    def _roots(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules, and how names of theirs start."""
        for number, module in enumerate(self._modules):
            yield f"{number}." if len(self._modules) > 1 else "", module

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for start, module in self._roots():
            for name, parameter in module.named_parameters():
                if not is_lazy(parameter):
                    yield start + name, parameter

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield tensors of the state with names, and whether they are buffers."""
        yield from ((name, each, False) for name, each in self._named_parameters())
        for start, module in self._roots():
            for name, buffer in module.named_buffers():
                if not is_lazy(buffer):
                    yield f"buffer {start}{name}", buffer, True
        names = {id(parameter): name for name, parameter in self._named_parameters()}
        for number, optimizer in enumerate(self._optimizers):
            for index, (parameter, entries) in enumerate(optimizer.state.items()):
                name = names.get(id(parameter), f"optimizer {number}, parameter {index}")
                if isinstance(entries, Mapping):
                    for key, value in entries.items():
                        if isinstance(value, torch.Tensor):
                            yield f"{name} ({key})", value, False


def _by_name(settings: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the settings of all groups of all optimizers, each under a name for a message."""
    return {
        f"{name} of group {number} of optimizer {index}": value
        for index, optimizer in enumerate(settings)
        for number, group in enumerate(optimizer)
        for name, value in group.items()
    }


def _plain_parts(local: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with memory that a tensor of any kind is made of.

    What is in the place of several tensors, such as a quantized one, can often neither be looked at
    nor digested: its class has few operations.
    """
    if is_sparse(local):  # torch asks no sparse tensor whether it is finite
        return members_of(local)
    if hasattr(local, "__tensor_flatten__"):
        inner = (getattr(local, name) for name in local.__tensor_flatten__()[0])
        return [part for each in inner for part in _plain_parts(local_of(each))]
    return [local.detach().values()] if local.is_nested else [local]


def _floats(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return this rank's parts of a tensor that may not be finite, in a form to look at."""
    return [
        each.float() if each.element_size() == 1 else each
        for each in _plain_parts(local_of(tensor))
        if not each.is_meta and (each.is_floating_point() or each.is_complex()) and each.numel()
    ]


def _shard_of(parameter: nn.Parameter) -> list[int]:
    """Return which shard of a DTensor this rank has, by dims of its mesh; empty for a replica."""
    if not isinstance(parameter, DTensor):
        return []
    here = parameter.device_mesh.get_coordinate() or ()
    pairs = zip(here, parameter.placements, strict=False)
    return [at for at, placement in pairs if not placement.is_replicate()]


@torch.no_grad()
def _has_nan(tensor: torch.Tensor) -> bool:
    return any(bool(local.isnan().any()) for local in _floats(tensor))


class _OldGradient:
    """Tells whether a backward adds to the gradient that a parameter has now.

    Not if it was dropped, or zeroed, in whatever way, or if the backward returns it to the caller.

    Args:
        parameter: with a gradient.
        report: is called after the first backward, with the answer.
    """

    def __init__(self, parameter: nn.Parameter, report: Callable[[bool], object]) -> None:
        assert parameter.grad is not None
        self._parameter, self._report = parameter, report
        self._gradient = weakref.ref(parameter.grad)
        self._version = write_counter(parameter.grad)
        self._is_there = self._is_done = False

    def before(self, _: object) -> None:
        """Take note before anything is added."""
        now = self._parameter.grad
        self._is_there = (
            now is not None
            and now is self._gradient()
            and write_counter(now) == self._version
            and bool(local_of(now).any())
        )

    def after(self, _: object) -> None:
        """Report whether it was added to."""
        if not self._is_done:
            self._is_done = True
            self._report(self._is_there)


def _droppable(
    optimizers: Iterable[Any], modules: Iterable[nn.Module]
) -> Iterator[_DropsGradients]:
    """Yield what keeps gradients of a model elsewhere than in `.grad`, each once."""
    owners = [*optimizers, *(inner for module in modules for inner in module.modules())]
    targets: Any = {id(each): each for owner in owners for each in (owner, *workers_on(owner))}
    yield from (each for each in targets.values() if hasattr(type(each), "drop_gradients"))


def _parts(optimizer: Any) -> list[Any]:
    """Return an optimizer, with those of its modules if it has several."""
    if isinstance(optimizer, OptimizersByModule):
        return [optimizer, *optimizer.optimizers_by_module().values()]
    return [optimizer]


def _torch_optimizers(optimizers: Iterable[Any]) -> Iterator[torch.optim.Optimizer]:
    """Yield the torch optimizers of optimizers of any kind."""
    for each in optimizers:
        if isinstance(each, torch.optim.Optimizer):
            yield each
            continue
        if isinstance(each, OptimizersByModule):  # none on a rank that trains no module
            yield from _torch_optimizers(each.optimizers_by_module().values())
            continue
        inner = getattr(each, "optimizer", None)
        if inner is None or inner is each:
            raise ConfigError(
                f"RerunMachine(optimizers=…): a {type(each).__name__} is not an optimizer"
            )
        yield from _torch_optimizers([inner])
