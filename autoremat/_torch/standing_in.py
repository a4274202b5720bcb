"""A GPU that is not here, as far as tracing and Inductor's code generation ask for it.

Enters: what is known of the GPU. Leaves: a context in which torch and triton answer as if it were
here. Guarantees: nothing runs on it, nothing is compiled, and when the context closes every name
stands as it stood and every answer that torch has remembered meanwhile is forgotten. It holds for
the whole process, so it is opened in one that does nothing else (`elsewhere.apart`).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo.device_interface
import torch.cuda.random
from torch._inductor import utils as inductor_utils
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import fake_tensor
from torch.utils import _triton

__all__ = ["AbsentGpu", "autocast_on_cpu", "gpu_standing_in", "has_triton_package"]

_WARP = 32
_OF_WORKER = ("get_device_properties", "current_device", "set_device")
_OF_INTERFACE = (
    *(*_OF_WORKER, "is_available", "device_count", "synchronize", "is_bf16_supported"),
    *("exchange_device", "maybe_exchange_device"),
)
_CUDA = "13.0"  # of the runtime that is pretended


def has_triton_package() -> bool:
    """Whether triton is installed, which writes a GPU's kernels; it is not imported for that."""
    return importlib.util.find_spec("triton") is not None


@contextlib.contextmanager
def autocast_on_cpu() -> Iterator[None]:
    """While open, graphs that are traced enter autocast for the CPU where they say CUDA."""
    enter = torch.amp._enter_autocast

    def _enter_autocast(device: str, dtype: torch.dtype | None = None, *rest: Any) -> Any:
        if device != "cuda":
            return enter(device, dtype, *rest)
        return enter("cpu", torch.get_autocast_dtype(device) if dtype is None else dtype, *rest)

    with mock.patch.object(torch.amp, "_enter_autocast", _enter_autocast):
        yield


@dataclass(frozen=True)
class AbsentGpu:
    """What is known of a GPU that is not here.

    Attributes:
        name: as torch would give it.
        capability: major and minor.
        multiprocessors: how many.
        memory_nbytes: of the device.
        shared_nbytes: shared memory that a block may opt in to.
        threads: that one multiprocessor holds.
        cache_nbytes: of the second level.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_nbytes: int
    shared_nbytes: int
    threads: int
    cache_nbytes: int

    @property
    def architecture(self) -> int:
        """The capability as one number, which triton and torch's generated code go by."""
        major, minor = self.capability
        return 10 * major + minor


@contextlib.contextmanager
def gpu_standing_in(gpu: AbsentGpu) -> Iterator[None]:
    """While open, torch and triton are told of this GPU.

    Raises:
        ImportError: if triton is not installed, or is one that torch cannot be used with.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    device = torch.device("cuda", 0)
    active = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", gpu.architecture, _WARP),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: device,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_answers)
        for owner, found in _replaced_names(gpu):
            for key, value in found.items():
                if hasattr(owner, key):
                    stack.enter_context(mock.patch.object(owner, key, value))
        stream = mock.patch.object(
            torch._C, "_cuda_getCurrentRawStream", create=True, return_value=0
        )
        stack.enter_context(stream)
        previous = getattr(driver, "_active", None)
        driver.set_active(active)
        stack.callback(setattr, driver, "_active", previous)
        _forget_answers()
        yield


def _replaced_names(gpu: AbsentGpu) -> list[tuple[Any, dict[str, Any]]]:
    """Where torch asks for a GPU, and what it finds there instead; not every torch has each."""
    answers = _answers(gpu)
    of_interface: dict[str, Any] = {
        name: staticmethod(answers.get(name) or answers[f"_{name}"]) for name in _OF_INTERFACE
    }
    of_interface["get_compute_capability"] = staticmethod(lambda *_: gpu.architecture)
    interface = torch._dynamo.device_interface.CudaInterface
    return [
        (torch.cuda, answers),
        (torch.cuda.random, {key: answers[key] for key in ("get_rng_state", "set_rng_state")}),
        (interface, of_interface),
        (interface.Worker, {name: of_interface[name] for name in _OF_WORKER}),
        (torch.version, {"cuda": _CUDA}),
        (torch.Tensor, _UNGUARDED),
        (torch._C, _CONVOLUTIONS),
        (fake_tensor, {"init_gpu_context": lambda _device: None}),
        (_triton, {"triton_hash_with_backend": lambda: gpu.name}),
    ]


def _answers(gpu: AbsentGpu) -> dict[str, Callable[..., Any]]:
    """What `torch.cuda` says of the GPU."""
    properties = _properties(gpu)
    return {
        "is_available": lambda: True,
        "_is_compiled": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_exchange_device": lambda *_: 0,
        "_maybe_exchange_device": lambda *_: 0,
        "set_device": lambda *_: None,
        "_lazy_init": lambda: None,
        "synchronize": lambda *_: None,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: gpu.capability,
        "get_device_name": lambda *_: gpu.name,
        "current_stream": lambda *_: SimpleNamespace(cuda_stream=0),
        "is_bf16_supported": lambda *_, **__: gpu.capability[0] >= 8,
        "get_rng_state": _no_state,
        "set_rng_state": lambda *_: None,
    }


def _properties(gpu: AbsentGpu) -> SimpleNamespace:
    """As `torch.cuda.get_device_properties` has them."""
    major, minor = gpu.capability
    return SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        multi_processor_count=gpu.multiprocessors,
        total_memory=gpu.memory_nbytes,
        warp_size=_WARP,
        max_threads_per_multi_processor=gpu.threads,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=gpu.shared_nbytes,
        shared_memory_per_multiprocessor=gpu.shared_nbytes + 1024,
        L2_cache_size=gpu.cache_nbytes,
        gcnArchName="",
        is_integrated=0,
    )


_GET_ITEM = torch.Tensor.__getitem__

# Methods that a build without CUDA cannot begin, since they switch to the tensor's device before
# they dispatch; by the operator they do not. That tensors had an item of Python's own stays with
# CPython's slots in this process: `torch.tensor` refuses lists of tensors without dimensions then.
_UNGUARDED = {
    "__invert__": lambda self: torch.bitwise_not(self),
    "copy_": lambda self, source, non_blocking=False: torch.ops.aten.copy_.default(
        self, source, non_blocking
    ),
    "contiguous": lambda self, memory_format=torch.contiguous_format: (
        torch.ops.aten.contiguous.default(self, memory_format=memory_format)
    ),
    "__getitem__": lambda self, index: (
        torch.ops.aten.select.int(self, 0, index) if type(index) is int else _GET_ITEM(self, index)
    ),
}


def _layout_of_convolution(
    given: torch.Tensor, weight: torch.Tensor, _backend: Any
) -> torch.memory_format:
    """As cuDNN lays out its result: as one of its inputs lies, if that has channels last."""
    last = torch.channels_last if given.dim() == 4 else torch.channels_last_3d
    tensors = (given, weight) if given.dim() in (4, 5) else ()
    if any(tensor.is_contiguous(memory_format=last) for tensor in tensors):
        return last
    return torch.contiguous_format


# How a fake convolution lies, which is asked of a build that has no cuDNN.
_CONVOLUTIONS = {"_conv_determine_backend_memory_format": _layout_of_convolution}


def _no_state(*_: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)


def _forget_answers() -> None:
    """What torch has remembered of the devices that it has found."""
    for owner in (_triton, inductor_utils):
        for name in _REMEMBERED:
            _forget(getattr(owner, name, None))
    _forget(DeviceProperties.create)


def _forget(function: Callable[..., Any] | None) -> None:
    clear = getattr(function, "cache_clear", None)
    if clear is not None:
        clear()


_REMEMBERED = (
    "has_triton",
    "has_triton_tma",
    "has_triton_tma_device",
    "has_triton_stable_tma_api",
    "has_triton_experimental_host_tma",
    "has_triton_tensor_descriptor_host_tma",
    "has_datacenter_blackwell_tma_device",
    "_device_supports_tma",
    "triton_backend",
    "triton_hash_with_backend",
    "get_gpu_type",
    "is_big_gpu",
    "get_max_num_sms",
    "using_b200",
    "get_device_tflops",
    "get_gpu_dram_gbps",
)
