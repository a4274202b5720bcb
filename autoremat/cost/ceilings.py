"""How fast a device can go: what bounds a call that was not measured.

Enters: a device. Leaves: its ceilings, measured once on this machine; nominal ones for a device
that is not here; and what single operations of a loop take. Guarantees: those of `agreed` and of
the file of costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from autoremat._torch import LOADS_OF_BOOLS, STORES_OF_BOOLS
from autoremat.cost.agreed import agree, agreed
from autoremat.cost.cache import CostCache, DeviceCeilings
from autoremat.cost.calls import Call
from autoremat.cost.estimates import NOMINAL_CEILINGS
from autoremat.cost.machine import is_here, settings_key
from autoremat.cost.made_up_inputs import Inputs
from autoremat.cost.runs import attempt, call_time_us

Figure = TypeVar("Figure")
"""A dataclass of numbers and lists of them."""

_ROUNDS = 3  # of which the quietest counts: a ceiling is the fastest that was seen
# Beside the model and under its budget: no more than it takes. On the CPU, what is larger measures
# how fast the system hands out pages; on a GPU, what is smaller stays in its cache.
COPY_NBYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
_CACHES = 4  # of a GPU, that many times its second level: an RTX 4090 has 72 MiB, a B200 126
_MATMUL_SIZE = {"cpu": 768, "cuda": 8192}
# In generated loops; what else there is takes a processor about one instruction.
COSTLY = (
    *("exp", "exp2", "expm1", "log", "log1p", "log2", "pow", "sigmoid", "tanh", "erf", "erfc"),
    *("sin", "cos", "tan", "sqrt", "rsqrt"),
)
# Inductor's generator on a processor takes one element after the other, ten rounds of Philox each:
# 17 ns where a plain operation takes 0.017 (AVX-512). No operator of torch's draws like that, and
# none moves bools as its vectors do, one by one: 11 ns to write one and 3.4 ns to read one, where
# such a plain operation takes 0.0106.
_ONE_BY_ONE = {
    **{"rand": 1000, "randn": 2000, "randint64": 1000},
    **{LOADS_OF_BOOLS: 320, STORES_OF_BOOLS: 1000},
}
_MOVES = frozenset({"load", "store", "store_reduction", "output", "constant", "load_seed"})
_NUM_ELEMENTS = 1 << 20  # enough for all threads
_PLAIN_FLOPS = 2.0  # of a matrix product, while a loop does one operation


def ceilings_of(device: torch.device, dtype: torch.dtype, cache: CostCache) -> DeviceCeilings:
    """A device's ceilings, looked up when an estimate needs them."""
    nominal = NOMINAL_CEILINGS["cpu" if device.type == "cpu" else "cuda"]
    measure = functools.partial(measure_ceilings, device, dtype)
    return once(f"ceilings|{dtype}|{settings_key(device)}", measure, device, nominal, cache)


def once(
    key: str, measure: Callable[[], Figure], device: torch.device, nominal: Figure, cache: CostCache
) -> Figure:
    """What is measured once on a machine, for all ranks; if that is not possible, nominal figures.

    Those are not kept: the next process may have the memory that this one lacked.
    """
    kind = type(nominal)
    found = agreed([key], kind) or cache.read([key], kind)
    if not found and is_here(device):
        measured = attempt(lambda: None, lambda _: measure())
        found = {} if measured is None else {key: measured}
        cache.write(found)
    return agree(found or {key: nominal}, kind)[key]


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> DeviceCeilings:
    """Time a large copy, a matrix product and the smallest operator."""
    size = _MATMUL_SIZE.get(device.type, 1024)
    copied_nbytes = _copied_nbytes(device)
    aten = torch.ops.aten
    source = torch.ones(copied_nbytes // 4, device=device)
    copy_us = _bare_time_us(aten.clone.default, (source,), device)
    launch_us = _bare_time_us(aten.clone.default, (source[:1],), device)
    del source
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    matmul_us = _bare_time_us(aten.mm.default, (matrix, matrix), device)
    return DeviceCeilings(
        copy_gbps=2 * copied_nbytes / copy_us / 1e3,
        matmul_gflops=2 * size**3 / matmul_us / 1e3,
        launch_us=launch_us,
    )


def _copied_nbytes(device: torch.device) -> int:
    nbytes = COPY_NBYTES.get(device.type, 8 << 20)
    if device.type != "cuda":
        return nbytes
    return max(nbytes, _CACHES * torch.cuda.get_device_properties(device).L2_cache_size)


def _bare_time_us(target: Any, args: tuple[Any, ...], device: torch.device) -> float:
    """Of the quietest round: a ceiling is the fastest that was seen."""
    call = Call(target, args, {}, (), (), placed_on=device)
    return min(call_time_us(call, Inputs(args, {})) for _ in range(_ROUNDS))


@dataclass(frozen=True)
class ElementTimes:
    """What a device takes to compute operations, an element of a loop each.

    Attributes:
        costly_ns: of those that take many instructions, in the order of `COSTLY`.
        plain_ns: of any other.
    """

    costly_ns: list[float]
    plain_ns: float

    def of(self, operation: str) -> float:
        """Nanoseconds of one element; reading and writing is no operation here."""
        if operation in COSTLY:
            return self.costly_ns[COSTLY.index(operation)]
        return 0.0 if operation in _MOVES else self.plain_ns * _ONE_BY_ONE.get(operation, 1)


def element_times_of(
    device: torch.device, ceilings: DeviceCeilings, cache: CostCache
) -> ElementTimes:
    """A processor's times, measured once; a GPU computes while it waits for its memory."""
    nothing = ElementTimes([0.0] * len(COSTLY), 0.0)
    if device.type != "cpu":
        return nothing
    measure = functools.partial(_measure_elements, device, ceilings)
    return once(f"ceilings|elements|{settings_key(device)}", measure, device, nothing, cache)


def _measure_elements(device: torch.device, ceilings: DeviceCeilings) -> ElementTimes:
    """By torch's own vectorised operators, on all threads, as loops of real size are."""
    values = torch.linspace(0.1, 2.0, _NUM_ELEMENTS, device=device)
    moving_us = 2 * values.nbytes / (ceilings.copy_gbps * 1e3)
    costly_ns: list[float] = []
    for name in COSTLY:
        operator = getattr(torch.ops.aten, name)
        target = operator.Tensor_Tensor if name == "pow" else operator.default
        args = (values, values) if name == "pow" else (values,)
        taken_us = _bare_time_us(target, args, device) - ceilings.launch_us - moving_us
        costly_ns.append(max(0.0, 1e3 * taken_us / _NUM_ELEMENTS))
    return ElementTimes(costly_ns, _PLAIN_FLOPS / ceilings.matmul_gflops)
