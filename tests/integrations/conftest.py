"""What all tests of trainers share."""

from __future__ import annotations

import pytest

from autoremat.integrations import followed


@pytest.fixture(autouse=True)
def no_line_of_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that are newer than what was tested are what is tested here."""
    monkeypatch.setattr(followed, "TESTED", {})
