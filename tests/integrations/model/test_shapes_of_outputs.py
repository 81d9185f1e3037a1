"""Decoders that give their output the input's shape, or whose layers attend several times."""

from typing import Any

import pytest
import torch

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.checking import check_model
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


# That want as many hidden states behind their layers as went in: one views its output as its
# input's shape, the layers of one look at what came before others.
FILLED_UP = [name for name in ("gpt2", "inkling2_text") if name in builds()]


@pytest.mark.parametrize(
    ("name", "refills"), [*((name, True) for name in FILLED_UP), ("llama", False)]
)
def test_the_self_check_finds_who_needs_it(name: str, refills: bool) -> None:
    verdict = check_model(built(name)).verdict
    assert verdict is not None
    assert verdict.quirks.refills is refills


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("name", sorted({*SHAPED, *FILLED_UP}))
def test_outputs_are_those_of_the_tokens_that_went_on(name: str, *, return_dict: bool) -> None:
    """The last layer's, nothing before them: as from every model, however it is asked."""
    model, (ids, mask) = built(name), left_padded(ROWS)
    cache, again, asked = PolicyCache(FAST), PolicyCache(FAST), {"return_dict": return_dict}
    with torch.no_grad(), cache.attached(model), again.attached(model):
        output: Any = model(
            ids, attention_mask=mask, cache=cache, output_hidden_states=True, **asked
        )
        plain: Any = model(ids, attention_mask=mask, cache=again, **asked)
    logits = output.logits if return_dict else output[0]
    states = output.hidden_states if return_dict else output[-1]
    (passed,) = cache.propagated.values()
    assert logits.shape[:2] == passed.shape == (2, 8)
    assert [each.shape[1] for each in states] == [40, 40, 8, 8, 8]
    there, head = passed >= 0, model.get_output_embeddings()
    without = plain.logits if return_dict else plain[0]
    torch.testing.assert_close(without[there], logits[there], atol=1e-4, rtol=1e-4)
    if name != "inkling2_text":  # whose head caps what it says
        torch.testing.assert_close(head(states[-1])[there], logits[there], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", [PyramidInfer(min_context=8), GemFilter(retention_rate=0.4)])
def test_other_ways_to_drop(policy: Any) -> None:
    """A padded row says what it says alone."""
    model, (ids, mask), cache = built("gpt2"), left_padded(ROWS), PolicyCache(policy)
    together, logits = generate(model, cache, ids, mask)
    assert len(cache.propagated) > 1 or policy.propagation.restarts
    alone, want = generate(model, PolicyCache(policy), ids[1:, -23:])
    assert torch.equal(together[1, 40:], alone[0, 23:])
    torch.testing.assert_close(logits[1], want[0], atol=1e-3, rtol=1e-4)


@pytest.mark.skipif("longcat_flash" not in builds(), reason="not in this Transformers")
def test_layers_that_attend_twice() -> None:
    model = built("longcat_flash")
    store = read_two_turns(model, SnapKV(0.3, window_size=4), [40, 23], [9, 21])
    assert len(store.layers) == 2 * len(model.base_model.layers)
