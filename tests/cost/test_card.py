"""A GPU from a file that was exported on one: read back, planned for, refused where damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import autoremat
from autoremat.cost import card as card_module
from autoremat.cost.cache import DeviceCeilings
from autoremat.cost.card import Card, card_document, measure_card, read_card, spec_named
from autoremat.cost.device_specs import find_spec
from autoremat.cost.estimates import NOMINAL_CEILINGS

CARD = Card(
    name="NVIDIA Imagined 12GB",
    kind="cuda",
    memory_nbytes=12 << 30,
    capability_major=8,
    capability_minor=9,
    multiprocessors=60,
    threads=1536,
    warp_size=32,
    shared_nbytes=99 << 10,
    cache_nbytes=48 << 20,
    clock_mhz=2600,
    memory_clock_mhz=10_501,
    memory_bus_bits=192,
    copy_gbps=450.0,
    launch_us=6.5,
    bfloat16_gflops=80_000.0,
    float16_gflops=79_000.0,
    float32_gflops=26_000.0,
    torch_version="2.13.0",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The card's file."""
    out = tmp_path / "card.json"
    out.write_text(json.dumps(card_document(CARD, trial={})))
    return out


def test_a_card_is_read_as_it_was_written(path: Path) -> None:
    assert read_card(path) == CARD


def test_plans_reach_what_was_measured(path: Path) -> None:
    """Large copies and products; the chip is as its driver described it."""
    spec = spec_named(str(path))
    assert (spec.name, spec.memory_nbytes) == (CARD.name, 12 << 30)
    assert spec.copy_gbps == 450.0
    reached_gflops = spec.product_share * spec.gflops(torch.bfloat16)
    assert reached_gflops == pytest.approx(80_000.0)
    assert spec.chip.capability == (8, 9)
    assert spec.chip.multiprocessors == 60


def test_a_name_of_the_table_is_still_one() -> None:
    assert spec_named("H100") == find_spec("H100")
    with pytest.raises(ValueError, match="Known: T4"):
        spec_named("H1000")


def test_a_step_is_planned_for_it(path: Path) -> None:
    """The report names it; twice the throughput gives a faster step, within the same peak."""

    def planned(card: Path) -> autoremat.Report:
        model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)).train()
        x = torch.empty(4096, 256)
        how: dict[str, Any] = {"compiler": "eager", "verbose": False, "time_limit": 1.0}
        return autoremat.plan(model, x, budget="50%", device=str(card), **how)

    fast = path.with_name("fast.JSON")
    fast.write_text(json.dumps(card_document(replace(CARD, copy_gbps=900.0))))
    slow_report, fast_report = planned(path), planned(fast)
    assert slow_report.device == CARD.name
    assert slow_report.budget_nbytes == 6 << 30
    assert fast_report.predicted_time_us < slow_report.predicted_time_us
    assert fast_report.predicted_peak_nbytes == slow_report.predicted_peak_nbytes


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["card"].pop(name)


def with_(**figures: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["card"].update(figures)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda d: d.pop("schema"), "expected schema 'autoremat.gpu/1', found None"),
        (lambda d: d.update(schema="other/1"), "found 'other/1'"),
        (lambda d: d.update(schema="autoremat.gpu/2"), "newer autoremat: update"),
        (lambda d: d.update(schema="autoremat.gpu/0"), "older autoremat"),
        (lambda d: d.pop("card"), 'its "card" lacks'),
        (without("copy_gbps"), "copy_gbps"),
        (with_(colour="green"), "colour"),
        (with_(copy_gbps="fast"), "copy_gbps is 'fast'; expected a finite number"),
        (with_(multiprocessors=-1), "multiprocessors is -1; expected a whole number"),
        (with_(multiprocessors=1.5), "multiprocessors is 1.5"),
        (with_(copy_gbps=float("nan")), "NaN is no figure"),
        (with_(copy_gbps=0), "copy_gbps of NVIDIA Imagined 12GB is 0, and a plan needs it"),
        (with_(copy_gbps=10**400), "copy_gbps of NVIDIA Imagined 12GB is more than any GPU has"),
        (with_(kind="cpu"), "is no GPU"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(
    path: Path, change: Callable[[dict[str, Any]], None], fact: str
) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"Device '.*card.json': ") as caught:
        spec_named(str(path))
    assert fact in str(caught.value)


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1]", "a JSON list"),
        (b"[" * 100_000, "not JSON"),
        (b" " * (2 << 20), "2097152 bytes are no exported card"),
    ],
)
def test_what_is_no_card_is_refused(path: Path, content: bytes, fact: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=fact):
        spec_named(str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read: No such file.*doctor --gpu --out"):
        spec_named(str(tmp_path / "none.json"))


NUMBERS = st.integers() | st.floats()
ANYTHING = st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.lists(NUMBERS, max_size=2)


def refused(path: Path) -> bool:
    """Whether a file is; else it gives a GPU that can be planned for."""
    try:
        spec = spec_named(str(path))
    except ValueError:  # any other error is a fault
        return True
    assert spec.copy_gbps > 0
    return False


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(sorted(asdict(CARD))), value=ANYTHING, cut=st.integers(0, 500))
def test_damage_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: Any, cut: int
) -> None:
    """Any figure replaced by anything, and any end cut off."""
    document = card_document(CARD)
    document["card"][name] = value
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    text = json.dumps(document)
    path.write_text(text)
    assert refused(path) or type(value) is type(getattr(CARD, name)) or type(value) is int
    path.write_text(text[:cut])
    assert refused(path)


def test_what_a_driver_says_is_the_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a GPU that is made up here; an older torch does not pass everything on."""
    said = SimpleNamespace(
        **{"total_memory": 12 << 30, "major": 8, "minor": 9, "multi_processor_count": 60},
        **{"max_threads_per_multi_processor": 1536, "warp_size": 32, "L2_cache_size": 48 << 20},
        **{"shared_memory_per_multiprocessor": 100 << 10, "clock_rate": 2_600_000},
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: said)
    monkeypatch.setattr(card_module, "device_title", lambda device: CARD.name)
    reached = DeviceCeilings(450.0, 26_000.0, 6.5)
    monkeypatch.setattr(card_module, "ceilings_of", lambda *_: reached)
    card = measure_card(torch.device("cuda"), cache_path=tmp_path / "costs.sqlite3")
    assert replace(card, float16_gflops=79_000.0, bfloat16_gflops=80_000.0) == replace(
        CARD, memory_clock_mhz=0, memory_bus_bits=0, torch_version=card.torch_version
    )
    assert card.spec().chip.shared_nbytes == 99 << 10


def test_figures_that_were_not_measured_are_not_exported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(card_module, "ceilings_of", lambda *_: NOMINAL_CEILINGS["cpu"])
    with pytest.raises(MemoryError, match=r"cannot be measured: .* End what else runs"):
        measure_card(torch.device("cpu"), cache_path=tmp_path / "costs.sqlite3")


@pytest.mark.thorough
def test_this_machine_is_measured(tmp_path: Path) -> None:
    """Ceilings of a processor; it is told apart from a GPU when a plan is to be made for it."""
    card = measure_card(torch.device("cpu"), cache_path=tmp_path / "costs.sqlite3")
    assert min(card.copy_gbps, card.float32_gflops, card.bfloat16_gflops, card.launch_us) > 0
    assert Card(**json.loads(json.dumps(card_document(card)))["card"]) == card
    with pytest.raises(ValueError, match="is no GPU"):
        card.spec()
