"""`docs/gpu_benchmarks.py`, as far as a machine without a GPU can tell."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """The script as a module, beside which it finds its others."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(DOCS)
    import gpu_benchmarks

    for name in ("GPU_BENCHMARK_BATCH", "GPU_BENCHMARK_DEVICE", "GPU_BENCHMARK_TINY"):
        monkeypatch.setenv(name, "")  # taken back at the end
    monkeypatch.setattr(sys, "argv", ["gpu_benchmarks.py"])
    return gpu_benchmarks


def row(variant: str, batch: int, rate: float | None, **figures: object) -> dict[str, object]:
    """A stored row."""
    names = ("budget_nbytes", "predicted_peak_nbytes", "peak_nbytes", "reserved_nbytes")
    found = dict.fromkeys((*names, "step_seconds", "time_ratio"))
    status = "out of memory" if rate is None else "ok"
    found |= {"model": "vit_l", "variant": variant, "batch": batch, "run": 0}
    return found | {"units_per_second": rate, "status": status, "message": ""} | figures


def test_the_largest_batch_is_the_largest_that_ran(script) -> None:
    """And beside it the most that any batch of the variant reached."""
    rows = [row("eager", 1, 50.0), row("eager", 2, 40.0), row("eager", 4, None)]
    (found,) = script.largest([*rows, row("compile", 1, None)])
    assert (found["variant"], found["batch"], found["best"]) == ("eager", 2, 50.0)


def test_without_a_gpu_it_says_so(
    script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        script.main([])
    assert "There is no GPU here. --tiny" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama_1b", "gpt2_xl", "vit_l"])
def test_a_tiny_model_returns_its_loss(script, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import gpu_benchmark_models

    for key, value in (("BATCH", "2"), ("DEVICE", "cpu"), ("TINY", "1")):
        monkeypatch.setenv(f"GPU_BENCHMARK_{key}", value)
    model, inputs = getattr(gpu_benchmark_models, name)()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert inputs[0].shape[0] == 2
    model(*inputs).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.thorough
def test_rows_are_measured_and_resumed(script, tmp_path: Path) -> None:
    """The whole way on a CPU, with a tiny model; a second run measures nothing again."""
    out = tmp_path / "page.md"
    words = ["--tiny", "--models", "vit_l", "--most", "1", "--out", str(out)]
    script.main(words)
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [r["variant"] for r in rows] == ["eager", "every-layer", script.WHOLE]
    assert all(r["status"] == "ok" and r["units_per_second"] > 0 for r in rows), rows
    assert "### Largest batch" in out.read_text()
    script.main([*words, "--resume"])
    assert json.loads(out.with_suffix(".json").read_text())["rows"] == rows


def test_whole_steps_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`docs/gpu_steps.py`, with a tiny model on the CPU: each row of a process of its own."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(DOCS)
    import gpu_steps

    asked = ["--tiny", "--only", "llama", "--compilers", "eager", "--shares", "0.7"]
    gpu_steps.main([*asked, "--out", str(tmp_path / "rows.md")])
    eager, planned = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert eager["status"] == planned["status"] == "ok"
    assert planned["peak_nbytes"] <= planned["budget_nbytes"] < eager["peak_nbytes"]
    assert planned["loss"] == pytest.approx(eager["loss"], rel=1e-2)
