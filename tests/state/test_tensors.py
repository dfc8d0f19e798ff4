"""The bytes of a tensor's elements, whatever its strides."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.state.tensor_elements import element_bytes, tensor_digest

DTYPES = (torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float32,
          torch.int64, torch.complex64, torch.complex128)  # fmt: skip


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of any strides, also of one element and of none, also expanded or conjugated."""
    sizes = draw(st.lists(st.integers(1, 5), max_size=3))
    base = torch.arange(int(np.prod(sizes)), dtype=torch.float32).to(draw(st.sampled_from(DTYPES)))
    view = base.view(sizes)
    for dim, size in enumerate(sizes):
        # Slicing float8 tensors with a step is a view, too.
        begin, step = draw(st.integers(0, size)), draw(st.integers(1, 6))
        view = view[(slice(None),) * dim + (slice(begin, None, step),)]
    view = view.permute(draw(st.permutations(range(view.ndim))))
    if draw(st.booleans()):
        view = view.unsqueeze(0).expand(draw(st.integers(1, 3)), *view.shape)
    return view.conj() if draw(st.booleans()) else view


@given(views())
def test_elements_are_read_in_row_major_order(view: torch.Tensor) -> None:
    values = view.resolve_conj().clone(memory_format=torch.contiguous_format)
    expected = bytes(values.untyped_storage())[: values.numel() * values.element_size()]
    assert bytes(element_bytes(view).tolist()) == expected
    assert tensor_digest(view) == tensor_digest(values)
