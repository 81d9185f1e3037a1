"""Every misuse is answered before anything is computed, and leaves model and cache usable."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    DynamicCache,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from kvpolicy import CachePolicy, DecodingEviction, LayerContext, Scorer
from kvpolicy.attention import query_key_products
from kvpolicy.errors import (
    KVPolicyError,
    NotAttachedError,
    UnsupportedGenerationError,
    UnsupportedModelError,
)
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.checking import check_model
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import (
    FastKV,
    GemFilter,
    GQAGroupSelector,
    KeepAllSelector,
    PassAllPropagation,
    SinkAndRecentSelector,
    SnapKV,
    StreamingLLM,
)
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.support.conversation import left_padded, prompt
from tests.integrations.support.reading import assert_same_positions, marks_on
from tests.integrations.test_use import tokens_of
from tests.reference import random_tokens, tiny_model

FASTKV = FastKV(tsp_rate=0.5, retention_rate=0.3)


def conversation(cache: PolicyCache, added: int) -> Tensor:
    """What a cache has read, and some more tokens."""
    assert cache._reader.tokens is not None
    return torch.cat([cache._reader.tokens.ids, prompt(added, seed=3)], dim=1)


@pytest.fixture
def usable(model: PreTrainedModel) -> Any:
    """Gives a cache in its second turn, and checks that what the test does to it does no harm."""
    cache, other = PolicyCache(FASTKV), PolicyCache(FASTKV)
    for each in (cache, other):
        tokens_of(model, prompt(60), each)
    before = marks_on(model)
    yield cache
    assert marks_on(model) == before
    ids = conversation(cache, 30)
    assert tokens_of(model, ids, cache) == tokens_of(model, ids, other)
    assert_same_positions(cache, other)


def test_unattached(model: PreTrainedModel, usable: PolicyCache) -> None:
    fresh = PolicyCache(FASTKV)
    for cache in (usable, fresh):
        with pytest.raises(NotAttachedError, match=r"cache\.attached\(model\)"):
            model(prompt(3), **{CACHE: cache})
    assert fresh.get_seq_length() == 0
    assert len(tokens_of(model, prompt(60), fresh)[0]) == 7


NO_PADDING = "must not turn tokens already read into padding"


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (prompt(2), torch.ones(1, 2), r"attention_mask must be .* \[1, 66 \+ 2\], got \[1, 2\]"),
        (prompt(2), torch.ones(1, 1, 2, 68, dtype=torch.bool), "attention_mask must be 2D"),
        (prompt(2), [[1] * 68], "must be 2D, .* got list"),
        (prompt(1), (torch.arange(67) != 5).long()[None], r"call cache\.start_turn\(\)"),
        (prompt(1)[:, :0], None, "at least one token"),
    ],
    ids=["short", "four dimensions", "no tensor", "changed", "no tokens"],
)
def test_a_forward_that_does_not_go_on(
    model: PreTrainedModel, usable: PolicyCache, ids: Tensor, mask: Any, message: str
) -> None:
    with usable.attached(model), pytest.raises(ValueError, match=message):
        model(ids, attention_mask=mask, cache=usable)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (prompt(80).repeat(2, 1), None, "input_ids must have the batch size the cache holds, 1"),
        (prompt(80)[:0], None, "input_ids must hold at least one token in at least one row, got"),
        (prompt(30).repeat(2, 1), None, "input_ids must have the batch size the cache holds, 1"),
        (prompt(30), None, "input_ids must continue the 66 tokens .* got 30"),
        ("embeddings", None, "inputs_embeds must continue the 66 tokens .* got 40"),
        # Transformers would cut off as many of them as the cache has seen.
        ("embeddings", torch.ones(1, 66 + 40).long(), "inputs_embeds must continue the 66 tokens"),
        # A mask that takes out what others were built on, in the prompt and in the answer.
        (None, (torch.arange(96) != 4).long()[None], NO_PADDING),
        (None, (torch.arange(96) != 61).long()[None], NO_PADDING),
    ],
)
def test_a_conversation_that_does_not_go_on(
    model: PreTrainedModel, usable: PolicyCache, ids: Any, mask: Tensor | None, message: str
) -> None:
    inputs = {"attention_mask": mask, "input_ids": conversation(usable, 30) if ids is None else ids}
    if isinstance(ids, str):
        inputs["inputs_embeds"] = model.get_input_embeddings()(prompt(40))
        del inputs["input_ids"]
    with pytest.raises(ValueError, match=message):
        model.generate(**inputs, cache=usable, max_new_tokens=7)


def test_right_padding(model: PreTrainedModel) -> None:
    ids, mask = left_padded([random_tokens(0, 40), random_tokens(1, 30)])
    cache = PolicyCache(FASTKV)
    with pytest.raises(ValueError, match="attention_mask must pad on the left.*row 1"):
        model.generate(ids, attention_mask=mask.flip(1), cache=cache, max_new_tokens=2)
    tokens_of(model, ids, cache, attention_mask=mask)


def test_padding_forgotten_in_decoding(model: PreTrainedModel) -> None:
    ids, mask = left_padded([random_tokens(0, 40), random_tokens(1, 30)])
    cache = PolicyCache(SnapKV(0.3))
    with torch.no_grad(), cache.attached(model):
        model(ids, attention_mask=mask, cache=cache)
        with pytest.raises(ValueError, match="attention_mask must be 0 on the padding .* got None"):
            model(ids[:, :1], cache=cache)
        longer = torch.cat([mask, mask[:, -1:]], dim=1)
        model(ids[:, :1], attention_mask=longer, cache=cache)
        assert cache.get_seq_length() == 41


def test_a_mask_that_revives_padding(model: PreTrainedModel) -> None:
    ids, mask = left_padded([random_tokens(0, 40), random_tokens(1, 30)])
    cache = PolicyCache(SnapKV(0.3))
    tokens_of(model, ids, cache, attention_mask=mask)
    more = torch.cat([ids, ids], dim=1)
    with pytest.raises(ValueError, match="must be 0 (on the padding|wherever)"):
        tokens_of(model, more, cache, attention_mask=torch.ones_like(more))
    revived = torch.ones_like(more)
    revived[1, :3] = 0
    with pytest.raises(ValueError, match="turns padding into tokens"):
        tokens_of(model, more, cache, attention_mask=revived)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "got contrastive_search"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "got group_beam_search"),
        ({"dola_layers": "low"}, "got dola_generation"),
        ({"prompt_lookup_num_tokens": 3, "output_attentions": True}, "output_attentions must be"),
        ({"prompt_lookup_num_tokens": 3, "output_hidden_states": True}, "so must output_hidden"),
        ({"custom_generate": lambda model, **_: None}, "custom_generate must be None unless"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_modes_of_generation_that_do_not_work_yet(
    model: PreTrainedModel, usable: PolicyCache, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedGenerationError, match=message):
        model.generate(prompt(80), cache=usable, max_new_tokens=3, **arguments)


def test_a_mode_in_the_models_own_generation_config(usable: PolicyCache) -> None:
    other = tiny_model("llama", seed=1)
    other.generation_config.penalty_alpha, other.generation_config.top_k = 0.6, 4
    with pytest.raises(UnsupportedGenerationError, match="got contrastive_search"):
        other.generate(prompt(80), cache=usable, max_new_tokens=3)


NO_INT = "tokens_to_remove must be an int"
NO_ROWS = (
    *([0], None, torch.tensor([0.5]), torch.tensor(0)),
    *(torch.tensor([0], dtype=torch.uint8), torch.tensor([0], dtype=torch.complex64)),
)


@pytest.mark.parametrize(
    ("use", "given", "error", "message"),
    [
        ("start_turn", 0, ValueError, "prompt_len must be at least 1, got 0"),
        ("start_turn", 2.0, TypeError, "prompt_len must be an int"),
        *(("crop", count, TypeError, NO_INT) for count in (-2.0, None, "x", True)),
        *(("reorder_cache", rows, TypeError, "rows must be") for rows in NO_ROWS),
        ("reorder_cache", torch.tensor([True]), ValueError, "rows must be"),
        ("reorder_cache", torch.tensor([], dtype=torch.int64), ValueError, "rows must be"),
    ],
)
def test_numbers_and_rows_that_are_none(
    usable: PolicyCache, use: str, given: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        usable.start_turn(prompt_len=given) if use == "start_turn" else getattr(usable, use)(given)


@pytest.mark.parametrize("rows", [[1], [-1], [0, 10**12]], ids=str)
def test_rows_that_the_cache_does_not_have(
    model: PreTrainedModel, usable: PolicyCache, rows: list[int]
) -> None:
    before = [(layer.keys, layer.positions) for layer in usable.layers]
    for take in (usable.reorder_cache, usable.batch_select_indices):
        with pytest.raises(ValueError, match=r"rows must be indices of the cache's 1 rows, in \[0"):
            take(torch.tensor(rows))
    assert usable.batch_size == 1
    for layer, (keys, positions) in zip(usable.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.positions, positions)


def test_rows_while_a_prompt_is_read_in_chunks(model: PreTrainedModel) -> None:
    cache = PolicyCache(SnapKV(0.3))
    cache.start_turn(prompt_len=40)
    with torch.no_grad(), cache.attached(model):
        model(prompt(20), cache=cache)
    with pytest.raises(ValueError, match="rows must not change while a prompt is read in chunks"):
        cache.reorder_cache(torch.tensor([0]))
    with pytest.raises(ValueError, match="tokens_to_remove must be 0 while a prompt is read"):
        cache.crop(-3)
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        cache.batch_repeat_interleave(0)


def test_layer_outside_the_model(model: PreTrainedModel) -> None:
    cache = PolicyCache(FastKV(tsp_layer=4))
    with pytest.raises(ValueError, match=r"tsp_layer must be in \[0, 3\] for a model of 4 layers"):
        tokens_of(model, prompt(60), cache)


def test_another_model(model: PreTrainedModel, usable: PolicyCache) -> None:
    deeper, other = tiny_model("llama", seed=1, num_layers=6), tiny_model("llama", seed=2)
    for wrong, message in (
        (deeper, "model must have the 4 layers"),
        (other, "model must be the one that filled the cache"),
    ):
        with pytest.raises(ValueError, match=message):
            tokens_of(wrong, conversation(usable, 30), usable)
    with (
        usable.attached(model),
        pytest.raises(ValueError, match="the one the cache is attached to"),
        usable.attached(deeper),
    ):
        pass
    usable_again = PolicyCache(FASTKV)
    tokens_of(model, prompt(60), usable_again)
    usable_again.reset()
    tokens_of(other, prompt(60), usable_again)


@pytest.mark.parametrize("policy", [None, "fastkv", FastKV], ids=str)
def test_no_policy(policy: Any) -> None:
    with pytest.raises(TypeError, match="policy must be a CachePolicy"):
        PolicyCache(policy)


@pytest.mark.parametrize("policy", [SnapKV(0.1), SnapKV, FASTKV], ids=str)
def test_a_policy_in_the_place_of_a_cache(model: PreTrainedModel, policy: Any) -> None:
    """In `generate`, and in a loop, where nothing is wrapped."""
    kind = policy if isinstance(policy, type) else type(policy)
    name = kind.__name__
    message = rf"a model must be given a cache, got the policy {name}; pass PolicyCache\({name}"
    with pytest.raises(TypeError, match=message):
        model.generate(prompt(20), cache=policy, max_new_tokens=2)
    for module in (model, model.model):
        with pytest.raises(TypeError, match=message):
            module(prompt(20), **{CACHE: policy})
    assert not hasattr(kind, "_is_user_defined")
    assert len(tokens_of(model, prompt(20), DynamicCache())[0]) == 7


def test_the_class_in_the_place_of_a_cache(model: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match=r"got the class PolicyCache; pass PolicyCache\(policy\)"):
        model.generate(prompt(20), cache=PolicyCache, max_new_tokens=2)


BOUNDED = CachePolicy(
    None,
    KeepAllSelector(),
    PassAllPropagation(),
    decoding=DecodingEviction(None, SinkAndRecentSelector(retention_tokens=8), every=10**15),
)


@pytest.mark.parametrize(
    ("policy", "count", "message"),
    [
        (SnapKV(0.1), 10**15, "max_new_tokens must be at most 512, .* got 1000000000000000; "),
        (SnapKV(0.1), 513, "max_new_tokens must be at most 512, .* got 513; .* or None to let it"),
        (BOUNDED, None, "'every' of the policy's decoding must be at most 512, .* got 10000000000"),
    ],
    ids=["huge", "one too many", "every"],
)
def test_memory_for_more_tokens_than_the_model_has_positions(
    policy: CachePolicy, count: int | None, message: str
) -> None:
    small = tiny_model("llama", seed=1)
    small.config.max_position_embeddings = 512
    cache = PolicyCache(policy, max_new_tokens=count)
    with pytest.raises(ValueError, match=message):
        small.generate(prompt(20), cache=cache, max_new_tokens=2)
    assert cache.get_seq_length() == 0
    if count is None:
        return
    cache.max_new_tokens = 512
    with cache.attached(small), pytest.raises(ValueError, match=message):
        cache.max_new_tokens = count
    assert cache.max_new_tokens == 512
    small.generate(prompt(20), cache=cache, max_new_tokens=2)
    assert cache.get_seq_length() == 21


def test_positions_that_are_stretched() -> None:
    """A rotary factor goes beyond the positions that the configuration states."""
    yarn = tiny_model("llama", seed=1)
    yarn.config.max_position_embeddings = 512
    yarn.config.rope_parameters = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    with PolicyCache(SnapKV(0.1), max_new_tokens=2048).attached(yarn):
        pass
    with pytest.raises(ValueError, match="at most 2048"):
        PolicyCache(SnapKV(0.1), max_new_tokens=2049).attached(yarn).__enter__()


def test_an_encoder_decoder() -> None:
    t5 = T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    model, cache = T5ForConditionalGeneration(t5), PolicyCache(FASTKV)
    with pytest.raises(UnsupportedModelError, match="must be decoder-only"):
        model.generate(prompt(30), cache=cache, max_new_tokens=2)
    with pytest.raises(UnsupportedModelError, match="must be decoder-only"), cache.attached(model):
        pass
    assert model.eval()(prompt(9), decoder_input_ids=prompt(2))


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("model", TypeError, r"model must be a torch\.nn\.Module, got str"),
        (
            nn.Linear(2, 2),
            UnsupportedModelError,
            "must take a cache of Transformers.* Linear does not",
        ),
    ],
)
def test_no_model(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), PolicyCache(FASTKV).attached(model):
        pass


def test_attention_that_bypasses_the_interface() -> None:
    other = tiny_model("llama", seed=1)
    attention = other.model.layers[2].self_attn

    class OwnAttention(type(attention)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
            return hidden_states, None

    attention.__class__ = OwnAttention
    before = marks_on(other)
    cache = PolicyCache(FASTKV)
    with pytest.raises(UnsupportedModelError, match="shows no queries: it reads queries"):
        tokens_of(other, prompt(60), cache)
    with pytest.raises(UnsupportedModelError, match=r"but layers \[2\] did not update it"):
        tokens_of(other, prompt(60), PolicyCache(StreamingLLM(0.3)))
    assert marks_on(other) == before


def test_own_attention_in_a_tested_family_is_checked() -> None:
    """Here one that forgets the mask, so that what is padding or comes later is seen."""
    other = tiny_model("llama", seed=1)

    class Blind(type(other.model.layers[2].self_attn)):  # type: ignore[misc]
        def forward(
            self,
            hidden_states: Tensor,
            position_embeddings: Any = None,
            attention_mask: Any = None,
            **kwargs: Any,
        ) -> tuple[Tensor, None]:
            batch, length, _ = hidden_states.shape
            each = (batch, length, -1, self.head_dim)
            queries, keys, values = (
                part(hidden_states).view(each).transpose(1, 2)
                for part in (self.q_proj, self.k_proj, self.v_proj)
            )
            if kwargs.get(CACHE) is not None:
                keys, values = kwargs[CACHE].update(keys, values, self.layer_idx)
            output = scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
            return self.o_proj(output.transpose(1, 2).reshape(batch, length, -1)), None

    for layer in other.model.layers:
        layer.self_attn.__class__ = Blind
    with pytest.raises(UnsupportedModelError, match="its self-check found"):
        tokens_of(other, prompt(60), PolicyCache(StreamingLLM(0.3)))


def test_keys_that_do_not_all_reach_attention(model: PreTrainedModel) -> None:
    class ForgetfulCache(PolicyCache):
        def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            keys, values = super().update(*args, **kwargs)
            return keys[:, :, 1:], values[:, :, 1:]

    before = marks_on(model)
    with pytest.raises(UnsupportedModelError, match="LlamaDecoderLayer at 0 did not"):
        tokens_of(model, prompt(60), ForgetfulCache(FASTKV))
    assert marks_on(model) == before


def test_keys_that_reach_attention_as_copies(model: PreTrainedModel) -> None:
    """As where a model casts them; what is held, head by head, is what the cache was given."""

    class CopyingCache(PolicyCache):
        def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            keys, values = super().update(*args, **kwargs)
            return keys.clone(), values

    plain, copying = PolicyCache(FASTKV), CopyingCache(FASTKV)
    said = tokens_of(model, prompt(60), plain)
    assert tokens_of(model, prompt(60), copying) == said
    for layer, twin in zip(plain.layers, copying.layers, strict=True):
        assert torch.equal(layer.positions, twin.positions)
        assert torch.equal(layer.keys, twin.keys)


def test_another_attention_implementation() -> None:
    other = tiny_model("llama", seed=1)
    other.config._attn_implementation_internal = "paged|sdpa"
    with pytest.raises(UnsupportedModelError, match=r"one of eager, sdpa, .*got 'paged\|sdpa'"):
        tokens_of(other, prompt(60), PolicyCache(FASTKV))


def test_a_context_beyond_the_sliding_window() -> None:
    config = MistralConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=32,
        eos_token_id=None,
    )
    sliding = MistralForCausalLM(config).eval()
    cache = PolicyCache(FASTKV)
    with pytest.raises(UnsupportedModelError, match=r"layers \[0\] sees 32 of 33 tokens.*: none"):
        tokens_of(sliding, prompt(33), cache)
    everything = PolicyCache(SnapKV(1.0))
    expected = tokens_of(sliding, prompt(20), DynamicCache())
    assert tokens_of(sliding, prompt(20), everything) == expected


def test_all_errors_of_the_package_are_value_errors() -> None:
    for error in (NotAttachedError, UnsupportedGenerationError, UnsupportedModelError):
        assert issubclass(error, KVPolicyError)
    assert issubclass(KVPolicyError, ValueError)


def test_a_conversation_padded_anew(model: PreTrainedModel) -> None:
    """A tokenizer pads whole texts on the left: the columns of what was read would move."""
    rows = [random_tokens(0, 30), random_tokens(1, 30)]
    ids, mask = left_padded(rows)
    cache = PolicyCache(SnapKV(0.3))
    said = tokens_of(model, ids, cache, attention_mask=mask)
    texts = [rows[0] + said[0] + random_tokens(5, 3), rows[1] + said[1] + random_tokens(6, 25)]
    again, again_mask = left_padded(texts)
    with pytest.raises(ValueError, match="do not pad the whole conversation again"):
        tokens_of(model, again, cache, attention_mask=again_mask)
    # Between the turns padding is right.
    added, added_mask = left_padded([random_tokens(5, 3), random_tokens(6, 25)])
    whole = torch.cat([ids, torch.tensor(said), added], dim=1)
    whole_mask = torch.cat([torch.ones(2, 37, dtype=torch.int64), added_mask], dim=1)
    tokens_of(model, whole, cache, attention_mask=whole_mask)


@pytest.mark.filterwarnings("ignore:.*checkpoint", "ignore:.*gradient_checkpointing")
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_gradient_checkpointing(name: str) -> None:
    """Its layers drop the cache from their arguments."""
    other = builds()[name].model()
    other.gradient_checkpointing_enable()
    other.train()
    cache = PolicyCache(SnapKV(0.3))
    message = r"layers \[0, 1, 2, 3\] did not update it"
    with cache.attached(other), pytest.raises(UnsupportedModelError, match=message):
        other(prompt(40), cache=cache, use_cache=True)
    assert cache.get_seq_length() == 0
    other.eval()
    assert tokens_of(other, prompt(40), cache)


@pytest.mark.parametrize(
    ("how", "arguments"),
    [
        ("plain", {"labels": prompt(80)}),
        ("plain", {"logits_to_keep": torch.tensor([15])}),
        ("by position", {"logits_to_keep": torch.tensor([15])}),
        ("decoder first", {"logits_to_keep": torch.tensor([15])}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_logits_of_tokens_that_may_be_dropped(
    model: PreTrainedModel, how: str, arguments: dict[str, Any]
) -> None:
    """Also through the head of a model whose decoder was attached first."""
    for policy in (FASTKV,) if how == "decoder first" else (FASTKV, SnapKV(1.0)):
        cache = PolicyCache(policy)
        given, named = ((None, None, cache), {}) if how == "by position" else ((), {"cache": cache})
        with torch.no_grad(), ExitStack() as stack:
            if how == "decoder first":
                stack.enter_context(cache.attached(model.model))
            stack.enter_context(cache.attached(model))
            if policy is FASTKV:
                stack.enter_context(pytest.raises(ValueError, match="dropped token has no logits"))
            model(prompt(80), *given, **named, **arguments)


IDS = prompt(20)
EMBEDS = torch.randn(1, 20, 16)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"input_ids": IDS.float()}, TypeError, "input_ids must be an int64 .* got torch.float32"),
        ({"input_ids": IDS.to(torch.uint8)}, TypeError, "input_ids must be .* got torch.uint8"),
        ({"input_ids": IDS.tolist()}, TypeError, "input_ids must be .* got list"),
        ({"input_ids": IDS[0]}, ValueError, r"input_ids must be \[batch, len\], got \[20\]"),
        (
            {"input_ids": IDS[:0]},
            ValueError,
            r"at least one token in at least one row, got \[0, 20\]",
        ),
        ({"inputs_embeds": EMBEDS[0]}, ValueError, r"inputs_embeds must be .*, got \[20, 16\]"),
        ({"inputs_embeds": EMBEDS.long()}, TypeError, "must be a float tensor .*, got torch.int64"),
        (
            {"input_ids": IDS, "position_ids": IDS[:, :3]},
            ValueError,
            r"position_ids must be \[batch, len\] = \[1, 20\], .* got \[1, 3\]; leave them out",
        ),
        ({"input_ids": IDS, "position_ids": IDS[0]}, ValueError, r"position_ids .* got \[20\]"),
        (
            {"input_ids": IDS, "position_ids": IDS.repeat(3, 1)},
            ValueError,
            r"position_ids .* got \[3, 20\]",
        ),
        ({"input_ids": IDS, "position_ids": [[0]]}, TypeError, "position_ids .* tensor, got list"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("policy", [SnapKV(0.3), GemFilter(retention_rate=0.5)], ids=str)
def test_inputs_of_another_kind(
    model: PreTrainedModel,
    policy: CachePolicy,
    inputs: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    cache, before = PolicyCache(policy), marks_on(model)
    with torch.no_grad(), cache.attached(model), pytest.raises(error, match=message):
        model(cache=cache, **inputs)
    assert (cache.get_seq_length(), marks_on(model)) == (0, before)
    assert tokens_of(model, IDS, cache) == tokens_of(model, IDS, PolicyCache(policy))


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"input_ids": IDS.tolist()}, TypeError, "input_ids must be a tensor, got list; let the"),
        ({"inputs": "a text"}, TypeError, "inputs must be a tensor, got str"),
        ({"input_ids": IDS[0]}, ValueError, r"input_ids must be \[batch, len\], got \[20\]"),
        ({"input_ids": IDS.float()}, TypeError, "input_ids must be an int64 .* got torch.float32"),
        ({"input_ids": IDS[:0]}, ValueError, "at least one token in at least one row"),
        ({"input_ids": IDS, "attention_mask": [[1] * 20]}, TypeError, "attention_mask must be a t"),
        ({"input_ids": IDS, "attention_mask": torch.ones(20)}, ValueError, "attention_mask must"),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(2, 20)},
            ValueError,
            "attention_mask must have the 1 rows of the input, got 2",
        ),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(1, 7)},
            ValueError,
            r"\[1, 20\], one for each new token, got \[1, 7\]; .* from attention_mask",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_inputs_of_another_kind_in_generate(
    model: PreTrainedModel, inputs: dict[str, Any], error: type[Exception], message: str
) -> None:
    cache, before = PolicyCache(FASTKV), marks_on(model)
    with pytest.raises(error, match=message):
        model.generate(cache=cache, max_new_tokens=2, **inputs)
    assert (cache.get_seq_length(), marks_on(model)) == (0, before)
    assert tokens_of(model, IDS, cache) == tokens_of(model, IDS, PolicyCache(FASTKV))


class LooksAtTheLast(Scorer):
    """Declares no queries, and looks at one."""

    def score(self, context: LayerContext) -> Tensor:
        return query_key_products(context.queries, context.keys)[:, :, -1]


def test_a_scorer_that_looks_at_queries_it_has_not_declared(model: PreTrainedModel) -> None:
    selector = GQAGroupSelector(0.5, window_size=1)
    cache = PolicyCache(CachePolicy(LooksAtTheLast(), selector, PassAllPropagation()))
    before = marks_on(model)
    with pytest.raises(ValueError, match="a scorer must declare num_queries to read queries"):
        model.generate(IDS, cache=cache, max_new_tokens=2)
    assert (cache.get_seq_length(), marks_on(model)) == (0, before)


def test_a_policy_and_a_length_that_a_model_is_asked_about(model: PreTrainedModel) -> None:
    found = check_model(model)
    assert found.refusal_of(SnapKV(0.3), 10) is None
    for policy in (None, "snapkv", SnapKV):
        with pytest.raises(TypeError, match="policy must be a CachePolicy"):
            found.refusal_of(policy, 10)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="context_len must be an int"):
        found.refusal_of(SnapKV(0.3), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="context_len must be at least 1, got 0"):
        found.refusal_of(SnapKV(0.3), 0)
