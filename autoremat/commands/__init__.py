"""The command line: one module per command, and `app`, which declares them to typer.

Enters: arguments, and a problem, a report or a target of the user's. Leaves: text on stdout,
messages on stderr, an exit code. The pipeline imports nothing from here.
"""
