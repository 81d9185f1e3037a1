"""Commands in these tests ask a small model where a user's would ask the default one."""

from pathlib import Path

import pytest

from tests.evaluation.support import NEEDLE, tiny_llama
from tests.evaluation.tokenizers import CHAT, tiny_tokenizer


@pytest.fixture(autouse=True)
def small_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.evaluation.models.default_model", lambda progress=None: NEEDLE)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of large weights that reads any text, with a chat template."""
    path = tmp_path_factory.mktemp("tiny") / "model"
    tiny_llama().save_pretrained(path)
    tiny_tokenizer(chat=CHAT, special=True).save_pretrained(path)
    return path
