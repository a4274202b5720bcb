"""What the pages of the repository show runs, what they quote is said, what they link is there.

A fenced block of Python is run, and under `docs/` one of commands, unless a comment before it says
why not. Such comments are `<!-- not run: why -->`, `<!-- file: NAME -->` for a file that the reader
is to write, `<!-- needs: LIBRARIES -->` for what `tests/test_recipes.py` runs, and
`<!-- exit code N -->`. The blocks of one page share their variables; all pages
share a folder.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

import autoremat
from autoremat.commands.app import app
from tests.training import measured

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", ".github/*.md", "solver/*.md", "docs/**/*.md")
    for path in sorted(ROOT.glob(pattern))
)
_FENCE = re.compile(
    r"^(?:<!-- (?P<note>[^>]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_QUOTE = re.compile(r"^> (.*(?:\n> .*)*)", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block, and the comment right above it."""

    language: str
    text: str
    note: str
    page: str

    @property
    def is_run(self) -> bool:
        """Whether the reader is to run it, with autoremat alone."""
        is_command = self.language == "bash" and self.page.startswith("docs/")
        is_shown = self.language == "python" or is_command
        return is_shown and not self.note.startswith(("not run", "file", "needs"))


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, top to bottom."""
    for found in _FENCE.finditer((ROOT / page).read_text(encoding="utf-8")):
        yield Block(found["language"], found["text"], found["note"] or "", page)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout's examples, and the files that the pages tell the reader to write."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in (block for page in PAGES for block in blocks(page)):
        if block.note.startswith("file: "):
            (folder / block.note.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
    return folder


@pytest.fixture
def reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In that folder, with Python as a script there would find it."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    torch._dynamo.reset()
    yield folder
    for name in ("my_model", "my_step"):
        sys.modules.pop(name, None)


# Dynamo looks at `.grad` of what one model makes for another.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.thorough
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.is_run for b in blocks(page))])
def test_what_a_page_shows_runs(page: str, reader: Path) -> None:
    """Each block in turn, as a reader would."""
    variables: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.is_run and block.language == "python":
            exec(compile(block.text, page, "exec"), variables)
        elif block.is_run:
            for line in block.text.splitlines():
                run_command(line, block.note)


def test_the_wrapper_of_the_readme_keeps_the_budget(reader: Path) -> None:
    """Its class is the one that the page on several models shows; measured, not by `verify`."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(
        r"^```python\n(class WithLoss.*?)\n\n\nstep =.*?^```$", readme, re.M | re.S
    )
    assert shown in (DOCS / "several_models.md").read_text(encoding="utf-8")
    my_step = importlib.import_module("my_step")
    model = importlib.import_module("my_model").Network(layers=3).blocks
    first, second = torch.randn(2, 1024, 64)
    plain = measured(my_step.WithLoss(model), (first, second))
    budget = int(0.7 * plain)
    step = autoremat.optimize(
        my_step.WithLoss(model), budget, compiler="eager", verbose=False, time_limit=5
    )
    step(first, second).backward()  # plans
    for _ in range(2):
        assert measured(step, (first, second)) <= budget


_MODELS = {
    "GPT-2, 12 layers": "gpt2",
    "GPT-2, 50k words": "gpt2_50k",
    "Llama, 50k words": "llama_50k",
}


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of a page's tables, by their first cell."""
    lines = (line.strip("|").split("|") for line in text.splitlines() if line.startswith("|"))
    return {first.strip(): [cell.strip(" *") for cell in rest] for first, *rest in lines}


def with_adamw(model: str) -> str:
    """A whole step in MiB: what is resident, two moments of each parameter, and the peak above."""
    stored = json.loads((DOCS / "benchmarks.json").read_text(encoding="utf-8"))["rows"]
    rows = [r for r in stored if (r["model"], r["compiler"]) == (model, "inductor")]
    (plain,) = (row for row in rows if row["variant"] == "plain")
    held = plain["resident_nbytes"] + 2 * plain["gradient_nbytes"]
    ours = min(
        r["peak_nbytes"] for r in rows if r["variant"] == "autoremat" and r["status"] == "ok"
    )
    return " to ".join(f"{(held + peak) / 2**20:.0f}" for peak in (plain["peak_nbytes"], ours))


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    """Its table is written by hand, the page of the benchmarks is not."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    columns = (
        "eager | `torch.compile` | + by hand | ours, at that peak | ours, smallest | with AdamW"
    )
    head = f"| | {columns} |"
    table = rows_of(readme.split(head)[1].split("\n\n")[0])
    del table["---"]
    assert len(table) == 8
    for name, shown in table.items():
        title = f'## {_MODELS.get(name, name.lower())}, compiler="inductor"\n'
        section = page.split(title)[1].split("\n## ")[0]
        (eager,) = re.findall(r"peak above it ([\d.]+) MiB", section)
        rows, by_hand = rows_of(section), "torch.compile + per-layer checkpoint"
        theirs = [rows["torch.compile"], rows[by_hand]]
        ours = [rows[f"as {by_hand}"], rows["smallest"]]
        found = [", ".join(row[:2]) for row in theirs]
        found += [f"{row[1]}, {row[5]}" for row in ours]  # peak and time
        found.append(with_adamw(_MODELS.get(name, name.lower())))
        assert [cell.replace("**", "") for cell in shown] == [eager, *found], name
        assert all(float(row[4].strip(" %")) <= 2 for row in ours), name  # predicted peaks


def run_command(line: str, note: str) -> None:
    """One command of autoremat, and that it ends with the code that the page names."""
    program, *arguments = shlex.split(line, comments=True)
    assert program == "autoremat", f"not a command of ours: {line}"
    result = CliRunner().invoke(app, arguments)
    code = int(note.removeprefix("exit code ")) if note else 0
    assert result.exit_code == code, f"{line}\n{result.output}"


@pytest.mark.parametrize("page", PAGES)
def test_a_block_that_is_not_run_says_why(page: str) -> None:
    """No block is skipped in silence: a note is one of five, and a reason has words."""
    notes = (
        r"|not run: \w+ .+|file: \w+\.py|exit code \d|command: (?:example|tests)|needs: [\w, -]+"
    )
    for block in blocks(page):
        assert re.fullmatch(notes, block.note), block.note
        if block.language == "python" and block.note != "not run: a signature":
            compile(block.text, page, "exec")


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_are_there(page: str) -> None:
    """Files exist, headings as well, and every picture has words in its place."""
    text = _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for alternative, target in re.findall(
        r"(?<!`)\[([^\[\]]*|!\[.*?\]\(.*?\))\]\(([^)\s]+)\)", text
    ):
        if target.startswith(("http://", "https://")):
            continue
        assert alternative
        name, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / name if name else ROOT / page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors_of(linked.read_text(encoding="utf-8")), target


def test_every_page_has_its_place_on_the_site() -> None:
    """What is there is in the navigation; pages that stand elsewhere are brought in."""
    site = (DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    brought_in = dict(
        re.findall(r'^    "(\w+\.md)": "(.*)",$', (DOCS / "site/hooks.py").read_text("utf-8"), re.M)
    )
    ours = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    named = re.findall(r"^ +- (?:.*: )?([\w/]+\.md)$", site, re.M)
    assert sorted(named) == sorted({*ours, *brought_in, "solver_api.md"})
    assert set(brought_in.values()) == {page for page in PAGES if not page.startswith("docs/")}


def anchors_of(text: str) -> set[str]:
    """Of a page's headings; of equal ones, the second is numbered."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.M):
        anchor = anchor_of(heading)
        numbers = (f"{anchor}-{n}" if n else anchor for n in range(100))
        found.add(next(one for one in numbers if one not in found))
    return found


def anchor_of(heading: str) -> str:
    """As the usual Markdown renderers make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_the_index_names_every_page() -> None:
    """No page is left for the reader to find by chance."""
    linked = re.findall(r"\]\(([\w./]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8"))
    pages = {page.name for page in DOCS.glob("*.md")} - {"index.md"}
    assert sorted(pages - set(linked)) == []


def test_the_messages_of_troubleshooting_are_ours() -> None:
    """Each quoted piece, between "...", is in a string of the source."""
    said = "\n".join(strings_of(ROOT / "autoremat"))
    quotes = _QUOTE.findall((DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
    assert len(quotes) >= 8
    for quote in quotes:
        pieces = [piece.strip(" `") for piece in quote.replace("\n> ", " ").split("...")]
        assert [piece for piece in pieces if piece and piece not in said] == []


def strings_of(folder: Path) -> Iterator[str]:
    """Every constant string of the sources; an f-string's fixed parts one by one."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_references_are_those_that_are_cited() -> None:
    """Every `[Key]` of sources and pages is in `references.md`, which lists nothing else."""
    page = (DOCS / "references.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \*\*\[(\w+)\]\*\*", page, re.M)
    folders = [ROOT / name for name in ("autoremat", "solver", "docs", "tests", "examples")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    texts = [
        path.read_text(encoding="utf-8")
        for path in files
        if path.suffix in (".py", ".md") and path.name != "references.md"
    ]
    cited = set(re.findall(r"\[([A-Z][A-Za-z]+[0-9]{4}|MemoryViz)\]", "\n".join(texts)))
    assert len(set(listed)) == len(listed)
    assert cited == set(listed)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "maker"),
    [("api", "api_reference"), ("cli", "cli_reference"), ("rooms", "rooms")],
)
def test_generated_pages_are_up_to_date(name: str, maker: str) -> None:
    """`python docs/api_reference.py` and the like would change nothing."""
    made = script(maker).page()
    assert made == (DOCS / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("picture", sorted((DOCS / "images").glob("*.png")), ids=lambda p: p.stem)
def test_pictures_are_small_and_made_by_the_script(picture: Path) -> None:
    """Each is drawn by `docs/report_pages.py`, is shown on a page, and loads fast."""
    pages = script("report_pages")
    drawn = {shot.name for subject in pages.SUBJECTS for shot in subject.pictures}
    assert picture.stem in drawn
    assert picture.stat().st_size <= pages.MOST_NBYTES
    shown = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    assert f"images/{picture.name}" in shown


def test_without_a_browser_no_picture_is_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script says what is missing and ends well, before it plans anything."""
    pages = script("report_pages")
    monkeypatch.setattr(pages, "find_browser", lambda: None)
    monkeypatch.setattr(sys, "argv", ["report_pages.py"])
    pages.main()
    assert "Skipped: no browser is installed" in capsys.readouterr().out


def script(name: str) -> ModuleType:
    """A script of `docs/` as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
