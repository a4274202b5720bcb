"""The promises of the layout: README commands, entry point, and who may import whom."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from autoremat import _torch
from tests.house import import_graph
from tests.house.import_graph import ROOMS, dotted, modules_of, room_of

ROOT = Path(__file__).parents[2]
TORCH_SIDE, SOLVER, REPORT = (
    ROOT / "autoremat",
    ROOT / "solver" / "autoremat_solver",
    ROOT / "autoremat" / "reporting",
)

# What a module may not need, not even through others: modules, or all below a package.
NEVER_NEEDED = {
    "autoremat.ask.budget": {"autoremat.reporting"},
    "autoremat.errors": {"autoremat.reporting.text", "autoremat.reporting.page"},
    "autoremat.comparison.worker": {"autoremat.commands"},
    "autoremat.ask.options": {
        "autoremat.planning.choice",
        "autoremat.problem.segments",
        "autoremat.problem.lower",
    },
}


@pytest.mark.parametrize("name", ["example", "tests"])
def test_readme_holds_one_command_line(name: str) -> None:
    """CI runs the README's own command, so it must be one line that the shell can parse."""
    script = ROOT / ".ci" / "readme_command"
    if not script.exists():
        pytest.skip("an sdist has no .ci")
    found = subprocess.run(
        [sys.executable, script, name], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert len(found.splitlines()) == 1
    assert found.startswith("python3 -m venv .venv && .venv/bin/pip install -e ")
    subprocess.run(["bash", "-n", "-c", found], check=True)


def test_commands_in_readme_name_files_that_exist() -> None:
    """A renamed example or document must not stay behind in the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = sorted(set(re.findall(r"(?:examples|docs)/[\w./]*\w", text)))
    assert paths
    assert [p for p in paths if not (ROOT / p).exists()] == []


def test_backend_entry_point_is_declared() -> None:
    """`torch.compile(backend="autoremat")` finds us by this group and name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["torch_dynamo_backends"] == {
        "autoremat": "autoremat.backend:autoremat"
    }


def test_import_of_the_solver_needs_no_torch() -> None:
    """The solver runs where torch is absent."""
    code = "import sys; sys.modules['torch'] = None; import autoremat_solver"
    environment = {"PYTHONPATH": str(SOLVER.parent)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_solver_imports_neither_torch_nor_autoremat() -> None:
    """The dependency goes one way."""
    assert offenders(SOLVER, lambda _, name: top(name) in {"torch", "autoremat"}) == []


def test_only_pulp_module_imports_pulp() -> None:
    """One module builds and runs the integer program."""
    wrong = offenders(ROOT, lambda path, name: top(name) == "pulp" and path.name != "_pulp.py")
    assert wrong == []


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_need_only_rooms_before_them(package: str) -> None:
    """Data flows one way: whoever reads the rooms in this order meets nothing unknown."""
    rank = {room: place for place, room in enumerate(ROOMS[package])}
    wrong = [
        f"{module} needs {needed}"
        for module, needs in modules_of(package).items()
        for needed in sorted(needs)
        if rank[room_of(needed)] > rank[room_of(module)]
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_has_its_place(package: str) -> None:
    """A new folder is part of the picture from its first day."""
    assert {room_of(module) for module in modules_of(package)} == set(ROOMS[package])


@pytest.mark.parametrize("package", ROOMS)
def test_there_is_no_import_cycle(package: str) -> None:
    """Modules can be read in one order; what a function imports when it runs is another matter."""
    graph = modules_of(package, in_functions=False)
    while leaves := {name for name, needs in graph.items() if not needs & graph.keys()}:
        graph = {name: needs for name, needs in graph.items() if name not in leaves}
    assert graph == {}


def test_report_needs_only_the_solver_and_the_standard_library() -> None:
    """A stored report can be shown where torch is absent; the words for its numbers need less."""
    units, markup, axes = "autoremat.units", "autoremat.markup", "autoremat.axes"
    renderers = {"autoremat_solver", "jinja2", "rich"}

    def foreign(path: Path, name: str) -> bool:
        inside = name.startswith(("autoremat.reporting.", f"{units}.", f"{markup}.", f"{axes}."))
        return not inside and top(name) not in renderers | sys.stdlib_module_names

    assert offenders(REPORT, foreign) == []
    for plain in (units, axes):
        assert {top(name) for name in imports(file_of(plain))} <= sys.stdlib_module_names
    assert {top(name) for name in imports(file_of(markup))} <= {"jinja2", *sys.stdlib_module_names}


@pytest.mark.parametrize(("name", "never"), NEVER_NEEDED.items(), ids=NEVER_NEEDED)
def test_what_comes_first_needs_nothing_that_comes_later(name: str, never: set[str]) -> None:
    """What users ask for is read, and refused, without the planner and without the renderers."""
    assert {module_of(other) for other in never} == never
    needed = {f"{other}." for other in needed_by(name)}
    assert [n for n in needed if n.startswith(tuple(f"{other}." for other in never))] == []


SAC_ILP = "torch.distributed._tools."


@pytest.mark.parametrize("folder", ["autoremat", "docs", "examples"])
def test_private_torch_names_stay_in_one_place(folder: str) -> None:
    """What torch may change under us is reached through `autoremat._torch` only.

    A benchmark's peer may be private itself.
    """

    def private(path: Path, name: str) -> bool:
        is_peer = path.name == "benchmark_sac_ilp.py" and name.startswith(SAC_ILP)
        is_inside = TORCH_SIDE / "_torch" in path.parents
        return is_private_torch(name) and not is_inside and not is_peer

    assert offenders(ROOT / folder, private) == []


def test_what_torch_notes_and_hides_is_asked_for_in_one_place() -> None:
    """Keys of `node.meta`, and private attributes of modules, operators and calls."""
    hidden = {"_boxed_call", "_call_impl", "_compiled_call_impl", "_schema"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources(TORCH_SIDE)
        if TORCH_SIDE / "_torch" not in path.parents
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Attribute) and node.attr in hidden) or reads_a_note(node)
    ]
    assert found == []


def reads_a_note(node: ast.AST) -> bool:
    """`x.meta["key"]` or `x.meta.get("key")`, written with a text."""
    if isinstance(node, ast.Subscript):
        notes, key = node.value, node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        notes, key = node.func.value, node.args[0]
    else:
        return False
    return isinstance(key, ast.Constant) and getattr(notes, "attr", "") == "meta"


def test_a_private_name_is_found_where_it_is_public() -> None:
    """`_torch.NAME` is what its module gives away; no two modules give it away."""
    modules = [import_module(f"autoremat._torch.{name}") for name in _torch.MODULES]
    names = [(name, module) for module in modules for name in module.__all__]
    assert len(dict(names)) == len(names)
    assert all(getattr(_torch, name) is getattr(module, name) for name, module in names)
    with pytest.raises(AttributeError, match="has no attribute 'is_tangential'"):
        _ = _torch.is_tangential


def test_measuring_imports_no_compiler() -> None:
    """`autoremat.measure_peak` is there before Dynamo and Inductor, which take seconds."""
    code = (
        "import sys, autoremat; autoremat.measure_peak;"
        "assert 'autoremat._torch.running' in sys.modules;"
        "assert not {'torch._dynamo', 'torch._inductor'} & sys.modules.keys()"
    )
    environment = {"PYTHONPATH": f"{SOLVER.parent}:{ROOT}"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def offenders(folder: Path, is_wrong) -> list[str]:  # type: ignore[no-untyped-def]
    """`file: name` for each import, or dotted use of torch, that `is_wrong(path, name)`."""
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources(folder)
        for name in imports(path) | torch_attributes(path)
        if is_wrong(path, name)
    ]


def sources(folder: Path) -> Iterator[Path]:
    """Our Python files below a folder; from the root, those of both packages."""
    folders = [TORCH_SIDE, SOLVER] if folder == ROOT else [folder]
    return (path for f in folders for path in sorted(f.rglob("*.py")))


def imports(path: Path) -> frozenset[str]:
    """Absolute names of all that one of our modules imports."""
    return import_graph.imports(path, SOLVER.parent if SOLVER in path.parents else ROOT)


def needed_by(name: str) -> set[str]:
    """Modules of the torch side that a module imports, and what these import in turn."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        names = {module_of(other) for other in imports(file_of(waiting.pop()))} - found - {""}
        found |= names
        waiting += names
    return found


def module_of(name: str) -> str:
    """The module of the torch side that an imported name is, or lies in; else ""."""
    while name and not file_of(name).exists():
        name = name.rpartition(".")[0]
    return name


def file_of(name: str) -> Path:
    """Where a module of the torch side stands, if there is one of that name."""
    path = ROOT.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def torch_attributes(path: Path) -> set[str]:
    """Dotted names that begin with `torch.`, as used in expressions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = (dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {name for name in found if name.startswith("torch.")}


def is_private_torch(name: str) -> bool:
    """Whether a part below `torch` begins with one underscore; operators' names are data."""
    first, *rest = name.split(".")
    if rest[:1] == ["ops"]:
        return False
    return first == "torch" and any(p.startswith("_") and not p.startswith("__") for p in rest)


def top(name: str) -> str:
    """The package that a dotted name belongs to."""
    return name.split(".")[0]
