"""Turn a page's links to files of the repository that are no pages into repository addresses.

Pages link such files relative to themselves, as on GitHub: ``../benchmarks/results/vllm.json``.
A link to a file that does not exist is left as it is, and MyST warns of it.
"""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

from docs._site.repository import ROOT, address_of


class RepositoryLinks(SphinxTransform):
    """Replace the references to files that are no pages, before Sphinx resolves any."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        """Replace them in the document that was just parsed."""
        folder = Path(self.env.doc2path(self.env.docname)).parent
        found = [addnodes.download_reference, addnodes.pending_xref]
        for node in [each for kind in found for each in self.document.findall(kind)]:
            target = self._path(node)
            if target is None:
                continue
            file = (folder / target).resolve()
            if file.exists() and file.is_relative_to(ROOT):
                link = nodes.reference("", "", refuri=address_of(file, node.get("reftargetid", "")))
                link += node.children
                node.replace_self(link)

    def _path(self, node: nodes.Element) -> str | None:
        """Return the path that a node refers to; None if it refers to a page or to no file."""
        if isinstance(node, addnodes.download_reference):
            return str(node["reftarget"])
        if node.get("reftype") != "myst":
            return None
        if node.get("refdomain") != "doc":
            return str(node["reftarget"])
        page = node["reftarget"]
        if page in self.env.found_docs:
            return None
        # Sphinx has made a page's name of the path: relative to docs/, without its suffix.
        return str(Path(self.env.srcdir) / f"{page}.md")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the transform."""
    app.add_transform(RepositoryLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
