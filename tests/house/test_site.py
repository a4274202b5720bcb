"""The site as people see it: in a browser, on a wide screen and on a narrow one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CANNOT_LOOK = 77  # how it ends where something is missing
LOOK = Path(__file__).parents[2] / "docs" / "site" / "look.py"


@pytest.mark.thorough
def test_no_page_of_the_site_is_wider_than_its_window() -> None:
    """Start, a recipe and the reference; skipped without mkdocs, playwright or a browser."""
    done = subprocess.run([sys.executable, str(LOOK)], capture_output=True, text=True, timeout=300)
    if done.returncode == CANNOT_LOOK:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fits") == 6
