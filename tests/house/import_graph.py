"""Who imports whom, as rooms and arrows: for the test that keeps their order, and for the page.

Enters: a checkout. Leaves: the modules of a package and what each needs, by their dotted names.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]

# The rooms of each package, in the order in which data flows: a room needs those before it only.
# docs/how_it_works.md and CONTRIBUTING.md show the same picture.
ROOMS = {
    "autoremat": (
        *("_torch", "units", "call_stack", "kept", "progress", "markup", "axes"),
        *(
            "reporting",
            "errors",
            "reserved",
            "host",
            "fallbacks",
            "ranks",
            "memory",
            "cost",
            "graph",
            "elsewhere",
            "ask",
        ),
        *("problem", "emit", "inductor", "planning", "torchtitan", "explain", "watch", "session"),
        *(
            "backend",
            "optimized",
            "api",
            "setup",
            "integrations",
            "offline",
            "verification",
            "targets",
            "comparison",
            "selective",
            "sizing",
            "trial",
            "commands",
        ),
        "__main__",
    ),
    "autoremat_solver": (
        *("certificate", "effort", "problem", "plan", "regions", "model", "simulate"),
        *("check_copies", "check"),
        *("node_link", "plan_document", "plans", "policies", "chains", "program"),
        *("bounds", "search", "solve", "offload"),
    ),
}


def modules_of(
    package: str, *, root: Path = ROOT, in_functions: bool = True
) -> dict[str, set[str]]:
    """Each module of a package, by its dotted name, and the others of it that it needs."""
    base = root / "solver" if package == "autoremat_solver" else root
    paths = {
        ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (base / package).rglob("*.py")
        if path != base / package / "__init__.py"
    }

    def needed(name: str) -> list[str]:
        while name and name not in paths:
            name = name.rpartition(".")[0]
        return [name] if name else []

    found = {
        module: imports(path, base, in_functions=in_functions) for module, path in paths.items()
    }
    return {
        module: {other for name in names for other in needed(name)} - {module}
        for module, names in found.items()
    }


def arrows_of(package: str, *, root: Path = ROOT) -> dict[str, set[str]]:
    """Each room of a package, and the others that it needs."""
    found: dict[str, set[str]] = {}
    for module, needs in modules_of(package, root=root).items():
        found.setdefault(room_of(module), set()).update(map(room_of, needs))
    return {room: needs - {room} for room, needs in found.items()}


def room_of(module: str) -> str:
    """The folder of a module, or its own name where it stands beside the folders."""
    return module.split(".")[1]


@functools.cache  # the tests of the house ask for the same files many times
def imports(path: Path, base: Path, *, in_functions: bool = True) -> frozenset[str]:
    """Absolute names of all that a module imports when it runs, wherever in the file."""
    package = path.relative_to(base).parent.parts
    names: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guards = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    typing_only = {
        child
        for guard in guards
        if dotted(guard.test).endswith("TYPE_CHECKING")
        for statement in guard.body
        for child in ast.walk(statement)
    }
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    later = {child for function in functions for child in ast.walk(function)}
    for node in ast.walk(tree):
        if node in typing_only or (node in later and not in_functions):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of attributes on a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""
