"""Steps that Inductor compiles and in which values leave and come back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import autoremat
from autoremat import _torch
from autoremat.host.operators import COPIES, OFFLOAD, OFFLOADED, RELOAD, RELOADED
from autoremat.inductor.fusion_limit import _COPYING, FusionLimit, peak_nbytes
from autoremat.inductor.hook import generate
from autoremat.inductor.wrapper import Buffers, read_wrapper
from tests.inductor.races import races
from tests.session.test_offload import BUDGET_NBYTES, SAVED, Deep, rows
from tests.training import make_seeded, measured, optimized, step

KB = 1024


@dataclass(frozen=True)
class Compiled:
    """A model, and the wrappers of its forward and its backward."""

    model: nn.Module
    sources: list[str]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Within a budget that only copies keep; its first step is taken."""
    given = {"offload": f"disk:{tmp_path_factory.mktemp('host')}", "save": SAVED}
    found = optimized(Deep, BUDGET_NBYTES, compiler="inductor", **given)
    with fresh_cache():
        _, sources = run_and_get_code(lambda: step(found, rows()))
    return Compiled(found, sources[-2:])


@pytest.fixture(scope="module")
def model(compiled: Compiled) -> nn.Module:
    """The same without the wrappers."""
    return compiled.model


def test_no_copy_is_raced_by_the_code(compiled: Compiled) -> None:
    """By a walk over it that knows nothing of the plan."""
    forward, backward = compiled.sources
    assert forward.count("offload.default(") >= 2
    assert backward.count("reload.default(") >= 2
    assert races(forward) == races(backward) == []


@pytest.mark.parametrize(("waits_for", "in_forward"), [("offloaded", True), ("reloaded", False)])
def test_code_that_does_not_wait_is_found(
    compiled: Compiled, waits_for: str, in_forward: bool
) -> None:
    """What shows that the walk above can fail."""
    source = compiled.sources[0 if in_forward else 1]
    call = rf"torch\.ops\.autoremat\.{waits_for}\.default\((\w+), \w+\)"
    assert races(re.sub(call, r"\1", source))


def test_a_compiled_step_keeps_the_budget_that_only_copies_can_keep(model: nn.Module) -> None:
    """To the byte, with the gradients of torch's own compiled step."""
    report = autoremat.report(model)
    waiting = report.graphs[0].waiting
    assert waiting is not None
    assert waiting.nbytes > 0
    assert not waiting.alone_fits
    assert measured(model, rows()) == report.predicted_peak_nbytes <= BUDGET_NBYTES
    found = step(model, rows())
    expected = step(torch.compile(make_seeded(Deep)), rows())
    for mine, its in zip(found.gradients.values(), expected.gradients.values(), strict=True):
        assert mine is its or torch.equal(mine, its)


def test_as_much_leaves_as_the_report_says(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where copies begin."""
    from autoremat.host import operators

    begun: list[tuple[str, int]] = []
    begin = operators._begin

    def counted(way: str, to: Any, source: Any) -> Any:
        begun.append((way, source.nbytes))
        return begin(way, to, source)

    monkeypatch.setattr(operators, "_begin", counted)
    step(model, rows())
    waiting = autoremat.report(model).graphs[0].waiting
    assert waiting is not None
    for way in ("out", "in"):
        assert sum(nbytes for other, nbytes in begun if other == way) == waiting.nbytes


def test_code_that_writes_over_what_leaves_is_found(compiled: Compiled) -> None:
    """By another name, as Inductor reuses memory, or as a library is told to."""
    begun = r"( *)(\w+ = torch\.ops\.autoremat\.offload\.default\((\w+), .*\))\n"
    for then in (r"\1another = \3", r"\1extern_kernels.mm(x, x, out=\3)"):
        assert races(re.sub(begun, rf"\1\2\n{then}\n", compiled.sources[0]))


def test_what_waits_on_the_host_is_no_memory_of_generated_code() -> None:
    """Nor is what a copy is waited for as; what comes back is."""
    source = """
def call(args):
    x, sent = args
    args.clear()
    buf0 = torch.ops.autoremat.offload.default(x, '/folder')
    buf1 = torch.ops.autoremat.offloaded.default(buf0, x)
    del buf0
    del x
    buf2 = torch.ops.autoremat.reload.default(sent, device(type='cpu'))
    buf3 = torch.ops.autoremat.reloaded.default(buf2, sent)
    del buf2
    del sent
    return (buf1, buf3)
"""
    layout = ((KB,), (1,))
    memory = read_wrapper(
        source,
        Buffers(
            input_nbytes=[4 * KB, 0],
            input_values=[None, None],
            result_nbytes={f"buf{n}": (4 * KB,) for n in range(4)},
            library_nbytes=lambda _: None,
            round_nbytes=lambda nbytes: nbytes,
            device_type="cpu",
            shared_inputs={},
            input_layouts=[layout, layout],
        ),
    )
    assert memory.peak_nbytes == 4 * KB
    sent, back = memory.returned
    assert sent is not None
    assert back is not None
    assert (sent[1], back[1]) == (0, 4 * KB)


@pytest.mark.parametrize("is_ruled_out", [True, False])
def test_no_result_lies_in_memory_of_the_host(
    is_ruled_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be a file. Inductor, left alone, takes it for the next result of its size."""

    def there_and_back(x: torch.Tensor) -> tuple[torch.Tensor]:
        made = x @ x
        sent = OFFLOADED(OFFLOAD(made, str(tmp_path)), made)
        return (RELOADED(RELOAD(sent, x.device), sent).sin().cumsum(0),)

    if not is_ruled_out:
        monkeypatch.setattr(_torch, "never_reuse", lambda nodes, operators: None)
    with torch.no_grad():
        module = make_fx(there_and_back, tracing_mode="fake")(torch.rand(32, 32))
    given = {"is_backward": False, "owned": {}, "num_visible_outputs": 1}
    with torch._inductor.config.patch(_pre_fusion_custom_pass=FusionLimit()):
        source = generate(module, **given, device=torch.device("cpu")).source
    (made,) = re.findall(r"(\w+) = torch\.ops\.autoremat\.offload\.", source)
    (copy,) = re.findall(rf"(\w+) = {made}\n", source)
    assert bool(re.search(rf"= {copy}; del {copy}  # reuse", source)) != is_ruled_out


def test_fusion_is_held_to_a_peak_in_which_the_host_does_not_count(tmp_path: Path) -> None:
    """A forward that repeats nothing, and sends a value away, is held to it as well."""
    seen: list[tuple[set[Any], int]] = []

    class Seen(FusionLimit):
        def __call__(self, nodes: list[Any]) -> list[Any]:
            kernels = _torch.kernels_before_fusion(nodes, _COPYING)
            peak = peak_nbytes(kernels, range(len(kernels.predecessors)))
            seen.append((_torch.called_operators(nodes), peak))
            balance = sum(b.allocated_nbytes - b.freed_nbytes for b in kernels.buffers if b.makers)
            assert balance == 0
            return super().__call__(nodes)

    def there_and_back(x: torch.Tensor) -> tuple[torch.Tensor]:
        made = x.cos()
        sent = OFFLOADED(OFFLOAD(made, str(tmp_path)), made)
        other = x.sin().cumsum(0)
        return (other + RELOADED(RELOAD(sent, x.device), sent),)

    with torch.no_grad():
        module = make_fx(there_and_back, tracing_mode="fake")(torch.rand(KB))
    given = {"is_backward": False, "owned": {}, "num_visible_outputs": 1}
    with torch._inductor.config.patch(_pre_fusion_custom_pass=Seen()):
        code = generate(module, **given, device=torch.device("cpu"))
    assert code.source.count("= torch.ops.autoremat.") == len(COPIES)
    called, own_nbytes = seen[0]
    assert called >= COPIES
    assert own_nbytes == code.memory.peak_nbytes == 2 * 4 * KB
