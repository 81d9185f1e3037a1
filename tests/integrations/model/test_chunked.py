"""Chunked attention: chunks in original positions, and queries scaled by theirs.

Every family of `make families` is held against its own dense attention there.
"""

from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.model.kinds import ChunkedAttention, FullAttention
from kvpolicy.integrations.transformers.model.masks import Chunk, Spans, Visibility, first_seen
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.model.quirks import Temperature
from kvpolicy.policies import FastKV, FullContext, SnapKV
from tests.integrations.hybrids.models import apart, generate, tokens
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.model.builds.dense import dense_logits
from tests.integrations.model.builds.judge import seen_by
from tests.integrations.model.builds.sizes import WINDOW
from tests.integrations.support.alone import read_two_turns
from tests.integrations.support.conversation import left_padded

ROWS = [tokens(0, 47), tokens(1, 31)]
POLICIES: dict[str, CachePolicy] = {
    "full_context": FullContext(),
    "snapkv": SnapKV(0.35, window_size=4),
    "fastkv": FastKV(tsp_layer=1, tsp_rate=0.6, retention_rate=0.35, window_size=4),
}
TOLERANCE = 1e-4


@cache
def chunked(implementation: str = "sdpa") -> PreTrainedModel:
    """Chunks in layers 0 and 2; in the others everything, without positions."""
    return builds()["llama4_text_mixed"].model(attn_implementation=implementation)


def test_what_the_model_is_taken_for() -> None:
    parts = ModelParts(chunked())
    kinds = [ChunkedAttention, FullAttention] * 2
    assert [type(kind) for kind in parts.kinds] == kinds
    assert parts.eligible == [1, 3]
    assert parts.windows == [WINDOW, None] * 2
    assert parts.temperatures == [None, Temperature(0.3, 8.0)] * 2


def test_a_chunk_by_hand() -> None:
    places = torch.arange(6)
    assert first_seen(places, Chunk(3)).tolist() == [0, 0, 0, 3, 3, 3]
    assert first_seen(places, 3).tolist() == [-2, -1, 0, 1, 2, 3]
    keys = torch.tensor([[[-1, 1, 2, 3, 5]]])
    seen = Visibility(keys, torch.tensor([[2, 3, 5]]), 1, Chunk(3)).mask("sdpa", torch.float32)
    assert isinstance(seen, Tensor)
    assert seen[0, 0].int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


def test_a_temperature_by_hand() -> None:
    """Scaled for positions 2 and 3, at positions 7 and 0."""
    hot = Temperature(0.5, 4.0)
    found = hot.corrected(torch.ones(1, 1, 2, 1), 2, torch.tensor([[7, 0]]))
    at_7, at_3 = (1 + 0.5 * torch.tensor(1.0 + times).log() for times in (2, 1))
    torch.testing.assert_close(found[0, 0, :, 0], torch.stack([at_7, 1 / at_3]))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [15, 16, 17, 32, 47, 48])
def test_at_every_place_in_a_chunk(length: int, policy: str, implementation: str) -> None:
    """Alone and beside a longer row: what is held is what the next token's chunk has so far."""
    model, row = chunked(implementation), tokens(2, length)
    for rows in ([row], [row, tokens(3, 53)]):
        store = PolicyCache(POLICIES[policy])
        said, logits = generate(model, store, *left_padded(rows), max_new_tokens=7)
        decoded = said[0, -7:-1].tolist()
        want = dense_logits(model, row + decoded, length, seen_by(store, 0, length))
        assert apart(logits[0], want[length - 1 :]) < TOLERANCE
        if length > WINDOW and policy != "fastkv":
            held = store.layers[2].positions[0, 0, :-6]
            assert held[held >= 0].tolist() == list(range(length // WINDOW * WINDOW, length))


@pytest.mark.parametrize("policy", ["full_context", "snapkv"])
def test_two_turns_against_dense_attention(policy: str) -> None:
    read_two_turns(chunked(), POLICIES[policy], [47, 31], [19, 11])


def test_positions_behind_a_drop_are_their_own() -> None:
    """By which the layers behind know chunks, and scale queries."""
    model, row, store = chunked(), ROWS[0], PolicyCache(POLICIES["fastkv"])
    said, logits = generate(model, store, torch.tensor([row]), max_new_tokens=7)
    passed = store.propagated[1][0].tolist()
    assert passed != list(range(47 - len(passed), 47))
    held = store.layers[2].positions[0, 0, :-6].tolist()
    assert held == [place for place in passed if place >= 32]
    seen = seen_by(store, 0, 47)
    want = dense_logits(model, row + said[0, 47:-1].tolist(), 47, seen)
    assert apart(logits[0], want[46:]) < TOLERANCE


def test_an_image_is_seen_whole_through_a_narrower_window() -> None:
    """Tokens 3 to 5 of a row with two held tokens are an image; the window has two tokens."""
    own = torch.ones(5, 5, dtype=torch.bool).tril()
    own[1:4, 1:4] = True
    places = torch.tensor([[2, 3, 4, 5, 6]])
    spans = Spans.of(own[None, None], places > 0, None, places)
    assert spans is not None
    seen = Visibility(torch.arange(7)[None, None], places, 1, 2, spans).mask("sdpa", torch.float32)
    assert isinstance(seen, torch.Tensor)
    expected = [[1, 2], [2, 3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5, 6]]
    assert [row.nonzero()[:, 0].tolist() for row in seen[0, 0]] == expected
