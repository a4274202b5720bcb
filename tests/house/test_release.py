"""What is released can be installed, and works where the repository is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import autoremat

ROOT = Path(__file__).parents[2]
PACKAGES = {"autoremat": ROOT / "autoremat", "autoremat_solver": ROOT / "solver/autoremat_solver"}
GRAPH = """
{"directed": true, "nodes": [
    {"id": "a", "time": 1, "nbytes": 8, "phase": "forward"},
    {"id": "b", "time": 1, "nbytes": 8, "phase": "backward"}
], "edges": [{"source": "a", "target": "b"}]}
"""
MODEL = """
import torch
from torch import nn

def make():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
    return model, (torch.randn(64, 8),), lambda out: out.sum()
"""


@dataclass(frozen=True)
class Release:
    """What was built.

    Attributes:
        wheel: from the tree.
        sdist: from the tree.
        rebuilt: a wheel from what the sdist holds.
    """

    wheel: Path
    sdist: Path
    rebuilt: Path


def run(command: Sequence[object], folder: Path) -> str:
    """What a command prints, with nothing of this process's Python around it."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(folder: Path) -> Path:
    """The Python of a fresh environment without anything, not even pip."""
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


def install(python: Path, *what: object) -> subprocess.CompletedProcess[str]:
    """Install by the pip that these tests were installed by."""
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *what]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """A wheel and an sdist of this tree, and a wheel of the sdist, by the declared backend."""
    folder = tmp_path_factory.mktemp("release")
    python = environment(folder / "backend")
    backend = install(python, "hatchling>=1.26")
    if backend.returncode:
        pytest.skip(f"the build backend cannot be installed: {backend.stderr[-200:]}")
    run([python, "-m", "hatchling", "build", "-d", folder / "built"], ROOT)
    (sdist,) = (folder / "built").glob("*.tar.gz")
    (wheel,) = (folder / "built").glob("*.whl")
    with tarfile.open(sdist) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    run([python, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "again"], unpacked)
    (rebuilt,) = (folder / "again").glob("*.whl")
    return Release(wheel, sdist, rebuilt)


def test_the_citation_is_of_this_version() -> None:
    """The one other place that names it, for tools that run no Python."""
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.M) == [autoremat.__version__]


def test_the_changelog_keeps_its_form() -> None:
    """Releases newest first, each with the kinds of change that Keep a Changelog names."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *releases = re.findall(r"^## (.*)$", text, re.M)
    assert first == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", name) for name in releases)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.M)) <= kinds


@pytest.mark.parametrize("name", ["bug.yml", "slow_or_large.yml"])
def test_whoever_files_an_issue_is_asked_what_doctor_says(name: str) -> None:
    """Versions and device are what most answers depend on."""
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / name).read_text(encoding="utf-8")
    assert "`autoremat doctor --json`" in text


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel."""
    with zipfile.ZipFile(wheel) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


@pytest.mark.thorough
def test_a_wheel_of_the_sdist_is_the_wheel_of_the_tree(release: Release) -> None:
    """File by file: the sdist lacks nothing that a build needs."""
    assert release.rebuilt.name == release.wheel.name
    assert contents(release.rebuilt) == contents(release.wheel)


@pytest.mark.thorough
def test_the_wheel_holds_both_packages_and_nothing_else(release: Release) -> None:
    """Every file of them, pages' templates and marks of types among these."""
    files = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in contents(release.wheel) if ".dist-info/" not in name}
    assert packed == files
    assert {"autoremat/py.typed", "autoremat_solver/py.typed"} <= packed
    assert {Path(name).suffix for name in packed} >= {".html", ".css", ".js", ".svg"}


@pytest.mark.thorough
def test_metadata_say_what_it_is(release: Release) -> None:
    """Version, licence, readme, and the entry points that torch and the shell look for."""
    found = contents(release.wheel)
    (folder,) = {name.partition("/")[0] for name in found if ".dist-info/" in name}
    metadata = found[f"{folder}/METADATA"].decode()
    head, _, body = metadata.partition("\n\n")
    assert f"Version: {autoremat.__version__}" in head.splitlines()
    assert "License-Expression: BSD-3-Clause" in head.splitlines()
    assert "Description-Content-Type: text/markdown" in head.splitlines()
    assert body.startswith("# autoremat")
    points = found[f"{folder}/entry_points.txt"].decode()
    assert "autoremat = autoremat.__main__:main" in points
    assert "autoremat = autoremat.backend:autoremat" in points


@pytest.mark.thorough
def test_the_sdist_holds_what_is_in_the_repository_and_no_more(release: Release) -> None:
    """No environment, cache or build that lay beside the sources."""
    with tarfile.open(release.sdist) as packed:
        names = [name.split("/", 1)[1] for name in packed.getnames()]
    tops = {"autoremat", "solver", "tests", "examples", "docs", ".github"}
    files = {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md"}
    made = {"PKG-INFO", "pyproject.toml", ".gitignore"}
    assert {name.partition("/")[0] for name in names} == tops | files | made
    assert [name for name in names if "__pycache__" in name or ".venv" in name] == []


@pytest.mark.thorough
def test_an_installed_wheel_works_without_the_repository(release: Release, tmp_path: Path) -> None:
    """Version, a plan, its page, the solver alone, and the backend by its name."""
    python = environment(tmp_path / "clean")
    installed = install(python, "--no-deps", release.wheel)
    assert not installed.returncode, installed.stderr
    # Its dependencies come from where these tests find theirs; a plain path, so that what is
    # installed there as editable stays out.
    paths = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (own,) = (tmp_path / "clean" / "lib").glob("python*/site-packages")
    (own / "dependencies.pth").write_text("\n".join(sorted(paths)), encoding="utf-8")
    command, outside = tmp_path / "clean" / "bin" / "autoremat", tmp_path / "outside"
    outside.mkdir()
    (outside / "model.py").write_text(MODEL, encoding="utf-8")
    (outside / "graph.json").write_text(GRAPH, encoding="utf-8")

    assert run([command, "--version"], outside).split() == ["autoremat", autoremat.__version__]
    what = "import autoremat, autoremat_solver as s; print(autoremat.__file__); print(s.__file__)"
    assert all(
        Path(path).is_relative_to(own) for path in run([python, "-c", what], outside).split()
    )
    plan = [
        "plan",
        "model.py:make",
        "--budget",
        "90%",
        "--compiler",
        "eager",
        "--html",
        "page.html",
    ]
    assert "Peak " in run([command, *plan], outside)
    page = (outside / "page.html").read_text(encoding="utf-8")
    assert "</html>" in page
    assert not re.search(r"(?:src|href)=\"https?://", page)
    solved = run([command, "solve", "graph.json", "--budget", "100%", "--json"], outside)
    assert json.loads(solved)
    backends = "import torch; print(torch.compiler.list_backends())"
    assert "'autoremat'" in run([python, "-c", backends], outside)
