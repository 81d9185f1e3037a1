"""Decoders that give their output the input's shape, or whose layers attend several times."""

from typing import Any

import pytest
import torch

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FastKV, GemFilter, PyramidInfer, SnapKV
from tests.integrations.hybrids.models import generate, tokens
from tests.integrations.model.builds.catalogue import builds, built
from tests.integrations.support.alone import read_two_turns
from tests.integrations.support.conversation import left_padded

SHAPED = ("gpt2", "gpt_bigcode", "gpt_bigcode_multi_head")
ROWS = [tokens(0, 40), tokens(1, 23)]
FAST = FastKV(tsp_rate=0.2, retention_rate=0.2, window_size=4)


@pytest.mark.parametrize("name", SHAPED)
def test_two_turns_of_padded_rows_with_dropping(name: str) -> None:
    assert read_two_turns(built(name), FAST, [40, 23], [9, 21]).propagated


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("name", SHAPED)
def test_outputs_are_those_of_the_tokens_that_went_on(name: str, *, return_dict: bool) -> None:
    """The last layer's, nothing before them: as from every model, however it is asked."""
    model, store = built(name), PolicyCache(FAST)
    asked = {"output_hidden_states": True, "return_dict": return_dict}
    with torch.no_grad(), store.attached(model):
        output: Any = model(torch.tensor(ROWS[:1]), cache=store, **asked)
    logits = output.logits if return_dict else output[0]
    states = output.hidden_states if return_dict else output[-1]
    assert logits.shape[:2] == (1, 8)
    assert [each.shape[1] for each in states] == [40, 40, 8, 8, 8]
    head: Any = model.get_output_embeddings()
    torch.testing.assert_close(head(states[-1]), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", [PyramidInfer(min_context=8), GemFilter(retention_rate=0.4)])
def test_other_ways_to_drop(policy: Any) -> None:
    """A padded row says what it says alone."""
    model, (ids, mask) = built("gpt2"), left_padded(ROWS)
    together, logits = generate(model, PolicyCache(policy), ids, mask)
    alone, want = generate(model, PolicyCache(policy), ids[1:, -23:])
    assert torch.equal(together[1, 40:], alone[0, 23:])
    torch.testing.assert_close(logits[1], want[0], atol=1e-3, rtol=1e-4)


@pytest.mark.skipif("longcat_flash" not in builds(), reason="not in this Transformers")
def test_layers_that_attend_twice() -> None:
    model = built("longcat_flash")
    store = read_two_turns(model, SnapKV(0.3, window_size=4), [40, 23], [9, 21])
    assert len(store.layers) == 2 * len(model.base_model.layers)
