"""Draw the pictures of reports: real pages of four models, in a real browser.

    python docs/report_pages.py            # all pictures; minutes, most of them for planning
    python docs/report_pages.py gpt2       # those of one model

Enters: GPT-2, the GPT of the example and a UNet of `tests/models.py`, planned and measured here,
and a Llama of 7 billion parameters, planned for an H100 without weights, from
`examples/llama_7b.json`. Leaves: PNG files in `docs/images/`, and on the terminal the seconds and
the peak resident memory of the 7 B plan.
Without Chromium or Chrome it says so and draws nothing.
"""

from __future__ import annotations

import argparse
import copy
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MOST_NBYTES = 250_000
WIDTH = 1280
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass(frozen=True)
class Picture:
    """One picture of a page.

    Attributes:
        name: of the file, without its ending.
        section: id of the section to show alone, or "" for the top of the page.
        height: of the window.
        dark: whether in the dark theme.
    """

    name: str
    section: str
    height: int
    dark: bool = False


@dataclass(frozen=True)
class Subject:
    """A model, how its page is made, and what is shown of it."""

    name: str
    write_page: Callable[[Path], None]
    pictures: tuple[Picture, ...]


# --- the pages ---------------------------------------------------------------------------------


def measured_page(name: str) -> Callable[[Path], None]:
    """Plan a model of `tests/models.py` for half of its peak, measure a step, write the page."""

    def write(page: Path) -> None:
        sys.path[:0] = [str(ROOT), str(ROOT / "solver")]
        import autoremat
        from autoremat.reporting.page import html
        from tests import models

        case = getattr(models, name)()
        keywords = {}
        if case.forward is models.call_with_labels:
            keywords = dict(zip(("input_ids", "labels"), case.inputs, strict=True))
        inputs = () if keywords else case.inputs
        budget = eager_peak(copy.deepcopy(case)) // 2
        options = {"budget": budget, "compiler": "eager", "verbose": False}
        report = autoremat.plan(case.model, *inputs, curve=10, **options, **keywords)
        autoremat.optimize(case.model, **options)
        checked = autoremat.verify(case.model, *inputs, **keywords)
        assert checked.ok, checked
        report = report.with_measured(checked.measured_peak_nbytes)
        page.write_text(html(report), encoding="utf-8")
        print(report.summary().splitlines()[0])

    return write


def eager_peak(case) -> int:  # type: ignore[no-untyped-def]
    """Measured peak of a plain step in bytes, all that it holds included."""
    import autoremat

    case.step()
    case.model.zero_grad(set_to_none=True)
    resident = autoremat.resident_nbytes(case.model, case.inputs)
    return resident + autoremat.measure_peak(case.step, device="cpu")


def llama_page(page: Path) -> None:
    """Plan the 7 B Llama by the command that the page shows, and print what that takes."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'solver'}"}
    command = [sys.executable, "-m", "autoremat", "plan", "hf:examples/llama_7b.json"]
    command += ["--batch", "4", "--seq", "2048", "--device", "H100", "--optimizer", "SGD"]
    command += ["--budget", "45GB", "--html", str(page)]
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    seconds = time.monotonic() - began
    # Of all children so far: this one alone, since the browser starts after it.
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / (1 << 20)
    print(done.stdout.splitlines()[0])
    print(
        f"7 B plan with its curve: {seconds:.0f} s, {processor:.0f} s of them on the processor; "
        f"{peak:.1f} GiB resident at most"
    )


SUBJECTS = (
    Subject(
        "llama_7b",
        llama_page,
        (Picture("llama_7b", "", 1050), Picture("llama_7b_curve", "curve", 560)),
    ),
    Subject(
        "gpt2",
        measured_page("gpt2"),
        (
            Picture("gpt2", "", 1050),
            Picture("gpt2_timeline", "timeline", 640),
            Picture("gpt2_values", "values", 800),
            Picture("gpt2_modules", "modules", 740),
            Picture("gpt2_curve", "curve", 560),
            Picture("gpt2_ground", "ground", 500),
        ),
    ),
    Subject(
        "example_gpt",
        measured_page("example_gpt"),
        (Picture("example_gpt", "timeline", 640),),
    ),
    Subject("unet", measured_page("unet"), (Picture("unet_dark", "", 1050, dark=True),)),
)


# --- the pictures ------------------------------------------------------------------------------


def find_browser() -> str | None:
    """Path of an installed browser."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def draw(browser: str, page: Path, picture: Picture) -> None:
    """Open a page, show one section of it, and write what is seen."""
    text = page.read_text(encoding="utf-8")
    if picture.section:
        # The section with its heading, and nothing around it.
        alone = (
            "<style>main > section, header.top, footer { display: none !important }"
            f"main > section#{picture.section} {{ display: block !important }}</style></head>"
        )
        text = text.replace("</head>", alone, 1)
    with tempfile.TemporaryDirectory() as folder:
        shown, png = Path(folder, "page.html"), Path(folder, "page.png")
        shown.write_text(text, encoding="utf-8")
        size = f"--window-size={WIDTH},{picture.height}"
        arguments = [*FLAGS, f"--user-data-dir={folder}/profile", size, "--hide-scrollbars"]
        if picture.dark:
            arguments.append("--blink-settings=preferredColorScheme=0")
        arguments += [f"--screenshot={png}", shown.as_uri()]
        subprocess.run([browser, *arguments], check=True, capture_output=True, timeout=120)
        data = png.read_bytes()
    if len(data) > MOST_NBYTES:
        raise SystemExit(f"{picture.name}.png has {len(data)} bytes, more than {MOST_NBYTES}.")
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / f"{picture.name}.png").write_bytes(data)
    print(f"{picture.name}.png: {len(data)} bytes")


def main() -> None:
    """Draw what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [subject.name for subject in SUBJECTS]
    parser.add_argument("names", nargs="*", metavar="MODEL", help=", ".join(names))
    parser.add_argument("--pages", type=Path, help="keep the pages in this folder, and reuse them")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(names))
    if unknown:
        parser.error(f"no model {', '.join(unknown)}: choose from {', '.join(names)}")
    browser = find_browser()
    if browser is None:
        print(f"Skipped: no browser is installed (none of {', '.join(BROWSERS)} is on the path).")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.pages or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for subject in SUBJECTS:
            if args.names and subject.name not in args.names:
                continue
            page = folder / f"{subject.name}.html"
            if not page.exists():
                subject.write_page(page.resolve())
            for picture in subject.pictures:
                draw(browser, page, picture)


if __name__ == "__main__":
    main()
