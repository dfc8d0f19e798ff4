"""How tensors hold their elements; sparse ones as the plain tensors that they are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ROWS_COMPRESSED = (torch.sparse_csr, torch.sparse_bsr)
_COLUMNS_COMPRESSED = (torch.sparse_csc, torch.sparse_bsc)
LAYOUTS = {
    str(layout).removeprefix("torch."): layout
    for layout in (torch.sparse_coo, *_ROWS_COMPRESSED, *_COLUMNS_COMPRESSED)
}
"""Name -> layout."""


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether its elements are in one run of memory, by offset and strides."""
    return tensor.layout is torch.strided and not tensor.is_nested


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether it is of a layout that has indices and values."""
    return tensor.layout in LAYOUTS.values()


def members_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The indices and, last, the values of a sparse tensor, detached; they share its memory."""
    detached = tensor.detach()
    if detached.layout is torch.sparse_coo:
        # The public ones refuse a tensor that is not coalesced.
        return [detached._indices(), detached._values()]
    if detached.layout in _ROWS_COMPRESSED:
        return [detached.crow_indices(), detached.col_indices(), detached.values()]
    return [detached.ccol_indices(), detached.row_indices(), detached.values()]


def from_members(
    layout: str,
    shape: Sequence[int],
    members: Sequence[torch.Tensor],
    *,
    is_coalesced: bool,
    checked: bool = True,
) -> torch.Tensor:
    """The tensor of `members_of`; KeyError for an unknown layout, RuntimeError for wrong members.

    Args:
        layout: its name, of `LAYOUTS`.
        shape: of the tensor.
        members: as `members_of` returns them.
        is_coalesced: of a COO tensor.
        checked: whether the indices are looked at, a pass over all of them.
    """
    if LAYOUTS[layout] is torch.sparse_coo:
        indices, values = members
        return torch.sparse_coo_tensor(
            indices, values, tuple(shape), is_coalesced=is_coalesced, check_invariants=checked
        )
    compressed, plain, values = members
    return torch.sparse_compressed_tensor(
        compressed, plain, values, tuple(shape), layout=LAYOUTS[layout], check_invariants=checked
    )


def like_with_members(tensor: torch.Tensor, members: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor of the same kind, made of copies of the members of this one."""
    return from_members(
        layout_name(tensor),
        tensor.shape,
        members,
        is_coalesced=is_coalesced(tensor),
        checked=False,
    )


def layout_name(tensor: torch.Tensor) -> str:
    """The name in `LAYOUTS` of a sparse tensor's layout."""
    return str(tensor.layout).removeprefix("torch.")


def is_coalesced(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of layout COO and is coalesced."""
    return tensor.layout is torch.sparse_coo and tensor.is_coalesced()
