"""Files of plans, reports, problems and caches are data: whatever they hold, nothing else happens.

Each file is damaged in a thousand ways, the same ones each time. It is then read as what it was
meant to be, or refused by the error that its reader promises.
"""

from __future__ import annotations

import ast
import copy
import json
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from autoremat_solver import ProblemError, read_problem

from autoremat.ask.plan_file import NodeRecord, StoredGraph, StoredPlan, read, write
from autoremat.errors import SteeringError
from autoremat.kept import Kept
from autoremat.reporting import CurvePoint, Fact, Fallback, PointKind, Report, ReportError
from tests.reporting.report_samples import layered_report, layered_step

ROOT = Path(__file__).parents[1]
COUNT = 400
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**30, 0.5, -0.0, 1e308, 1e999, float("nan")),
    *(
        "",
        "\x00",
        "\ud800",
        "</script><script>alert(1)</script>",
        "{{ 7 * 7 }}",
        "__import__('os')",
    ),
    *([], {}, [[]], {"__class__": "os.system"}, [None] * 3, ["a", "a"]),
)
DEEP = "[" * 100_000


def damaged(text: str, seed: int) -> str:
    """The text of a JSON file after one to three accidents, or with bytes of it gone."""
    drawn = random.Random(seed)
    if seed % 4 == 0:
        return cut(text, drawn)
    data = json.loads(text)
    for _ in range(drawn.randint(1, 3)):
        damage(data, drawn)
    return json.dumps(data)


def cut(text: str, drawn: random.Random) -> str:
    """Some of it is missing, twice there, or another character."""
    start, length = drawn.randrange(len(text)), drawn.choice((1, 1, 2, 30, 1000))
    middle = drawn.choice(("", text[start : start + length] * 2, chr(drawn.randrange(0x250)), DEEP))
    return text[:start] + middle + text[start + length :]


def damage(data: Any, drawn: random.Random) -> None:
    """One entry somewhere inside is gone, odd, or where another one was."""
    places = list(entries(data))
    if not places:
        return
    inside, key = drawn.choice(places)
    match drawn.randrange(4):
        case 0:
            del inside[key]
        case 1:
            other, its_key = drawn.choice(places)
            inside[key] = copy.deepcopy(other[its_key])
        case 2 if isinstance(inside[key], int | float):
            inside[key] = -inside[key] if drawn.random() < 0.3 else 10 * inside[key]
        case _:
            inside[key] = copy.deepcopy(drawn.choice(ODD))


def entries(data: Any) -> Iterator[tuple[Any, Any]]:
    """Each list or object inside, with each of its keys."""
    keys = list(data) if isinstance(data, dict) else range(len(data))
    for key in keys if isinstance(data, dict | list) else ():
        yield data, key
        if isinstance(data[key], dict | list):
            yield from entries(data[key])


# --- what is read ------------------------------------------------------------------------------


def plan_text(path: Path) -> str:
    """A plan of two graphs."""
    nodes = (
        NodeRecord("x", "input", (), ("float32 (8, 512)",)),
        NodeRecord("mm", "aten.mm.default", ("x",), ("float32 (8, 8)",)),
        NodeRecord("output", "output", ("mm",), ()),
    )
    graph = StoredGraph(nodes, ("mm", "mm"), ("x",), "optimal")
    write(StoredPlan((graph, graph), "eager", "cpu", "2.13.0"), path)
    return path.read_text(encoding="utf-8")


def report_text(_: Path) -> str:
    """A report with something in most of its parts."""
    from dataclasses import replace

    report = replace(
        layered_report(2, 3),
        curve=(CurvePoint(5_000_000, 100.0, "every layer", PointKind.STRATEGY),),
        facts=(Fact("Python", "3.12.3"),),
        fallbacks=(Fallback("AR101", "`graph 1` is not understood.", "Do something."),),
    )
    return report.to_json()


def problem_text(_: Path) -> str:
    """A step of the solver's."""
    return layered_step(2, 2)[0].to_json()


def graph_text(_: Path) -> str:
    """A graph as networkx writes it."""
    return (ROOT / "examples" / "residual_mlp.json").read_text(encoding="utf-8")


def read_plan(text: str, path: Path) -> None:
    """From a file."""
    path.write_bytes(text.encode(errors="surrogatepass"))
    read(path)


def read_plan_of_lightning(text: str, folder: Path) -> None:
    """From a checkpoint, as Lightning's callback takes it."""
    pytest.importorskip("lightning")
    from autoremat.integrations.lightning import PLAN, Autoremat

    callback = Autoremat("1GB")
    callback.load_state_dict({"plan": text})
    room, name = callback._resumed_from("some.ckpt", folder.parent)
    assert (room, name) == (folder.parent, "The plan in some.ckpt" if text else "")
    read(folder.parent / PLAN)


def show_report(text: str, _: Path) -> None:
    """Read and rendered; what a file brings along is no markup of the page."""
    report = Report.from_json(text)
    report.summary()
    page = report.to_html()
    assert "<script>alert" not in page
    assert ">49<" not in page


def take_problem(text: str, _: Path) -> None:
    """As `autoremat solve` reads it."""
    read_problem(text)


@dataclass(frozen=True)
class Kind:
    """A kind of file: a sample, its reader, and what the reader may raise."""

    sample: Callable[[Path], str]
    reader: Callable[[str, Path], None]
    error: type[Exception]


KINDS = {
    "plan": Kind(plan_text, read_plan, SteeringError),
    "plan in a checkpoint": Kind(plan_text, read_plan_of_lightning, SteeringError),
    "report": Kind(report_text, show_report, ReportError),
    "problem": Kind(problem_text, take_problem, ProblemError),
    "graph": Kind(graph_text, take_problem, ProblemError),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_damaged_file_is_read_or_refused(kind: Kind, tmp_path: Path) -> None:
    """With the reader's own error, which says what is wrong, and no other."""
    path = tmp_path / "file.json"
    text = kind.sample(path)
    kind.reader(text, path)
    refused = 0
    for seed in range(COUNT):
        try:
            kind.reader(damaged(text, seed), path)
        except kind.error:
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {damaged(text, seed)[:2000]}") from error
    assert COUNT // 4 < refused < COUNT


def not_a_number_of_steps() -> Iterator[str]:
    """What a file of steps may hold instead."""
    yield from (json.dumps(one) for one in ODD if json.dumps(one) != "0")
    yield from ("", "NaN", "1e3", "12 34", "-1", "1" * 5000, DEEP, "\ufeff7", "0x10")


@pytest.mark.parametrize("text", list(not_a_number_of_steps()), ids=lambda text: text[:12])
def test_steps_of_a_checkpoint_are_a_number_or_passed_over(text: str, tmp_path: Path) -> None:
    """Of the file that `load_state` reads, the count stays what it was."""
    pytest.importorskip("accelerate")
    from autoremat.integrations.accelerate import STEPS, Following

    following = Following.__new__(Following)
    following._followed = SimpleNamespace(resume=lambda folder: None)
    following.steps = 3
    for content, steps in ((text, 3), ("7", 7)):
        (tmp_path / STEPS).write_bytes(content.encode(errors="surrogatepass"))
        following._load(None, str(tmp_path))
        assert following.steps == steps


@dataclass(frozen=True)
class Number:
    """What a cache may hold."""

    us: float


class Numbers(Kept):
    """Numbers."""

    FILE, FORMAT, WHAT = "numbers.sqlite", 1, "numbers"


@pytest.mark.parametrize("text", ["", "null", "[", "[1, 2]", '{"us": 1}', DEEP, '"x"'])
def test_a_cache_that_holds_something_else_is_as_good_as_empty(tmp_path: Path, text: str) -> None:
    """It costs a measurement, nothing more."""
    with Numbers.open(tmp_path / "numbers.sqlite") as kept:
        kept._connection.execute("INSERT INTO found VALUES ('key', ?)", (text,))
        assert kept.read(["key"], Number) == {}


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_cache_is_begun_anew(tmp_path: Path, seed: int) -> None:
    """Any bytes of the file may be others."""
    path, drawn = tmp_path / "numbers.sqlite", random.Random(seed)
    with Numbers.open(path) as kept:
        kept.write({f"key {n}": Number(n) for n in range(200)})
    data = bytearray(path.read_bytes())
    for _ in range(drawn.choice((1, 10, 1000))):
        data[drawn.randrange(len(data))] = drawn.randrange(256)
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Numbers.open(path) as kept:
            kept.read([f"key {n}" for n in range(200)], Number)
            kept.write({"new": Number(0.5)})


# --- what could run code -----------------------------------------------------------------------

# Between processes of one program, never a file: a forked child, ranks of one training job.
BETWEEN_PROCESSES = {"autoremat/elsewhere/apart.py", "autoremat/session/lockstep.py"}
# What Inductor has generated in this process, to see how much memory it takes.
OWN_CODE = {"autoremat/inductor/wrapper.py", "autoremat/inductor/library_calls.py"}
RUNS_CODE = {
    "eval",
    "exec",
    "pickle.load",
    "pickle.loads",
    "torch.load",
    "yaml.load",
    "marshal.loads",
}


def test_nothing_else_can_make_code_of_data() -> None:
    """Pickles are read in two places, expressions in two others, and none of them is of a file."""
    found: dict[str, set[str]] = {}
    for path in (p for folder in ("autoremat", "solver") for p in (ROOT / folder).rglob("*.py")):
        names = {
            ast.unparse(node.func) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)
        }
        if names & RUNS_CODE:
            found[path.relative_to(ROOT).as_posix()] = names
    assert found.keys() == BETWEEN_PROCESSES | OWN_CODE
    assert all(
        not names & {"eval", "exec"} for path, names in found.items() if path not in OWN_CODE
    )


def tree(path: Path) -> ast.Module:
    """A module's syntax."""
    return ast.parse(path.read_text(encoding="utf-8"))
