"""A gather in flight cannot be observed: every read and write finds whole new values."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from holdfast import Checkpointer, Layout, OptimizerState, ProcessGroups
from holdfast.errors import DeadlineError, HoldfastError
from holdfast.optim import ReducedOptimizer, ShardedOptimizer, collectives
from holdfast.optim.buckets import Bucket
from holdfast.optim.joint import JointSums
from tests.harness import RankContext, run_ranks

adamw = partial(torch.optim.AdamW, lr=0.05)


class Late:
    """A gather that does not begin before it is waited for: until then memory is half old."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start

    def wait(self) -> None:
        self._start().wait()


@contextlib.contextmanager
def late_gathers() -> Iterator[None]:
    real = collectives.all_gather
    collectives.all_gather = lambda *args: Late(lambda: real(*args))  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        collectives.all_gather = real


def plain(p: Tensor) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


class Lin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 6))
        self.bias = nn.Parameter(torch.empty(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, plain(self.weight), plain(self.bias)))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(11, 6))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, plain(self.weight))


class Net(nn.Module):
    """A tied head, a child and a parameter of the root; `early` reads all before modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Table()
        self.child = Lin()
        self.scale = nn.Parameter(torch.empty(6))
        self.early: str | None = None

    def forward(self, ids: Tensor) -> Tensor:
        extra = torch.zeros(6, dtype=self.scale.dtype)
        if self.early == "tied":
            extra = F.linear(
                torch.ones(1, 6, dtype=self.scale.dtype), plain(self.embed.weight)
            ).sum()
        elif self.early == "child":
            extra = plain(self.child.weight).sum(0) + plain(self.child.bias).sum()
        elif self.early == "function":
            extra = Twice.apply(plain(self.child.weight)).sum(0)
        elif self.early == "past torch function":
            with torch._C.DisableTorchFunctionSubclass():
                extra = self.child.weight.sum() + self.embed.weight.sum()
        x = self.child(self.embed(ids))
        return F.linear(x * plain(self.scale) + extra, plain(self.embed.weight))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 2


def build(groups: ProcessGroups | None, dtype: torch.dtype) -> Net:
    net = Net()
    generator = torch.Generator().manual_seed(2)
    for module in net.modules():
        for name, p in list(module._parameters.items()):
            assert p is not None
            value: Tensor = torch.randn(p.shape, generator=generator).mul_(0.3).to(dtype)
            if groups is not None:
                mesh = groups.mesh("dp_cp", "tp")
                value = distribute_tensor(value, mesh, [Replicate()] * 2, src_data_rank=None)
            setattr(module, name, nn.Parameter(value))
    return net


def optimizer_of(net: nn.Module, groups: ProcessGroups, **options: Any) -> ShardedOptimizer:
    options = {"make": adamw, "bucket_nbytes": 300, "align_nbytes": 4, **options}
    return ShardedOptimizer(
        net, net.parameters(), groups=groups, over="dp_cp", divisor=2, elementwise=True, **options
    )


def one_step(net: nn.Module, optimizer: Any, step: int, groups: ProcessGroups) -> None:
    ids = (torch.arange(8) + step * 3 + groups.index("dp_cp")) % 11
    with optimizer.microbatch(is_last=True):
        net(ids).float().square().mean().backward()
    optimizer.step()


IDS = torch.tensor([1, 4, 7])


def early(kind: str) -> Callable[[Net], Any]:
    def read(net: Net) -> Any:
        net.early = kind
        try:
            out = net(IDS)
            out.float().sum()
            return out
        finally:
            net.early = None

    return read


def average(net: Net) -> Any:
    kept = [torch.zeros_like(p) for p in net.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(kept, list(net.parameters()), 0.5)
    return kept


def averaged_model(net: Net) -> Any:
    model = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model.update_parameters(net)
    model.update_parameters(net)
    return list(model.parameters())


def saved(net: Net) -> Any:
    file = io.BytesIO()
    torch.save([plain(p) for p in net.parameters()], file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def load(net: Net) -> Any:
    state = {k: v.detach().clone() * 0 + 0.25 for k, v in build_like(net).items()}
    net.load_state_dict(state)
    return list(net.parameters())


def build_like(net: Net) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in net.named_parameters()}


def load_child(net: Net) -> Any:
    net.child.load_state_dict({k: torch.ones_like(v) for k, v in net.child.state_dict().items()})
    return list(net.parameters())


@torch.no_grad()
def clip_weights(net: Net) -> Any:
    for p in net.parameters():
        p.clamp_(-0.02, 0.02)
    return list(net.parameters())


@torch.no_grad()
def write_data(net: Net) -> Any:
    for p in net.parameters():
        p.data.mul_(0.5)
        p[0].fill_(0.125)  # DTensor has no p[0] = number
    return list(net.parameters())


def recomputed(net: Net) -> Any:
    x = torch.ones(2, 6, dtype=net.scale.dtype)
    out = checkpoint(net.child, x, use_reentrant=False)
    return [out, *torch.autograd.grad(out.float().sum(), [net.child.weight])]


def raised_between(net: Net) -> Any:
    handle = net.child.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        net(IDS)
    handle.remove()
    return [net.child(torch.ones(1, 6, dtype=net.scale.dtype)), *net.parameters()]


def fail(*args: Any) -> None:
    raise ZeroDivisionError


def evaluated(net: Net) -> Any:
    net.eval()
    try:
        with torch.inference_mode():
            return net.child(torch.ones(1, 6, dtype=net.scale.dtype)).clone()
    finally:
        net.train()


READS: dict[str, Callable[[Net], Any]] = {
    "forward": lambda net: net(IDS),
    "tied early": early("tied"),
    "child early": early("child"),
    "custom function": early("function"),
    "lerp": average,
    "averaged model": averaged_model,
    "norm": lambda net: [p.detach().norm() for p in net.parameters()],
    "data": lambda net: [p.data for p in net.parameters()],
    "detach": lambda net: [p.detach().float() for p in net.parameters()],
    "numpy": lambda net: [plain(p.detach()).float().numpy().copy() for p in net.parameters()],
    "tolist": lambda net: [plain(p.data).tolist() for p in net.parameters()],
    "pointer": lambda net: [plain(p).data_ptr() * 0 + plain(p).sum() for p in net.parameters()],
    "local": lambda net: [plain(p) for p in net.parameters()],
    "attribute": lambda net: [getattr(p, "_local_tensor", p) for p in net.parameters()],
    "state dict": lambda net: list(net.state_dict().values()),
    "kept vars": lambda net: list(net.state_dict(keep_vars=True).values()),
    "vector": lambda net: parameters_to_vector([plain(p) for p in net.parameters()]),
    "deepcopy": lambda net: list(copy.deepcopy(net).parameters()),
    "copy of one": lambda net: [copy.deepcopy(net.scale), copy.copy(net.scale)],
    "saved": saved,
    "recomputed": recomputed,
    "functional": lambda net: torch.func.functional_call(net, dict(net.named_parameters()), (IDS,)),
    "submodule": evaluated,
    "exception": raised_between,
    "clip weights": clip_weights,
    "write data": write_data,
    "load": load,
    "load child": load_child,
    "text": lambda net: [str(p) for p in net.parameters()],
    "stacked": lambda net: torch.stack([plain(net.scale), plain(net.child.bias)]),
}


def leaves(value: Any) -> list[Any]:
    found = value if isinstance(value, list) else [value]
    return [plain(v).detach().clone() if isinstance(v, Tensor) else v for v in found]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)


def is_in_flight(bucket: Bucket) -> bool:
    return bucket._gathering is not None


def every_read(context: RankContext, declared: bool, low: bool) -> int:
    """Two equal runs, one that waits in `step`: what each read gives, and what follows from it."""
    dtype = torch.bfloat16 if low else torch.float32
    in_flight = 0
    with ProcessGroups.create(Layout(dp=2)) as groups, late_gathers():
        mesh = groups if declared else None
        net, truth = build(mesh, dtype), build(mesh, dtype)
        optimizer = optimizer_of(net, groups, overlap=True, stage=1)
        waiting = optimizer_of(truth, groups, overlap=False)
        for number, (name, read) in enumerate(READS.items()):
            one_step(net, optimizer, number, groups)
            one_step(truth, waiting, number, groups)
            flying = [is_in_flight(b) for b in optimizer._buckets]
            assert all(flying), (name, flying)
            assert isinstance(net.scale, nn.Parameter)
            assert net.scale.shape == truth.scale.shape
            assert net.scale.grad is None
            assert all(is_in_flight(b) for b in optimizer._buckets)  # shapes wait for nothing
            in_flight += len(flying)
            got, expected = leaves(read(net)), leaves(read(truth))
            assert len(got) == len(expected)
            assert all(same(a, b) for a, b in zip(got, expected, strict=True)), name
            for p, q in zip(net.parameters(), truth.parameters(), strict=True):
                assert torch.equal(plain(p), plain(q)), name
                assert type(p) is (DTensor if declared else nn.Parameter)
            del got, expected
        for a, b in zip(optimizer._buckets, waiting._buckets, strict=True):
            assert torch.equal(a.main, b.main)
    return in_flight


@pytest.mark.parametrize(
    ("declared", "low"),
    [
        pytest.param(False, False, marks=pytest.mark.slow, id="plain-fp32"),
        pytest.param(True, True, id="dtensor-bf16"),
        pytest.param(False, True, marks=pytest.mark.nightly, id="plain-bf16"),
        pytest.param(True, False, marks=pytest.mark.nightly, id="dtensor-fp32"),
    ],
)
def test_every_read_and_write_finds_new_values(declared: bool, low: bool) -> None:
    for in_flight in run_ranks(2, every_read, declared, low, timeout_s=300).results:
        assert in_flight >= 2 * len(READS)


def past_everything(context: RankContext, root: str) -> None:
    """Code that gets at memory past Python: it waits in its module, or there is no overlap."""
    with (
        ProcessGroups.create(Layout(dp=2)) as groups,
        late_gathers(),
        # what is in one small bucket is not overlapped
        mock.patch.object(JointSums, "fits", return_value=False),
    ):
        net = build(None, torch.float32)
        optimizer = optimizer_of(net, groups, overlap=True, bucket_nbytes=1 << 20)
        (bucket,) = optimizer._buckets
        one_step(net, optimizer, 0, groups)
        assert is_in_flight(bucket)
        with torch._C.DisableTorchFunctionSubclass():
            assert bool(net.child.weight.isnan().all())  # never half old
        # the first module of several that share the bucket waits: any, not all of them
        seen: list[bool] = []
        handle = net.embed.register_forward_pre_hook(lambda *_: seen.append(is_in_flight(bucket)))
        net.embed(IDS)
        handle.remove()
        assert seen == [False]

        # a module of the bucket that was not entered through its hooks: step waits
        with optimizer.microbatch(is_last=True):
            x = net.embed(IDS) @ net.child.weight
            (x * net.scale).square().mean().backward()
        optimizer.step()
        assert not is_in_flight(bucket)
        net.early = "past torch function"
        assert not bool(net(IDS).isnan().any())
        net.early = None

        # a view from before the step sees what the step made, like any optimizer's
        kept = net.child.weight.data
        one_step(net, optimizer, 1, groups)
        assert not is_in_flight(bucket)
        assert torch.equal(kept, net.child.weight)
        del kept
        one_step(net, optimizer, 2, groups)
        assert is_in_flight(bucket)

        # a save keeps views of its own, and takes nothing from the overlap
        checkpointer = Checkpointer(root, groups=groups)
        state = {"model": net, "optimizer": OptimizerState(optimizer, net)}
        checkpointer.save(1, state)
        saved_weights = [p.detach().clone() for p in net.parameters()]
        one_step(net, optimizer, 3, groups)
        checkpointer.load(state, step=1)
        for p, value in zip(net.parameters(), saved_weights, strict=True):
            assert torch.equal(p, value)


def test_what_python_does_not_see_waits_or_finds_nan(tmp_path: Any) -> None:
    run_ranks(2, past_everything, str(tmp_path))


def stale_graph(context: RankContext) -> None:
    """A graph from before the step is refused by autograd, as after any optimizer's step."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for mesh in (None, groups):
            net = build(mesh, torch.float32)
            optimizer = optimizer_of(net, groups, overlap=True)
            kept = net(IDS).square().mean()
            one_step(net, optimizer, 0, groups)
            with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
                kept.backward()
            optimizer.drop_gradients()
            for foreach in (False, True):
                net = build(mesh, torch.float32)
                optimizer = ReducedOptimizer(
                    torch.optim.SGD(net.parameters(), lr=0.1, foreach=foreach),
                    groups,
                    reduce="dp_cp",
                )
                kept = net(IDS).square().mean()
                net(IDS).square().mean().backward()
                optimizer.step()
                with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
                    kept.backward()


def test_a_graph_from_before_the_step_is_stale() -> None:
    """I1: also of DTensors, which torch's own optimizers write without telling autograd."""
    run_ranks(2, stale_graph)


def broken_gather(context: RankContext) -> None:
    """A gather that fails is an error for every reader, again and again."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        net = build(None, torch.float32)
        optimizer = optimizer_of(net, groups, overlap=True)
        one_step(net, optimizer, 0, groups)
        real = collectives.all_gather
        collectives.all_gather = lambda *_: Late(lambda: boom())  # type: ignore[assignment, return-value]
        one_step(net, optimizer, 1, groups)
        collectives.all_gather = real
        for read in (net.scale.sum, net.scale.tolist, net.state_dict, lambda: net(IDS)):
            with pytest.raises(HoldfastError, match=r"gathering of parameters.*boom"):
                read()


def boom() -> None:
    raise RuntimeError("boom")


def test_a_gather_that_fails_fails_for_every_reader() -> None:
    run_ranks(2, broken_gather)


def given_up(context: RankContext) -> None:
    """The sum after an update misses its limit while gathers are in flight, on all ranks."""
    waited: list[str] = []
    real = collectives.wait

    def wait(work: collectives.Pending, what: str) -> None:
        waited.append(what)
        if what == "the agreement on an update":
            real(work, what)
            raise DeadlineError("late", details={"waited_s": 1.0})
        real(work, what)

    with ProcessGroups.create(Layout(dp=2)) as groups, late_gathers():
        net = build(None, torch.float32)
        optimizer = optimizer_of(net, groups, overlap=True)
        one_step(net, optimizer, 0, groups)
        optimizer.synchronize()
        collectives.wait = wait
        try:
            with pytest.raises(DeadlineError, match="2 of 2 ranks failed"):
                one_step(net, optimizer, 1, groups)
            assert waited[-1] == "the agreement on an update"
            for read in (net.scale.sum, net.scale.tolist, net.state_dict, lambda: net(IDS)):
                with pytest.raises(DeadlineError, match="late"):
                    read()
        finally:
            collectives.wait = real


def test_gathers_are_not_waited_for_once_other_ranks_were_late_in_vain() -> None:
    """R7: no second limit passes in a step, and no half-gathered value is ever read."""
    run_ranks(2, given_up, fresh=True)


def forgotten(context: RankContext) -> None:
    """Rank 0 forgets a gather, as an optimizer's that is thrown away, before rank 1 begins it."""
    with ProcessGroups.create(Layout(dp=2), data_timeout_s=20) as groups:
        for number in range(2):
            out = torch.full((2,), float("nan"))
            out[context.rank] = 10.0 * number + context.rank
            if context.rank and number == 0:
                time.sleep(0.2)
            share = out[context.rank :][:1]
            work = collectives.all_gather(out, share, groups.group("dp_cp"))
            if context.rank or number:
                work.wait()
            del work
            assert out.tolist() == [10.0 * number, 10.0 * number + 1]


def test_a_gather_that_is_forgotten_in_flight_disturbs_no_other() -> None:
    """S1: what had not arrived was withdrawn, and met the messages of the next optimizer."""
    run_ranks(2, forgotten)


def copies(context: RankContext) -> None:
    with ProcessGroups.create(Layout(dp=2)) as groups, late_gathers():
        for mesh in (None, groups):
            for dtype in (torch.float32, torch.bfloat16):
                copy_once(groups, mesh, dtype)


def copy_once(groups: ProcessGroups, mesh: ProcessGroups | None, dtype: torch.dtype) -> None:
    net = build(mesh, dtype)
    optimizer = optimizer_of(net, groups, overlap=True)
    one_step(net, optimizer, 0, groups)
    assert all(is_in_flight(b) for b in optimizer._buckets)
    twins = [copy.deepcopy(net)]
    if mesh is None:
        twins.append(pickle.loads(pickle.dumps(net)))
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        twins.append(torch.load(file, weights_only=False))
    for p, q in zip(net.parameters(), twins[0].parameters(), strict=True):
        assert type(q) is type(p)
        assert torch.equal(plain(p), plain(q))
        assert plain(p).untyped_storage().data_ptr() != plain(q).untyped_storage().data_ptr()
    before = [plain(p).detach().clone() for p in net.parameters()]
    for twin in twins:
        # backward, forward, saving and loading of the copy do nothing to the original
        one_step(net, optimizer, 1, groups)
        flying = [is_in_flight(b) for b in optimizer._buckets]
        assert all(flying)
        twin(IDS).float().square().mean().backward()
        twin.load_state_dict(twin.state_dict())
        assert all(p.grad is not None for p in twin.parameters())
        assert [is_in_flight(b) for b in optimizer._buckets] == flying
        for p, value in zip(twin.parameters(), before, strict=True):
            assert torch.equal(plain(p), value)
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
    again = copy.deepcopy(twins[-1])
    twin_optimizer = optimizer_of(again, groups, overlap=True, name="twin")
    one_step(again, twin_optimizer, 1, groups)
    with optimizer.microbatch(is_last=True):
        net(IDS).float().mean().backward()
    for p in copy.deepcopy(net).parameters():  # between backward and step, too
        assert type(p) is (nn.Parameter if mesh is None else DTensor)
        assert p.grad is None
    with pytest.raises(HoldfastError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(HoldfastError, match="cannot be copied or pickled"):
        pickle.dumps(optimizer)


def test_a_copy_of_a_model_is_a_plain_model() -> None:
    run_ranks(2, copies)


def compiled(context: RankContext) -> None:
    """Compiled from outside or inside, as a whole or in part: all see new values."""
    # A backend of torch's own traces with other values than the compiler.
    backends = {"outside": "eager", **dict.fromkeys(("wrapped", "inside", "a module"), "aot_eager")}
    for way, backend in backends.items():
        torch.compiler.reset()
        with ProcessGroups.create(Layout(dp=2), timeout_s=60) as groups, late_gathers():
            compiled_as(way, backend, groups)


def compiled_as(way: str, backend: str, groups: ProcessGroups) -> None:
    bare, truth = build(None, torch.float32), build(None, torch.float32)
    net: Any = torch.compile(bare, backend=backend) if way == "wrapped" else bare
    optimizer = optimizer_of(net, groups, overlap=True)
    waiting = optimizer_of(truth, groups, overlap=False)
    fast: Any = torch.compile(bare, backend=backend) if way == "outside" else net
    if way in ("inside", "a module"):
        (bare if way == "inside" else bare.child).compile(backend=backend)
    for step in range(4):
        # an eager call in between makes all modules count as called
        one_step(fast if step % 2 else net, optimizer, step, groups)
        one_step(truth, waiting, step, groups)
        for model in (fast, net, bare):
            torch.testing.assert_close(model(IDS), truth(IDS))
    optimizer.close()
    waiting.close()


@pytest.mark.slow
def test_a_compiled_model_sees_new_values() -> None:
    """S1: before, the compiler read parameters in flight while they were shown: a deadline."""
    run_ranks(2, compiled, timeout_s=400)
