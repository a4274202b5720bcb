"""What a model and its training hold at a moment."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from autoremat.watch.present import Present


class Training(Present):
    """Steps of a model that has gradients as each begins, or not."""

    def __init__(self) -> None:
        self.optimizers = SimpleNamespace(steps=0)
        self.exist = False

    def gradients(self) -> Iterator[object]:
        return iter([object()] * self.exist)


@pytest.mark.parametrize(
    ("steps", "accumulates"),
    [
        ("none", False),
        ("none none none", False),
        ("taken taken taken", False),
        ("none waiting taken waiting", True),
        ("none waiting taken waiting taken", True),
        ("none waiting taken taken", False),
        ("none waiting waiting", True),
    ],
)
def test_gradients_add_up_where_steps_find_such_that_nobody_has_taken(
    steps: str, accumulates: bool
):
    """A scaler that leaves out one step of the optimizer, as in float16, makes that of no run."""
    training = Training()
    for found in steps.split():
        training.exist = found != "none"
        training.optimizers.steps += found == "taken"
        training.begin_step()
    assert training.accumulates == accumulates
