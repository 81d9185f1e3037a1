"""Builds and judges every decoder of the installed Transformers: `make families`."""

import argparse
import json
import logging
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from kvpolicy.integrations.transformers.model import check
from tests.integrations.model.builds.catalogue import NOT_BUILT, builds
from tests.integrations.model.builds.judge import Judge, Verdict

OUTCOMES = ("wrong", "error", "unjudged", "unbuilt", "late", "refused", "right")


class _Everything:
    """In the place of the names of families that need no self-check."""

    def __contains__(self, name: object) -> bool:
        return True


@contextmanager
def unchecked() -> Iterator[None]:
    """Lets the library compute where its self-check would have it refuse."""
    module: Any = check
    before = module.TESTED
    module.TESTED = _Everything()
    try:
        yield
    finally:
        module.TESTED = before


def judged(names: list[str]) -> Iterator[Verdict]:
    """Builds and judges models, one after the other."""
    for name, build in builds().items():
        if names and name not in names:
            continue
        start = time.perf_counter()
        try:
            model = build.model()
        except Exception as error:
            shown = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            yield Verdict(name, "unbuilt", shown)
            continue
        verdict = Judge(name, model)()
        verdict.seconds = time.perf_counter() - start
        yield verdict
    for name, why in NOT_BUILT.items():
        if not names or name in names:
            yield Verdict(name, "unbuilt", why)


def table(verdicts: list[Verdict]) -> str:
    """Outcomes by type, 80 columns wide."""
    lines = [f"Transformers {transformers.__version__}, torch {torch.__version__}", ""]
    counts = Counter(each.outcome for each in verdicts)
    lines += [", ".join(f"{counts[each]} {each}" for each in OUTCOMES if counts[each]), ""]
    for outcome in OUTCOMES:
        for each in verdicts:
            if each.outcome == outcome:
                head = f"{outcome:9}{each.name:26}"
                body = textwrap.wrap(each.reason, 44)[:6] or [""]
                lines.append(f"{head} {body[0]}".rstrip())
                lines += [" " * 36 + line for line in body[1:]]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="builds; all if none is given")
    parser.add_argument("--out", type=Path, help="a JSON file; a table goes beside it, as .txt")
    parser.add_argument(
        "--unchecked",
        action="store_true",
        help="without the library's self-check: what it computes, not what it lets a user do",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    verdicts = []
    with unchecked() if options.unchecked else nullcontext():
        for verdict in judged(options.names):
            print(f"{verdict.outcome:9}{verdict.name:26} {verdict.seconds:4.1f} s", flush=True)
            verdicts.append(verdict)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps([asdict(each) for each in verdicts], indent=1))
    found = table(verdicts)
    print(f"\n{found}")
    if options.out:
        options.out.with_suffix(".txt").write_text(found)


if __name__ == "__main__":
    main()
