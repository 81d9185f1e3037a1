"""Draw the picture of a comparison again, from its JSON file.

`make compare` makes the numbers; ``benchmarks/results/compare`` holds the reported ones. Of all
policies in the file, those are drawn that `make compare` shows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from kvpolicy.evaluation.comparison.picture import plot_comparison
from kvpolicy.evaluation.comparison.settings import SHOWN
from kvpolicy.evaluation.results import write_all

RESULTS = Path(__file__).parent / "results" / "compare"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read ``compare.json`` of a folder and write ``compare.png`` beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    folder: Path = parser.parse_args(arguments).folder
    data = json.loads((folder / "compare.json").read_text())
    write_all(folder, {"compare.png": plot_comparison(data, SHOWN)})


if __name__ == "__main__":
    main()
