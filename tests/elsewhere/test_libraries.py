"""What library calls of a GPU's code allocate inside."""

from __future__ import annotations

import ast

import pytest
import torch

from autoremat.cost.calls import TensorSpec
from autoremat.cost.device_specs import find_spec
from autoremat.elsewhere.libraries import library_calls_elsewhere

_CPU = torch.device("cpu")
_ALL_HEADS, _SHARED = "reinterpret_tensor(qkv, (2, 4, 16, 8), (1536, 8, 96, 1), {})", "key"
_LAYOUTS = {
    "gradient": ((2, 4, 16, 8), (512, 128, 8, 1)),
    "query": ((2, 4, 16, 8), (512, 128, 8, 1)),
    "key": ((2, 2, 16, 8), (256, 128, 8, 1)),
    "qkv": ((32, 96), (96, 1)),
}


def _layout_of(name: str) -> TensorSpec | None:
    found = _LAYOUTS.get(name)
    return found and TensorSpec(*found, torch.bfloat16, _CPU)


@pytest.mark.parametrize(
    ("query", "key", "nbytes"),
    [
        ("query", "query", 4 * 2 * 4 * 128 * 33),
        ("query", _SHARED, 4 * 2 * 4 * 128 * 33 + 2 * (2 * 4 * 16 * 8 * 2)),
        (_ALL_HEADS.format(0), _ALL_HEADS.format(32), 4 * 2 * 4 * 128 * 33),
    ],
    ids=["buffers", "shared keys", "views of one product"],
)
def test_an_attentions_backward_sums_gradients_of_queries(query: str, key: str, nbytes: int):
    """In float32, rows rounded to 128 and heads to 32; shared keys' and values' for each head."""
    operator = "torch.ops.aten._scaled_dot_product_flash_attention_backward.default"
    text = f"{operator}(gradient, {query}, {key}, {key}, query, sums, None, None, 16, 16, 0.0)"
    spec = find_spec("A100 80GB")
    assert spec is not None
    (found,) = library_calls_elsewhere(spec, ast.parse(text), _layout_of, _CPU).values()
    assert found.peak_nbytes == nbytes
