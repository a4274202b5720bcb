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
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        kernel = attention_kernel(capability, *given, enable_gqa=enable_gqa)
        with torch.autocast(place, enabled=False):
            return _KERNELS[kernel](*given, scale, enable_gqa)

    return scaled_dot_product_attention


def attention_kernel(
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    enable_gqa: bool = False,
) -> str:
    """Which kernel torch takes: "cudnn", "flash", "efficient" or "math".

    Args:
        capability: major and minor compute capability.
        query: (batch, heads, tokens, size); only sizes, strides and types matter, as of the others.
        key: likewise.
        value: likewise.
        attn_mask: added to the scores.
        dropout_p: of the probabilities.
        is_causal: whether each token sees those before it only.
        enable_gqa: whether several heads may share a key and a value.
    """
    given = (capability, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    prefers_cudnn = capability[0] in _PREFERS_CUDNN
    order = ["flash", "efficient"]
    if prefers_cudnn:
        order.insert(0, "cudnn")
    elif not torch.backends.cuda.math_sdp_enabled():  # which comes before it, and always can
        order.append("cudnn")
    return next((kernel for kernel in order if _CAN[kernel](*given)), "math")


def _can_cudnn(
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    _is_causal: bool,
    enable_gqa: bool,
) -> bool:
    sizes = (query.shape[-1], value.shape[-1])
    may_vary = torch.is_deterministic_algorithms_warn_only_enabled()
    is_mixed = capability[0] in _PREFERS_CUDNN and sizes == _CUDNN_MIXED_HEAD_DIMS
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and (may_vary or not torch.are_deterministic_algorithms_enabled())
        and (mask is None or (mask.dim() in (2, 4) and not mask.requires_grad))
        and _is_narrow(capability, query, key, value)
        and _OLDEST <= capability <= _NEWEST
        and (dropout_p * _DROPOUT_STEPS).is_integer()
        and _has_heads(query, key, value, enable_gqa)
        and _lies_row_by_row(query, key, value)
        and (is_mixed or all(size <= _CUDNN_HEAD_DIM and size % 8 == 0 for size in sizes))
        and key.shape[-2] != 1
        and not (dropout_p and query.shape[-2] == 1)
    )


def _can_flash(
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    size = query.shape[-1]
    is_small = any(low <= capability <= high for low, high in _SMALL_SHARED_MEMORY)
    trains = query.requires_grad or key.requires_grad or value.requires_grad
    has_backward = size <= _SMALL_HEAD_DIM or (not dropout_p and size > _LARGE_HEAD_DIM)
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and mask is None
        and size == key.shape[-1] == value.shape[-1]
        and size <= _FLASH_HEAD_DIM
        and _OLDEST <= capability <= _NEWEST
        and (has_backward or not (is_small and trains))
        and not (is_causal and query.shape[-2] != key.shape[-2])
        and _is_narrow(capability, query, key, value)
        and _has_heads(query, key, value, enable_gqa)
        and _lies_row_by_row(query, key, value)
    )


def _can_efficient(
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    _dropout_p: float,
    _is_causal: bool,
    _enable_gqa: bool,
) -> bool:
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
        and _has_heads(query, key, value, enable_gqa=False)
        and all(t.stride(-1) == 1 for t in (query, key, value))
    )


_CAN = {"cudnn": _can_cudnn, "flash": _can_flash, "efficient": _can_efficient}


def _is_narrow(capability: tuple[int, int], *tensors: Tensor) -> bool:
    types = _HALVES if capability >= _OLDEST else (torch.float16,)
    return tensors[0].dtype in types and len({tensor.dtype for tensor in tensors}) == 1


def _has_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Four dimensions, one batch, and as many heads, or a number that divides them."""
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    if not query.shape[0] == key.shape[0] == value.shape[0] or 0 in (query.shape[2], key.shape[2]):
        return False
    heads = {tensor.shape[1] for tensor in (key, value)}
    if heads == {query.shape[1]}:
        return True
    return enable_gqa and len(heads) == 1 and query.shape[1] % key.shape[1] == 0


def _lies_row_by_row(*tensors: Tensor) -> bool:
    return all(tensor.shape[-1] == 1 or tensor.stride(-1) == 1 for tensor in tensors)


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    _enable_gqa: bool,
) -> Tensor:
    found: tuple[Tensor, ...] = aten._scaled_dot_product_cudnn_attention(
        query, key, value, mask, True, dropout_p, is_causal, False, scale=scale
    )
    return found[0]


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    _enable_gqa: bool,
) -> Tensor:
    size = query.shape[-1]
    more = -size % _FLASH_ALIGNMENT
    if more:
        query, key, value = (F.pad(tensor, (0, more)) for tensor in (query, key, value))
    factor = 1.0 / math.sqrt(size) if scale is None else scale
    found: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=factor
    )
    return found[0][..., :size] if more else found[0]


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    _enable_gqa: bool,
) -> Tensor:
    if mask is not None:
        more = -mask.shape[-1] % _BIAS_ALIGNMENT
        if more:
            mask = F.pad(mask, (0, more))[..., : mask.shape[-1]]
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    found: tuple[Tensor, ...] = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, True, dropout_p, is_causal, scale=scale
    )
    return found[0]


def _math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    found: tuple[Tensor, ...] = aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    return found[0]


_KERNELS = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": _math}
