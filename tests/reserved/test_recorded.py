"""The emulator says what torch's own allocator has said.

`recorded.json` was written by `torchs_allocator.compare`, in which the allocator of torch's wheels
for CUDA runs on a device that is none.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.reserved.traces import EACH, RECORDED_SEEDS, SETTINGS, STEPS, Case

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())


def test_the_versions_that_are_supported_were_asked():
    """The oldest and the newest one, under each setting."""
    assert RECORDED["torch"] == ["2.11.0", "2.13.0"]
    asked = [(setting, seed) for setting, seed, _ in RECORDED["cases"]]
    assert asked == [(setting, seed) for setting in SETTINGS for seed in RECORDED_SEEDS]


@pytest.mark.parametrize(("setting", "seed", "answers"), RECORDED["cases"])
def test_each_request_is_answered_as_torch_does(setting: str, seed: int, answers: list[str]):
    """Allocated, reserved, the peaks of both, retries, and what has no room."""
    assert Case.random(setting, seed, STEPS).answers()[EACH - 1 :: EACH] == answers
