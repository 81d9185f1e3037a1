"""What a kind of model does not do under a policy: refused by name, before anything is held."""

import pytest
import torch

from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    FastKV,
    FullContext,
    GemFilter,
    GQAGroupSelector,
    KeyNormScorer,
    KVzip,
    PassAllPropagation,
    PyramidInfer,
    RestartPropagation,
    SinkAndRecentSelector,
    SnapKV,
    StreamingLLM,
)
from tests.integrations.hybrids.models import tokens
from tests.integrations.model.builds.catalogue import builds, built
from tests.integrations.support.asking import TurnedBackScorer
from tests.integrations.support.reading import marks_on
from tests.integrations.support.versions import OLD

IDS = torch.tensor([tokens(0, 47)])


class TurningSelector(GQAGroupSelector):
    needs_rotary = True


def turning(selector: GQAGroupSelector) -> CachePolicy:
    return CachePolicy(TurnedBackScorer(), selector, PassAllPropagation())


FULL, GEM, FAST = FullContext(), GemFilter(retention_rate=0.4), FastKV(tsp_rate=0.2)
GAPLESS = StreamingLLM(retention_tokens=14, num_sinks=2, gapless=True)
TURNING = turning(GQAGroupSelector(0.5))
PYRAMID = PyramidInfer(min_context=4, decay_ratio=0.3)
BLIND_RESTART = CachePolicy(
    KeyNormScorer(),
    SinkAndRecentSelector(0.3),
    RestartPropagation(filter_layer=None, retention_rate=0.5),
)
LOOKING_ANSWER = StreamingLLM(retention_tokens=12, decoding=SnapKV().decoding_rule(12))
WITH_WINDOWS = (
    *("gpt_oss", "gemma3_text", "qwen3_windows", "llama4_text"),
    *("gemma3n_text", "gemma4_text_shared"),
)
COLUMNS = "attention scores must not depend on the columns of keys, but "
SEES_ALL = "full attention if StreamingLLM.* layer 0 is of the kind "
ROTARY = "model must have a rotary.*"
AFTER_WINDOWS = "layers after which PyramidPropagation.* drops tokens must"
READ_ONCE = r"rereading of KVzip\(retention_rate=0.3\) must be None"
BORROWS = r"layers \[2\] hold a recurrent state, or no keys of their own; layers that attend: "
NEAREST = r"must attend, but layers \[0.*layers that attend: \[1, 3\]; the nearest is 1"
KEEPS = "layer must hold its state in the cache, but RecurrentGemmaDecoderLayer at 0 keeps it"
REFUSED: list[tuple[str, CachePolicy, str]] = [
    # Whatever the policy.
    ("bloom", FULL, COLUMNS + "BloomBlock adds alibi"),
    ("falcon_alibi", FULL, COLUMNS + "FalconDecoderLayer adds alibi"),
    ("mpt", FULL, COLUMNS + "MptBlock adds position_bias"),
    ("cpmant", FULL, COLUMNS + "CpmAntTransformerBlock adds position_bias"),
    ("prophetnet", FULL, "but ProphetNetDecoderLayer adds main_relative_position_buckets"),
    ("big_bird", FULL, "attention_type is 'block_sparse', which attends to blocks of columns"),
    ("openai-gpt", FULL, r"must take a cache of Transformers.* but OpenAIGPTModel does not"),
    ("hrm_text", FULL, "whose 32 layers of keys and values are those of 8 modules"),
    ("mamba", FULL, "some layer must hold keys and values"),
    ("mamba2", SnapKV(), "some layer must hold keys and values"),
    ("recurrent_gemma", SnapKV(), "shows no queries" if OLD else KEEPS),
    # What stands without gaps is turned.
    ("mistral_sliding", GAPLESS, SEES_ALL + "sliding window"),
    ("qwen3_next", GAPLESS, "layer 0 is of the kind recurrent"),
    ("deepseek_v3", GAPLESS, "layer 0 is of the kind latent attention"),
    ("llama4_text_mixed", GAPLESS, "layer 0 is of the kind chunked attention"),
    ("gpt2", GAPLESS, "layer 0 gets no rotary embedding.*gapless=False"),
    ("qwen2_vl", GAPLESS, "its rotary positions have several axes"),
    # Parts that turn keys.
    ("gpt2", TURNING, ROTARY + "layer 0 gets no rotary embedding"),
    ("falcon", TURNING, ROTARY + "attention functions of their own"),
    (
        "hunyuan_v1_dense",
        TURNING,
        ROTARY + "layer 0 does something else to its keys than rotating them",
    ),
    ("deepseek_v2", turning(TurningSelector(0.5)), "must not rotate keys or read output weights"),
    # Second readings.
    ("gemma3n_text", KVzip(), READ_ONCE),
    ("falcon_h1", KVzip(), READ_ONCE),
    ("falcon", KVzip(), "reads queries"),
    # Restarts.
    ("bart", GEM, "but the model counts columns"),
    ("kosmos-2.5", GEM, "but the model counts columns"),
    ("falcon", BLIND_RESTART, "it restarts the prefill"),
    (
        "llama4_text_mixed",
        GemFilter(filter_layer=1),
        "restarts the prefill at new positions, 16 tokens, got 47",
    ),
    ("longcat_flash", GEM, "whose layers attend several times each"),
    # Answers that are bounded by queries, where attention shows none.
    (
        "falcon",
        LOOKING_ANSWER,
        r"must not read queries .* layers \[0, 1, 2, 3\]; use the rule of StreamingLLM",
    ),
    # Drops after layers that cannot say what goes on, or do not see it.
    ("longcat_flash", FAST, "whose layers attend several times each"),
    (
        "llama4_text_mixed",
        FastKV(tsp_layer=0),
        r"sees 16 of 47 tokens; layers that see all: \[1, 3\]",
    ),
    (
        "gemma3_text",
        FastKV(tsp_layer=0),
        r"sliding window of layers \[0\] sees 16 of 47 tokens; layers that see all: \[1, 3\]",
    ),
    (
        "hy_v4",
        FastKV(tsp_layer=2),
        r"which layers \[2\] do; the others: \[1, 3\]; the nearest is 3",
    ),
    ("qwen3_next", FastKV(tsp_layer=0, tsp_rate=0.5), NEAREST),
    ("qwen3_next", GemFilter(filter_layer=0), NEAREST),
    ("qwen3_next", PyramidInfer(min_context=8), NEAREST),
    ("gemma3n_text", FastKV(tsp_layer=2), BORROWS),
    ("gemma4_text_shared", FastKV(tsp_layer=2), BORROWS),
    ("gemma3n_text", PYRAMID, r"keys of their own; layers that attend: \[0"),
    ("gemma4_text_shared", PYRAMID, r"keys of their own; layers that attend: \[0"),
    ("mllama", FastKV(tsp_layer=1), r"must attend, but layers \[1\]"),
    ("mllama", GemFilter(filter_layer=1), r"must attend, but layers \[1\]"),
    *((name, PYRAMID, AFTER_WINDOWS) for name in WITH_WINDOWS),
]


@pytest.mark.parametrize(
    ("name", "policy", "message"), [case for case in REFUSED if case[0] in builds()]
)
def test_it_is_refused_and_the_model_left_as_it_was(
    name: str, policy: CachePolicy, message: str
) -> None:
    model, cache = built(name), PolicyCache(policy)
    before = marks_on(model)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=message):
            model.generate(IDS, cache=cache, max_new_tokens=2)
    assert cache.get_seq_length() == 0
    assert all(layer.kept_len == 0 for layer in cache.layers)
    assert marks_on(model) == before
