"""The library that solves programs."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIRST_MODEL = """
import os, sys
from autoremat_solver.program.{module} import {name}
from autoremat_solver.program.formulation import LinearProgram
print("before")
{name}(LinearProgram([1.0], [1.0], [({{0: 1.0}}, 1.0, 2.0)]){more})
os.write(1, b"after\\n")
"""


@pytest.mark.parametrize(
    ("module", "name", "more"),
    [("_pulp", "LinearSolver", ""), ("_highs", "Relaxation", ", work=9")],
)
def test_the_first_model_of_a_process_prints_nothing(module: str, name: str, more: str):
    """From 1.16 on HiGHS greets, into what another program may read."""
    script = FIRST_MODEL.format(module=module, name=name, more=more)
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert told.stdout == "before\nafter\n"


def test_a_process_without_output_solves():
    """As a daemon, or a window without a terminal."""
    script = "import os; os.close(1)\n" + FIRST_MODEL.format(
        module="_pulp", name="LinearSolver", more=""
    ).replace('print("before")', "").replace('os.write(1, b"after\\n")', "")
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr


def test_what_a_caller_holds_ends_with_it():
    """Pulp keeps exceptions of its import, and they the functions that were running."""
    script = """
import gc, weakref
class Model: pass
def train():
    model = Model()
    import autoremat_solver.program._pulp
    return weakref.ref(model)
model = train()
gc.collect()
print(model() is None)
"""
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert told.stdout == "True\n"


def test_a_process_that_ends_solves():
    """As a handler of its end may: there are no more threads then."""
    script = "import atexit, concurrent.futures.thread\n@atexit.register\ndef end():\n" + "".join(
        f"    {line}\n"
        for line in FIRST_MODEL.format(module="_pulp", name="LinearSolver", more="").splitlines()
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert told.stdout == "before\nafter\n", told.stderr
