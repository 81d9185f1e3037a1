"""A policy with a layer that the model does not have: the message begins with the policy's name."""

from pathlib import Path

import pytest

from kvpolicy.evaluation.cli import main
from tests.evaluation.support import NEEDLE

PREFILL = "generate --prompt f1"
COMPARE = "compare --count 2"
EXPORT = "export --prompt-file prompt.txt --to out/a.safetensors"
TASKS = NEEDLE.parent
EVAL = f"eval --include {TASKS} --tasks needle_one_hop --lengths 256 --limit 1 --out out"
ESTIMATE = "estimate --config Llama-3.1-8B --context 1000"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (f"{PREFILL} -p fastkv --set tsp_layer=40", "fastkv@40"),
        (f"{PREFILL} -p gemfilter --rate 0.2 --set filter_layer=40", "gemfilter 0.2"),
        (f"{PREFILL} --propagation token_selective:tsp_layer=40", "composition"),
        (f"{COMPARE} -p snapkv,fastkv,claa --rate 0.2 --set tsp_layer=40", "fastkv@40 0.2"),
        (f"{EXPORT} -p fastkv --set tsp_layer=40", "fastkv@40"),
        (f"{EVAL} -p snapkv,fastkv --rate 0.2 --set tsp_layer=40", "fastkv@40 0.2"),
        (f"{ESTIMATE} -p snapkv,claa --rate 0.2 --set tsp_layer=40", "claa@40 0.2"),
    ],
)
def test_the_message_names_the_policy(
    line: str,
    name: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompt.txt").write_text("f1 f2")
    assert main(line.split()) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    last_layer = 31 if line.startswith("estimate") else 5
    assert last.startswith(f"error: {name}: ")
    assert f"must be in [0, {last_layer}] for a model of {last_layer + 1} layers, got 40" in last
