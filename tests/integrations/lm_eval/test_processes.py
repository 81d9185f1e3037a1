"""Two processes, as ``torchrun`` starts them, give what one gives."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integrations.lm_eval.conftest import Evaluate
from tests.integrations.lm_eval.support import documents, local_task
from tests.integrations.lm_eval.test_model import EVICTS, KINDS, answers, assert_same

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


def test_two_processes(evaluate: Evaluate, folder: Path, tmp_path: Path) -> None:
    tasks = [local_task(tmp_path, kind, documents()) for kind in KINDS]
    for task in tasks:
        yaml_of(task, tmp_path / f"{task['task']}.yaml")
    arguments = {"pretrained": folder, "dtype": "float32", **EVICTS}
    command = [
        *("torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())),
        *("-m", "kvpolicy.integrations.lm_eval", "run", "--model", "kvpolicy"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--tasks", ",".join(str(tmp_path / f"{task['task']}.yaml") for task in tasks)),
        *("--batch_size", "2", "--device", "cpu"),
        *("--log_samples", "--output_path", str(tmp_path / "out")),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for task in tasks:
        wanted = answers(evaluate(task, "kvpolicy", batch_size=2, **EVICTS))
        found = answers(samples_of(tmp_path / "out", task["task"]))
        assert_same(found, wanted)
