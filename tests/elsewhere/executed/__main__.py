"""Executes steps: `TRITON_INTERPRET=1 python -m tests.elsewhere.executed`.

Enters: lines, each the name of a file of `Work`, pickled. Leaves: in the file's place the steps as
they ran, and how often each kernel was interpreted; then a line.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch

from autoremat.elsewhere.present import standing_in
from tests.elsewhere.executed.dropout import SEED
from tests.elsewhere.executed.interpreter import KERNELS
from tests.elsewhere.executed.step import run_step
from tests.elsewhere.executed.work import Ran, Work


def execute(file: Path) -> None:
    """All plans on the same values, and from the same seed."""
    work: Work = pickle.loads(file.read_bytes())
    ran: list[Ran] = []
    KERNELS.clear()
    for program in work.programs:
        torch.manual_seed(SEED)
        with standing_in(work.spec):
            ran.append(run_step(program, work.values))
    file.write_bytes(pickle.dumps((ran, KERNELS)))


torch.set_num_threads(1)
for name in sys.stdin:
    execute(Path(name.strip()))
    print("done", flush=True)
