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
        saved: by name, what the forward returned, and left to the backward.
        copied_nbytes: that have left for the host ("out"), and that have come back ("in").
    """

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    inputs: dict[str, Tensor]
    peak_nbytes: int
    events: list[tuple[int, int]]
    operators: set[str]
    saved: dict[str, Tensor]
    copied_nbytes: dict[str, int]


class Executor:
    """A process whose Triton interprets, for as long as it is open.

    Args:
        folder: where its files go.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._log = folder / "work", folder / "log"
        cache = str(folder / "cache")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.elsewhere.executed"],
                env={**os.environ, "TRITON_INTERPRET": "1", "TORCHINDUCTOR_CACHE_DIR": cache},
                cwd=Path(__file__).parents[3],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, work: Work) -> tuple[list[Ran], dict[str, int]]:
        """The steps as they ran; how often each kernel of theirs was interpreted."""
        self._file.write_bytes(pickle.dumps(work))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(self._file, file=self._process.stdin, flush=True)
        assert self._process.stdout.readline(), self._log.read_text()[-4000:]
        ran, kernels = pickle.loads(self._file.read_bytes())
        return ran, kernels
