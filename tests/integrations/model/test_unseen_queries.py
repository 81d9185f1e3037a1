"""Models with attention functions of their own, which show no queries: policies without work."""

from typing import Any

import pytest
import torch

from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.checking import check_model
from kvpolicy.policies import (
    H2O,
    FastKV,
    FullContext,
    GemFilter,
    KeyDiff,
    KeyNorm,
    KeyNormScorer,
    SinkAndRecentSelector,
    SnapKV,
    StreamingLLM,
    TokenSelectivePropagation,
)
from tests.integrations.hybrids.models import generate, tokens
from tests.integrations.model.builds.catalogue import Build, builds, built
from tests.integrations.model.builds.judge import Judge
from tests.integrations.support.alone import read_two_turns
from tests.integrations.support.conversation import left_padded
from tests.integrations.support.versions import NO_QUERIES, OLD

# Of one key head for all queries, of one for each; windows in columns; one mask for all heads.
# The last attends both ways in an older Transformers, and is refused there.
FAMILIES = (
    *("falcon", "falcon_grouped", "gpt_neo", "xglm", *NO_QUERIES),
    *(() if OLD else ("megatron-bert",)),
)
ROWS = [tokens(0, 40), tokens(1, 23)]
POLICIES: dict[str, CachePolicy] = {
    "streamingllm": StreamingLLM(0.4),
    "keydiff": KeyDiff(0.4, window_size=2),  # each head keeps its own
    "dropping": CachePolicy(
        KeyNormScorer(),
        SinkAndRecentSelector(0.2),
        TokenSelectivePropagation(tsp_rate=0.2, window_size=4),
    ),
}
LOOKING: dict[str, CachePolicy] = {
    "snapkv": SnapKV(0.3, window_size=4),
    "fastkv": FastKV(tsp_rate=0.5, retention_rate=0.3, window_size=4),
    "h2o": H2O(0.4, window_size=2),
    "gemfilter": GemFilter(retention_rate=0.4),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_policies_without_queries_are_right_and_others_refused(name: str) -> None:
    verdict = Judge(name, built(name))()
    for policy, outcome in verdict.policies.items():
        if policy.startswith(("full_context", "streamingllm")):
            assert outcome == "right", (policy, outcome)
        else:
            assert outcome.startswith("refused: "), (policy, outcome)
            assert "shows no queries: it reads queries" in outcome
    assert verdict.effect > 1e-2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FAMILIES)
def test_two_turns_of_padded_rows(name: str, policy: str) -> None:
    store = read_two_turns(built(name), POLICIES[policy], [40, 23], [9, 21])
    assert bool(store.propagated) is (policy == "dropping")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementations(implementation: str) -> None:
    model = builds()["falcon"].model(attn_implementation=implementation)
    read_two_turns(model, KeyDiff(0.4), [40, 23], [9, 21])


def test_evicted_keys_are_freed() -> None:
    store = PolicyCache(StreamingLLM(0.25))
    model = built("falcon")
    with torch.no_grad(), store.attached(model):
        model(torch.tensor(ROWS[:1]), cache=store)
    config: Any = model.config
    head = config.hidden_size // config.num_attention_heads
    assert [layer.nbytes() for layer in store.layers] == [2 * 10 * head * 4] * 4


@pytest.mark.skipif(OLD, reason="this Transformers cuts the masks of later chunks wrongly")
def test_padding_in_a_chunk_behind_others_where_windows_are_of_columns() -> None:
    """Such a chunk is refused in a later turn, and the cache stays as it was."""
    model, (ids, mask) = built("gpt_neo"), left_padded(ROWS)
    store = PolicyCache(StreamingLLM(0.4))
    said, _ = generate(model, store, ids, mask)
    more, more_mask = left_padded([tokens(5, 12), tokens(6, 5)])
    longer = torch.cat([said, more], dim=1)
    whole = torch.cat([mask, torch.ones_like(said[:, 40:]), more_mask], dim=1)
    with pytest.raises(UnsupportedModelError, match="count their window in columns"):
        generate(model, store, longer, whole, prefill_chunk_size=6)
    assert store.get_seq_length() == said.shape[1] - 1
    generate(model, store, longer, whole)


@pytest.mark.parametrize("policy", LOOKING)
def test_policies_that_look_at_queries(policy: str) -> None:
    model, looking = built("falcon"), LOOKING[policy]
    calls: list[Any] = []
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda *_: calls.append(None))
    for _ in range(2):
        with pytest.raises(
            UnsupportedModelError, match="a policy that does not, such as Streaming"
        ):
            generate(model, PolicyCache(looking), torch.tensor(ROWS[:1]))
    handle.remove()
    assert not calls
    found = check_model(model)
    assert not found.shows_queries
    assert "shows no queries" in str(found.refusal_of(looking, 1000))
    assert found.refusal_of(KeyNorm(0.4), 1000) is None


@pytest.mark.skipif(OLD, reason="this Transformers' BigBird attends both ways")
def test_full_attention_of_a_model_that_may_be_sparse() -> None:
    model = Build("big_bird", "big_bird", {"attention_type": "original_full"}).model()
    read_two_turns(model, StreamingLLM(0.4), [40, 40], [9, 9])


@pytest.mark.skipif(OLD, reason="this Transformers' GIT is refused with images by other words")
def test_image_features_that_are_put_before_the_tokens() -> None:
    model, ids = built("git"), torch.tensor(ROWS[:1])
    config: Any = model.config
    size = config.vision_config.image_size
    store = PolicyCache(FullContext())
    with pytest.raises(UnsupportedModelError, match="one hidden state for each token"):
        generate(model, store, ids, pixel_values=torch.zeros(1, 3, size, size))
    assert store.get_seq_length() == 0
    generate(model, store, ids)
