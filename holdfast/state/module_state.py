"""`nn.Module` as a part of the state: parameters, persistent buffers, extra state.

A load fills the module's own tensors in place. Forms are loaded into separate memory and reach the
module only through its `load_state_dict`, which may do anything with them, or nothing. So the
module's state dict is read again afterwards: it must show what was loaded.
"""

from __future__ import annotations

import inspect
import io
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast._torch import buffer_table, parameter_table, write_counter
from holdfast.arguments import check_choice
from holdfast.errors import ConfigError, HoldfastError, MismatchError, PlacementError, some_of
from holdfast.state.arrival import ask_back, differences, recorded, same_containers
from holdfast.state.markers import Marked, Padded, Stored
from holdfast.state.module_tree import (
    ModuleStateDict,
    RegisteredTensor,
    StateDictEntry,
    broadcast_elsewhere,
    declared_padding,
    has_user_loader,
    makes_forms,
    plain_root,
    prefixes_of,
    read_state_dict,
    refuse_empty,
    refuse_hook_states,
    refuse_lost,
    runs_code,
    same_memory,
    walk_all,
)
from holdfast.state.module_versions import (
    ChangedModule,
    changed_modules,
    give_versions,
    state_dict_below,
    unversioned_modules,
)
from holdfast.state.stored import PlacedTemplates, StoredPart, zeros_like_target
from holdfast.state.tensor_elements import element_bytes, equal_bits, local_of, tensor_digest
from holdfast.state.unfinished import unfinished_on

Selection = Literal["trainable"] | Callable[[str, object], bool] | None

_BYTES_IO = "$io.BytesIO"
_TRIED = "_holdfast_tried_forms"
"""Attribute of a module: the tensors that were tried, with the names of the forms next to them."""


class ModuleState:
    """A module as a part of the state, by choice: some of its entries, or under other names.

        state = {"adapters": ModuleState(model, only="trainable")}

    A module without choice is a part by itself. Tensors come from `state_dict(keep_vars=True)`, so
    that hooks of the module (FSDP2 reshards in one) run. A load writes into the module's own
    parameters and buffers, in place. What the module shows in another form (split, fused,
    packed, copied) is loaded into separate memory, passed to the module's `load_state_dict`, and
    proved: the state dict then shows what was loaded. Tensors whose padding is declared
    (`declare_padding`) are stored without it.

    A load is as strict over the chosen entries as over all of a module's: entries of the checkpoint
    that are not chosen are 'unexpected' (`ignore_unexpected=True` leaves them and names them in the
    report). `left_out` names what the choice leaves out.

    Args:
        module: The module.
        only: What is stored, and requested by a load. None: everything. "trainable": parameters
            that require a gradient, and every persistent buffer and extra state, which training
            changes, too; frozen parameters are neither stored nor requested, and stay as they are.
            A callable `(name, value) -> bool` chooses by logical name and by the tensor (or extra
            state).
        prefix: Put before every name, as in "decoder."; to load a module's entries from inside of a
            larger module's checkpoint see `FromPart`.
        buffers: "equal" on all ranks, as parameters are; every save checks it. "first_rank" is for
            a model in DistributedDataParallel, each rank of which has statistics of its own rows
            (BatchNorm) and takes the first rank's at its next forward: these are stored, and a load
            gives them to all ranks.
        hook_state: a communication hook of a wrapper (DDP's `register_comm_hook`) may have a state,
            such as PowerSGD's error feedback, which is not stored. "refuse" refuses a save then;
            "transient" accepts that a resumed run starts it fresh.

        extra_state: "proved": after a load the module must state what was given to
            `set_extra_state`. "applies_later" is for modules that take it only at a later call: it
            is given to them all the same, and named in `LoadReport.handed_over`.

    Raises:
        ConfigError: If it is not a module, an option is unknown, or the prefix does not end in a
            dot.
        PlacementError: At a save, for a chosen parameter or persistent buffer that the module's
            state dict shows in no form, for the state of a communication hook, and for
            buffers="first_rank" without DistributedDataParallel that broadcasts them.

    Cost:
        A save makes no collectives and copies no tensors, beyond what the module's own `state_dict`
        does.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        only: Selection = None,
        prefix: str = "",
        buffers: Literal["equal", "first_rank"] = "equal",
        hook_state: Literal["refuse", "transient"] = "refuse",
        extra_state: Literal["proved", "applies_later"] = "proved",
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"ModuleState takes a module, got a {type(module).__name__}")
        if only is not None and only != "trainable" and not callable(only):
            raise ConfigError(
                f"ModuleState: only={only!r} is not 'trainable', a callable (name, value) -> bool, "
                f"or None for everything"
            )
        if not isinstance(prefix, str) or (prefix and not prefix.endswith(".")):
            raise ConfigError(f"ModuleState: prefix={prefix!r} does not end in a dot")
        check_choice(hook_state, name="ModuleState: hook_state", choices=("refuse", "transient"))
        check_choice(buffers, name="ModuleState: buffers", choices=("equal", "first_rank"))
        check_choice(
            extra_state, name="ModuleState: extra_state", choices=("proved", "applies_later")
        )
        self._proves_extra = extra_state == "proved"
        self.applied_later: tuple[str, ...] = ()
        """Entries of the last load that the module applies only later."""
        self._buffers = buffers
        self._root = module
        self._refuses_hooks = hook_state == "refuse"
        self._module = plain_root(module)
        self._only = only
        self._prefix = prefix
        self._pending: ModuleLoad | None = None
        self.forms: set[str] = set()
        """Entries that the module has made for its state dict, which a load does not fill."""
        self.versions: dict[str, int] = {}
        """Of the last tree's modules, by their names in it, all that are not 1."""
        self.unversioned: list[str] = []
        """Modules whose entries the last load took as of their own version: none was stated."""

    def tree(self) -> dict[str, object]:
        """Return tensors and extra state by logical name; tensors with padding are marked.

        Raises:
            PlacementError: Naming parameters and persistent buffers that the module's state dict
                shows in no form, or tensors in attributes of a module that states nothing.
        """
        if self._refuses_hooks:
            refuse_hook_states(self._root)
        shown = self._read()
        if self._only is None:
            refuse_empty(shown, self._module)
        unrelated = unrelated_to_forms(self._module, self._hidden(shown))
        if unrelated:
            refuse_lost(self._module, unrelated)
        padded = declared_padding(self._module)  # after the hooks, which may replace parameters
        result: dict[str, object] = {}
        self.forms = set()
        own = shown.versions.items()
        self.versions = {f"{self._prefix}{name}".rstrip("."): number for name, number in own}
        left_to_first = broadcast_elsewhere(self._root) if self._buffers == "first_rank" else set()
        for entry in self._selected(shown):
            value = entry.value
            if entry.backing is not None and id(entry.backing.tensor) in left_to_first:
                continue
            if entry.backing is None:
                self.forms.add(self._prefix + entry.name)
            if isinstance(value, torch.Tensor) and not entry.is_extra:
                declared = padded.find(value, entry.name)
                value = value if declared is None else Padded(value, declared)
            elif isinstance(value, io.BytesIO):
                value = {_BYTES_IO: value.getvalue()}
            result[self._prefix + entry.name] = value
        return result

    def template(self, stored: StoredPart) -> dict[str, object]:
        """Return the module's own tensors as targets, new ones for forms."""
        shown = self._read()
        padded = declared_padding(self._module)
        nodes = dict(stored.children(stored.node) or ())
        templates = PlacedTemplates(in_place=False)
        entries = self._selected(shown)
        changed = changed_modules(
            self._module,
            stored.versions,
            prefix=self._prefix,
            stored=nodes.keys(),
        )
        self.unversioned = []
        if stored.versions is None:
            self.unversioned = unversioned_modules(
                self._module, prefix=self._prefix, stored=nodes.keys()
            )
        pending = ModuleLoad(
            self._module, shown, entries=entries, hidden=self._hidden(shown), changed=changed
        )
        result: dict[str, object] = {}
        for entry in entries:
            name = self._prefix + entry.name
            target: object = entry.value
            if name not in nodes:
                # Missing, or absent with the caller's consent: the module keeps it, no zeros.
                pending.absent.add(entry.name)
            elif entry.backing is None and not entry.is_form:
                below = StoredPart(nodes[name], stored.tensors, f"{stored.name}.{name}")
                target = templates.template(target, below)
            elif isinstance(target, torch.Tensor | Marked):
                declared = None
                if isinstance(target, torch.Tensor):
                    declared = padded.find(target, entry.name)
                info = stored.tensor(nodes[name])
                shape = None if info is None else info.shape
                if entry.is_form and declared is not None and shape == declared:
                    shape = None  # memory for the padding, too
                if entry.is_form or (declared is None and _may_grow(entry, shape)):
                    pending.copied.add(entry.name)
                    target = _form_target(target, shape)
                if declared is not None and isinstance(target, torch.Tensor):
                    target = Padded(target, declared)
            result[name] = target
        self._pending = pending
        return result

    def restore(self, tree: object) -> None:
        """Pass forms and extra state to the module, run its hooks, and prove the result.

        Raises:
            MismatchError: Naming the entries that the module did not take.
        """
        pending, self._pending = self._pending, None
        if not isinstance(tree, Mapping) or pending is None:
            raise PlacementError(
                f"the stored state of {type(self._module).__name__} is not a mapping"
            )
        loaded = {
            entry.name: _loaded(tree[self._prefix + entry.name])
            for entry in pending.entries
            if self._prefix + entry.name in tree and entry.name not in pending.absent
        }
        if not self._proves_extra:
            extra = {entry.name for entry in pending.entries if entry.is_extra} & loaded.keys()
            pending.unproved |= extra
        pending.unproved |= pending.converted & loaded.keys()
        self.applied_later = tuple(self._prefix + name for name in sorted(pending.unproved))
        if any(entry.backing is None for entry in pending.entries) or (
            pending.copied or runs_code(self._module)
        ):
            pending.load_entries(loaded)

    @property
    def module(self) -> nn.Module:
        """The module, in its wrappers."""
        return self._root

    def unfinished_work(self) -> str | None:
        """Return what the objects that train the module have not finished."""
        return unfinished_on(*(inner for *_, inner, _ in walk_all(self._root)))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the parameters and persistent buffers that the selection leaves out, sorted."""
        shown = read_state_dict(self._module)
        return tuple(
            sorted(
                {held.name for held in shown.registered if held.is_persistent}
                - {entry.name for entry in self._selected(shown)}
                - {held.name for held in self._hidden(shown)}
            )
        )

    def _read(self) -> ModuleStateDict:
        """Return the module's state dict, in which nothing that is selected is missing."""
        shown = read_state_dict(self._module)
        lost = [held.name for held in shown.lost if self._is_selected(held.name, held.tensor)]
        if lost:
            refuse_lost(self._module, lost)
        return shown

    def _selected(self, shown: ModuleStateDict) -> list[StateDictEntry]:
        """Return the entries that are stored and loaded."""
        if self._only is None:
            return list(shown.entries.values())
        if callable(self._only):
            return [e for e in shown.entries.values() if self._only(e.name, e.value)]
        owners = {held.name: held for held in shown.registered}
        any_hidden = [held.tensor.requires_grad for held in shown.formed]
        result = []
        for entry in shown.entries.values():
            owner = entry.backing or next(_owners(entry.name, owners), None)
            if owner is None:
                keep = entry.is_extra or not any_hidden or any(any_hidden)
            else:
                keep = self._is_selected(owner.name, owner.tensor)
            if keep:
                result.append(entry)
        return result

    def _hidden(self, shown: ModuleStateDict) -> list[RegisteredTensor]:
        """Return registered tensors that come back through forms, as far as they are selected."""
        return [held for held in shown.formed if self._is_selected(held.name, held.tensor)]

    def _is_selected(self, name: str, tensor: torch.Tensor) -> bool:
        """Return True if a registered tensor is stored and loaded."""
        if callable(self._only):
            return bool(self._only(name, tensor))
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        return self._only is None or not frozen


def _loaded(value: object) -> object:
    """Return what the module is given for an entry, as it was saved."""
    if isinstance(value, dict) and value.keys() == {_BYTES_IO}:
        return io.BytesIO(value[_BYTES_IO])
    return value


def _owners(name: str, registered: Mapping[str, RegisteredTensor]) -> Iterator[RegisteredTensor]:
    """Yield the registered tensors that a form is named after: `weight` for `weight.scale`, too."""
    while name:
        if name in registered:
            yield registered[name]
        name = name.rpartition(".")[0]


def _form_target(value: torch.Tensor | Marked, shape: tuple[int, ...] | None) -> object:
    """Return new memory for a form, placed like the module's, or `Stored()` if the shape differs.

    The shape of a form may depend on values (packed and grown ones); the module is the judge.
    """
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
        if shape not in (None, tuple(value.shape)):
            return Stored()
        if is_lazy(value):
            return value
    dtype = value.dtype if isinstance(value, torch.Tensor) else value.local.dtype
    return zeros_like_target(value, dtype)


def _may_grow(entry: StateDictEntry, shape: tuple[int, ...] | None) -> bool:
    """Return True if a module can take a tensor of another shape than its own, as observers do."""
    value, held = entry.value, entry.backing
    if held is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    if is_lazy(value) or shape in (None, tuple(value.shape)):
        return False
    return has_user_loader(held.owner)


class _Snapshot(NamedTuple):
    """A tensor that only the module's code can write, as it was before."""

    held: RegisteredTensor
    version: tuple[int, int]
    digest: str


class ModuleLoad:
    """The load of one module, from the template to the proof."""

    def __init__(
        self,
        module: nn.Module,
        before: ModuleStateDict,
        *,
        entries: Sequence[StateDictEntry],
        hidden: Sequence[RegisteredTensor],
        changed: Sequence[ChangedModule] = (),
    ) -> None:
        """Prepare a load.

        Args:
            before: The module's state dict now.
            entries: Those of its entries that the load is about.
            hidden: Registered tensors that come back through entries of other names.
            changed: Modules that convert their entries from another version of their class.
        """
        self._module = module
        self._before = before
        self._hidden = hidden
        self._kind = type(module).__name__
        self._unexpected: set[str] = set()
        self.entries = entries
        self.copied: set[str] = set()
        """Names of entries that are loaded into separate memory."""
        self.absent: set[str] = set()
        """Names that are not stored; they stay as they are."""
        self.unproved: set[str] = set()
        """Names of entries that the module is declared to apply later, or converts."""
        scopes = tuple(each.prefix for each in changed)
        self._changed = changed
        self.converted = {name for name in before.entries if scopes and name.startswith(scopes)}
        """Names of entries whose values the module may convert."""
        self._given: dict[str, object] = {}
        """Records of the entries that are values, from before the module was given them."""

    def load_entries(self, loaded: Mapping[str, object]) -> None:
        """Pass what was loaded to the module.

        Args:
            loaded: Logical name -> value.

        Raises:
            MismatchError: Naming what the module did not take.
        """
        given: OrderedDict[str, object] = OrderedDict()
        for name, entry in self._before.entries.items():
            # What the module has now is not of the version that it converts from.
            if name in loaded or name not in self.converted:
                given[entry.key] = loaded.get(name, entry.value)
        if self._before.metadata is not None:
            give_versions(given, self._before.metadata, self._changed)
        # Both before any code of the module runs.
        digests = self._digests(loaded)
        self._given = {
            entry.name: recorded(loaded[entry.name])
            for entry in self.entries
            if self._is_value(entry) and entry.name in loaded and entry.name not in self.unproved
        }
        snapshots = [
            _Snapshot(held, _version(held.tensor), tensor_digest(held.tensor))
            for held in self._hidden
        ]
        load = partial(self._load, given, loaded, digests)
        load()
        self._refuse_untouched(snapshots, load)

    def _load(
        self,
        given: Mapping[str, object],
        loaded: Mapping[str, object],
        digests: Mapping[str, str],
    ) -> None:
        """Load the module, and those inside of it that show something else then."""
        self._call(self._module, given)
        after = read_state_dict(self._module)
        wrong = self._wrong(after, loaded, digests)
        # A second attempt may run on one rank alone, so only if no collective can be in it.
        if wrong and not self._is_collective:
            self._load_inner(after, wrong, loaded, given)
            wrong = self._wrong(read_state_dict(self._module), loaded, digests)
        if wrong:
            raise MismatchError(self._refusal(wrong))

    @property
    def _is_collective(self) -> bool:
        """True if the module's code may run collectives, which one rank must not run alone."""
        values = [entry.value for entry in self.entries if entry.backing is None]
        return any(isinstance(value, DTensor) for value in values)

    def _call(self, module: nn.Module, given: Mapping[str, object]) -> None:
        """`load_state_dict`, not strict: what it did not take shows in the proof."""
        try:
            takes = inspect.signature(module.load_state_dict).parameters.values()
            lenient = any(p.name == "strict" or p.kind is p.VAR_KEYWORD for p in takes)
            options = {"strict": False} if lenient else {}
            # A model that was made in inference mode can be written in it alone.
            is_inference = any(held.tensor.is_inference() for held in self._before.registered)
            with torch.inference_mode(is_inference), torch.no_grad():
                # It may take entries out, and be called again.
                outcome: object = module.load_state_dict(same_containers(given), **options)
        except HoldfastError:
            raise
        except Exception as error:
            raise MismatchError(
                f"{type(module).__name__}.load_state_dict does not take what was loaded: "
                f"{str(error) or repr(error)}"
            ) from error
        unexpected = getattr(outcome, "unexpected_keys", None)
        if module is self._module and isinstance(unexpected, list):
            entries, keys = self._before.entries.values(), set(unexpected)
            self._unexpected = {entry.name for entry in entries if entry.key in keys}
        self._keep_parameters()

    def _digests(self, loaded: Mapping[str, object]) -> dict[str, str]:
        """Of the module's own tensors that code of the user's might change while it loads."""
        scopes = tuple(
            logical for logical, _, inner, _ in walk_all(self._module) if has_user_loader(inner)
        )
        return {
            entry.name: tensor_digest(value)
            for entry in self.entries
            if isinstance(value := loaded.get(entry.name), torch.Tensor)
            and entry.backing is not None
            and entry.name not in self.copied | self.converted
            and entry.name.startswith(scopes)
        }

    def _wrong(
        self, after: ModuleStateDict, loaded: Mapping[str, object], digests: Mapping[str, str]
    ) -> list[str]:
        """Names of the entries that the module does not show as they were loaded."""
        wrong = []
        for entry in self.entries:
            if entry.name not in loaded or entry.name in self.converted:
                continue
            shown = after.entries.get(entry.name)
            now = None if shown is None else shown.value
            if entry.name in digests:
                is_right = isinstance(now, torch.Tensor) and (
                    tensor_digest(now) == digests[entry.name]
                )
            else:
                is_right = self._is_value(entry) or (
                    same_memory(now, loaded[entry.name]) or equal_bits(now, loaded[entry.name])
                )
            if shown is None or not is_right:
                wrong.append(entry.name)
        return list(dict.fromkeys([*wrong, *self._other_values(after)]))

    def _is_value(self, entry: StateDictEntry) -> bool:
        """Return True for extra state, and for what an overridden `state_dict` adds."""
        return entry.backing is None and entry.name not in self.copied

    def _other_values(self, after: ModuleStateDict) -> list[str]:
        """Names of values that the module states otherwise than it was given them."""
        if not self._given:
            return []

        answers = [after]

        def ask() -> dict[str, object]:
            shown = answers.pop() if answers else read_state_dict(self._module)
            entries = shown.entries.items()
            return {name: entry.value for name, entry in entries if name in self._given}

        answer = ask_back(self._given, ask, where="", owner=self._kind)
        wrong = [f"{each.path}." for each in answer.wrong]
        return [name for name in self._given if any(w.startswith(f".{name}.") for w in wrong)]

    def _keep_parameters(self) -> None:
        """Put back parameter objects that the module has replaced, with the values of the new ones.

        An optimizer holds the objects: with others in the module it would train unused tensors.
        """
        for held in self._before.registered:
            parameters, old = parameter_table(held.owner), held.tensor
            now = parameters[held.attribute] if held.attribute in parameters else old  # noqa: SIM401
            if now is old or now is None or is_lazy(old) or is_lazy(now):
                continue
            if type(now) is type(old) and _is_alike(now, old):
                with torch.no_grad():
                    old.copy_(now)
                setattr(held.owner, held.attribute, old)
            else:
                logging.getLogger("holdfast").warning(
                    "%s.load_state_dict replaced the parameter %s by one of another kind; make the "
                    "optimizer after the load, or it trains the old one",
                    self._kind,
                    held.name,
                )

    def _load_inner(
        self,
        after: ModuleStateDict,
        wrong: Sequence[str],
        loaded: Mapping[str, object],
        given: Mapping[str, object],
    ) -> None:
        """Do what torch leaves undone: `load_state_dict` of inner modules, quantised state.

        torch calls `load_state_dict` of the root alone.
        """
        left = set(wrong)
        keys = {entry.name: entry.key for entry in self.entries}
        for _, actual, inner, _ in reversed(walk_all(self._module)):
            mine = [name for name in left if keys[name].startswith(actual)]
            if not actual or not mine or type(inner).load_state_dict is nn.Module.load_state_dict:
                continue
            self._call(inner, state_dict_below(given, actual))
            left -= set(mine)
        left -= _set_quant_states(self._before, left, loaded)
        self._fill_live(after, left, loaded)
        self._keep_parameters()

    def _fill_live(
        self, after: ModuleStateDict, left: set[str], loaded: Mapping[str, object]
    ) -> None:
        """Write to tensors that the module shows as they are, without a way to take them.

        Such a tensor is at one place for as long as it lives, and the module has nothing that only
        this entry could stand for: a copy made for the state dict is at another place each time.
        """
        if not left or self._hidden:
            return
        again = read_state_dict(self._module)
        for name in left & self._unexpected:
            one, other, value = after.entries.get(name), again.entries.get(name), loaded[name]
            if one is None or other is None or not isinstance(value, torch.Tensor):
                continue
            if not isinstance(one.value, torch.Tensor) or not same_memory(one.value, other.value):
                continue
            if not isinstance(value, DTensor) and _is_alike(one.value, value):
                with torch.no_grad():
                    one.value.copy_(value)

    def _refuse_untouched(self, snapshots: Sequence[_Snapshot], load: Callable[[], None]) -> None:
        """Raise MismatchError for a tensor that other entries represent and that nothing wrote.

        A loader may write the very bytes that were there, past torch's counter of versions. It is
        distinguished from one that does not write by loading once more over other bytes.
        """
        suspects = [snapshot.held for snapshot in snapshots if _is_untouched(snapshot)]
        if not suspects:
            return
        if self._is_collective:
            raise MismatchError(self._untouched([held.name for held in suspects]))
        kept = [local_of(held.tensor).clone() for held in suspects]
        with torch.no_grad():
            for held, value in zip(suspects, kept, strict=True):
                local_of(held.tensor).copy_(inverted(value))
        digests = [tensor_digest(held.tensor) for held in suspects]
        untouched: list[str] = []
        try:
            load()
        finally:
            for held, value, digest in zip(suspects, kept, digests, strict=True):
                if tensor_digest(held.tensor) == digest:
                    untouched.append(held.name)
                    with torch.no_grad():
                        local_of(held.tensor).copy_(value)
        if untouched:
            raise MismatchError(self._untouched(untouched))

    def _untouched(self, names: Sequence[str]) -> str:
        """Return the message that the module's load did not write tensors."""
        return (
            f"{self._kind}.state_dict() does not show {some_of(names)} itself, and loading what it "
            f"shows did not write to it: it keeps what it had before the load. Give the module a "
            f"load hook (or _load_from_state_dict) that makes it from the entries of the state dict"
        )

    def _refusal(self, wrong: Sequence[str]) -> str:
        """Return the message that entries have not reached the module."""
        message = (
            f"{self._kind} shows {some_of(wrong)} in another form, and after load_state_dict "
            f"it does not show what was loaded: the values have not reached it, or not unchanged"
        )
        unknown = [name for name in wrong if name in self._unexpected]
        if unknown:
            message += f"; its load_state_dict does not know {some_of(unknown)}"
        return (
            f"{message}. Give the module a load hook (or _load_from_state_dict, load_state_dict) "
            f"that takes back what its state_dict makes, or leave the entries out: "
            f"ModuleState(module, only=lambda name, value: ...)"
        )


def _is_untouched(snapshot: _Snapshot) -> bool:
    """Return True if nothing has written a tensor: same object, version and bytes."""
    held = snapshot.held
    now = parameter_table(held.owner).get(
        held.attribute, buffer_table(held.owner).get(held.attribute)
    )
    if now is not held.tensor or _version(held.tensor) != snapshot.version:
        return False
    return local_of(held.tensor).numel() > 0 and tensor_digest(held.tensor) == snapshot.digest


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """torch's counters of writes, of a tensor and of what it holds on this rank."""
    if tensor.is_inference():
        return (0, 0)
    return (write_counter(tensor), write_counter(local_of(tensor)))


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same shape and dtype."""
    return one.shape == other.shape and one.dtype == other.dtype


def _set_quant_states(
    before: ModuleStateDict, left: set[str], loaded: Mapping[str, object]
) -> set[str]:
    """Rebuild state that quantised parameters keep as an attribute (bitsandbytes); what it took.

    Such a parameter has a `quant_state` that goes into a state dict by `as_dict` and comes out of
    one by `from_dict`, as names below the parameter's.
    """
    taken: set[str] = set()
    for held in before.registered:
        quant_state = getattr(held.tensor, "quant_state", None)
        build = getattr(type(quant_state), "from_dict", None)
        mine = {name for name in left if name.startswith(f"{held.name}.")}
        if not mine or build is None:
            continue
        made = build(qs_dict=state_dict_below(loaded, f"{held.name}."), device=held.tensor.device)
        held.tensor.quant_state = made  # type: ignore[attr-defined]
        if getattr(held.owner, "quant_state", None) is quant_state:
            held.owner.quant_state = made
        taken |= mine
    return taken


def inverted(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that differs from this one in every element."""
    if tensor.dtype is torch.bool:
        return tensor.logical_not()
    return element_bytes(tensor).bitwise_not().view(tensor.dtype).reshape(tensor.shape)


def unrelated_to_forms(module: nn.Module, hidden: Sequence[RegisteredTensor]) -> list[str]:
    """Return the names of tensors that no form of the module's state dict is made from.

    A hook may show a parameter in another form, or drop it and show something else. Names cannot
    tell; the trial does: other bytes in the parameter give other bytes in a form made of it.

    Each tensor has other bytes for one call of `state_dict`, and then its own again. What was tried
    once is not tried again while the forms have the same names.

    Cost: two calls of `state_dict` and a digest of the forms for each tensor, at its first save.
    """
    unrelated: list[str] = []
    if not hidden:
        return unrelated
    tried: set[tuple[str, tuple[str, ...]]] = vars(module).setdefault(_TRIED, set())
    scopes: dict[str, nn.Module] = {}
    for prefix, _, inner, _ in walk_all(module):
        if makes_forms(inner):
            scopes.setdefault(prefix, inner)
    names_in: dict[str, tuple[str, ...]] = {}
    for held in hidden:
        # Around a tensor the outermost module that makes forms.
        prefix = next((each for each in prefixes_of(held.name) if each in scopes), "")
        scope = scopes.get(prefix, module)
        if prefix not in names_in:
            names_in[prefix] = tuple(sorted(each.name for each in _made_in(scope)))
        names = names_in[prefix]
        if (held.name, names) in tried:
            continue
        before = _forms_in(scope)
        with _other_bytes(held.tensor):
            try:
                after = _forms_in(scope)
            except Exception:  # its code met bytes that it does not take: it reads them
                after = None
        if after is None or any(differences(before, after, prefix, owner="")):
            tried.add((held.name, names))
        else:
            unrelated.append(held.name)
    return unrelated


def _made_in(scope: nn.Module) -> Iterable[StateDictEntry]:
    """Return the entries that are not tensors of the module's own."""
    return [each for each in read_state_dict(scope).entries.values() if each.backing is None]


def _forms_in(scope: nn.Module) -> object:
    """Return the record of the forms."""
    return recorded({each.name: each.value for each in _made_in(scope)})


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
