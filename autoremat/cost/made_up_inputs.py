"""Made-up inputs on which an operator can run alone.

Enters: a `Call`. Leaves: real arguments of the same shapes, strides, dtypes and devices.
Guarantees: integers that index are within range (out of range would end a CUDA context),
probabilities lie in [0, 1], values come from a private generator, each tensor has its own
storage, and only operators known to have no effect outside their arguments are admitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from autoremat._torch import arguments_of, tree_map
from autoremat.cost.calls import Call, TensorSpec
from autoremat.cost.grouped import OFFSETS, even_offsets, is_grouped

# These read a workspace that only their own forward can fill; on another they end the process.
OPAQUE = ("_rnn", "_lstm", "_gru")
ADMITTED = frozenset({"aten", "prims"})
"""Namespaces whose operators may run alone: no collectives, and nobody's custom operators, whose
effects and input ranges are unknown. Grouped products may, whoever's they are."""

# Dropout in this attention's gradient reads its seed on the host, where its forward has left it,
# and not where traced graphs say that it is: that would end the process.
_READS_SEEDS = "efficient_attention_backward"
_SEEDS = "philox_"  # how arguments of that kind begin
_HOST = torch.device("cpu")

_PROBABILITIES = ("bernoulli", "multinomial", "binary_cross_entropy")
_BLOCK = 1 << 14
_SEED = 20_260_101


@dataclass(frozen=True, slots=True)
class Inputs:
    """Real arguments for one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def runs_alone(call: Call) -> bool:
    """Whether the call may be run on made-up inputs."""
    name = call.target.overloadpacket.__name__
    is_admitted = call.target.namespace in ADMITTED or is_grouped(call.target)
    return is_admitted and not any(part in name for part in OPAQUE)


def draw_inputs(call: Call) -> Inputs:
    """Allocate and fill the call's arguments."""
    bound = index_bound(call)
    unit = any(name in call.target.overloadpacket.__name__ for name in _PROBABILITIES)

    def draw(value: Any) -> Any:
        return made_up(value, bound, unit=unit) if isinstance(value, TensorSpec) else value

    args, kwargs = tree_map(draw, _with_seeds_on_host(call))
    offsets = call.args[OFFSETS] if is_grouped(call.target) and len(call.args) > OFFSETS else None
    if isinstance(offsets, TensorSpec):
        left, right = (call.args[number].shape for number in range(OFFSETS))
        args = (*args[:OFFSETS], even_offsets(offsets, left, right), *args[OFFSETS + 1 :])
    return Inputs(args, kwargs)


def _with_seeds_on_host(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the call; the seeds of its dropout are where it reads them."""

    def placed(name: str, value: Any) -> Any:
        is_seed = name.startswith(_SEEDS) and isinstance(value, TensorSpec)
        return replace(value, device=_HOST) if is_seed else value

    if not call.target.overloadpacket.__name__.endswith(_READS_SEEDS):
        return call.args, call.kwargs
    names = (argument.name for argument in arguments_of(call.target))
    args = tuple(map(placed, names, call.args))
    return args, {name: placed(name, value) for name, value in call.kwargs.items()}


def index_bound(call: Call) -> int:
    """Exclusive upper limit of the integers in the call's tensors; 1 (all zero) is always valid.

    A realistic spread matters where equal indices collide, as in the gradient of an embedding.
    """
    name = call.target.overloadpacket.__name__
    rule = _INDEX_BOUNDS.get(name.removeprefix("_unsafe_").removesuffix("_"))
    if rule is None:
        return 1
    try:
        return max(1, int(rule(call.args)))
    except (AttributeError, IndexError, TypeError, ValueError):
        return 1


def _smallest_indexed_dim(args: tuple[Any, ...]) -> int:
    """For `index` and its kin: the shortest dimension that an index tensor selects from."""
    indices = next(arg for arg in args[1:] if isinstance(arg, list | tuple))
    sizes = zip(args[0].shape, indices, strict=False)
    return min((size for size, index in sizes if index is not None), default=1)


def _along(args: tuple[Any, ...]) -> int:
    return args[0].shape[args[1]]


def _classes(args: tuple[Any, ...]) -> int:
    shape = args[0].shape
    return shape[1] if len(shape) > 1 else shape[0]


_INDEX_BOUNDS = {
    "embedding": lambda args: args[0].shape[0],
    "embedding_dense_backward": lambda args: args[2],
    "gather": _along,
    "scatter": _along,
    "scatter_add": _along,
    "scatter_reduce": _along,
    "index_select": _along,
    "index_add": _along,
    "index": _smallest_indexed_dim,
    "index_put": _smallest_indexed_dim,
    "nll_loss_forward": _classes,
    "nll_loss2d_forward": _classes,
    "nll_loss_backward": lambda args: _classes(args[1:]),
    "nll_loss2d_backward": lambda args: _classes(args[1:]),
}


def made_up(spec: TensorSpec, bound: int = 1, *, unit: bool = False) -> torch.Tensor:
    """A tensor of made-up values: integers from 0 below the bound, numbers from 0 to 1 if asked."""
    dtype = spec.dtype
    storage = torch.empty(spec.span, dtype=dtype, device=spec.device)
    if bound > 1 or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        _tile(storage, _block(spec, bound, unit))
    else:
        storage.zero_()
    return storage.as_strided(spec.shape, spec.stride)


def _block(spec: TensorSpec, bound: int, unit: bool) -> torch.Tensor:
    """A short run of random values; drawing every value would cost more than most operators."""
    generator = torch.Generator().manual_seed(_SEED)
    count = min(_BLOCK, spec.span)
    if spec.dtype == torch.bool:
        values = torch.randint(0, 2, (count,), generator=generator)
    elif spec.dtype.is_complex:
        values = torch.randn(count, generator=generator, dtype=torch.complex64)
    elif not spec.dtype.is_floating_point:
        limit = min(bound, torch.iinfo(spec.dtype).max)
        values = torch.randint(0, limit, (count,), generator=generator)
    elif unit:
        values = torch.rand(count, generator=generator, dtype=torch.float32)
    else:
        values = torch.randn(count, generator=generator, dtype=torch.float32)
    return values.to(spec.dtype).to(spec.device)


def _tile(storage: torch.Tensor, block: torch.Tensor) -> None:
    """Fill by doubling: few kernels, however large the storage is."""
    done = block.numel()
    storage[:done] = block
    while done < storage.numel():
        more = min(done, storage.numel() - done)
        storage[done : done + more] = storage[:more]
        done += more
