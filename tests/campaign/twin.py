"""The same program in one process: the truth that every way is compared with."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import Layout
from tests.campaign.actions import (
    OWN_STEPS,
    Action,
    AddGroup,
    ClearState,
    Detour,
    Drop,
    Evaluate,
    Freeze,
    Hook,
    Load,
    Look,
    Microbatch,
    Move,
    ReloadOptimizer,
    Save,
    Schedule,
    Set,
    Step,
    Swap,
    Thaw,
    Toggle,
    TwiceBackward,
    Write,
    WriteGradients,
)
from tests.campaign.models import generate
from tests.campaign.programs import OPTIMIZERS, Program, Way
from tests.campaign.ways import (
    STALE,
    THAWED,
    Hooks,
    Values,
    add_group,
    buffers_of,
    change_settings,
    clip,
    closure_of,
    evaluate,
    evaluate_average,
    evaluate_otherwise,
    forwards,
    freeze,
    is_hooked,
    late_parameters,
    param_groups,
    reload,
    rows_of,
    scheduler_of,
    set_trainable,
    step_schedule,
    tensors_of,
    toggle,
    write,
)


@dataclass
class Situation:
    """What has happened since gradients were forgotten, by which a refusal is judged."""

    has_gradients: bool = False
    is_reduced: bool = False
    """True after a last microbatch."""
    has_odd_forward: bool = False
    """True after a forward without backward."""
    is_open: bool = False
    """True unless the last one of the microbatches had a backward."""
    has_run: bool = False
    """True after a forward that may have a backward, until whole copies are surely freed."""
    is_written: bool = False
    """True if parameters were written after such a forward, which may keep whole copies."""
    is_thawed: bool = False
    """True if something is trained that was frozen at the start."""
    was_thawed: bool = False
    """True if something got a gradient that was frozen at the start."""
    is_hooked: bool = False
    """True if hooks are at parameters."""
    is_split: bool = False
    """True if ranks have other settings."""
    is_regrouped: bool = False
    """True if what is to be loaded has another number of parameter groups."""
    is_reentrant: bool = False
    """True if activations may be computed again within backwards of their own."""


class Twin:
    """One process that trains on the whole batch; narrow parameters have main ones in float32."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.model = generate(program.seed, program.traits).model
        self._late = late_parameters(self.model) if program.ways[-1].has_late else {}
        freeze(self._late)
        self._all = list(self.model.parameters())
        self._at_start = {p: p.requires_grad for p in self._all}
        self._mains = [
            nn.Parameter(p.detach().float()) if p.dtype == torch.bfloat16 else p for p in self._all
        ]
        self._has_loaded_mains = False
        make = OPTIMIZERS[program.optimizer]
        members = [p for p in self._mains if p not in self._late]
        has_tensor_rates = program.ways[-1].has_tensor_rates
        self._optimizer = make(
            param_groups(members, settings=make.keywords, has_tensor_rates=has_tensor_rates)
        )
        self._scheduler = scheduler_of(self._optimizer, program.ways[-1])
        self._keeps_schedule = program.ways[-1].keeps_schedule
        self._sums: dict[int, Tensor] = {}
        """Gradients so far, by position of the parameter."""
        self._shares = 1
        self._saved: Any = None
        self._saved_first: Any = None
        self._saved_before: Any = None
        """What the way before has left."""
        self._hooks = Hooks(self.model)
        self.situation = Situation(is_reentrant=program.traits.is_reentrant)

    def do(self, action: Action, way: Way) -> Values:
        """Do what an action says; losses are those of all data ranks."""
        match action:
            case Microbatch():
                return self._microbatch(action, way)
            case Step():
                if action.mode == "own closure":
                    self._microbatch(closure_of(action), way)
                return self._step(action)
            case Look():
                named = self.model.named_parameters()
                return {
                    "parameters": {name: p.detach().clone() for name, p in named},
                    "buffers": buffers_of(self.model),
                }
            case Evaluate():
                return {"output": evaluate(self.model, action.mode)}
            case Swap():
                self._note_write()
                return {
                    "output": evaluate_average(
                        self.model, save=self._save if action.saves else None
                    )
                }
            case Write():
                self._note_write()
                write(self.model, action)
                if action.how == "load_state_dict" and not self._has_loaded_mains:
                    self._refresh_mains()
            case Detour():
                return {"output": evaluate_otherwise(self.model, action)}
            case Freeze() | Thaw():
                self._set_trainable(action)
            case Save():
                self._save()
            case Load():
                self._note_write()
                self._load(self._source(action))
            case Drop():
                if action.to_zeros:
                    for total in self._sums.values():
                        total.zero_()
                else:
                    self._drop(frees=action.how == "drop_gradients")
            case WriteGradients():
                self._write_gradients(action)
            case Hook():
                self._hooks.register(action)
                self.situation.is_hooked = self._hooks.at_gradients
            case ReloadOptimizer():
                reload(self._optimizer)
            case Set():
                if action.ranks is None:
                    change_settings(self._optimizer, action.factor)
                else:
                    self.situation.is_split = True
            case ClearState():
                self._optimizer.state.clear()
            case AddGroup():
                add_group(self._optimizer, self._late, at_start=self._at_start)
            case Toggle():
                toggle(self.model, action)
            case Schedule():
                step_schedule(self._scheduler)
            case Move():
                self._note_write()
        return {}

    def fail(self, action: Action, text: str) -> None:
        """Follow what the ranks do after an error that has this text: see `Trained.recover`."""
        if not isinstance(action, Save | Load):
            self._drop()
        if isinstance(action, Swap) and STALE.search(text):
            self._load(self._saved)
        if THAWED.search(text):
            self._set_trainable(Thaw())
        if is_hooked(action, text):
            self._hooks.remove()
            self.situation.is_hooked = False

    def end_way(self) -> None:
        """Keep what the way leaves to the next one."""
        self._saved_before = self._state()
        self._has_loaded_mains = True  # the next way loads it

    # ---- inside ----

    def _save(self) -> None:
        self._saved = self._state()
        if self._saved_first is None:
            self._saved_first = self._saved

    def situation_at(self, action: Action) -> Situation:
        """Return what has happened, by which a refusal of an action is judged."""
        if isinstance(action, Load):
            saved = self._source(action)[2]["param_groups"]
            self.situation.is_regrouped = len(saved) != len(self._optimizer.param_groups)
        return self.situation

    def _source(self, action: Load) -> Any:
        if action.is_of_before:
            return self._saved_before
        return self._saved_first if action.is_first else self._saved

    def _state(self) -> Any:
        # A save takes what was written, but main parameters keep bits for when it is undone.
        mains = self._written_mains()
        rates = self._optimizer.state_dict(), self._scheduler.state_dict()
        return copy.deepcopy((tensors_of(self.model), mains, *rates))

    def _microbatch(self, action: Microbatch, way: Way) -> Values:
        layout = Layout(**way.layout)
        self._shares = layout.dp * layout.cp
        if action.form == "cleared":
            self._drop(frees=False)
        situation = self.situation
        situation.has_run |= action.does != "nothing"
        situation.is_reduced |= action.is_last
        situation.has_odd_forward |= action.does == "forward"
        situation.is_open = not (action.is_last and action.does == "all")
        if action.does == "nothing":
            return {}
        groups = {rank: layout.group("dp_cp", rank) for rank in layout.ranks}
        idle = [groups[rank].index(rank) for rank in (layout.ranks[i] for i in action.idle)]
        shares = [
            rows_of(action.step, index=index, shares=self._shares, parts=action.num_parts)
            for index in range(self._shares)
            if index not in idle
        ]
        batches = [[parts[action.part] for parts in shares]]
        if self.program.traits.dtype == torch.bfloat16:  # each rank rounds a gradient of its own
            batches = [[rows] for rows in batches[0]]
        losses: list[float] = []
        gradients: list[float | None] = []
        for batch in batches:
            with torch.set_grad_enabled(action.does != "no_grad"):
                found = forwards(self.model, batch, action)
            if action.form == "evaluated":  # which may write to buffers
                evaluate(self.model, "no_grad")
            if action.does == "all":
                for loss in found.totals():
                    if isinstance(action, TwiceBackward):
                        loss.backward(retain_graph=True)
                        self._add_gradients()
                    loss.backward()
                    self._add_gradients()
            losses += found.losses()
            gradients += found.input_gradients()
        rest, others = iter(losses), iter(gradients)
        return {
            "losses": [None if i in idle else next(rest) for i in range(self._shares)],
            "input gradients": [None if i in idle else next(others) for i in range(self._shares)],
        }

    def _add_gradients(self) -> None:
        self.situation.has_gradients = True
        for i, (p, main) in enumerate(zip(self._all, self._mains, strict=True)):
            if p.grad is not None:
                # Hooks have halved this gradient, and halve what was added up before, too.
                halved = 0.5 ** sum(each is p for each in self._hooks.after)
                before = self._sums.get(i, torch.zeros(())) * halved
                self._sums[i] = before + p.grad.to(main.dtype)
                p.grad = None
                self.situation.was_thawed |= not self._at_start[p]

    @torch.no_grad()
    def _step(self, action: Step) -> Values:
        limit, is_skipped = action.max_norm, bool(action.bad)
        self._take_written_values()
        for i, total in self._sums.items():
            self._mains[i].grad = total / self._shares
        gradients: list[Any] = [main.grad for main in self._mains if main.grad is not None]
        norm = math.sqrt(sum(float(g.to(torch.complex128).abs().square().sum()) for g in gradients))
        num_zeros = sum(
            main.numel() if main.grad is None else int((main.grad == 0).sum())
            for p, main in zip(self._all, self._mains, strict=True)
            if p.requires_grad or main.grad is not None
        )
        is_alone = action.mode in OWN_STEPS
        is_skipped &= not is_alone
        clipped = 0 < limit < norm and not is_skipped and not is_alone
        if clipped:
            for gradient in gradients:
                gradient.mul_(limit / norm)
        if not is_skipped:
            self._optimizer.step()
        for p, main in zip(self._all, self._mains, strict=True):
            if p is not main:
                p.copy_(main)
        self._has_loaded_mains = False
        is_as_built = all(p.requires_grad == was for p, was in self._at_start.items())
        is_as_built &= not self.situation.was_thawed
        if is_alone:  # it frees no whole copies; the backward of a last microbatch does
            self._note_write()
            self._drop(frees=not self.situation.is_open)
            return {}
        self._drop()
        return {
            "norm": norm,
            # What is frozen later may count or not, also if it was frozen at the start.
            "num_zeros": num_zeros if is_as_built else None,
            "clipped": clipped,
            "skipped": is_skipped,
        }

    def _drop(self, *, frees: bool = True) -> None:
        self._optimizer.zero_grad()
        self._sums.clear()
        before = self.situation
        self.situation = Situation(
            is_thawed=before.is_thawed,
            is_hooked=before.is_hooked,
            is_reentrant=before.is_reentrant,
        )
        if not frees:
            self.situation.has_run = before.has_run
            self.situation.is_written = before.is_written

    def _write_gradients(self, action: WriteGradients) -> None:
        written = {*self.model.blocks[action.block].parameters()}
        positions = [i for i in self._sums if self._all[i] in written]
        if action.how in ("clip norm", "clip value"):
            averaged = [nn.Parameter(self._sums[i].detach()) for i in positions]
            for p in averaged:
                p.grad = p.detach() / self._shares
            clip(averaged, action.how, scale=1.0)
            for i, p in zip(positions, averaged, strict=True):
                assert p.grad is not None
                self._sums[i] = p.grad * self._shares
            return
        for i in positions:
            if action.how == "halve":
                self._sums[i].mul_(0.5)
            else:
                del self._sums[i]
        self.situation.has_gradients = bool(self._sums)

    def _set_trainable(self, action: Freeze | Thaw) -> None:
        set_trainable(self.model, action, at_start=self._at_start, late=self._late)
        self.situation.is_thawed = any(p.requires_grad > was for p, was in self._at_start.items())

    @torch.no_grad()
    def _load(self, saved: Any) -> None:
        weights, mains, state, schedule = copy.deepcopy(saved)
        self.model.load_state_dict(weights)
        for main, saved in zip(self._mains, mains, strict=True):
            main.copy_(saved)
        self._optimizer.load_state_dict(state)
        if self._keeps_schedule:
            self._scheduler.load_state_dict(schedule)
        self._has_loaded_mains = True

    def _note_write(self) -> None:
        self.situation.is_written |= self.situation.has_run

    @torch.no_grad()
    def _take_written_values(self) -> None:
        """Let main parameters follow what was written to the model's (see S2)."""
        for main, written in zip(self._mains, self._written_mains(), strict=True):
            if main is not written:
                main.copy_(written)

    @torch.no_grad()
    def _written_mains(self) -> list[Tensor]:
        pairs = zip(self._all, self._mains, strict=True)
        return [
            main if p is main else torch.where(main.to(p.dtype) == p, main, p.to(main.dtype))
            for p, main in pairs
        ]

    @torch.no_grad()
    def _refresh_mains(self) -> None:
        for p, main in zip(self._all, self._mains, strict=True):
            if p is not main:
                main.copy_(p)
