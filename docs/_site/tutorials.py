"""Run the notebooks of docs/tutorials and store what they print.

``python -m docs._site.tutorials`` runs all of them, cell by cell, in this process. They print and
draw nothing else, so that no notebook server is needed, and a test can compare what they print.
"""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "tutorials"


def notebooks() -> list[Path]:
    """Return the notebooks."""
    return sorted(FOLDER.glob("*.ipynb"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a notebook that hold code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any]) -> list[str]:
    """Run the code of a notebook from top to bottom; return what each cell prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for cell in code_cells(notebook):
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            exec("".join(cell["source"]), names)
        printed.append(stream.getvalue())
    return printed


def stored(notebook: dict[str, Any]) -> list[str]:
    """Return what each cell with code printed when the notebook was stored."""
    return [
        "".join("".join(output["text"]) for output in cell["outputs"])
        for cell in code_cells(notebook)
    ]


def store(path: Path) -> None:
    """Run a notebook and write what it prints into it."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    printed = run(notebook)
    for number, (cell, text) in enumerate(zip(code_cells(notebook), printed, strict=True), 1):
        lines = text.splitlines(keepends=True)
        output = {"name": "stdout", "output_type": "stream", "text": lines}
        cell["outputs"], cell["execution_count"] = ([output] if text else []), number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for each in notebooks():
        store(each)
        print(each)
