"""Compare kvpolicy with NVIDIA's kvpress: time, memory, kept positions, answers, batches, turns.

Each library runs in its own environment, as a process that answers commands. Both read the same
weights from disk and the same prompts, and take turns. ``make bench-kvpress`` builds the other
environment and runs this. Writes ``kvpress.json`` and prints tables.

    python benchmarks/kvpress/compare.py --kvpress-python .venv-kvpress/bin/python
        [--lengths 4096 8192] [--rounds 5] [--threads 1] [--only kept] [--out benchmarks/results]

With ``--only``, the other experiments' rows, settings and machine stay as the file has them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from sidebyside import experiments
from sidebyside.processes import Worker
from sidebyside.prompts import save_random_llama
from sidebyside.summary import LIBRARIES
from sidebyside.tables import show
from transformers.utils.logging import disable_progress_bar

from kvpolicy.evaluation.results import check_folder, environment, write_all
from kvpolicy.evaluation.tasks.needle.task import MODEL_DIR

SCRIPTS = {"kvpolicy": "run_ours.py", "kvpress": "run_kvpress.py"}
EXPERIMENTS = ("counts", "kept", "batch", "turns", "answers", "times")
RESULTS = Path(__file__).resolve().parents[1] / "results"


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line and check it before any process starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kvpress-python", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--questions", type=int, default=25)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--only", choices=EXPERIMENTS, nargs="+", default=EXPERIMENTS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if not os.access(options.kvpress_python, os.X_OK):
        parser.error(
            "--kvpress-python must be the interpreter of an environment with kvpress, got "
            f"{options.kvpress_python}; `make bench-kvpress` builds one"
        )
    for name in ("rounds", "new_tokens", "threads", "questions"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if min(options.lengths) < 128:
        parser.error(f"--lengths must be at least 128 tokens, got {min(options.lengths)}")
    check_folder(options.out)
    if set(options.only) < set(EXPERIMENTS) and not (options.out / "kvpress.json").exists():
        parser.error(
            f"--only needs the other experiments in a kvpress.json in --out, got {options.out}"
        )
    return options


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all experiments and return the record of their results.

    Args:
        options: See `options_of`.
        folder: Folder for the model and the workers' logs.
    """
    pythons = {"kvpolicy": Path(sys.executable), "kvpress": options.kvpress_python}
    random_model = folder / "random"
    save_random_llama(random_model, max_length=max(options.lengths) * 2)

    def start(library: str, shows_peaks: bool) -> Worker:
        log = folder / f"{library}{'-peaks' if shows_peaks else ''}.log"
        script = SCRIPTS[library]
        return Worker(pythons[library], script, log, options.threads, returns_memory=shows_peaks)

    with ExitStack() as stack:
        load = [os.getloadavg()[0]]
        bench = experiments.open_bench(stack, start, (random_model, MODEL_DIR))
        found = dict(bench.ask_both("versions"))
        doing = {
            "counts": lambda: experiments.counts(bench),
            "kept": lambda: experiments.kept(bench, options.lengths),
            "batch": lambda: experiments.batch(bench),
            "turns": lambda: experiments.turns(bench),
            "answers": lambda: experiments.answers(bench, options.rates, options.questions),
            "times": lambda: experiments.times(
                bench, options.lengths, options.rounds, options.new_tokens
            ),
        }
        rows = {name: doing[name]() for name in EXPERIMENTS if name in options.only}
        load.append(os.getloadavg()[0])
    return {
        "settings": {
            **experiments.SETTINGS,
            "rounds": options.rounds,
            "new_tokens": options.new_tokens,
            "dtype": "float32",
            "questions_at": experiments.NEEDLE_LEN,
            "batch": {"rate": experiments.QUARTER["rate"], "rows": experiments.ROW_LENGTHS},
            "turns": {"rate": experiments.QUARTER["rate"], "tokens": experiments.TURN_LENGTHS},
            "model": json.loads((random_model / "config.json").read_text()),
        },
        "versions": {library: found[library]["versions"] for library in LIBRARIES},
        "machine": {
            **environment(torch.device("cpu"))["machine"],
            "threads": {library: found[library]["threads"] for library in LIBRARIES},
            "load_average_before_and_after": load,
        },
        **rows,
    }


def whole(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the record, with earlier results for experiments that were not run."""
    measured = {name: record[name] for name in EXPERIMENTS if name in record}
    if len(measured) == len(EXPERIMENTS):
        return record
    before: dict[str, Any] = json.loads(path.read_text())
    return before | measured


def main() -> None:
    """Measure, write the results and print them."""
    options = options_of()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        record = measure(options, Path(folder))
    record = whole(record, options.out / "kvpress.json")
    write_all(options.out, {"kvpress.json": json.dumps(record, indent=1).encode()})
    print(json.dumps(record["versions"]))
    print(show(record))


if __name__ == "__main__":
    main()
