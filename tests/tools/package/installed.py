"""Try an installed kvpolicy, with the interpreter of an environment that has nothing else.

    python -I tests/tools/package/installed.py core    # without extras
    python -I tests/tools/package/installed.py cli     # with the extra cli

-I keeps the checkout, whose folders have the packages' names, off the path.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = Path(sys.prefix) / "bin" / "kvpolicy"
LIBRARY = (
    "kvpolicy.policies",
    "kvpolicy.testing",
    "kvpolicy.integrations.transformers",
    "kvpolicy.integrations.vllm",
    "kvpolicy.evaluation",
)


def run(*arguments: str) -> str:
    """Run the command in an empty folder and return what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [COMMAND, *arguments], cwd=folder, capture_output=True, text=True, check=False
        )
    said = found.stdout + found.stderr
    assert found.returncode == 0, f"{arguments}: {said[-2000:]}"
    return said


def core() -> None:
    """Import the library, answer a prompt under a policy."""
    import kvpolicy

    place = Path(kvpolicy.__file__).resolve()
    assert place.is_relative_to(Path(sys.prefix).resolve()), f"{place} is not the installed one"
    for name in LIBRARY:
        importlib.import_module(name)
    assert len(kvpolicy.registered("policy")) >= 28
    assert kvpolicy.build("fastkv") is not None
    answer()


def answer() -> None:
    """Ask the bundled model a question under FastKV."""
    import torch

    from kvpolicy.evaluation.needle import NeedleTask, load_model
    from kvpolicy.integrations.transformers import PolicyCache
    from kvpolicy.policies import FastKV

    prompt = NeedleTask(context_len=1024).prompts(1)[0]
    cache = PolicyCache(FastKV(tsp_layer=3, tsp_rate=0.2, retention_rate=0.1))
    ids = torch.tensor([prompt.input_ids])
    output = load_model().generate(ids, cache=cache, max_new_tokens=3)
    assert tuple(output[0, -3:].tolist()) == prompt.answer
    assert 0.1 < cache.report().total.share < 0.11


def cli() -> None:
    """Run the commands that need no other extra."""
    from kvpolicy.evaluation.needle import MODEL_DIR

    assert "compare" in run("--help")
    assert "snapkv" in run("policies")
    assert "fastkv" in run("check", str(MODEL_DIR)).lower()
    small = ("--context", "64", "--count", "2", "--rounds", "1", "--answer-tokens", "2")
    assert "fastkv" in run("compare", "-p", "fastkv", *small)


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    {"core": core, "cli": cli}[sys.argv[1]]()
    print(f"kvpolicy installed, {sys.argv[1]}: works")
