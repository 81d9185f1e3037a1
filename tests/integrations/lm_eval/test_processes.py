"""Two processes, as ``torchrun`` starts them, give what one gives."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.lm_eval.conftest import Evaluate
from tests.integrations.lm_eval.support import documents, local_task
from tests.integrations.lm_eval.test_model import EVICTS, answers

ROOT = Path(__file__).parents[3]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def yaml_of(config: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(config))  # JSON is YAML


def samples_of(folder: Path, task: str) -> list[dict[str, Any]]:
    (file,) = folder.rglob(f"samples_{task}_*.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(found, key=lambda sample: sample["doc_id"])


@pytest.mark.parametrize("kind", ["generate_until", "multiple_choice"])
def test_two_processes(evaluate: Evaluate, folder: Path, tmp_path: Path, kind: str) -> None:
    task = local_task(tmp_path, kind, documents())
    wanted = evaluate(task, "kvpolicy", batch_size=2, **EVICTS)
    yaml_of(task, tmp_path / "task.yaml")
    arguments = {"pretrained": folder, "dtype": "float32", **EVICTS}
    command = [
        *("torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())),
        *("-m", "kvpolicy.integrations.lm_eval", "run", "--model", "kvpolicy"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--tasks", str(tmp_path / "task.yaml"), "--batch_size", "2", "--device", "cpu"),
        *("--log_samples", "--output_path", str(tmp_path / "out")),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = samples_of(tmp_path / "out", task["task"])
    assert len(found) == len(wanted) == 5
    for one, other in zip(answers(found), answers(wanted), strict=True):
        assert one == (other if isinstance(other, str) else (pytest.approx(other[0]), other[1]))
