"""Layers that attend to the keys and values of an earlier one: what they see, and what is held."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FastKV, SnapKV
from tests.integrations.hybrids.models import TOLERANCE, apart, generate, hybrid, tokens
from tests.integrations.support.conversation import left_padded
from tests.integrations.support.versions import OLD

NAMES = ("gemma3n_text", "gemma4_text_shared")
PRODUCERS = (None, None, 0, 1)  # a sliding window and full attention, each with a borrower
ROWS = [tokens(0, 47), tokens(1, 31)]
POLICIES = {
    "snapkv": SnapKV(0.4, window_size=4),
    "fastkv": FastKV(tsp_layer=1, tsp_rate=0.5, retention_rate=0.3, window_size=4),
}


def read(model: PreTrainedModel, policy: str) -> tuple[PolicyCache, Tensor, Tensor]:
    """A cache that has read two rows and decoded four tokens, the conversation and its mask."""
    cache, (ids, mask) = PolicyCache(POLICIES[policy]), left_padded(ROWS)
    said, _ = generate(model, cache, ids, mask)
    return cache, said, torch.cat([mask, mask.new_ones(2, said.shape[1] - 47)], dim=1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_borrowers_hold_nothing_and_have_their_producers_positions(name: str, policy: str) -> None:
    cache, _, _ = read(hybrid(name), policy)
    assert tuple(layer.producer for layer in cache.layers) == PRODUCERS
    report = cache.report()
    for layer, row in zip(cache.layers, report.layers, strict=True):
        assert layer.positions is not None
        assert layer.attends is row.holds_tokens is (layer.producer is None)
        if layer.producer is not None:
            assert torch.equal(layer.positions, cache.layers[layer.producer].positions)
            assert (layer.keys, layer.values, layer.kept_len) == (None, None, 0)
            assert row.held_bytes == row.full_bytes == 0


@pytest.mark.skipif(OLD, reason="this Transformers' Gemma 4 does not cut hidden states itself")
def test_some_logits_of_a_decoder_that_cuts_hidden_states_itself() -> None:
    model, ids = hybrid("gemma4_text_shared"), torch.tensor(ROWS[:1])
    cache = PolicyCache(POLICIES["fastkv"])
    with torch.no_grad(), cache.attached(model):
        with pytest.raises(UnsupportedModelError, match="logits_to_keep must be 0 or 1 if"):
            model(ids, cache=cache, logits_to_keep=3)
        assert cache.get_seq_length() == 0
        one = model(ids, cache=cache, logits_to_keep=1).logits
        again = PolicyCache(POLICIES["fastkv"])
        with again.attached(model):
            whole = model(ids, cache=again).logits
    assert apart(one, whole[:, -1:]) < TOLERANCE


def test_some_logits_where_nothing_is_dropped() -> None:
    """The decoder goes on with the last tokens only, in the middle of its layers."""
    model = hybrid("gemma4_text_shared")
    for rows in (ROWS[:1], ROWS):
        ids, mask = left_padded(rows)
        found = []
        for keep in (0, 3):
            cache = PolicyCache(POLICIES["snapkv"])
            with torch.no_grad(), cache.attached(model):
                for start, end in ((0, 40), (40, 47)):
                    cache.start_turn()
                    output = model(
                        ids[:, start:end],
                        attention_mask=mask[:, :end],
                        cache=cache,
                        logits_to_keep=keep,
                    )
            found.append(output.logits[:, -3:])
        assert apart(found[1], found[0]) < TOLERANCE
