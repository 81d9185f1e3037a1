"""Settings of the documentation site, which `make docs` builds."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = PROJECT["name"]
version = release = PROJECT["version"]
author = "the kvpolicy authors"
copyright = author
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
    "docs._site.repository_links",
    "docs._site.reference",
]
exclude_patterns = ["_site", "examples", "Thumbs.db"]
nitpicky = False  # docstrings name arguments and private parts in backticks, too

# Pages are written for GitHub as well: its anchors, its fences for diagrams.
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
nb_execution_mode = "off"  # notebooks are stored with their outputs; a test runs them again

# A name in single backticks in a docstring becomes a link if it is public.
default_role = "py:obj"
add_module_names = False
autoclass_content = "class"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"kvpolicy {version}"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "source_repository": PROJECT["urls"]["Repository"] if "urls" in PROJECT else "",
    "source_branch": "main",
    "source_directory": "docs/",
}
copybutton_exclude = ".linenos, .gp, .go"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
smartquotes_action = "D"  # dashes alone
mermaid_height = "auto"
mermaid_fullscreen = False
