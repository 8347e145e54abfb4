"""Settings of Sphinx for `build.py`."""

import inspect
import pkgutil
import re
from pathlib import Path

project = "podracer"
html_title = "podracer"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
html_theme = "furo"
html_copy_source = False
html_show_sphinx = False
myst_heading_anchors = 4  # as GitHub makes them
myst_enable_extensions = ["html_image"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
default_role = "code"  # what is in single backticks
suppress_warnings = ["ref.python"]  # fields of one name in several classes
NAME = re.compile(r"^\.\. auto\w+:: (\S+)$", re.M)


def setup(app):
    """Show signatures and types without what only the library itself reads in them."""
    app.connect("builder-inited", lambda app: remove_markers())
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("autodoc-process-docstring", literal_equations)


def readable_signature(app, kind, name, thing, options, signature, result):
    """Return the signature of a thing, none of a protocol."""
    return "" if getattr(thing, "_is_protocol", False) else signature, result


def literal_equations(app, kind, name, thing, options, lines):
    """Show indented blocks, which are equations and code, as they are."""
    text = "\n".join(lines)
    lines[:] = re.sub(r"(?<=\S)\n\n(?= {4}\S)", "\n\n::\n\n", text).split("\n")


def documented():
    """Yield what the pages of the reference name, and all of the modules that they name."""
    pages = (Path(__file__).parent / "api").glob("*.md")
    for name in {x for page in pages for x in NAME.findall(page.read_text())}:
        thing = pkgutil.resolve_name(name)
        yield from vars(thing).values() if inspect.ismodule(thing) else [thing]


def remove_markers():
    """Take those of the command line out of the annotations of all public classes, texts all."""
    for thing in documented():
        for kind in thing.__mro__ if isinstance(thing, type) else ():
            for annotated in (kind, vars(kind).get("__init__")):
                annotations = getattr(annotated, "__annotations__", None) or {}
                for name, text in annotations.items():
                    if isinstance(text, str):
                        annotations[name] = without_markers(text)


def without_markers(text):
    """Return a text with `X` in place of each `Annotated[X, ...]`."""
    while start := re.search(r"\bAnnotated\[", text):
        depth, ends = 0, []  # of the type and of the whole
        for place in range(start.end(), len(text)):
            character = text[place]
            if depth == 0 and character in ",]":
                ends.append(place)
                if character == "]":
                    break
            depth += (character in "([{") - (character in ")]}")
        text = text[: start.start()] + text[start.end() : ends[0]] + text[ends[-1] + 1 :]
    return text
