"""No group is looked up and no module keeps anything (G7)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast import (
    RNG,
    Checkpointer,
    GroupError,
    HoldfastError,
    Layout,
    OptimizerState,
    PerRank,
    ProcessGroups,
    Replicated,
    Sharded,
    ShardedOptimizer,
    current_groups,
)
from holdfast.collector import collector_paused
from holdfast.optim import gradient_norm

ROOT = Path(holdfast.__file__).parent
CHANGES = {"append", "add", "update", "setdefault", "pop", "clear", "extend", "insert", "remove",
           "popitem", "discard", "appendleft"}  # fmt: skip
CACHES = {"cache", "lru_cache", "cached_property"}
MEMORY = ("storage/objects/_obstore.py", "memory_store is cached")
"""`memory://name` stands for memory of this process: that is the state, as a disk has one."""
DECODERS = ("decoding.py", ("_json_decoder is cached", "_msgpack_decoder is cached"))
"""By type, as msgspec keeps its own look at it: the same whoever asks."""
MUTABLE = {"dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque", "count",
           "WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "local"}  # fmt: skip


def name_of(node: ast.AST) -> str:
    """The last name of a call, attribute or name."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def kept_by(tree: ast.Module) -> set[str]:
    """Names at the top of a module, or in the body of a class, that stand for something mutable."""
    found = set()
    bodies = [tree.body, *(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]
    for statement in (s for body in bodies for s in body):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            value = statement.value
            is_display = isinstance(
                value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
            )
            if is_display or (isinstance(value, ast.Call) and name_of(value) in MUTABLE):
                targets = [statement.target] if isinstance(statement, ast.AnnAssign) else None
                found |= {name_of(t) for t in targets or statement.targets}  # type: ignore[union-attr]
    return found


def within_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Each function or lambda, and all that is in one, once."""
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        yield from ast.walk(node)
        return
    for child in ast.iter_child_nodes(node):
        yield from within_functions(child)


def state_in(source: str) -> Iterator[str]:
    """What a module would keep between two calls, in words."""
    with collector_paused():
        tree = ast.parse(source)
    kept = kept_by(tree)
    for node in within_functions(tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if name_of(decorator) in CACHES - {"cached_property"}:
                    yield f"line {node.lineno}: {node.name} is cached"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = name_of(node.func.value)
            if node.func.attr in CHANGES and owner in kept:
                yield f"line {node.lineno}: {owner}.{node.func.attr}()"
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            for target in targets:
                if isinstance(target, ast.Subscript) and name_of(target.value) in kept:
                    yield f"line {node.lineno}: {name_of(target.value)}[...] is set"
    for statement in tree.body:
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Call) and name_of(value) in MUTABLE:
            yield f"line {statement.lineno}: {name_of(value)}() at the top of the module"


def test_no_module_keeps_state() -> None:
    """Plan caches of other systems sat in modules and classes, and outlived what they were of."""
    modules = sorted(ROOT.rglob("*.py"))
    assert len(modules) > 80
    found = {str(m.relative_to(ROOT)): list(state_in(m.read_text())) for m in modules}
    for module, stated in (MEMORY, DECODERS):
        found[module] = [each for each in found[module] if not each.endswith(stated)]
    assert {module: reports for module, reports in found.items() if reports} == {}


@pytest.mark.parametrize(
    "source",
    [
        "CACHE = {}\ndef f(x):\n    CACHE[x] = 1\n",
        "class A:\n    plans: dict = {}\n    def f(self):\n        self.plans.update(x=1)\n",
        "import functools\n@functools.lru_cache\ndef f(x):\n    return x\n",
        "def f():\n    global x\n    x = 1\n",
        "from itertools import count\n_NEXT = count()\n",
        "from collections import defaultdict\nSEEN = defaultdict(int)\n",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(state_in(source))


def test_every_public_name_works_alone_or_says_what_is_missing(tmp_path: Path) -> None:
    """Without torch.distributed and without a group: one process, or an error of the library."""
    assert not torch.distributed.is_initialized()
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path) as checkpointer:
        state = {
            "model": model,
            "optimizer": OptimizerState(optimizer, model),
            "rng": RNG(),
            "own": PerRank({"x": 1}),
            "tensors": {
                "cut": Sharded(torch.ones(2), (2,), dims={0: "tp"}),
                "same": Replicated(torch.ones(2)),
            },
        }
        checkpointer.prepare(state)
        checkpointer.save(1, state)
        checkpointer.save_async(2, state).result(30)
        assert checkpointer.load(state).step == 2
        assert (checkpointer.steps(), checkpointer.latest()) == ([1, 2], 2)
    single = ProcessGroups.single()
    sharded = ShardedOptimizer(
        model, model.parameters(), make=torch.optim.SGD, groups=single, over="dp_cp", divisor=1
    )
    with sharded.microbatch(is_last=True):
        model(torch.ones(1, 3)).sum().backward()
    assert not sharded.step().skipped
    assert gradient_norm(model.parameters(), groups=single).is_finite
    with pytest.raises(GroupError, match="No process groups"):
        current_groups()
    for make in (ProcessGroups.create, lambda layout: ProcessGroups.adopt(layout, {})):
        with pytest.raises(GroupError, match="init_process_group"):
            make(Layout(dp=2))
    with pytest.raises(HoldfastError):
        Layout(tp=2, ranks=(0,))
    assert not torch.distributed.is_initialized()


def test_a_launcher_without_groups_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WORLD_SIZE says that there are others: nothing is written as if there were none."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(GroupError, match="groups"):
        Checkpointer(tmp_path / "run").save(1, {"m": {"x": torch.ones(2)}})
    assert not (tmp_path / "run").exists()
