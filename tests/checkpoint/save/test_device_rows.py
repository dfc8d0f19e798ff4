"""Rows that are copied later from a device: what notices a write. (`tests/gpu` has the streams.)

The tensors are of the host, the streams of a stand-in: what is asked of the order of things on a
device is `tests/gpu/test_lazy.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.checkpoint.save.device_rows import (
    DeviceRows,
    DeviceSource,
    WordSums,
    can_be_summed,
    snapshots,
)
from holdfast.checkpoint.save.staging import CudaCopier, content_digest, prepare_staging
from holdfast.format.index import ImageEntry, layout_image
from holdfast.state.tensor_elements import TORCH_TO_NAME
from holdfast.writer.memory import SharedMemory

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64, torch.bool)


@given(
    nbytes=st.one_of(st.integers(1, 2000), st.integers(1, 3 << 20)),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["bit", "negated", "swapped", "rows swapped", "rolled", "filled"]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=100, deadline=None)
def test_another_content_has_other_sums(
    nbytes: int, dtype: torch.dtype, kind: str, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    nbytes = -(-nbytes // dtype.itemsize) * dtype.itemsize
    data = torch.from_numpy(draw.integers(0, 256, nbytes, dtype=np.uint8))
    tensor = (data % 2 == 1) if dtype == torch.bool else data.view(dtype)
    other = torch.randn(3)  # a neighbour, which keeps its sums
    sums = WordSums([other, tensor, other], torch.device("cpu"))
    before, content = sums.take(), tensor.clone()
    numel = len(tensor)
    if kind == "bit" and dtype != torch.bool:
        tensor.view(torch.uint8)[int(draw.integers(nbytes))] ^= 1 << int(draw.integers(8))
    elif kind == "negated" and dtype.is_floating_point:
        tensor.data.neg_()
    elif kind == "swapped":
        i, j = draw.integers(numel, size=2)
        tensor[[i, j]] = tensor[[j, i]]
    elif kind == "rows swapped" and numel > 4096:
        rows = tensor[:4096].view(8, 512)
        rows.copy_(rows[torch.from_numpy(draw.permutation(8))])
    elif kind == "rolled":
        tensor.data.copy_(tensor.roll(1))
    elif kind == "filled":
        tensor.data.zero_()
    is_same = torch.equal(tensor.view(torch.uint8), content.view(torch.uint8))
    assert sums.differ(before, sums.take()) == ([] if is_same else [1])


def test_what_cannot_be_summed() -> None:
    flat = torch.zeros(4096, dtype=torch.uint8)
    assert can_be_summed(flat)
    assert can_be_summed(flat[8:-3])
    assert not can_be_summed(flat[4:])  # within a word
    with torch.inference_mode():
        assert not can_be_summed(torch.zeros(4096))  # counts no versions


def test_snapshots_are_bitwise_copies() -> None:
    base = torch.randn(6, 8)
    sources = [
        base.clone(),
        base.t(),
        base[:, 1:5:2],
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.empty(0, 3),
        torch.tensor(-0.0),
        torch.tensor(7),
        torch.tensor([math.nan, -math.nan, math.inf]),
        nn.Parameter(torch.ones(2)),
        torch.randn(3).bfloat16(),
        torch.tensor([True, False]),
    ]
    kept = [each.detach().resolve_conj().clone() for each in sources]
    found = snapshots({10 + i: (f"t{i}", each) for i, each in enumerate(sources)})
    with torch.no_grad():
        for each in sources:
            each.zero_()
    assert sorted(found) == [10 + i for i in range(len(sources))]
    for i, wanted in enumerate(kept):
        name, tensor, version, _ = found[10 + i]
        assert (name, version, tensor.shape) == (f"t{i}", None, wanted.shape)
        assert tensor.dtype == wanted.dtype
        assert content_digest(tensor) == content_digest(wanted)


class Streams:
    """Stands in for `torch.cuda`: everything is done at once."""

    def Stream(self, *, device: torch.device) -> Streams:
        return self

    def current_stream(self, device: torch.device) -> Streams:
        return self

    @contextmanager
    def stream(self, stream: Streams) -> Iterator[None]:
        yield

    def wait_stream(self, other: Streams) -> None: ...

    def wait_event(self, event: Streams) -> None: ...

    def record_event(self) -> Streams:
        return self

    def synchronize(self) -> None: ...


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda x: x.mul_(1.0),  # the same bytes: its version tells
    "through a view": lambda x: x[3].fill_(2.0),
    "data": lambda x: x.data.neg_(),
    "alias": lambda x: x.data.view(-1)[7:8].add_(1.0),
    "resized": lambda x: x.untyped_storage().resize_(8 * x.nbytes),
}


@pytest.mark.parametrize("kind", ["nothing", *WRITES])
@pytest.mark.parametrize("place", ["copied", "compared"])
@pytest.mark.parametrize("when", ["before", "held back", "after"])
def test_a_write_before_the_copy_is_named_and_one_behind_it_is_not(
    kind: str, place: str, when: str
) -> None:
    x, y = torch.randn(300, 8), torch.randn(64)
    wanted = x.clone(), y.clone()
    entries = [ImageEntry(name=n, dtype=TORCH_TO_NAME[y.dtype], shape=(64,)) for n in "a"]
    sources: list[torch.Tensor] = [y]
    if place == "copied":
        entries.append(ImageEntry(name="b", dtype=TORCH_TO_NAME[x.dtype], shape=(300, 8)))
        sources.append(x)
    staging = prepare_staging(SharedMemory(), layout_image(entries), sources)
    copier = CudaCopier(torch.device("cuda:0"), cuda=Streams())
    own = {i: DeviceSource.of("ab"[i], each) for i, each in enumerate(sources)}
    others = {5: DeviceSource.of("b", x)} if place == "compared" else {}
    rows = DeviceRows(own, others, copier)
    write: Callable[[torch.Tensor], Any] = WRITES.get(kind, lambda x: None)
    if when == "before":
        write(x)
    digests = rows.enqueue(staging)
    if when == "held back":
        rows.hold_back()
        if kind in ("data", "alias"):
            return  # what follows is ordered by streams, which these are not
        write(x)
    names = rows.finish()
    if when == "after":
        write(x)
        rows.hold_back()
    expected = ["b"] if when == "before" and kind != "nothing" else []
    assert list(dict.fromkeys(names)) == expected
    if not expected:
        assert torch.equal(staging.destinations[0], wanted[1])
        if place == "copied":
            assert torch.equal(staging.destinations[1], wanted[0])
        else:
            assert digests == {5: content_digest(wanted[0])}
