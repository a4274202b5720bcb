"""What the process that executes steps is given, what it gives back, and how it is asked."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from autoremat.cost.device_specs import DeviceSpec
from tests.elsewhere.executed.plans import Program


@dataclass(frozen=True)
class Work:
    """Plans of one step, and values that each is run on.

    Attributes:
        programs: the plans, in generated code.
        values: of the graph's inputs, in order.
        spec: of the GPU that stands in.
    """

    programs: Sequence[Program]
    values: Sequence[Tensor]
    spec: DeviceSpec


@dataclass(frozen=True)
class Ran:
    """What a step left.

    Attributes:
        outputs: of the forward; the first is the loss.
        gradients: by the input's name in the graph; those that there are.
        inputs: by name, as the step leaves them.
        peak_nbytes: above what stood before.
        events: of the memory: pairs of a block and its bytes, 0 where it is freed.
        operators: library calls that made their results themselves.
    """

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    inputs: dict[str, Tensor]
    peak_nbytes: int
    events: list[tuple[int, int]]
    operators: set[str]


def executed(work: Work, file: Path) -> tuple[list[Ran], dict[str, int]]:
    """The steps as they ran in a process whose Triton interprets; how often each kernel did."""
    file.write_bytes(pickle.dumps(work))
    command = [sys.executable, "-m", "tests.elsewhere.executed", str(file)]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "TORCHINDUCTOR_CACHE_DIR": f"{file}.cache"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ran, kernels = pickle.loads(file.read_bytes())
    return ran, kernels
