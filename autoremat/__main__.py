"""`python -m autoremat`, and what the console script `autoremat` runs."""

from __future__ import annotations

from autoremat.commands.interrupt import leaving_at_once


def main() -> None:
    """Run the command line; Ctrl-C is answered in one line even while it is imported."""
    with leaving_at_once():
        from autoremat.commands.app import app
    app()


if __name__ == "__main__":
    main()
