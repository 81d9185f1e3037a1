"""What a state does not allow is refused by name, and leaves model and cache usable."""

from typing import Any

import pytest
import torch

from kvpolicy.errors import NotAttachedError, UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.checking import check_model
from kvpolicy.integrations.transformers.forward.attending import LayerAttention
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import FastKV, FullContext, GemFilter, SnapKV
from tests.integrations.hybrids.models import (
    BY_COLUMNS,
    KINDS,
    OWN_CACHE,
    generate,
    hybrid,
    same,
    states_of,
    tokens,
)
from tests.integrations.model.builds.catalogue import Build, builds
from tests.integrations.model.builds.judge import Judge
from tests.integrations.support.conversation import left_padded

ROWS = [tokens(0, 47), tokens(1, 31)]


@pytest.mark.parametrize("name", KINDS)
def test_padding_between_turns(name: str) -> None:
    model, (ids, mask) = hybrid(name), left_padded(ROWS)
    cache = PolicyCache(SnapKV(0.4, window_size=4))
    said, _ = generate(model, cache, ids, mask)
    before = states_of(cache)
    longer = torch.cat([said, torch.tensor([tokens(5, 9), [0] * 4 + tokens(6, 5)])], dim=1)
    whole = torch.cat([mask, torch.ones(2, longer.shape[1] - 47, dtype=torch.long)], dim=1)
    gap = whole.clone()
    gap[1, said.shape[1] : said.shape[1] + 4] = 0
    with pytest.raises(UnsupportedModelError, match="but row 1 has tokens before its padding"):
        generate(model, cache, longer, gap)
    ended = whole.clone()
    ended[1, said.shape[1] - 2 : said.shape[1]] = 0
    with pytest.raises(UnsupportedModelError, match="must not turn tokens already read into pad"):
        generate(model, cache, longer, ended)
    assert same(states_of(cache), before)
    generate(model, cache, longer, whole)


def test_padding_inside_a_first_prompt_is_moved() -> None:
    """It is put before the row's tokens, as everywhere."""
    model, (ids, mask) = hybrid("qwen3_next"), left_padded(ROWS)
    inside = torch.cat([ids[1, 16:26], ids[1, :16], ids[1, 26:]])
    of_inside = torch.cat([mask[1, 16:26], mask[1, :16], mask[1, 26:]])
    _, want = generate(model, PolicyCache(FullContext()), ids[1:], mask[1:])
    _, found = generate(model, PolicyCache(FullContext()), inside[None], of_inside[None])
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_not_taken_back(name: str) -> None:
    model, cache = hybrid(name), PolicyCache(SnapKV(0.4, window_size=4))
    ids = torch.tensor(ROWS[:1])
    said, _ = generate(model, cache, ids)
    before = states_of(cache)
    cache.crop(0)
    with pytest.raises(ValueError, match="tokens_to_remove must be 0 if layers are recurrent"):
        cache.crop(-1)
    assert not cache.is_croppable
    assert same(states_of(cache), before)
    with pytest.raises((UnsupportedGenerationError, ValueError), match="assist") as raised:
        generate(model, cache, torch.cat([said, ids], dim=1), prompt_lookup_num_tokens=3)
    assert same(states_of(cache), before), raised
    generate(model, cache, torch.cat([said, ids], dim=1))


def test_drafts_are_refused_before_anything_is_read() -> None:
    cache = PolicyCache(SnapKV(0.4, window_size=4))
    with pytest.raises(UnsupportedGenerationError, match="prompt_lookup_num_tokens must be None"):
        generate(hybrid("lfm2"), cache, torch.tensor(ROWS[:1]), prompt_lookup_num_tokens=3)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", KINDS)
def test_defaults_act_after_attention(name: str) -> None:
    parts = ModelParts(hybrid(name))
    placed = FastKV().placed(parts.num_layers, parts.eligible)
    (layer,) = placed.propagation.acting_layers(parts.num_layers)
    assert parts.kinds[layer].attends
    assert all(parts.kinds[each].attends for each in parts.eligible)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in OWN_CACHE])
def test_a_cache_that_is_not_attached(name: str) -> None:
    model, cache = hybrid(name), PolicyCache(SnapKV(0.4, window_size=4))
    with pytest.raises(NotAttachedError, match="cache must be attached"):
        model(torch.tensor(ROWS[:1]), **{CACHE: cache})
    generate(model, cache, torch.tensor(ROWS[:1]))
    before = states_of(cache)
    with pytest.raises(NotAttachedError, match="cache must be attached"):
        model(torch.tensor([[5]]), **{CACHE: cache})
    assert same(states_of(cache), before)


def test_a_model_whose_recurrent_layers_begin_anew() -> None:
    """Jamba's read several tokens from an empty state, with any cache."""
    model, ids = hybrid("jamba"), torch.tensor(ROWS[:1])
    cache = PolicyCache(SnapKV(0.4, window_size=4))
    said, _ = generate(model, cache, ids)
    before = states_of(cache)
    message = "one token at a time must follow what the cache has read, got 48"
    with pytest.raises(UnsupportedModelError, match=message):
        generate(model, cache, torch.cat([said, ids], dim=1))
    assert same(states_of(cache), before)
    generate(model, cache, torch.cat([said, ids[:, :0], said[:, :0]], dim=1))  # one token
    chunked = PolicyCache(SnapKV(0.4, window_size=4))
    with pytest.raises(UnsupportedModelError, match="one token at a time"):
        generate(model, chunked, ids, prefill_chunk_size=9)
    assert chunked.get_seq_length() == 0


@pytest.mark.parametrize("name", [name for name in BY_COLUMNS if name in builds()])
def test_a_restart_where_attention_counts_columns(name: str) -> None:
    model, cache = hybrid(name), PolicyCache(GemFilter(filter_layer=1, retention_rate=0.5))
    ids = torch.tensor([tokens(0, 12)])  # as long as fits the windows
    with pytest.raises(UnsupportedModelError, match="that of layer 0 counts columns; use a policy"):
        generate(model, cache, ids)
    assert cache.get_seq_length() == 0
    assert all(not layer.state_nbytes() for layer in cache.layers)


def test_rows_whose_queries_are_scaled_by_their_column() -> None:
    build = builds()["inkling_text"]
    patch = {**build.patch, "log_scaling_n_floor": 40}
    model = Build("inkling_text", "inkling_text", patch).model()
    policy = FastKV(tsp_rate=0.5, retention_rate=0.3, window_size=4)
    cache = PolicyCache(policy)
    with pytest.raises(UnsupportedModelError, match="log_scaling_n_floor, 40 tokens, got 2 rows"):
        generate(model, cache, *left_padded([ROWS[0], ROWS[0]]))
    assert cache.get_seq_length() == 0
    generate(model, PolicyCache(SnapKV(0.4, window_size=4)), *left_padded([ROWS[0], ROWS[0]]))
    verdict = Judge("inkling_text", model)
    assert verdict._outcome(policy, [ROWS[0]]) == "right"


def test_the_self_check_notices_states_that_have_read_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = builds()["lfm2"].model()
    assert check_model(model).pads
    monkeypatch.setattr(
        LayerAttention, "_for_state", lambda self, hidden, given: {**given, "attention_mask": None}
    )
    found = check_model(model)
    assert not found.pads
    assert found.refusal is None


def test_the_self_check_notices_states_that_have_read_what_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here later layers carry on from the tokens that went on, in the wrong order."""
    model = builds()["lfm2"].model()
    honest = LayerAttention._for_state

    def backwards(self: Any, hidden: Any, given: Any) -> Any:
        if self._reach.slots is not None:
            hidden.copy_(hidden.flip(1))
        return honest(self, hidden, given)

    monkeypatch.setattr(LayerAttention, "_for_state", backwards)
    found = check_model(model)
    assert found.findings["evicting"].reason is None
    assert "wrong logits under a policy that drops tokens" in str(found.findings["dropping"].reason)


@pytest.mark.parametrize(
    ("name", "continues"), [*((name, True) for name in KINDS), ("jamba", False)]
)
def test_the_self_check_reads_a_row_in_two_parts(name: str, continues: bool) -> None:
    found = check_model(hybrid(name))
    assert found.refusal is None
    assert found.verdict is not None
    assert found.verdict.quirks.continues is continues
