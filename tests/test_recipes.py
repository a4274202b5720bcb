"""Each recipe's script runs as it stands, where its library is installed, and keeps its budget.

A script is the block of Python under `<!-- needs: LIBRARIES -->`; what follows `by` starts it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "docs" / "recipes"
_SCRIPT = re.compile(
    r"^<!-- needs: (?P<needs>[\w, ]+?)(?:, by (?P<starter>[^\n]+))? -->\n"
    r"```python\n(?P<text>.*?)^```$",
    re.M | re.S,
)
_REPORTED = re.compile(r"print\((?:autoremat|callback)\.report\(")


@dataclass(frozen=True)
class Recipe:
    """A script of a page.

    Attributes:
        page: its name.
        needs: libraries without which it is skipped.
        starter: a launcher with its arguments, or "" for plain Python.
        text: the script.
    """

    page: str
    needs: tuple[str, ...]
    starter: str
    text: str

    @property
    def command(self) -> list[str]:
        """What starts `recipe.py`."""
        if {"timm", "torchvision"} & set(self.needs):
            assert not self.starter
            return [sys.executable, str(ROOT / "docs" / "torchvision_here.py"), "recipe.py"]
        launcher, *arguments = shlex.split(self.starter) or [""]
        module = {"": [], "torchrun": ["-m", "torch.distributed.run"]}[launcher]
        return [sys.executable, *module, *arguments, "recipe.py"]

    @property
    def peaks(self) -> int:
        """How many peaks it prints, of a report or by itself."""
        return len(_REPORTED.findall(self.text)) + self.text.count('f"Peak')


def recipes() -> Iterator[Recipe]:
    """All of them, page by page."""
    for path in sorted(RECIPES.glob("*.md")):
        for found in _SCRIPT.finditer(path.read_text(encoding="utf-8")):
            needs = tuple(name.strip() for name in found["needs"].split(","))
            yield Recipe(path.stem, needs, found["starter"] or "", found["text"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "recipe", list(recipes()), ids=lambda recipe: f"{recipe.page}-{recipe.needs[0]}"
)
def test_a_recipe_runs_within_its_budget(recipe: Recipe, tmp_path: Path) -> None:
    """Every peak that it reports is within the budget, and its last plan leaves nothing out."""
    missing = [name for name in recipe.needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    (tmp_path / "recipe.py").write_text(recipe.text, encoding="utf-8")
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    paths = os.pathsep.join([str(ROOT), str(ROOT / "solver"), *inherited])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        recipe.command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    peaks = re.findall(r"^Peak .*\(budget [\d.]+ MB\).*$", done.stdout, re.M)
    assert len(peaks) == recipe.peaks
    assert "OVER" not in done.stdout
    assert "without a plan" not in done.stdout


@pytest.mark.parametrize(
    "recipe", list(recipes()), ids=lambda recipe: f"{recipe.page}-{recipe.needs[0]}"
)
def test_each_script_prints_a_peak(recipe: Recipe) -> None:
    """Else that it keeps its budget would be said of nothing."""
    assert recipe.peaks >= 1


def test_every_page_has_a_script_and_is_listed() -> None:
    """And no script is skipped because a comment above it is not understood."""
    pages = {path.stem for path in RECIPES.glob("*.md")} - {"index"}
    assert {recipe.page for recipe in recipes()} == pages
    listed = re.findall(r"\]\((\w+)\.md\)", (RECIPES / "index.md").read_text(encoding="utf-8"))
    assert set(listed) == pages
    texts = "".join(path.read_text(encoding="utf-8") for path in RECIPES.glob("*.md"))
    assert texts.count("<!-- needs: ") == len(list(recipes()))
