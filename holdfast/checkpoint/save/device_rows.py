"""Lazy staging of what is on a device: copied on a side stream, in the order of the streams.

The host waits for nothing: a step of an optimizer that changes a source is put behind the copies on
the device (`DeviceRows.hold_back`). The kernel of the host cannot watch a device's memory. So a
write in between is noticed by what it leaves: another version of the tensor, or, where it has none
(`.data`, kernels of others), other sums of its words than at the call. The sums are taken on the
caller's stream at the call, and on the side stream behind the copies.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from holdfast._torch import write_counter
from holdfast.checkpoint.save.staging import CudaCopier, Staging, content_digest, storage_span
from holdfast.state.tensor_elements import flat_copies

_ROW = 1021
"""Words that are summed apart. A prime: rows of a matrix that change places change sums."""
_BLOCK = 256
"""So many words, `_ROW` words apart, make one sum."""


class DeviceSource(NamedTuple):
    """A contiguous tensor on a device that is read later."""

    name: str
    tensor: torch.Tensor
    """Detached, so of the memory that it has at the call; it counts versions with its source."""
    version: int | None
    """At the call; None of a snapshot, which nobody else has."""
    storage: tuple[int, int]
    """Address and bytes of its memory at the call."""

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> DeviceSource:
        """Return a tensor as it is now; see `can_be_summed`."""
        return cls(name, tensor.detach(), write_counter(tensor), storage_span(tensor))

    @property
    def is_written(self) -> bool:
        """True if it was written, resized or freed through a tensor that counts versions."""
        is_counted = write_counter(self.tensor) != self.version
        return is_counted or storage_span(self.tensor) != self.storage


@torch.no_grad()
def snapshots(sources: Mapping[int, tuple[str, torch.Tensor]]) -> dict[int, DeviceSource]:
    """Return copies of named tensors on their devices, made on the caller's streams.

    Cost: as of `flat_copies`.
    """
    copies = flat_copies([tensor.detach() for _, tensor in sources.values()])
    return {
        number: DeviceSource(name, copy.view(tensor.shape), None, (0, 0))
        for (number, (name, tensor)), copy in zip(sources.items(), copies, strict=True)
    }


def can_be_summed(tensor: torch.Tensor) -> bool:
    """Return True for a contiguous tensor that counts its versions and begins at a whole word."""
    return not tensor.is_inference() and tensor.data_ptr() % 8 == 0


class WordSums:
    """Sums of the words of some tensors: each of up to 256 words that are 1,021 words apart.

    Another content has the same sums only if none of them changes, modulo two to the power of 64.
    Words are 64 bits long, those of elements of 64 bits half as long: to negate such elements would
    change the sum of whole ones by nothing.

    Args:
        tensors: on one device, see `can_be_summed`.
        device: it.

    Cost: one pass over the tensors on the device, up to three launches a tensor; memory for one
    byte in 256 (of elements of 64 bits in 128).
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._parts = [_parts(each) for each in tensors]
        self._bounds = [0]
        for blocks, rest, tail in self._parts:
            count = len(blocks) * _ROW + (_ROW if len(rest) else 0) + len(tail)
            self._bounds.append(self._bounds[-1] + count)
        self._device = device

    @torch.no_grad()
    def take(self) -> torch.Tensor:
        """Return the sums of all tensors, taken on the current stream: one vector."""
        sums = torch.empty(self._bounds[-1], dtype=torch.int64, device=self._device)
        for (blocks, rest, tail), at in zip(self._parts, self._bounds, strict=False):
            if len(blocks):
                stop = at + len(blocks) * _ROW
                torch.sum(blocks, 1, dtype=torch.int64, out=sums[at:stop].view(-1, _ROW))
                at = stop
            if len(rest):
                torch.sum(rest, 0, dtype=torch.int64, out=sums[at : at + _ROW])
                at += _ROW
            if len(tail):
                sums[at : at + len(tail)] = tail
        return sums

    def differ(self, sums: torch.Tensor, others: torch.Tensor) -> list[int]:
        """Return the places of tensors whose sums differ; waits for the current stream."""
        if torch.equal(sums, others):
            return []
        different = (sums != others).cpu()
        spans = zip(self._bounds, self._bounds[1:], strict=False)
        return [place for place, span in enumerate(spans) if different[slice(*span)].any()]


class DeviceRows:
    """What a save reads later from one device.

    Args:
        copied: by place in the plan: what this rank writes; at least one here or in `compared`.
        compared: by row of its claims: what others write, and this rank reports the digest of.
        copier: of the device.

    The calling thread makes it and calls `hold_back`; another one calls `enqueue` and `finish`.
    """

    def __init__(
        self,
        copied: Mapping[int, DeviceSource],
        compared: Mapping[int, DeviceSource],
        copier: CudaCopier,
    ) -> None:
        self.copied, self.compared, self._copier = copied, compared, copier
        every = [*copied.values(), *compared.values()]
        self._watched = [each for each in every if each.version is not None]
        self._sums = WordSums([each.tensor for each in self._watched], every[0].tensor.device)
        self._lock = threading.Lock()
        self._written: list[str] | None = None
        self._before = self._sums.take()
        copier.begin()  # behind the sums
        self._done: torch.cuda.Event | None = None

    def enqueue(self, staging: Staging) -> dict[int, int]:
        """Put the copies on the side stream, and the sums behind them.

        Returns:
            Digests of what is compared, by row: copied here, and waited for.
        """
        with self._copier.on_stream():
            self._copier.copy(
                [staging.destinations[place] for place in self.copied],
                [each.tensor for each in self.copied.values()],
            )
            digests = {row: content_digest(each.tensor) for row, each in self.compared.items()}
            self._after = self._sums.take()
            self._done = self._copier.record()
        return digests

    def hold_back(self) -> None:
        """What the caller launches from here on runs behind the copies; after `enqueue`."""
        self._check()
        if self._done is not None:
            self._copier.hold_back(self._done)

    def finish(self) -> list[str]:
        """Wait for the copies; return the names of sources that were written before."""
        self.wait()
        written = self._check()
        with self._copier.on_stream():
            differ = self._sums.differ(self._before, self._after)
        return [*written, *(self._watched[place].name for place in differ)]

    def wait(self) -> None:
        """Wait for what `enqueue` has launched, if it has."""
        if self._done is not None:
            self._done.synchronize()

    def _check(self) -> list[str]:
        """Return the names of sources whose version has changed, as seen by the first call.

        What is written after the copies, or by what was held back, is not a fault.
        """
        with self._lock:
            if self._written is None:
                self._written = [each.name for each in self._watched if each.is_written]
            return self._written


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the bytes of a contiguous tensor, shared.

    Returns:
        (blocks, `_BLOCK`, `_ROW`) words, (rows, `_ROW`) words of the rest, (n,) bytes behind them.
    """
    data = tensor.view(-1).view(torch.uint8)
    word = torch.int32 if tensor.dtype.itemsize >= torch.int64.itemsize else torch.int64
    num_rows = len(data) // (_ROW * word.itemsize)
    at = num_rows * _ROW * word.itemsize
    rows = data[:at].view(word).view(num_rows, _ROW)
    num_blocks = num_rows // _BLOCK
    blocks = rows[: num_blocks * _BLOCK].view(num_blocks, _BLOCK, _ROW)
    return blocks, rows[num_blocks * _BLOCK :], data[at:]
