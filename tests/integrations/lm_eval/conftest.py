from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import kvpolicy.integrations.lm_eval  # noqa: F401 - registers the model type
from tests.integrations.lm_eval.support import char_tokenizer
from tests.reference import tiny_model

Evaluate = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model and its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    model, tokenizer = tiny_model("llama", seed=1), char_tokenizer()
    # So that `generate` ends a row by itself: the harness leaves what follows in batches.
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def manager() -> TaskManager:
    return TaskManager(include_defaults=False)


@pytest.fixture(scope="session")
def evaluate(folder: Path, manager: TaskManager) -> Evaluate:
    """Runs the real harness on one task; returns its samples in the order of the documents."""

    def run(
        task: dict[str, Any], model: str, batch_size: int = 1, chat: bool = False, **arguments: Any
    ) -> list[dict[str, Any]]:
        results = simple_evaluate(
            model=model,
            model_args={"pretrained": str(folder), "dtype": "float32", **arguments},
            tasks=[task],
            batch_size=batch_size,
            device="cpu",
            apply_chat_template=chat,
            bootstrap_iters=0,
            task_manager=manager,
        )
        samples: list[dict[str, Any]] = results["samples"][task["task"]]
        return sorted(samples, key=lambda sample: sample["doc_id"])

    return run
