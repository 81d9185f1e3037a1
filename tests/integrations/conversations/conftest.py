import pytest
from transformers import PreTrainedModel

from .support import chat_model


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return chat_model("llama")
