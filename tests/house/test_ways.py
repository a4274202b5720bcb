"""What `docs/how_it_works.md` says of the way of a budget and of a value is what happens."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import autoremat
from tests.tiny import Layers, many_rows
from tests.training import optimized, peaks, step


class Deep(Layers):
    """More operations than can be searched exhaustively."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            for layer in self.layers:
                x = torch.tanh(layer(x))
        return x.square().mean()


PAGE = Path(__file__).parents[2] / "docs" / "how_it_works.md"


def way(name: str) -> list[str]:
    """The functions of a list on the page, in its order."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"<!-- way of a {name} -->\n(.*?)<!-- end -->", text, re.S)
    assert found, name
    return re.findall(r"^\d+\. `([\w.]+)`$", found[1], re.M)


def code_of(name: str) -> CodeType:
    """The code of a function or method, by its dotted name."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        found = getattr(found, "__wrapped__", found)
        return getattr(found, "__func__", found).__code__
    raise AssertionError(f"{name} is not there")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["budget", "value"])
def test_the_way_on_the_page_is_the_way_of_a_step(name: str) -> None:
    """Each function of the list is called, for the first time in the list's order."""
    codes = {code_of(function): function for function in way(name)}
    assert len(codes) >= 8
    seen: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        function = codes.get(frame.f_code) if event == "call" else None
        if function is not None and function not in seen:
            seen.append(function)

    found = peaks(Deep, (many_rows(),))
    sys.setprofile(note)
    try:
        model = optimized(Deep, found.at(0.5), time_limit=3.0)
        step(model, (many_rows(),))
        autoremat.report(model)
    finally:
        sys.setprofile(None)
    assert seen == way(name)
