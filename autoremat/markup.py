"""Templates of pages and pictures: one definition of how text becomes markup.

Enters: the folder of a package and a template's name in it. Leaves: a jinja2 template. Guarantees:
no text that is given to it is ever markup, and a name that it is not given is an error.
"""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


def template(package: str, name: str, folder: str = ".") -> Template:
    """A template of a package's folder, which may include others of it."""
    return Environment(
        loader=PackageLoader(package, folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(name)
