"""Random trees through every format that holds trees, and back: what differs is named.

Prevents a silent loss in a conversion: an element, a key, a type, an order of keys, a value's bits.
The oracle compares what `torch.load` gives of the first file and of the last one, leaf by
leaf. Each path that differs must begin a sentence of one of the two conversions.
"""

from __future__ import annotations

import datetime
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import PlanError
from holdfast.foreign.convert import ConvertOptions, open_any, plan_conversion
from holdfast.format.values import join_path, key_name

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint16,
    torch.int64, torch.uint64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e8m0fnu,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 0, -(2**70), 1.5, -0.0, float("nan"), float("inf"), 1 + 2j, "",
    "a\x00b\ud800", b"\x00",
    bytearray(b"x"), range(3), slice(1, None), frozenset({1}), {1, "a"}, torch.bfloat16,
    torch.Size([1, 2]), torch.device("cpu"), datetime.date(2020, 1, 2), Path("/x"), np.float32(0.1),
    np.arange(3), np.arange(4.0).reshape(2, 2).T, np.array(["a", "bc"]), np.arange(2, dtype=">i2"),
    np.zeros((0, 2)), Counter("aab"), deque([1], maxlen=3), defaultdict(list, {"a": [1]}),
    defaultdict(int, {"a": 1}),
)  # fmt: skip
KEYS: tuple[Any, ...] = ("a", "b.c", "", "ü/x", "..", "a b", 0, 7, -1, 1.5, (1, 2), None, True)


def tensor(rng: random.Random) -> torch.Tensor:
    """Random bits, NaN payloads too; whole, a view with strides, a scalar, or empty."""
    dtype = rng.choice(DTYPES)
    shape = rng.choice([(), (0, 3), (5,), (3, 4), (2, 3, 4)])
    numel = int(np.prod(shape))
    data = bytearray(rng.randbytes(numel * dtype.itemsize))
    data = bytearray(byte & 1 for byte in data) if dtype == torch.bool else data
    flat = torch.frombuffer(data, dtype=dtype) if numel else torch.empty(0, dtype=dtype)
    result = flat.view(shape)
    if rng.random() < 0.3:
        result = result.movedim(0, -1) if shape else result.expand(2)
    elif rng.random() < 0.2 and shape and shape[0] > 1:
        result = result[1:]
    if result.is_floating_point() and dtype.itemsize > 1 and rng.random() < 0.2:
        result = torch.nn.Parameter(result)
    return result


def tree(rng: random.Random, depth: int, tied: list[torch.Tensor]) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        if rng.random() < 0.4:
            return rng.choice(VALUES)
        if tied and rng.random() < 0.3:
            return rng.choice(tied)
        tied.append(tensor(rng))
        return tied[-1]
    count = rng.randrange(4)
    if kind < 0.8:
        keys = rng.sample(KEYS, count)
        members = {key: tree(rng, depth - 1, tied) for key in keys}
        return OrderedDict(members) if rng.random() < 0.2 else members
    made = [tree(rng, depth - 1, tied) for _ in range(count)]
    return tuple(made) if rng.random() < 0.5 else made


def differences(a: Any, b: Any, path: str) -> Iterator[str]:
    """The paths at which two trees differ; an OrderedDict is a dict, a Size a tuple."""
    if isinstance(a, torch.Tensor):
        is_alike = isinstance(b, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape)
        if not is_alike or bits(a) != bits(b) or a.requires_grad != b.requires_grad:
            yield path
    elif isinstance(a, np.ndarray):
        is_alike = isinstance(b, np.ndarray) and (a.dtype, a.shape) == (b.dtype, b.shape)
        if not is_alike or a.tobytes() != b.tobytes():
            yield path
    elif isinstance(a, dict):
        kinds = {dict if type(each) is OrderedDict else type(each) for each in (a, b)}
        if len(kinds) > 1 or list(a) != list(b):
            yield path
            return
        for key, member in a.items():
            yield from differences(member, b[key], join_path(path, key_name(key)))
    elif isinstance(a, list | tuple):
        kinds = {tuple if type(each) is torch.Size else type(each) for each in (a, b)}
        if len(kinds) > 1 or len(a) != len(b):
            yield path
            return
        for i, (one, two) in enumerate(zip(a, b, strict=True)):
            yield from differences(one, two, join_path(path, i))
    elif isinstance(a, set | frozenset):
        # The order in which a set shows its members is that of their insertion if hashes collide.
        if type(a) is not type(b) or sorted(map(repr, a)) != sorted(map(repr, b)):
            yield path
    elif type(a) is not type(b) or repr(a) != repr(b):
        yield path


def bits(value: torch.Tensor) -> bytes:
    flat = value.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def convert(source: Path, to: Path, kind: Any) -> list[str]:
    """Convert; the sentences about what is not the same."""
    with open_any(source) as catalog:
        whole = kind == "torch_save"
        conversion = plan_conversion(catalog, to, ConvertOptions(to=kind, whole_tree=whole))
        conversion.run()
        return [*conversion.catalog.left_out, *conversion.output.notes]


def is_named(path: str, notes: list[str]) -> bool:
    """True if a sentence is about a path or what it is in; of several tensors three are named."""
    ends = [i for i, letter in enumerate(path) if letter == "."] + [len(path)]
    places = tuple(path[:end] + after for end in ends for after in (" ", ": ", ", "))
    return any(
        note.startswith(places) or ("requires_grad" in note and (path in note or " and " in note))
        for note in notes
    )


@pytest.mark.parametrize("kind", ["holdfast", "dcp", "torch_save"])
def test_what_differs_after_a_conversion_is_named(kind: str, tmp_path: Path) -> None:
    refused = 0
    for seed in range(16):
        rng = random.Random(seed)
        state = {"model": {f"x{i}": tree(rng, 3, []) for i in range(3)}, "w": torch.ones(1)}
        source = tmp_path / f"{seed}.pt"
        torch.save(state, source)
        there, back = tmp_path / f"{seed}-there", tmp_path / f"{seed}-back.pt"
        try:
            notes = convert(source, there, kind)
        except PlanError:  # two names that are one when joined with dots
            refused += 1
            continue
        notes += convert(there, back, "torch_save")
        result = torch.load(back, weights_only=False)
        expected = torch.load(source, weights_only=False)
        result = result["model"] if set(result) == {"model"} else result
        for path in differences(expected, result, ""):
            whole = f"model.{path}" if path else "model"
            assert is_named(whole, notes) or is_named(path, notes), (seed, path, notes)
    assert refused < (8 if kind == "dcp" else 1)
