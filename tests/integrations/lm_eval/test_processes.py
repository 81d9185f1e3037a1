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
# The command as it is, but that each process writes down the documents it is asked about.
COUNTING = """
import json, os, pathlib, runpy
from kvpolicy.integrations.lm_eval import PolicyLM

def counted(name):
    ask = getattr(PolicyLM, name)
    def wrapper(self, requests, *args, **kwargs):
        asked = [[each.task_name, each.doc_id] for each in requests]
        file = pathlib.Path({folder!r}) / f"{{name}}-{{os.environ['RANK']}}.json"
        file.write_text(json.dumps(asked))
        return ask(self, requests, *args, **kwargs)
    setattr(PolicyLM, name, wrapper)

for name in ("generate_until", "loglikelihood"):
    counted(name)
runpy.run_module("kvpolicy.integrations.lm_eval", run_name="__main__")
"""


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
    script = tmp_path / "counting.py"
    script.write_text(COUNTING.format(folder=str(tmp_path)))
    arguments = {"pretrained": folder, "dtype": "float32", **EVICTS}
    command = [
        *("torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())),
        *(str(script), "run", "--model", "kvpolicy"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--tasks", ",".join(str(tmp_path / f"{task['task']}.yaml") for task in tasks)),
        *("--batch_size", "2", "--device", "cpu"),
        *("--log_samples", "--output_path", str(tmp_path / "out")),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"PYTHONPATH": str(ROOT)}
    environment.pop("ACCELERATE_USE_CPU", None)
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for task in tasks:
        wanted = answers(evaluate(task, "kvpolicy", batch_size=2, **EVICTS))
        found = answers(samples_of(tmp_path / "out", task["task"]))
        assert_same(found, wanted)
    for name in ("generate_until", "loglikelihood"):
        shares = [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(2)]
        first, second = ({tuple(each) for each in share} for share in shares)
        assert (len(first), len(second)) == (3, 2)
        assert not first & second
