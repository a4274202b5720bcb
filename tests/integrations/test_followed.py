"""What trainers' callbacks have in common, without a trainer."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import autoremat
from autoremat.integrations import followed as followed_module
from autoremat.integrations.followed import PAGE, PLAN, REPORT, TESTED, Followed

QUICK = {"compiler": "eager", "verbose": False}
ROOT = Path(__file__).parents[2]


def model() -> nn.Module:
    """One that has something to plan."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sin().square().mean()

    return Net()


def test_a_model_that_was_optimised_before_stays_as_it_is_and_that_is_told() -> None:
    """Another budget is not heeded in silence; a second run of the same trainer says nothing."""
    given = autoremat.optimize(model(), "1GB", **QUICK)
    with pytest.warns(UserWarning, match=r"optimised before.* budget '10MB'"):
        Followed("10MB", dict(QUICK)).begin(given, [])
    followed, plain = Followed("1GB", dict(QUICK)), model()
    followed.begin(plain, [])
    followed.begin(plain, [])


def test_a_plan_of_a_checkpoint_gives_way_to_what_the_user_decided(tmp_path: Path) -> None:
    """Options that no known plan goes with are taken as they are."""
    given = autoremat.optimize(model(), "1GB", **QUICK)
    given(torch.ones(4, 8)).backward()
    autoremat.save_plan(given, tmp_path / PLAN)
    options = {**QUICK, "offload": f"disk:{tmp_path}"}
    Followed("1GB", options).begin(model(), [], tmp_path)


def test_a_plan_of_another_device_or_compiler_is_set_aside_with_a_line(tmp_path: Path) -> None:
    """It was chosen by other times; the line says by which."""
    given = autoremat.optimize(model(), "1GB", **QUICK)
    given(torch.ones(4, 8)).backward()
    path = tmp_path / PLAN
    autoremat.save_plan(given, path)
    text = path.read_text()
    path.write_text(text.replace('"device": "cpu"', '"device": "NVIDIA H100"'))
    with pytest.warns(UserWarning, match=r"on NVIDIA H100; this is .* on cpu"):
        Followed("1GB", dict(QUICK)).begin(model(), [], tmp_path)
    path.write_text(text)
    with pytest.warns(UserWarning, match=r'made with compiler="eager".*compiler="inductor"'):
        Followed("1GB", {"verbose": False}).begin(model(), [], tmp_path)


def test_a_plan_of_another_torch_is_named_where_its_graph_differs(tmp_path: Path) -> None:
    """Where the graph is the same, the plan is taken."""
    given = autoremat.optimize(model(), "1GB", **QUICK)
    given(torch.ones(4, 8)).backward()
    path = tmp_path / PLAN
    autoremat.save_plan(given, path)
    text = path.read_text().replace(f'"{torch.__version__}"', '"2.9.1"')
    for operator in ("aten.sin.default", "aten.sine.default"):
        path.write_text(text.replace("aten.sin.default", operator))
        followed, plain = Followed("1GB", dict(QUICK)), model()
        followed.begin(plain, [], tmp_path)
        followed.step_begins(is_measured=False)
        plain(torch.ones(4, 8)).backward()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            followed.step_ends()
        lines = [str(one.message) for one in told]
        if operator == "aten.sin.default":
            assert lines == []
        else:
            assert "set aside for 1 of 1 graphs" in lines[0]
            assert "(torch 2.9.1 then" in lines[0]
            assert "aten.sine.default" in lines[0]


@contextmanager
def told() -> Iterator[list[str]]:
    """Texts of all warnings."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield texts
    texts += [str(one.message) for one in found]


def planned(**options: object) -> Followed:
    """After the first step."""
    followed, plain = Followed("1GB", {**QUICK, **options}), model()
    followed.begin(plain, [])
    plain(torch.ones(4, 8)).backward()
    return followed


def file_in_place(folder: Path) -> None:
    """Something else has the checkpoint's name."""
    folder.write_text("a file")


def folder_in_place(folder: Path) -> None:
    """The plan's own name is taken."""
    (folder / PLAN).mkdir(parents=True)


def nothing_there(folder: Path) -> None:
    """Such as after a callback that moves checkpoints away."""


@pytest.mark.parametrize("prepare", [file_in_place, folder_in_place, nothing_there])
def test_a_folder_that_cannot_be_written_is_told_of_once(
    tmp_path: Path, prepare: Callable[[Path], None]
) -> None:
    """With the fact, its cause and what to do; no folder is made, nor is anything half written."""
    followed, folders = planned(), [tmp_path / "one", tmp_path / "two"]
    with told() as texts:
        for folder in folders:
            prepare(folder)
            followed.store(folder)
    (text,) = texts
    assert f"plan and report are not in {folders[0]}: " in text
    assert "Error: [Errno" in text
    assert "Training goes on" in text
    assert "Give the trainer a folder that can be written" in text
    assert all(folder.exists() == (prepare is not nothing_there) for folder in folders)
    assert not [*tmp_path.rglob("*.part")]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_folder_that_is_read_only_or_full_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As the system says it, also where tests may write anywhere."""
    followed = planned()

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(code, "it says", str(path))

    for name in ("mkdir", "write_text"):
        monkeypatch.setattr(Path, name, refuse)
    with told() as texts:
        for _ in range(2):
            followed.store(tmp_path, {"more": "text"}, is_new=True)
    assert len(texts) == 1
    assert "it says" in texts[0]
    assert not [*tmp_path.iterdir()]


def test_a_plan_that_cannot_be_stored_says_why_and_the_report_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder is at fault, and none is asked for."""
    followed = planned()
    folder = tmp_path / "checkpoint"

    def refuse(*_: object) -> None:
        raise ValueError("A plan is of one model.")

    monkeypatch.setattr("autoremat.integrations.followed.save_plan", refuse)
    with told() as texts:
        for _ in range(2):
            followed.store(folder, is_new=True)
    (text,) = texts
    assert "A plan is of one model." in text
    assert "Give the trainer a folder" not in text
    assert {path.name for path in folder.iterdir()} == {REPORT, PAGE}


def test_a_plan_that_lets_values_wait_is_kept_with_the_checkpoint(tmp_path: Path) -> None:
    """As any plan is."""
    planned(offload=f"disk:{tmp_path}").store(tmp_path / "checkpoint", is_new=True)
    assert (tmp_path / "checkpoint" / PLAN).exists()


def test_a_checkpoint_that_cannot_be_read_is_planned_anew_with_a_line(tmp_path: Path) -> None:
    """One without a plan is not worth a line."""
    (tmp_path / "broken" / PLAN).mkdir(parents=True)
    with told() as texts:
        Followed("1GB", dict(QUICK)).begin(model(), [], tmp_path / "broken")
    assert len(texts) == 1
    assert "cannot be used, so the run is planned anew" in texts[0]
    (tmp_path / "file").write_text("a file")
    with told() as texts:
        for folder in (tmp_path, tmp_path / "file", tmp_path / "nowhere"):
            Followed("1GB", dict(QUICK)).begin(model(), [], folder)
    assert texts == []


def test_loggers_that_cannot_write_are_told_of_once() -> None:
    """Whatever they raise, and however many there are."""
    followed = planned()

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def broken() -> None:
        raise RuntimeError("closed")

    with told() as texts:
        for send in (full, broken, full):
            followed.log(send)
    (text,) = texts
    assert "figures cannot be logged: OSError: [Errno 28] No space left" in text
    assert "give the logger a place that it can write" in text


# --- another version of a library ----------------------------------------------------------------


def missing(library: str) -> str:
    """As of what was not installed but copied."""
    raise importlib.metadata.PackageNotFoundError(library)


@pytest.mark.parametrize(
    ("here", "is_told"),
    [
        *(("4.9.9", True), ("4.10.0rc1", False), ("4.99.1", False), ("5.2.7", False)),
        *(("5.3", True), ("10.0.dev0+abc", True), ("unknown", True), ("", True)),
    ],
)
def test_a_version_that_was_not_tested_is_told_of(
    monkeypatch: pytest.MonkeyPatch, here: str, is_told: bool
) -> None:
    """In one line with its number and what was tested, and never by an error."""
    monkeypatch.setattr(followed_module, "TESTED", {"library": ("4.10", "5.2")})
    monkeypatch.setattr(followed_module, "version", lambda name: here if here else missing(name))
    with told() as texts:
        followed_module.tell_if_untested("library")
    assert len(texts) == is_told
    assert all(f"library {here or 'of an unknown version'} was not tested" in t for t in texts)
    assert all("knows 4.10 to 5.2" in text and "\n" not in text for text in texts)


def test_the_versions_of_the_measured_runs_are_tested_ones() -> None:
    """Those that `docs/trainers.md` names."""
    runs = json.loads((ROOT / "docs" / "trainers.json").read_text(encoding="utf-8"))["runs"]
    numbers = followed_module._numbers
    for run in runs:
        for library, (oldest, newest) in TESTED.items():
            assert numbers(oldest) <= numbers(run["versions"][library]) <= numbers(newest)
