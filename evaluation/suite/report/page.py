"""Write the report as one HTML page that needs no other file, script or network."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvpolicy.evaluation.suite.folder import Results
from kvpolicy.evaluation.suite.joining import differences
from kvpolicy.evaluation.suite.report import charts, words
from kvpolicy.evaluation.suite.report.origin import facts_of, sources_of
from kvpolicy.evaluation.suite.summary import Summary, mean_score

if TYPE_CHECKING:
    from jinja2 import Environment

OPEN_PARTS = 4


@cache
def templates() -> Environment:
    """Return the Jinja environment of the HTML page's templates, which escape all text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals.update(words=words, charts=charts, mean_score=mean_score, dumps=json.dumps)
    return found


def page(results: Results) -> str:
    """Render the HTML report page for a folder of results."""
    summary, description = Summary.of(results), results.description
    sources = sources_of(results)
    facts = {"settings": description.settings, **description.environment}
    if len(sources) > 1:
        facts = {f"settings of {each.folder}": each.description.settings for each in sources}
    methods = {label: method.parameters for label, method in description.methods.items()}
    text = (
        templates()
        .get_template("page.html")
        .render(
            summary=summary,
            figures=summary.figures.values(),
            model=description.settings.get("model", "model"),
            samples=len(results.samples),
            sources=sources,
            origin=facts_of(sources),
            unlike=differences(sources),
            facts={**facts, "methods": methods},
            open_parts=OPEN_PARTS,
        )
    )
    return text.strip() + "\n"
