"""What the site has and `docs/` has not: pages of the repository, and references from docstrings.

Enters: the pages of `docs/`, and those that stand elsewhere in the repository since people look for
them there. Leaves: pages whose links lead to pages of the site; links to sources become plain code,
since the site has none. Guarantees: no page is written twice; what a link names is there, or the
build fails.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import autoremat_solver
from mkdocs.structure.files import File, Files

import autoremat

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from api_reference import GROUPS  # noqa: E402

Groups = tuple[tuple[str, tuple[str, ...]], ...]
ELSEWHERE = {
    "overview.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": ".github/SECURITY.md",
    "solver.md": "solver/README.md",
}
_PAGES = {path: f"docs/{page}" for page, path in ELSEWHERE.items()}
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\]\([^)]*\))*\])\(([^)\s]+)\)")
_API_HEAD = """# Python API

All names are in `autoremat`; each is loaded on first use, so that reading a report needs no torch.
Sizes are bytes (`_nbytes`), times are microseconds (`_us`).
"""
_SOLVER_HEAD = """# Solver API

The package `autoremat_solver` needs no torch: a problem in, a plan out. [How it works
inside](solver.md), and [the command](cli.md) that is the same without Python.
"""
_SOLVER_GROUPS = (
    ("The problem", ("Problem", "Value", "Op", "Phase", "Region", "read_problem", "ProblemError")),
    ("Solving", ("solve", "Solver", "Solution", "Status")),
    ("The plan", ("Plan", "simulate", "Timeline", "check")),
)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages that stand elsewhere."""
    for page, path in ELSEWHERE.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "solver_api.md", content=_reference_of_solver()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the repository as links of the site; the API from docstrings."""
    name = page.file.src_uri
    if name == "api.md":
        return _reference()
    stands_in = posixpath.dirname(ELSEWHERE.get(name, f"docs/{name}"))
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)
    texts = [
        part if part.startswith("```") else _LINK.sub(lambda m: _link(m, stands_in, name), part)
        for part in parts
    ]
    return _with_room_before_lists("".join(texts))


def _link(found: re.Match[str], stands_in: str, page: str) -> str:
    """A link as the site needs it; its text may hold another one."""
    text, target = found[1], found[2]
    text = text[0] + _LINK.sub(lambda m: _link(m, stands_in, page), text[1:])
    if target.startswith(("http://", "https://", "#")):
        return f"{text}({target})"
    path, _, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(stands_in, path))
    path = _PAGES.get(path, path)
    if not path.startswith("docs/") or path.endswith((".py", ".json")):
        return text.removeprefix("[").removesuffix("]")
    relative = posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(page) or ".")
    return f"{text}({relative}{'#' * bool(anchor)}{anchor})"


def _with_room_before_lists(markdown: str) -> str:
    """A list right below a line of text is one for GitHub, and text for Python-Markdown."""
    lines: list[str] = []
    is_code = False
    for line in markdown.split("\n"):
        is_code ^= line.startswith("```")
        is_item = re.match(r"(?:[-*] |\d+\. )", line) is not None
        if is_item and not is_code and lines and lines[-1].strip():
            previous = next((one for one in reversed(lines) if not one.startswith(" ")), "")
            if not re.match(r"(?:[-*] |\d+\. )", previous):
                lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _reference() -> str:
    """The page `api.md`, by the same groups and headings."""
    return _groups(_API_HEAD, "autoremat", _with_the_rest(GROUPS, autoremat.__all__))


def _reference_of_solver() -> str:
    groups = _with_the_rest(_SOLVER_GROUPS, autoremat_solver.__all__)
    return _groups(_SOLVER_HEAD, "autoremat_solver", groups)


def _with_the_rest(groups: Groups, exported: Sequence[str]) -> Groups:
    listed = {name for _, names in groups for name in names}
    return (*groups, ("More", tuple(name for name in exported if name not in listed)))


def _groups(head: str, package: str, groups: Groups) -> str:
    parts = [head]
    for title, names in groups:
        if names:
            parts.append(f"## {title}\n")
            parts += [f"::: {package}.{name}\n" for name in names]
    return "\n".join(parts)
