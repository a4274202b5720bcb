"""The choice where values may also leave the device.

Enters: a stated graph with a host, and a budget. Leaves: a `Choice` whose plan may offload.
Guarantees: it is never slower, by the solver's count, than what recompute alone was found to reach,
nor is its peak higher; only what is one dense tensor leaves.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from autoremat_solver import OffloadSolver

from autoremat import _torch
from autoremat.host.memory import Host
from autoremat.planning.choice import Choice
from autoremat.planning.simulated import as_simulated, choose_by_simulation, simulated_peaks
from autoremat.problem.subject import Subject

LEAST_NBYTES = 4096  # of a value that leaves: a page of a file


def choose_with_offload(
    subject: Subject, host: Host, budget_nbytes: int, *, time_limit_s: float
) -> Choice:
    """The fastest plan found that fits; if none does, the one of the smallest peak found."""
    solver = OffloadSolver(
        subject.lowered.problem,
        host.free_nbytes,
        time_limit_s=time_limit_s,
        movable=movable(subject),
    )
    solution = solver.solve(budget_nbytes)
    peaks = simulated_peaks(subject.lowered, solution.plan)
    found = as_simulated(subject, solution, budget_nbytes, peaks)
    if not found.fits:
        alone = choose_by_simulation(subject, solver.solver, budget_nbytes)
        found = alone if alone.needed_nbytes <= found.needed_nbytes else found
    return replace(found, alone=solver.alone(budget_nbytes))


def movable(subject: Subject) -> frozenset[str]:
    """Values that one operation makes as one dense tensor of known sizes."""
    root, nbytes = subject.lowered.storages.root, subject.lowered.storages.nbytes
    return frozenset(
        name
        for name in subject.lowered.problem.value_by_name
        if nbytes.get(name, 0) >= LEAST_NBYTES
        and name in root
        and root[name].op == "call_function"
        and _is_whole(_torch.fake_value(root[name]), nbytes[name], subject.device)
    )


def _is_whole(value: object, nbytes: int, device: torch.device) -> bool:
    """Whether a tensor on the device is all of its storage, without symbols or gaps."""
    if not isinstance(value, torch.Tensor) or value.is_sparse:
        return False
    if value.device.type != device.type:
        return False
    if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return False
    last = sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    own_nbytes = value.numel() * value.element_size()
    return last + 1 == value.numel() and own_nbytes <= nbytes and not value.storage_offset()
