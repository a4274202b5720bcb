"""Executes steps: `TRITON_INTERPRET=1 python -m tests.elsewhere.executed FILE`.

Enters: a file of `Work`, pickled. Leaves: in its place the steps as they ran, and how often each
kernel was interpreted.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch

from autoremat.elsewhere.present import standing_in
from tests.elsewhere.executed.interpreter import KERNELS
from tests.elsewhere.executed.step import run_step
from tests.elsewhere.executed.work import Ran, Work


def main(file: Path) -> None:
    """All plans on the same values, and from the same seed."""
    work: Work = pickle.loads(file.read_bytes())
    torch.set_num_threads(1)
    ran: list[Ran] = []
    for program in work.programs:
        torch.manual_seed(0)
        with standing_in(work.spec):
            ran.append(run_step(program, work.values))
    file.write_bytes(pickle.dumps((ran, KERNELS)))


main(Path(sys.argv[1]))
