"""Settings of Sphinx for `build.py`."""

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
