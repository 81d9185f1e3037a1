"""Elements of HTML and SVG."""

from __future__ import annotations

import xml.etree.ElementTree as Tree


def node(tag: str, *children: Tree.Element | str, **attributes: object) -> Tree.Element:
    """An element; texts are escaped when it is written.

    Args:
        tag: Its name.
        children: Elements and texts, in their order.
        attributes: By name, ``_`` standing for ``-``, with one at the end for nothing; numbers are
            written with two decimals, what is None is left out.

    Example:
        >>> written(node("p", "a < ", node("b", "c"), class_="note", data_x=1 / 3))
        '<p class="note" data-x="0.33">a &lt; <b>c</b></p>'
    """
    named = {
        name.rstrip("_").replace("_", "-"): f"{value:.2f}".rstrip("0").rstrip(".")
        if isinstance(value, float)
        else str(value)
        for name, value in attributes.items()
        if value is not None
    }
    element = Tree.Element(tag, named)
    last: Tree.Element | None = None
    for child in children:
        if not isinstance(child, str):
            element.append(child)
            last = child
        elif last is None:
            element.text = (element.text or "") + child
        else:
            last.tail = (last.tail or "") + child
    return element


def written(element: Tree.Element) -> str:
    """An element as HTML."""
    return Tree.tostring(element, encoding="unicode", method="html")
