"""One training step as Inductor wrote it for a GPU, run on the CPU.

Enters: a program, and values of its inputs. Leaves: results, gradients, inputs as they are left,
and what was asked of the memory. The wrapper is the generated text as it stands: where it says
`empty_strided_cuda` it gets `Memory`, its kernels run in Triton's interpreter, its library calls as
`OnCpu` runs them. It wants a process of its own, in which a GPU stands in.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch.utils._python_dispatch import _disable_current_modes

from tests.elsewhere.executed.interpreter import prepare
from tests.elsewhere.executed.libraries import OnCpu
from tests.elsewhere.executed.memory import Memory
from tests.elsewhere.executed.plans import Program
from tests.elsewhere.executed.work import Ran

_RUNS = itertools.count()


def run_step(program: Program, values: Sequence[Tensor]) -> Ran:
    """Forward, the loss's gradient, backward.

    Args:
        program: whose only differentiable output is a loss.
        values: of its inputs, in order; copied.
    """
    prepare()
    memory = Memory()
    mode = OnCpu(memory)
    inputs = {
        name: value.detach().clone() for name, value in zip(program.inputs, values, strict=True)
    }
    forward, backward = program.forward, program.backward
    with torch.no_grad(), _as_on_cuda(memory), mode:
        results = _called(forward.source, [inputs[name] for name in forward.inputs])
        outputs = results[: program.outputs]
        saved = dict(zip(forward.results, results, strict=True))
        with _disable_current_modes():  # copies that the memory does not see
            crossing = {name: one.clone() for name, one in saved.items() if isinstance(one, Tensor)}
        named = {name: saved[name] for name in backward.inputs if name != program.tangent}
        del saved, results
        of_loss = memory.empty_strided((), (), torch.float32).fill_(1)
        named[program.tangent] = of_loss
        given = [named.pop(name) for name in backward.inputs]
        found = _called(backward.source, given)
        del of_loss  # `Tensor.backward` holds it until then
    gradients = dict(zip(program.inputs, found, strict=True))
    del found
    tensors = {name: value for name, value in gradients.items() if isinstance(value, Tensor)}
    events = list(memory.events)  # before what is returned is gone
    copied = mode.copies.made_nbytes
    return Ran(outputs, tensors, inputs, memory.peak_nbytes, events, mode.called, crossing, copied)


def _called(source: str, given: list[Any]) -> list[Any]:
    """The wrapper's results; what it is given is its own."""
    # Loaded anew each time: code that ran before would ask the memory of that run.
    return list(PyCodeCache.load(f"{source}\n# run {next(_RUNS)}\n").call(given))


@contextlib.contextmanager
def _as_on_cuda(memory: Memory) -> Iterator[None]:
    """While open, generated wrappers find the memory that they ask for."""
    guards, cuda = torch._C._dynamo.guards, torch.cuda
    with (
        mock.patch.object(guards, "_empty_strided_cuda", memory.empty_strided),
        mock.patch.object(cuda, "_DeviceGuard", return_value=contextlib.nullcontext()),
    ):
        yield
