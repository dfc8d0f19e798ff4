"""Memory that the kernel watches: whether anything has written to it since.

A version counter does not see a write through `.data`, NumPy or C++, and one that nobody sees would
be stored as if it had been there at the call. The kernel sees all of them: pages are
write-protected by `userfaultfd` in its asynchronous mode (Linux 6.7), in which a write is let
through at once and noted. Nothing is delivered to this process, so no thread has to answer.

Protecting a page costs what its entry in the page table costs: with pages of 4 kB half as much time
as a copy of the memory, with huge pages (2 MB) a five-hundredth of that. So memory that is watched
again and again is collapsed into huge pages first, once.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from holdfast.writer.memory import HUGE_NBYTES, collapse_pages

Span = tuple[int, int]
"""Addresses of the first byte, and of the one behind the last."""

PAGE_NBYTES = mmap.PAGESIZE

_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
"""Numbers of the system call."""
_USER_MODE_ONLY = 1  # what an unprivileged process may ask for; nothing is delivered anyway
_API, _API_CALL = 0xAA, 0xC018AA3F
_REGISTER, _UNREGISTER, _WRITEPROTECT = 0xC020AA00, 0x8010AA01, 0xC018AA06
_PAGEMAP_SCAN = 0xC0606610
_WP_UNPOPULATED, _WP_ASYNC = 1 << 13, 1 << 15
_MODE_WP, _WRITEPROTECT_ON = 2, 1
_CHECK_WPASYNC, _IS_WRITTEN = 2, 2


class WatchError(Exception):
    """The kernel cannot watch this memory, or cannot watch any."""


class WriteWatch:
    """Watches memory for writes of any kind.

    Raises:
        WatchError: the kernel cannot (older than 6.7, another system), or must not (a container).

    Cost: two descriptors.
    """

    def __init__(self) -> None:
        number = _USERFAULTFD.get(platform.machine())
        if number is None or not os.path.exists("/proc/self/pagemap"):
            raise WatchError("this system has no userfaultfd")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._pagemap = -1
        self._fd: int = self._libc.syscall(number, os.O_CLOEXEC | _USER_MODE_ONLY)
        if self._fd < 0:
            raise WatchError(f"userfaultfd: {os.strerror(ctypes.get_errno())}")
        self._registered: list[Span] = []
        self._collapsed: set[Span] = set()
        try:
            request = struct.pack("QQQ", _API, _WP_ASYNC | _WP_UNPOPULATED, 0)
            self._call(self._fd, _API_CALL, request)
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, WatchError) as error:
            self.close()
            raise WatchError(f"userfaultfd has no asynchronous protection: {error}") from error

    def begin(self, spans: Sequence[Span]) -> list[bool]:
        """Watch the whole pages inside of each span, from now on, until `end`.

        Pages around them may be protected, too, which nobody notices.

        Returns:
            For each span whether it is watched: only memory of this process alone is (no file, no
            device, not shared).

        Cost: with huge pages some microseconds for 100 MB, and a look at the process's mappings.
        The first time also a copy of the memory, by which the kernel makes huge pages of it.
        """
        maps = _mappings()
        starts = [each.start for each in maps]
        pieces: dict[int, list[Span]] = {}
        places: list[list[int]] = []
        for first, last in map(whole_pages, spans):
            number, at, touched = bisect_right(starts, first) - 1, first, []
            while at < last and 0 <= number < len(maps) and maps[number].start <= at:
                mapping = maps[number]
                if not (mapping.is_own and at < mapping.stop):
                    break
                stop = min(last, mapping.stop)
                pieces.setdefault(number, []).append((at, stop))
                touched.append(number)
                number, at = number + 1, stop
            places.append(touched if at >= last else [-1])
        refused = {-1} | {n for n, inside in pieces.items() if not self._protect(maps[n], inside)}
        return [refused.isdisjoint(touched) for touched in places]

    def _protect(self, mapping: _Mapping, pieces: list[Span]) -> bool:
        """Protect pieces of one mapping; return False if the kernel refuses."""
        limits = mapping.start, mapping.stop
        try:
            # The whole mapping: one that is registered in part is cut in two, and with it each huge
            # page across the cut.
            request = struct.pack("QQQQ", limits[0], limits[1] - limits[0], _MODE_WP, 0)
            self._call(self._fd, _REGISTER, request)
            self._registered.append(limits)
            for piece in _clustered(pieces):
                start, stop = _widened(piece, limits)
                self._make_huge((start, stop))
                request = struct.pack("QQQ", start, stop - start, _WRITEPROTECT_ON)
                self._call(self._fd, _WRITEPROTECT, request)
        except OSError:
            return False
        return True

    def is_written(self, span: Span) -> bool:
        """Return True if a whole page inside of the span was written since `begin`, or moved."""
        start, stop = whole_pages(span)
        if start >= stop:
            return False
        region = (ctypes.c_uint64 * 3)()
        request = struct.pack(
            "12Q", 96, _CHECK_WPASYNC, start, stop, 0, ctypes.addressof(region), 1, 1,
            0, _IS_WRITTEN, 0, _IS_WRITTEN,
        )  # fmt: skip
        try:
            num_regions: int = fcntl.ioctl(self._pagemap, _PAGEMAP_SCAN, bytearray(request))
            return num_regions > 0
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOMEM, errno.EFAULT):
                return True  # no longer the memory that was registered
            raise

    def end(self) -> None:
        """Watch nothing any more; writes cost nothing then. Some of it may be unmapped."""
        for start, stop in self._registered:
            with suppress(OSError):
                self._call(self._fd, _UNREGISTER, struct.pack("QQ", start, stop - start))
        self._registered = []

    def close(self) -> None:
        """Give the descriptors back."""
        for descriptor in (self._fd, self._pagemap):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd = self._pagemap = -1

    def _make_huge(self, span: Span) -> None:
        """Ask for huge pages, once for each span; a refusal costs time, nothing else."""
        start = -(-span[0] // HUGE_NBYTES) * HUGE_NBYTES
        stop = span[1] // HUGE_NBYTES * HUGE_NBYTES
        if start >= stop or (start, stop) in self._collapsed:
            return
        self._collapsed.add((start, stop))
        self._libc.madvise(start, stop - start, mmap.MADV_HUGEPAGE)
        collapse_pages(start, stop)

    @staticmethod
    def _call(descriptor: int, request: int, argument: bytes) -> None:
        fcntl.ioctl(descriptor, request, bytearray(argument))


def whole_pages(span: Span) -> Span:
    """Return the whole pages inside of a span; empty, or less, if there are none."""
    start, stop = span
    return -(-start // PAGE_NBYTES) * PAGE_NBYTES, stop // PAGE_NBYTES * PAGE_NBYTES


class _Mapping(NamedTuple):
    """One line of this process's memory map."""

    start: int
    stop: int
    is_own: bool
    """True for writable memory that is private and no file."""


def _clustered(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, those less than a huge page apart as one."""
    clusters: list[Span] = []
    for start, stop in sorted(spans):
        if clusters and start - clusters[-1][1] < HUGE_NBYTES:
            clusters[-1] = clusters[-1][0], max(clusters[-1][1], stop)
        else:
            clusters.append((start, stop))
    return clusters


def _widened(span: Span, limits: Span) -> Span:
    """Return a span up to the next bounds of huge pages, within the limits."""
    start = max(span[0] // HUGE_NBYTES * HUGE_NBYTES, limits[0])
    stop = min(-(-span[1] // HUGE_NBYTES) * HUGE_NBYTES, limits[1])
    return start, stop


def _mappings() -> list[_Mapping]:
    """Return this process's mappings, in order of address."""
    maps = []
    with open("/proc/self/maps", "rb") as lines:
        for line in lines:
            fields = line.split(None, 5)
            start, _, stop = fields[0].partition(b"-")
            is_own = fields[1][:2] == b"rw" and fields[1][3:4] == b"p" and fields[4] == b"0"
            maps.append(_Mapping(int(start, 16), int(stop, 16), is_own))
    return maps
