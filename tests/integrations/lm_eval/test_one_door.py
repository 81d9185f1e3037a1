"""The needle model's questions through the harness, from its own command too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from kvpolicy.integrations.lm_eval import PolicyLM
from tests.needle import MODEL_DIR, load_model, load_tokenizer

FOLDER = MODEL_DIR.parent
TASKS = ["needle_one_hop", "needle_two_hop"]


@pytest.mark.parametrize(
    ("question", "wanted"), [("with", (1.0, 1.0)), ("later", None)], ids=["with", "later"]
)
def test_needle_questions(question: str, wanted: tuple[float, float] | None) -> None:
    tokenizer = load_tokenizer()
    manager = TaskManager(
        include_path=FOLDER, include_defaults=False, metadata={"max_seq_lengths": [256]}
    )
    lm = PolicyLM(
        load_model(), tokenizer=tokenizer, policy="snapkv", retention_rate=0.2,
        question=question, batch_size=4,
    )  # fmt: skip
    results = simple_evaluate(
        model=lm, tasks=TASKS, task_manager=manager, limit=8, bootstrap_iters=0
    )
    assert results["config"]["question"] == question
    assert results["config"]["policy"] == str(lm.policy)
    found = tuple(results["results"][name]["exact_match,none"] for name in TASKS)
    if wanted is not None:
        assert found == wanted
    else:  # the window holds filler: the pair that is asked for is among 16
        assert max(found) < 0.6


def test_the_harness_s_command(tmp_path: Path) -> None:
    command = [
        *("-m", "kvpolicy.integrations.lm_eval", "run", "--model", "kvpolicy"),
        *("--model_args", f"pretrained={MODEL_DIR},policy=snapkv,retention_rate=0.2"),
        *("--include_path", str(FOLDER), "--tasks", "needle_one_hop", "--limit", "4"),
        *("--metadata", "max_seq_lengths=[256]", "--device", "cpu", "--batch_size", "2"),
        *("--output_path", str(tmp_path)),
    ]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "|needle_one_hop|" in done.stdout
    (file,) = tmp_path.rglob("results_*.json")
    results = json.loads(file.read_text())
    assert results["results"]["needle_one_hop"]["exact_match,none"] == 1.0
    assert results["config"]["question"] == "with"
