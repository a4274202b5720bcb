"""Copies between a GPU and the memory of its host, on a stream each way.

Enters: a tensor to copy, and one of its sizes to copy it to. Leaves: a `Copy`. Guarantees: a copy
begins when all that the computing stream was given before has been done: what it reads is made by
then, and nobody uses what it writes any more. Whatever the computing stream is given after `wait`
runs when the copy is made: so memory that is freed then may be taken by it at once. The process
waits for nothing.

torch has operators for this as well (`ao::offload` and others, from 2.13 on). Both ways share one
stream there, so that what leaves holds up what comes back, which a plan has not counted on; and
waiting frees what was copied, whoever else may hold it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Copy:
    """One that is under way.

    Attributes:
        made: on the stream that copies, behind it.
        device: the GPU.
    """

    made: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        """Let what the computing stream is given from now on run behind it."""
        torch.cuda.current_stream(self.device).wait_event(self.made)


def begin(way: str, to: Tensor, source: Tensor) -> Copy:
    """Begin a copy "out" or "in"; both tensors have to stay until it was waited for."""
    device = source.device if source.is_cuda else to.device
    copying = stream(way, device)
    copying.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(copying), torch.no_grad():
        to.copy_(source, non_blocking=True)
    return Copy(copying.record_event(), device)


@functools.cache
def stream(way: str, device: torch.device) -> torch.cuda.Stream:
    """The one that copies that way."""
    return torch.cuda.Stream(device)
