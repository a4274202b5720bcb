"""The process in which OR-tools CP-SAT runs for `solver_cp_sat.py`: one worker thread.

It is a process of its own because the libraries of OR-tools and of highspy share a name and cannot
be loaded into one. Enters: pickled (costs, hints or None, rows, limits) on standard input. Leaves
per program a pickled (values or None, proven, [(processor seconds, values) per solution found],
processor seconds in all) on standard output.
"""

from __future__ import annotations

import os
import pickle
import sys
import time

from ortools.sat.python import cp_model


def solve(costs, hints, rows, seconds, counted):  # type: ignore[no-untyped-def]
    """Minimise; limited by seconds of the clock or by deterministic time."""
    began = time.process_time()
    model = cp_model.CpModel()
    xs = [model.new_bool_var("") for _ in costs]
    for terms, upper in rows:
        if terms:
            columns = [xs[x] for x in terms]
            model.add(cp_model.LinearExpr.weighted_sum(columns, list(terms.values())) <= upper)
        elif upper < 0:
            model.add_bool_or([])
    model.minimize(cp_model.LinearExpr.weighted_sum(xs, costs))
    for x, value in zip(xs, hints or (), strict=False):
        model.add_hint(x, value)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.linearization_level = int(os.environ.get("LEVEL", "2"))
    if counted is not None:
        solver.parameters.max_deterministic_time = counted
    if seconds is not None:
        solver.parameters.max_time_in_seconds = seconds - (time.process_time() - began)
    found = []

    class Heard(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            values = [int(self.value(x)) for x in xs] if seconds is not None else None
            found.append((time.process_time() - began, values))

    status = solver.solve(model, Heard())
    known = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    values = [int(solver.value(x)) for x in xs] if known else None
    proven = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    return values, proven, found, time.process_time() - began


def main() -> None:
    """Answer until the input ends."""
    while True:
        try:
            asked = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(solve(*asked), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
