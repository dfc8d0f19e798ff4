"""Which dtypes go into which without loss, against brute force."""

from __future__ import annotations

import pytest
import torch

from holdfast.state.tensor_elements import TORCH_TO_NAME, refused_cast


def exact(stored: torch.dtype, target: torch.dtype) -> bool:
    """By brute force: whether every value of a small stored dtype is in the target."""
    size = 8 * stored.itemsize
    bits = torch.arange(2**size, dtype=torch.int32)
    values = (bits.to(torch.uint8) if size == 8 else bits.to(torch.uint16)).view(stored)
    there = values.to(target).to(torch.float64)
    return bool((there == values.to(torch.float64)).all())


@pytest.mark.parametrize("stored", [torch.int8, torch.uint8, torch.int16, torch.uint16])
def test_integers_are_cast_where_every_value_is_there(stored: torch.dtype) -> None:
    for target, name in TORCH_TO_NAME.items():
        if target.is_complex or target == stored or "fnuz" in str(target) or "e8m0" in str(target):
            continue
        allowed = not refused_cast(TORCH_TO_NAME[stored], name)
        assert allowed == (target != torch.bool and exact(stored, target)), name


def test_casts_that_cannot_be_meant_are_refused() -> None:
    refused = {
        ("C64", "F32"): "imaginary", ("C128", "F64"): "imaginary", ("C64", "BOOL"): "imaginary",
        ("F32", "I64"): "fractions", ("BF16", "BOOL"): "fractions", ("F64", "U8"): "fractions",
        ("I64", "I32"): "too small", ("I8", "U64"): "negative", ("U64", "I64"): "too small",
        ("I64", "F64"): "exactly", ("I32", "F32"): "exactly", ("U8", "BOOL"): "zero",
        ("F32", "F8_E8M0"): "powers of two", ("I32", "C64"): "exactly",
    }  # fmt: skip
    for (stored, target), why in refused.items():
        assert why in refused_cast(stored, target)
    for stored, target in (
        ("F32", "BF16"), ("BF16", "F32"), ("F64", "F8_E4M3FNUZ"), ("F8_E8M0", "F32"),
        ("F32", "C64"), ("C128", "C32"), ("I32", "F64"), ("I32", "I64"), ("U32", "I64"),
        ("BOOL", "I8"), ("BOOL", "F32"), ("U8", "BF16"), ("I16", "C64"), ("F16", "F16"),
    ):  # fmt: skip
        assert refused_cast(stored, target) == ""
