"""Continuations scored from caches: where they are cut, and models whose layers are recurrent."""

import pytest
import torch
from torch.nn.functional import log_softmax

from kvpolicy.integrations.lm_eval.scoring import CacheScorer, Continuation
from kvpolicy.policies import FullContext, SnapKV
from tests.integrations.hybrids.models import hybrid, tokens


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_models_with_recurrent_layers(name: str) -> None:
    """A state cannot skip padding behind a document: unlike lengths are scored apart."""
    model = hybrid(name)
    pairs = [
        (tokens(document, 20 + 3 * document), tokens(10 + choice, 1 + choice % 3))
        for document in range(2)
        for choice in range(4)
    ]
    requests = {
        index: Continuation.of(context, scored, None, 100)
        for index, (context, scored) in enumerate(pairs)
    }
    for policy in (FullContext(), SnapKV(0.3, window_size=4)):
        found = []
        for batch_size in (1, 3):
            scores = {}
            for each in CacheScorer(model, policy, batch_size, pad=0).score(requests):
                scores |= each
            found.append([scores[index].log_likelihood for index in range(len(pairs))])
        assert found[1] == pytest.approx(found[0], abs=1e-4)
        wanted = []
        for context, scored in pairs:
            logits = model(torch.tensor([context + scored])).logits[0, len(context) - 1 : -1]
            likely = log_softmax(logits, dim=-1)
            wanted.append(float(likely.gather(1, torch.tensor(scored)[:, None]).sum()))
        is_full = isinstance(policy, FullContext)
        assert (found[0] == pytest.approx(wanted, abs=1e-4)) is is_full


def test_where_a_context_is_cut() -> None:
    context, scored = [1, 2, 3, 4, 5], [6, 7]
    whole = Continuation.of(context, scored, None, 100)
    assert (whole.document, whole.rest, whole.scored) == ((1, 2, 3, 4), (5, 6), (6, 7))
    assert whole.asked_len == 1
    later = Continuation.of(context, scored, 3, 100)
    assert (later.document, later.rest, later.asked_len) == ((1, 2, 3), (4, 5, 6), 2)
    # As the harness does: max_length tokens are read, the last of the continuation is not.
    cut = Continuation.of(context, scored, None, 4)
    assert (cut.document, cut.rest) == ((3, 4), (5, 6))
    assert Continuation.of(context, scored, 3, 4).document == (3,)
    assert Continuation.of([1], scored, None, 100).document == ()
    with pytest.raises(ValueError, match="max_length must leave room for the document"):
        Continuation.of(context, scored, 3, 3)
    with pytest.raises(ValueError, match="a continuation must have at most max_length=1 tokens"):
        Continuation.of(context, scored, None, 1)
