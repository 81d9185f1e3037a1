import pytest
from transformers import PreTrainedModel

from tests.reference import tiny_model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A tiny Llama; a test that changes it makes one of its own."""
    return tiny_model("llama", seed=1)
