"""What the library calls of a wrapper take."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from autoremat._torch import recording_memory
from autoremat.cost.cache import Measured
from autoremat.cost.calls import TensorSpec
from autoremat.inductor import library_calls as module
from autoremat.inductor.library_calls import library_calls, library_us

CPU = torch.device("cpu")
MATRIX = TensorSpec((8, 8), (8, 1), torch.float32, CPU)
LAYOUTS = {"buf0": MATRIX, "buf1": MATRIX, "buf2": MATRIX, "buf3": MATRIX}
PRODUCT = "extern_kernels.mm(buf0, buf1, out=buf2)"


def wrapper(*statements: str) -> ast.AST:
    return ast.parse("\n".join(statements))


def measured(*statements: str) -> dict[str, Measured]:
    return library_calls(wrapper(*statements), LAYOUTS.get, CPU)


def test_a_call_has_a_time_and_what_it_leaves() -> None:
    """The same call on other buffers is the same; one that returns its result holds it."""
    other = "extern_kernels.mm(buf1, buf0, out=buf3)"
    sine = "torch.ops.aten.sin.default(buf0)"
    found = measured(PRODUCT, other, f"buf3 = {sine}")
    assert found.keys() == {PRODUCT, other, sine}
    assert found[PRODUCT] == found[other]
    assert found[PRODUCT].time_us > 0
    assert found[sine].kept_nbytes == 8 * 8 * 4


@pytest.mark.parametrize(
    "text",
    [
        "torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', '0')",
        "torch.ops.somebodys.operator.default(buf0)",
        "torch.ops.aten._assert_async.msg(buf0, 'no')",
        "torch.ops.aten._thnn_fused_lstm_cell.default(buf0, buf1, buf2)",
    ],
)
def test_what_communicates_asserts_or_is_somebodys_own_is_not_run(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So how long the code takes is not known."""
    drawn: list[str] = []
    draw = module._draw

    def seen(text: str, *given: Any) -> Any:
        drawn.append(text)
        return draw(text, *given)

    monkeypatch.setattr(module, "_draw", seen)
    found = measured(PRODUCT, text)
    assert set(drawn) <= {PRODUCT}
    assert found.keys() == {PRODUCT}
    assert library_us(wrapper(PRODUCT, text), found) is None


def test_each_call_counts() -> None:
    """As often as it stands there; what does not run on made-up inputs leaves the sum unknown."""
    figures = {PRODUCT: Measured(5.0, 0, 0)}
    assert (
        library_us(wrapper(PRODUCT, "buf9 = empty_strided_cpu((8, ), (1, ))", PRODUCT), figures)
        == 10.0
    )
    wrong = "extern_kernels.mm(buf0, buf9, out=buf2)"
    assert measured(wrong) == {}
    assert library_us(wrapper(wrong), {}) is None


def test_calls_are_measured_while_somebody_profiles() -> None:
    """In whose session they do not show."""
    text = "torch.ops.aten.cos.default(buf0)"
    with recording_memory() as session:
        assert measured(text)[text].kept_nbytes == 8 * 8 * 4
    assert "aten::cos" not in {event.name for event in session.events()}
