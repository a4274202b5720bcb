"""Look at the site in a browser: does any page scroll sideways?

    python docs/site/look.py                  # builds the site, looks at three pages
    python docs/site/look.py --out pictures   # and draws them

Enters: the site as `mkdocs build --strict` makes it. Leaves: a line for each page and width, and
exit code 1 if a page is wider than its window; with `--out`, pictures of what was looked at.
Without mkdocs, playwright or a browser it says so and ends with exit code 77.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PAGES = ("index.html", "recipes/transformers.html", "api.html")
WIDTHS_PX = (1400, 500)
HEIGHT_PX = 900
CANNOT_LOOK = 77


def missing() -> str:
    """What is not here to build the site and look at it, in words; nothing if all is."""
    for name in ("mkdocs", "mkdocstrings", "playwright"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    if browser_path() is None:
        return f"no browser is installed: none of {', '.join(BROWSERS)} is on the path"
    return ""


def browser_path() -> str | None:
    """An installed Chromium or Chrome."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def build(site: Path) -> None:
    """Make the site, as CONTRIBUTING says, but into a folder of its own."""
    config = ROOT / "docs" / "site" / "mkdocs.yml"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    subprocess.run([*command, "-f", config, "-d", site], cwd=ROOT, check=True)


def widths(site: Path, out: Path | None = None) -> Iterator[tuple[str, int, int]]:
    """Pages, the width of the window and that of what is in it, in pixels."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as engine:
        # As root, which containers often run as, Chromium starts only without its sandbox.
        browser = engine.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        for width in WIDTHS_PX:
            tab = browser.new_page(viewport={"width": width, "height": HEIGHT_PX})
            for page in PAGES:
                tab.goto((site / page).as_uri())
                yield page, width, _content_px(tab)
                if out is not None:
                    name = page.replace("/", "-").removesuffix(".html")
                    tab.screenshot(path=out / f"{name}-{width}.png")
        browser.close()


def _content_px(tab: Any) -> int:
    return int(tab.evaluate("document.documentElement.scrollWidth"))


def main() -> int:
    """Build, look, and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a folder for pictures")
    args = parser.parse_args()
    if why := missing():
        print(why, file=sys.stderr)
        return CANNOT_LOOK
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    is_wide = False
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        for page, window, content in widths(Path(folder), args.out):
            is_wide |= content > window
            verdict = "too wide" if content > window else "fits"
            print(f"{page} at {window} px: {content} px, {verdict}")
    return int(is_wide)


if __name__ == "__main__":
    sys.exit(main())
