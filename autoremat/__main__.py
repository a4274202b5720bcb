"""`python -m autoremat`, and what the console script `autoremat` runs."""

from __future__ import annotations

from autoremat.interrupt import leaving_at_once


def main() -> None:
    """Run the command line; Ctrl-C is answered in one line even while it is imported."""
    with leaving_at_once():
        from autoremat.cli import app
    app()


if __name__ == "__main__":
    main()
