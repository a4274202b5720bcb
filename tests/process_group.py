"""A process group of this process alone, for tests that import the fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import distributed


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path) -> Iterator[None]:
    """The group is there during each test of the module."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()
