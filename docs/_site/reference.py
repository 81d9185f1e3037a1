"""Fill pages when the site is built, and link the public names in docstrings."""

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from docs._site.entries import filled

# The pages of methods stand below this one; on GitHub their folder lists them.
METHODS = "methods/README"
LIST_OF_METHODS = """

```{toctree}
:hidden:
:glob:

*
```
"""


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Write into a page what is made from the package or its folder."""
    if page == METHODS:
        source[0] += LIST_OF_METHODS
    elif page.startswith("reference/"):
        source[0] = filled(source[0])


def link_public_name(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """Link a name in backticks to the one public name that ends with it, if there is one."""
    if node.get("refdomain") != "py" or node.get("reftype") != "obj":
        return None
    target = node["reftarget"].removesuffix("()")
    python: Any = env.get_domain("py")
    found = [name for name in python.objects if name.endswith(f".{target}")]
    shortest = [name for name in found if name.count(".") == min(it.count(".") for it in found)]
    if len(shortest) != 1 or not target[:1].isupper():
        return None
    entry = python.objects[shortest[0]]
    address = app.builder.get_relative_uri(node["refdoc"], entry.docname)
    link = nodes.reference("", "", internal=True, refuri=f"{address}#{entry.node_id}")
    link += content
    return link


def setup(app: Sphinx) -> dict[str, bool]:
    """Register what fills pages and links names."""
    app.connect("source-read", fill)
    app.connect("missing-reference", link_public_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
