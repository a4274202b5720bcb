"""Copies between a GPU and the memory of its host, on a stream each way.

Enters: a tensor to copy, and one that lies alike to copy it to. Leaves: a `Copy`. Guarantees: a
copy begins when all that the computing stream was given before has been done: what it reads is made
by then, and nobody uses what it writes any more. Whatever the computing stream is given after
`wait` runs when the copy is made: so memory that is freed then may be taken by it at once. All that
a tensor spans is copied as it lies, in one piece, so no other memory is taken. Nothing here holds
up the process, but `finish`, and copies where the host's memory is not page-locked.

torch has operators for this as well (`ao::offload` and others, from 2.13 on). Both ways share one
stream there, so that what leaves holds up what comes back, which a plan has not counted on; and
waiting frees what was copied, whoever else may hold it.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from autoremat import _torch


@dataclass(frozen=True)
class Copy:
    """One that is under way.

    Attributes:
        made: on the stream that copies, behind it.
        device: the GPU.
        if_gone: lets the computing stream wait if what is written goes before somebody has waited,
            as where a step has failed.
    """

    made: torch.cuda.Event
    device: torch.device
    if_gone: weakref.finalize[[torch.cuda.Event], torch.UntypedStorage]

    def wait(self) -> None:
        """Let what the computing stream is given from now on run behind it."""
        self.if_gone.detach()
        torch.cuda.current_stream(self.device).wait_event(self.made)

    def finish(self) -> None:
        """Hold up the process until it is made."""
        self.if_gone.detach()
        self.made.synchronize()


def begin(way: str, to: Tensor, source: Tensor) -> Copy:
    """Begin a copy "out" or "in"; both tensors have to stay until it was waited for."""
    device = source.device if source.is_cuda else to.device
    copying, computing = stream(way, device), torch.cuda.current_stream(device)
    copying.wait_stream(computing)
    with torch.cuda.stream(copying), torch.no_grad():
        _whole(to).copy_(_whole(source), non_blocking=True)
    made = copying.record_event()
    if_gone = weakref.finalize(to.untyped_storage(), computing.wait_event, made)
    if_gone.atexit = False
    return Copy(made, device, if_gone)


def stream(way: str, device: torch.device) -> torch.cuda.Stream:
    """The one that copies that way; the current GPU's, if the device has no number."""
    number = torch.cuda.current_device() if device.index is None else device.index
    return _stream(way, number)


@functools.cache
def _stream(way: str, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(torch.device("cuda", number))


def _whole(tensor: Tensor) -> Tensor:
    """All that a tensor spans, in one row: what lies between its elements is copied as well.

    Between tensors with gaps torch copies by way of others that have none.
    """
    extent = int(_torch.extent(tensor.size(), tensor.stride()))
    return tensor.as_strided((extent,), (1,))
