"""Copies between a GPU and its host: what runs behind what, told by clocks of streams."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch

from autoremat.host import operators, streams

DEVICE = torch.device("cuda", 0)
Clock = dict[str, int]  # by stream, how much of it has been done for certain


@dataclass
class Work:
    """Something that a stream is given, and what was done for certain before it began."""

    stream: str
    number: int
    seen: Clock

    def is_behind(self, other: Work) -> bool:
        """Whether it cannot begin before the other has ended."""
        return self.seen.get(other.stream, 0) >= other.number


class Stream:
    """A stand-in for CUDA's: a clock of all that was done before what it is given next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {}

    def run(self) -> Work:
        """Something new on it."""
        seen = dict(self.clock)
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return Work(self.name, self.clock[self.name], seen)

    def record_event(self) -> Clock:
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        for name, number in event.items():
            self.clock[name] = max(number, self.clock.get(name, 0))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


@dataclass
class Gpu:
    """Its streams, and the one that is given work now."""

    computing: Stream = field(default_factory=lambda: Stream("computing"))
    made: list[Stream] = field(default_factory=list)
    current: Stream | None = None

    def new_stream(self, _device: torch.device) -> Stream:
        self.made.append(Stream(f"copies {len(self.made)}"))
        return self.made[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Storage:
    """What a tensor lies in."""


@dataclass
class Memory:
    """A tensor on the GPU, or one of its host."""

    gpu: Gpu
    is_cuda: bool
    device: torch.device = DEVICE
    made: Work | None = None
    storage: Storage = field(default_factory=Storage)

    @property
    def copied(self) -> Work:
        """The copy into it."""
        assert self.made is not None
        return self.made

    @property
    def data(self) -> Memory:
        return self

    def data_ptr(self) -> int:
        return id(self)

    def size(self) -> tuple[int, ...]:
        return (2, 3)

    def stride(self) -> tuple[int, ...]:
        return (4, 1)

    def untyped_storage(self) -> Storage:
        return self.storage

    def as_strided(self, size: tuple[int, ...], stride: tuple[int, ...]) -> Memory:
        assert (size, stride) == ((7,), (1,))  # with the gap between its rows
        return self

    def copy_(self, _source: Memory, *, non_blocking: bool) -> None:
        assert non_blocking
        assert self.gpu.current is not None
        self.made = self.gpu.current.run()


def begin(way: str, to: Memory, source: Memory) -> None:
    """As the operators do."""
    operators._begin(way, to, source)  # type: ignore[arg-type]


def wait(to: Memory, source: Memory) -> None:
    """As the operators do."""
    operators._wait(to, source)  # type: ignore[arg-type]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """One that is not here."""
    found = Gpu()
    monkeypatch.setattr(torch.cuda, "Stream", found.new_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: found.computing)
    monkeypatch.setattr(torch.cuda, "stream", found.on)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    streams._stream.cache_clear()
    yield found
    streams._stream.cache_clear()
    operators._under_way.clear()


def test_what_leaves_is_made_before_and_kept_until_it_was_waited_for(gpu: Gpu) -> None:
    """Between the two, computing waits for nothing."""
    x, host = Memory(gpu, is_cuda=True), Memory(gpu, is_cuda=False)
    made = gpu.computing.run()
    begin("out", host, x)
    beside = gpu.computing.run()
    wait(host, x)
    written_over = gpu.computing.run()
    assert host.copied.is_behind(made)
    assert not beside.is_behind(host.copied)
    assert written_over.is_behind(host.copied)


def test_what_comes_back_has_left_before_and_is_read_behind_the_copy(gpu: Gpu) -> None:
    """Nor is it written into memory that somebody still uses."""
    x, host, back = (Memory(gpu, is_cuda=cuda) for cuda in (True, False, True))
    begin("out", host, x)
    wait(host, x)
    used_before = gpu.computing.run()
    begin("in", back, host)
    beside = gpu.computing.run()
    wait(back, host)
    read = gpu.computing.run()
    assert back.copied.is_behind(host.copied)
    assert back.copied.is_behind(used_before)
    assert not beside.is_behind(back.copied)
    assert read.is_behind(back.copied)


def test_memory_that_nobody_waited_for_is_used_behind_the_copy_into_it(gpu: Gpu) -> None:
    """As where a step fails between the two, and the next one is given its memory."""
    back = Memory(gpu, is_cuda=True)
    begin("in", back, Memory(gpu, is_cuda=False))
    copied = back.copied
    assert not gpu.computing.run().is_behind(copied)
    back.storage = Storage()  # the old one is gone
    assert gpu.computing.run().is_behind(copied)


def test_the_process_itself_waits_where_it_has_to() -> None:
    """For what only the GPU waits for otherwise."""
    made, if_gone = mock.Mock(), mock.Mock()
    streams.Copy(made, DEVICE, if_gone).finish()
    made.synchronize.assert_called_once_with()
    if_gone.detach.assert_called_once_with()


def test_copies_of_one_way_follow_each_other_and_those_of_both_do_not(gpu: Gpu) -> None:
    """As a plan has counted on; a GPU with a number, and the current one without, are the same."""
    first, second, back = (Memory(gpu, is_cuda=cuda) for cuda in (False, False, True))
    begin("out", first, Memory(gpu, is_cuda=True))
    begin("out", second, Memory(gpu, is_cuda=True, device=torch.device("cuda")))
    begin("in", back, Memory(gpu, is_cuda=False))
    assert second.copied.is_behind(first.copied)
    assert not back.copied.is_behind(first.copied)
    assert len(gpu.made) == 2


def test_all_that_a_tensor_spans_is_copied_in_one_row() -> None:
    """Also where a compiler has left gaps, between which torch would copy by other memory."""
    x = torch.full((21,), 7.0).as_strided((4, 3), (5, 1)).copy_(torch.arange(12.0).view(4, 3))
    to = torch.zeros(21).as_strided((4, 3), (5, 1))
    assert streams._whole(x).is_contiguous()
    streams._whole(to).copy_(streams._whole(x))
    assert torch.equal(to, x)
    assert streams._whole(x).numel() == 18


def test_memory_is_gone_with_the_last_tensor_in_it_and_not_before() -> None:
    """What tells that nobody will wait any more."""
    gone: list[int] = []
    x = torch.zeros(8)
    weakref.finalize(x.untyped_storage(), gone.append, 1)
    part = x[4:]
    del x
    gc.collect()
    assert not gone
    del part
    assert gone
