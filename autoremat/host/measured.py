"""How fast copies to where values wait are, and back: measured by such copies.

Enters: a folder on a disk, or a GPU that is here. Leaves: a `Link`. Guarantees: what is measured is
what a plan's copies do: a value that comes back gets new memory, and of a GPU both ways are busy.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable

import torch
from autoremat_solver import Link

from autoremat.errors import OffloadError
from autoremat.host import streams
from autoremat.host.disk import Disk, forget_files
from autoremat.host.operators import OFFLOAD, OFFLOADED, RELOAD, RELOADED
from autoremat.host.pinned import pinned_like

VALUE_NBYTES = 4 << 20  # copied to a file and back: as large as values of a step on a CPU are
SAMPLE_NBYTES = 32 << 20  # copied from a GPU and back
LEAST_NBYTES = 1 << 20  # of either, where there is no room for more
SMALL_NBYTES = 4096  # of which a copy takes as long as any
_BESIDE = 4  # copies to a file or back, beside which is computed
_SIZE = 256  # of the matrices of which products are computed then: they stay in a core's cache
_ROUNDS = 16
_FEWEST_ROUNDS, _LONG_S = 4, 3.0  # of what computing loses, where copies are so slow
_FILLS = 200  # of memory, which keep a GPU busy for a millisecond
_SOON_S = 0.002  # by when a small copy is made


def disk_link(disk: Disk) -> Link:
    """How fast copies from the CPU to files in a folder and back are.

    To and from files that were written before, as those of all steps but the first are.

    Raises:
        OffloadError: if no file can be made there.
    """
    nbytes = VALUE_NBYTES
    try:
        while True:
            try:
                return _Files(disk, nbytes).link(_Files(disk, SMALL_NBYTES))
            except OffloadError:
                nbytes //= 2
                if nbytes < LEAST_NBYTES:
                    raise
    finally:
        forget_files()  # those of a step are no more than it needs


class _Files:
    """A value on the CPU, and its copy in a file."""

    def __init__(self, disk: Disk, nbytes: int) -> None:
        self._nbytes = nbytes
        self._value = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        self._folder = disk.folder
        self._copy = self._begin_out()()

    def link(self, small: _Files) -> Link:
        """How fast copies of these are, beside those of next to nothing."""
        small_us = max(_quiet_us(small.out), _quiet_us(small.back))
        out_us, in_us = (max(0.1, _quiet_us(way) - small_us) for way in (self.out, self.back))
        return Link(
            *(self._nbytes / out_us, self._nbytes / in_us),
            latency_us=small_us,
            ask_us=small.ask_us(),
            slowdown=self._slowdown(small_us + out_us, small_us + in_us),
        )

    def _slowdown(self, out_us: float, in_us: float) -> float:
        """Of the time of copies, what computing loses beside them.

        With a core for each that is next to nothing.

        Args:
            out_us: what a copy to a file takes.
            in_us: what a copy back takes.
        """
        matrix = torch.ones(_SIZE, _SIZE, dtype=torch.float32, device="cpu")
        result = torch.empty_like(matrix)
        product_us = _quiet_us(lambda: torch.mm(matrix, matrix, out=result))

        def compute_us(count: int) -> float:
            began = time.perf_counter()
            for _ in range(count):
                torch.mm(matrix, matrix, out=result)
            return 1e6 * (time.perf_counter() - began)

        shares = []
        for begin, takes_us in ((self._begin_out, out_us), (self._begin_back, in_us)):
            count = math.ceil(2 * _BESIDE * takes_us / product_us)
            shares.append(_lost_share(begin, takes_us, functools.partial(compute_us, count)))
        return statistics.mean(shares)

    def _begin_out(self) -> Callable[[], torch.Tensor]:
        copy = OFFLOAD(self._value, self._folder)
        return lambda: OFFLOADED(copy, self._value)

    def _begin_back(self) -> Callable[[], torch.Tensor]:
        back = RELOAD(self._copy, self._value.device)
        return lambda: RELOADED(back, self._copy)

    def out(self) -> None:
        """A copy to a file, waited for."""
        self._begin_out()()

    def back(self) -> None:
        """A copy back, waited for."""
        self._begin_back()()

    def ask_us(self) -> float:
        """To ask for a copy, and later to find it made."""
        taken = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            copy = OFFLOAD(self._value, self._folder)
            asked = time.perf_counter()
            time.sleep(_SOON_S)
            waits = time.perf_counter()
            OFFLOADED(copy, self._value)
            taken.append(asked - began + time.perf_counter() - waits)
        return 1e6 * _quiet(taken)


def _quiet_us(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return max(0.1, 1e6 * _quiet(times))


def _quiet(times: list[float]) -> float:
    """Of a round that something else has not spoilt, nor luck: a quarter of them were faster."""
    return sorted(times)[len(times) // 4]


def _lost_share(
    begin: Callable[[], Callable[[], object]], takes_us: float, compute_us: Callable[[], float]
) -> float:
    """What computing loses beside copies, of the time for which they are made meanwhile."""
    alone_us: list[float] = []
    beside_us, left_us = [], []
    until_s = time.perf_counter() + _LONG_S
    while len(alone_us) < _ROUNDS:
        if len(alone_us) >= _FEWEST_ROUNDS and time.perf_counter() > until_s:
            break
        alone_us.append(compute_us())
        began = time.perf_counter()
        waits = [begin() for _ in range(_BESIDE)]
        left_us.append(_BESIDE * takes_us - 1e6 * (time.perf_counter() - began))
        beside_us.append(compute_us())
        for wait in waits:
            wait()
    lost_us = _quiet(beside_us) - _quiet(alone_us)
    return max(0.0, lost_us / max(_quiet(left_us), takes_us))


def gpu_link(device: torch.device) -> Link:
    """How fast copies from a GPU to its host and back are, both ways at once, measured now.

    Raises:
        torch.OutOfMemoryError: if the GPU has no room for any.
    """
    nbytes = SAMPLE_NBYTES
    while True:
        try:
            small, large = _Sample(SMALL_NBYTES, device), _Sample(nbytes, device)
            latency_us = max(small.copies_us())
            break
        except torch.OutOfMemoryError:
            nbytes //= 2
            if nbytes < LEAST_NBYTES:
                raise
    out_us, in_us = (max(0.1, taken_us - latency_us) for taken_us in large.copies_us())
    return Link(nbytes / out_us, nbytes / in_us, latency_us, is_pinned=large.is_pinned)


class _Sample:
    """Bytes on a GPU and its host, to be copied."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._here = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._there = [pinned_like(one) for one in self._here]
        self._device = self._here[0].device  # with its number
        self._busy = torch.empty(max(nbytes, LEAST_NBYTES), dtype=torch.uint8, device=device)
        self.is_pinned = self._there[0].is_pinned()

    def copies_us(self) -> tuple[float, float]:
        """What a copy out and one in take, each while the other is under way."""
        copies = (("out", self._there[0], self._here[0]), ("in", self._here[1], self._there[1]))
        rounds = []
        for _ in range(_ROUNDS):
            torch.cuda.synchronize(self._device)
            with torch.cuda.device(self._device):
                self._be_busy()
                spans = [self._timed(*copy) for copy in copies]
            torch.cuda.synchronize(self._device)
            rounds.append([1e3 * begun.elapsed_time(made) for begun, made, _ in spans])
            for *_, copy in spans:
                copy.wait()
        out_us, in_us = (statistics.median(times) for times in zip(*rounds, strict=True))
        return out_us, in_us

    def _be_busy(self) -> None:
        """Let the GPU compute until both copies have been asked for: else it would wait for us."""
        for _ in range(_FILLS):
            self._busy.zero_()

    def _timed(
        self, way: str, to: torch.Tensor, source: torch.Tensor
    ) -> tuple[torch.cuda.Event, torch.cuda.Event, streams.Copy]:
        """Events before and behind a copy, and that."""
        begun, made = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        copying = streams.stream(way, self._device)
        copying.wait_stream(torch.cuda.current_stream(self._device))
        copying.record_event(begun)
        copy = streams.begin(way, to, source)
        copying.record_event(made)
        return begun, made, copy
