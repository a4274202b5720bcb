"""`autoremat doctor`: whether everything that autoremat rests on works here.

Enters: the machine as it is. Leaves: a table or one JSON object on stdout, and an exit code.
Guarantees: every check really does what it speaks of, and none ends the others.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoremat._torch import MODULES
from autoremat.commands.exits import BAD_INPUT
from autoremat.commands.interrupt import leaving_at_once

TORCH_RANGE = ((2, 11), (2, 14))


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: what was looked at.
        ok: whether it works.
        text: what is there, or what is wrong and what to do.
    """

    name: str
    ok: bool
    text: str


class Trouble(Exception):
    """Something does not work; the message says what to do."""


def run(*, as_json: bool) -> int:
    """Do what the command says and return its exit code."""
    with leaving_at_once():
        findings = [_checked(name, check) for name, check in CHECKS.items()]
    if as_json:
        print(
            json.dumps({"ok": all(f.ok for f in findings), "checks": list(map(asdict, findings))})
        )
    else:
        Console().print(_table(findings))
    return 0 if all(finding.ok for finding in findings) else BAD_INPUT


def _checked(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, check())
    except Trouble as trouble:
        return Finding(name, False, str(trouble))
    except Exception as error:  # a check that breaks has found something
        return Finding(name, False, f"{type(error).__name__}: {error}")


def _versions() -> str:
    from autoremat import __version__

    names = ("pulp", "highspy", "networkx", "sympy", "numpy")
    found = [f"{name} {importlib.metadata.version(name)}" for name in names]
    ours = [f"autoremat {__version__}", f"Python {platform.python_version()}"]
    return ", ".join([*ours, *found])


def _torch() -> str:
    import torch

    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    low, high = TORCH_RANGE
    if not low <= version < high:
        wanted = ">={}.{},<{}.{}".format(*low, *high)
        raise Trouble(f"torch {torch.__version__} is not tried: pip install 'torch{wanted}'.")
    return f"torch {torch.__version__}"


def _private_names() -> str:
    count = 0
    for module in MODULES:
        try:
            loaded = importlib.import_module(f"autoremat._torch.{module}")
        except (ImportError, AttributeError) as error:
            raise Trouble(
                f"This torch has moved a name: {error}. Install a release from 2.11 to "
                "2.13, and report it."
            ) from error
        missing = [name for name in loaded.__all__ if not hasattr(loaded, name)]
        if missing:
            raise Trouble(f"{loaded.__name__} lacks {', '.join(missing)}: please report it.")
        count += len(loaded.__all__)
    return f"all {count} found"


def _devices() -> str:
    import torch

    from autoremat.graph.devices import device_name, device_nbytes
    from autoremat.units import format_nbytes

    cpu = torch.device("cpu")
    found = [f"cpu {format_nbytes(device_nbytes(cpu))}, {torch.get_num_threads()} threads"]
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        found.append(f"{device} {device_name(device)} {format_nbytes(device_nbytes(device))}")
    return "; ".join(found)


def _compiler() -> str:
    import torch

    named = os.environ.get("CXX")
    found = next((path for c in (named, "g++", "clang++") if c and (path := shutil.which(c))), None)
    if torch.cuda.is_available():
        try:
            version = importlib.metadata.version("triton")
        except importlib.metadata.PackageNotFoundError:
            raise Trouble(
                'Inductor needs triton on a GPU: pip install triton, or use compiler="eager".'
            ) from None
        return f"triton {version}" + (f", {found}" if found else "")
    if found is None:
        raise Trouble(
            "Inductor needs a C++ compiler on the CPU: install g++ or clang++, or set CXX; until "
            'then use compiler="eager".'
        )
    if _has_triton():
        return f"{found}; triton {importlib.metadata.version('triton')}, for GPUs that are not here"
    return f"{found}; without triton, which plans for GPUs that are not here are read with"


def _has_triton() -> bool:
    from autoremat import _torch

    return _torch.has_triton_package()


def _cache() -> str:
    from autoremat.cost.cache import CostCache

    path = CostCache.default_path()
    with CostCache.open() as cache:
        count = cache.count(without="ceilings|")
    if not os.access(path, os.W_OK):
        raise Trouble(
            f"{path} cannot be written: operations are measured anew by each process. Set "
            "XDG_CACHE_HOME to a folder of yours."
        )
    return f"{path}: {count} operations measured"


def _solver() -> str:
    """The integer program's library, by solving one."""
    from autoremat_solver.program._pulp import require_solver

    return f"{require_solver()} solves an integer program"


def _step() -> str:
    """The main job on a small model: the same gradients, the measured peak within the budget."""
    import torch
    from torch import nn

    from autoremat.api import optimize
    from autoremat.memory.meter import measure_peak, resident_nbytes
    from autoremat.units import format_nbytes

    class WithLoss(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    def made() -> nn.Module:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
        return WithLoss(*layers).train()

    x = torch.randn(512, 64)
    plain, ours = made(), made()
    plain(x).backward()
    budget = resident_nbytes(ours, x) + 1_000_000
    optimize(ours, budget, compiler="eager", strict=True, verbose=False, time_limit=5.0)

    def step() -> None:
        ours.zero_grad(set_to_none=True)
        ours(x).backward()

    step()
    peak = resident_nbytes(made(), x) + measure_peak(step, device="cpu")
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        if not torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-7):
            raise Trouble("The gradients of a small model are not eager mode's: please report it.")
    if peak > budget:
        raise Trouble(f"A small model peaks at {peak} bytes, above {budget}: please report it.")
    return f"gradients as in eager mode, peak {format_nbytes(peak)} of {format_nbytes(budget)}"


CHECKS: dict[str, Callable[[], str]] = {
    "versions": _versions,
    "torch": _torch,
    "private names": _private_names,
    "devices": _devices,
    "compiler": _compiler,
    "cache": _cache,
    "solver": _solver,
    "a planned step": _step,
}


def _table(findings: list[Finding]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark = Text("ok", style="green") if finding.ok else Text("no", style="bold red")
        table.add_row(mark, finding.name, Text(finding.text))
    return table
