"""`autoremat cache`, as a user meets it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from autoremat.cost.cache import CostCache, Measured
from autoremat.planning.found_before import FoundBefore
from tests.commands import command_line


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with CostCache.open() as cache:
        cache.write({"first": Measured(1.0, 2, 3)})


def files(*arguments: object) -> dict[str, dict[str, Any]]:
    """By file, what the command says of it."""
    result = command_line.run("cache", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return {Path(row["path"]).name: row for row in json.loads(result.stdout)["files"]}


def test_it_shows_what_is_kept_and_where():
    result = command_line.run("cache")
    assert result.exit_code == 0
    costs, plans = result.stdout.splitlines()
    assert str(CostCache.default_path()) in costs
    assert "1 operations measured" in costs
    assert str(FoundBefore.default_path()) in plans
    assert files()["costs.sqlite3"]["nbytes"] > 0


def test_it_forgets():
    assert files("--clear")["costs.sqlite3"]["count"] == 0


def test_what_is_exported_is_there_after_an_import(tmp_path):
    folder = tmp_path / "of another machine"
    files("--export", folder)
    files("--clear")
    with CostCache.open() as cache:
        cache.write({"second": Measured(4.0, 5, 6)})
    found = files("--import", folder)["costs.sqlite3"]
    assert (found["count"], found["added"]) == (2, 1)
    with CostCache.open() as cache:
        assert cache.read(["first"], Measured) == {"first": Measured(1.0, 2, 3)}


def test_an_import_replaces_nothing(tmp_path):
    files("--export", tmp_path / "out")
    files("--clear")
    with CostCache.open() as cache:
        cache.write({"first": Measured(9.0, 9, 9)})
    assert files("--import", tmp_path / "out")["costs.sqlite3"]["added"] == 0
    with CostCache.open() as cache:
        assert cache.read(["first"], Measured) == {"first": Measured(9.0, 9, 9)}


def test_a_folder_without_an_export_is_refused(tmp_path):
    assert "--export wrote" in command_line.refused("cache", "--import", tmp_path)


def test_an_export_does_not_write_over_another(tmp_path):
    files("--export", tmp_path / "out")
    said = command_line.refused("cache", "--export", tmp_path / "out")
    assert "is there already" in said


@pytest.mark.parametrize("damage", ["no database", "another format"])
def test_a_foreign_file_is_refused_and_nothing_is_lost(tmp_path, damage):
    files("--export", tmp_path / "out")
    path = tmp_path / "out" / "costs.sqlite3"
    if damage == "no database":
        path.write_bytes(b"nothing of the kind" * 300)
    else:
        with sqlite3.connect(path) as other:
            other.execute("PRAGMA user_version = 99")
    assert str(path) in command_line.refused("cache", "--import", tmp_path / "out")
    assert files()["costs.sqlite3"]["count"] == 1
