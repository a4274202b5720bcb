"""The attention that a GPU takes, where the graph is traced without one.

Enters: a Dynamo graph and the GPU's compute capability. Leaves: the same graph, in which each
`scaled_dot_product_attention` calls the operator that torch takes on that GPU for these types,
sizes and masks: cuDNN's, flash, memory-efficient, or products and a softmax, under autocast for
CUDA where the model asks for that. The rules are those of
torch 2.13 (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`: `priority_order`, `can_use_*`;
`attention.cpp`: what is padded and expanded before a kernel), for dense tensors. What depends on
the build is as in torch's own wheels: flash and cuDNN are compiled in, cuDNN is newer than 9.15.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)
_OLDEST, _NEWEST = (8, 0), (12, 1)  # compute capabilities of the flash and the cuDNN kernels
_PREFERS_CUDNN = (9, 10)  # major ones
_CUDNN_HEAD_DIM, _CUDNN_MIXED_HEAD_DIMS = 128, (192, 128)
_FLASH_HEAD_DIM = 256
_SMALL_SHARED_MEMORY = (((8, 6), (8, 9)), ((12, 0), (12, 1)))
_SMALL_HEAD_DIM, _LARGE_HEAD_DIM = 192, 224  # between them flash has no backward there
_DROPOUT_STEPS = 16.0  # of cuDNN's probabilities
_FLASH_ALIGNMENT, _BIAS_ALIGNMENT = 8, 16


def with_attention_of(module: fx.GraphModule, capability: tuple[int, int]) -> None:
    """Let a Dynamo graph, regions inside it included, take the attention of a GPU."""
    attention = _attention_on(capability)
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.op == "call_function" and node.target is F.scaled_dot_product_attention:
                    node.target = attention
            part.recompile()


def _attention_on(capability: tuple[int, int]) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        place = query.device.type
        if torch.is_autocast_enabled(place):  # as it is for the operator itself
            narrow = torch.get_autocast_dtype(place)
            query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(narrow)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            least = torch.scalar_tensor(-math.inf, dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, 0.0, least)
        given = Attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa=enable_gqa
        )
        with torch.autocast(place, enabled=False):
            return _KERNELS[given.kernel_on(capability)](given)

    return scaled_dot_product_attention


@dataclass(frozen=True)
class Attention:
    """What attention is given.

    Attributes:
        query: (batch, heads, tokens, size); for the choice of a kernel, only sizes, strides and
            types matter, as of the others.
        key: likewise.
        value: likewise.
        mask: added to the scores.
        dropout_p: of the probabilities.
        is_causal: whether each token sees those before it only.
        scale: of the scores; None for the usual one.
        enable_gqa: whether several heads may share a key and a value.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def kernel_on(self, capability: tuple[int, int]) -> str:
        """Which kernel torch takes on a GPU: "cudnn", "flash", "efficient" or "math"."""
        order = ["flash", "efficient"]
        if capability[0] in _PREFERS_CUDNN:
            order.insert(0, "cudnn")
        elif not torch.backends.cuda.math_sdp_enabled():  # which comes before it, and always can
            order.append("cudnn")
        return next((kernel for kernel in order if _CAN[kernel](self, capability)), "math")

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    def is_narrow(self, capability: tuple[int, int]) -> bool:
        """Whether all are of one type of two bytes that the GPU computes with."""
        types = _HALVES if capability >= _OLDEST else (torch.float16,)
        return self.query.dtype in types and len({tensor.dtype for tensor in self.tensors}) == 1

    def has_heads(self, *, shared: bool) -> bool:
        """Four dimensions, one batch, and as many heads; or, if shared, a number that divides."""
        query, key, value = self.tensors
        if not query.dim() == key.dim() == value.dim() == 4:
            return False
        is_empty = 0 in (query.shape[2], key.shape[2])
        if is_empty or not query.shape[0] == key.shape[0] == value.shape[0]:
            return False
        heads = {key.shape[1], value.shape[1]}
        if heads == {query.shape[1]}:
            return True
        return shared and len(heads) == 1 and query.shape[1] % key.shape[1] == 0

    @property
    def lies_row_by_row(self) -> bool:
        """Whether the elements of a head follow each other."""
        return all(tensor.shape[-1] == 1 or tensor.stride(-1) == 1 for tensor in self.tensors)


def _can_cudnn(given: Attention, capability: tuple[int, int]) -> bool:
    sizes, mask = (given.query.shape[-1], given.value.shape[-1]), given.mask
    may_vary = torch.is_deterministic_algorithms_warn_only_enabled()
    is_mixed = capability[0] in _PREFERS_CUDNN and sizes == _CUDNN_MIXED_HEAD_DIMS
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and (may_vary or not torch.are_deterministic_algorithms_enabled())
        and (mask is None or (mask.dim() in (2, 4) and not mask.requires_grad))
        and given.is_narrow(capability)
        and _OLDEST <= capability <= _NEWEST
        and (given.dropout_p * _DROPOUT_STEPS).is_integer()
        and given.has_heads(shared=given.enable_gqa)
        and given.lies_row_by_row
        and (is_mixed or all(size <= _CUDNN_HEAD_DIM and size % 8 == 0 for size in sizes))
        and given.key.shape[-2] != 1
        and not (given.dropout_p and given.query.shape[-2] == 1)
    )


def _can_flash(given: Attention, capability: tuple[int, int]) -> bool:
    query, key, value = given.tensors
    size = query.shape[-1]
    is_small = any(low <= capability <= high for low, high in _SMALL_SHARED_MEMORY)
    trains = any(tensor.requires_grad for tensor in given.tensors)
    has_backward = size <= _SMALL_HEAD_DIM or (not given.dropout_p and size > _LARGE_HEAD_DIM)
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and given.mask is None
        and size == key.shape[-1] == value.shape[-1]
        and size <= _FLASH_HEAD_DIM
        and _OLDEST <= capability <= _NEWEST
        and (has_backward or not (is_small and trains))
        and not (given.is_causal and query.shape[-2] != key.shape[-2])
        and given.is_narrow(capability)
        and given.has_heads(shared=given.enable_gqa)
        and given.lies_row_by_row
    )


def _can_efficient(given: Attention, capability: tuple[int, int]) -> bool:
    query, key, value = given.tensors
    types = (*_HALVES, torch.float32) if capability >= _OLDEST else (torch.float16, torch.float32)
    is_half = query.dtype in _HALVES
    has_tensor_cores = capability >= _OLDEST or (capability >= (7, 0) and is_half)
    alignment = 4 if capability >= _OLDEST else 1
    if has_tensor_cores:
        alignment = max(alignment, 128 // (16 if is_half else 32))
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in types
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % alignment == 0
        and value.shape[-1] % alignment == 0
        and given.has_heads(shared=False)
        and all(tensor.stride(-1) == 1 for tensor in given.tensors)
    )


_CAN = {"cudnn": _can_cudnn, "flash": _can_flash, "efficient": _can_efficient}


def _cudnn(given: Attention) -> Tensor:
    found: tuple[Tensor, ...] = aten._scaled_dot_product_cudnn_attention(
        *given.tensors, given.mask, True, given.dropout_p, given.is_causal, scale=given.scale
    )
    return found[0]


def _flash(given: Attention) -> Tensor:
    size, tensors = given.query.shape[-1], given.tensors
    more = -size % _FLASH_ALIGNMENT
    padded = [F.pad(tensor, (0, more)) for tensor in tensors] if more else tensors
    scale = 1.0 / math.sqrt(size) if given.scale is None else given.scale
    found: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention(
        *padded, given.dropout_p, given.is_causal, scale=scale
    )
    return found[0][..., :size] if more else found[0]


def _efficient(given: Attention) -> Tensor:
    query, key, _ = given.tensors
    mask = given.mask
    if mask is not None:
        more = -mask.shape[-1] % _BIAS_ALIGNMENT
        if more:
            mask = F.pad(mask, (0, more))[..., : mask.shape[-1]]
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    found: tuple[Tensor, ...] = aten._scaled_dot_product_efficient_attention(
        *given.tensors, mask, True, given.dropout_p, given.is_causal, scale=given.scale
    )
    return found[0]


def _math(given: Attention) -> Tensor:
    found: tuple[Tensor, ...] = aten._scaled_dot_product_attention_math(
        *given.tensors,
        given.mask,
        given.dropout_p,
        given.is_causal,
        scale=given.scale,
        enable_gqa=given.enable_gqa,
    )
    return found[0]


_KERNELS = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": _math}
