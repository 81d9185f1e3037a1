"""The cache as its users handle it: loops, turns, failures, what is left behind."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

from kvpolicy import CachePolicy, LayerContext, PropagationPolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE, cache_of
from kvpolicy.policies import FastKV, FullContext, KeepAllSelector, SnapKV, StreamingLLM
from kvpolicy.selection import compress
from tests.integrations.support.conversation import left_padded, prompt
from tests.integrations.support.reading import Interrupted, marks_on
from tests.reference import random_tokens, tiny_model

FASTKV = FastKV(tsp_rate=0.5, retention_rate=0.3)


def tokens_of(model: PreTrainedModel, ids: Tensor, cache: Any, **kwargs: Any) -> list[list[int]]:
    output = model.generate(ids, **{CACHE: cache}, max_new_tokens=7, do_sample=False, **kwargs)
    return output[:, ids.shape[1] :].tolist()


def test_inputs_embeds_give_what_input_ids_give(model: PreTrainedModel) -> None:
    embeds = model.get_input_embeddings()(prompt(60))
    cache, expected = PolicyCache(FASTKV), PolicyCache(FASTKV)
    output = model.generate(inputs_embeds=embeds, cache=cache, max_new_tokens=7, do_sample=False)
    assert output.tolist() == tokens_of(model, prompt(60), expected)
    assert cache.propagated[1].tolist() == expected.propagated[1].tolist()


def test_a_prompt_shorter_than_its_budget_loses_nothing(model: PreTrainedModel) -> None:
    for policy in (SnapKV(), FASTKV, StreamingLLM(), StreamingLLM(num_sinks=0)):
        cache = PolicyCache(policy)
        expected = tokens_of(model, prompt(5), DynamicCache())
        if isinstance(policy, StreamingLLM):
            tokens_of(model, prompt(5), cache)
            assert cache.layers[0].positions[0, 0, 0] == (0 if policy.selector.num_sinks else 4)
        else:
            assert tokens_of(model, prompt(5), cache) == expected
            assert cache.propagated == {}


def test_the_model_is_left_as_it_was(model: PreTrainedModel) -> None:
    before = marks_on(model)
    expected = tokens_of(model, prompt(60), DynamicCache())
    cache = PolicyCache(FASTKV)
    tokens_of(model, prompt(60), cache)
    with cache.attached(model):
        assert marks_on(model) != before
    assert marks_on(model) == before
    assert tokens_of(model, prompt(60), DynamicCache()) == expected


def test_generate_passes_other_caches_through(model: PreTrainedModel) -> None:
    PolicyCache(FullContext())
    PolicyCache(FullContext())
    wrapped = GenerationMixin.generate
    assert not hasattr(wrapped._kvpolicy_wraps, "_kvpolicy_wraps")
    assert wrapped.__doc__ == wrapped._kvpolicy_wraps.__doc__
    output = model.generate(prompt(20), max_new_tokens=3, return_dict_in_generate=True)
    assert isinstance(cache_of(output), DynamicCache)


IN_A_FRESH_PROCESS = """
import sys
import torch
import kvpolicy, kvpolicy.policies
assert not any(name.startswith("transformers") for name in sys.modules), "imports transformers"
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM
stock = GenerationMixin.generate
import kvpolicy.evaluation
assert GenerationMixin.generate is stock, "changes generate before PolicyCache is imported"
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import cache_of
from kvpolicy.policies import FastKV
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, eos_token_id=None,
))
output = model.generate(
    torch.arange(50)[None],
    cache=PolicyCache(FastKV()),
    max_new_tokens=3,
    return_dict_in_generate=True,
)
assert cache_of(output).propagated[0].shape == (1, 10)
"""


def test_the_first_cache_of_a_process_may_be_built_inside_the_call() -> None:
    """Python looks `generate` up before it builds the cache that is passed to it."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_attached_cache_leaves_other_calls_alone(model: PreTrainedModel) -> None:
    expected = model(prompt(30)).logits
    cache = PolicyCache(FASTKV)
    with cache.attached(model):
        assert torch.equal(model(prompt(30)).logits, expected)
        assert torch.equal(model(prompt(30), **{CACHE: DynamicCache()}).logits, expected)
    assert cache.get_seq_length() == 0


def test_report_counts_tokens_and_bytes(model: PreTrainedModel) -> None:
    ids, mask = left_padded([random_tokens(0, 50), random_tokens(1, 30)])
    cache = PolicyCache(SnapKV(0.2))
    assert cache.report().total.share == 0
    assert cache.get_max_length() == -1
    with torch.no_grad(), cache.attached(model):
        model(ids, attention_mask=mask, cache=cache)
    report = cache.report()
    assert len(report.layers) == 4
    for layer in (*report.layers, report.total):
        assert layer.seen == 80
        assert layer.kept == 10 + 8
    slot = 2 * 8 * 4  # keys and values of 8 floats
    assert (
        report.layers[0].held_bytes == 2 * (10 + 8) * slot
    )  # two heads; 6 is int(0.2 * 30), 8 the window
    assert report.layers[0].full_bytes == 2 * 2 * 50 * slot
    assert report.total.full_bytes == 4 * report.layers[0].full_bytes
    assert report.total.share == 0.18
    table = str(report).splitlines()
    assert len(table) == 6
    assert max(map(len, table)) <= 80
    assert table[-1].split() == ["total", "80", "18.0", "9,216", "0", "51,200", "18.0%"]


@torch.no_grad()
def chunk_with_padding_inside(model: PreTrainedModel, cache: Any, **kwargs: Any) -> Tensor:
    """Logits of a second turn [answer token][padding][question] of row 1, by hand."""
    ids, mask = torch.cat([prompt(20), prompt(20, 1)]), torch.ones(2, 20, dtype=torch.int64)
    added, added_mask = torch.cat([prompt(8, 2), prompt(8, 3)]), torch.ones(2, 8, dtype=torch.int64)
    added_mask[1, 1:5] = 0
    whole = torch.cat([mask, added_mask], dim=1)
    positions = (whole.cumsum(1) - 1).clamp(min=0)
    first = {"attention_mask": mask, "position_ids": positions[:, :20]}
    model(ids, **{CACHE: cache}, **first)
    if isinstance(cache, PolicyCache) and kwargs.pop("turn", True):
        cache.start_turn()
    output = model(
        added,
        attention_mask=whole,
        position_ids=positions[:, 20:],
        **{CACHE: cache},
        output_hidden_states=True,
    )
    return torch.cat([output.logits, *output.hidden_states], dim=-1)


@pytest.mark.parametrize("turn", [True, False])
def test_padding_inside_a_chunk_leaves_every_column_its_own_logits(
    model: PreTrainedModel, turn: bool
) -> None:
    cache = PolicyCache(FullContext())
    with cache.attached(model):
        got = chunk_with_padding_inside(model, cache, turn=turn)
    expected = chunk_with_padding_inside(model, DynamicCache())
    real = torch.ones(2, 8, dtype=torch.bool)
    real[1, 1:5] = False
    torch.testing.assert_close(got[real], expected[real], atol=1e-4, rtol=0)


def half_done(model: PreTrainedModel, cache: PolicyCache, ids: Tensor, error: Any) -> None:
    """A forward that fails in the third layer."""

    def fail(*args: Any) -> None:
        raise error

    handle = model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(error):
        model(ids, cache=cache)
    handle.remove()


USES: dict[str, Callable[[PolicyCache], Any]] = {
    "read": lambda cache: None,
    "crop": lambda cache: cache.crop(-2),
    "turn": lambda cache: cache.start_turn(),
    "reset": lambda cache: cache.reset(),
    "report": lambda cache: str(cache.report()),
    "layers": lambda cache: [layer.kept_len for layer in cache.layers],
    "mask": lambda cache: cache.get_mask_sizes(1, 0),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}


@torch.no_grad()
@pytest.mark.parametrize("error", [RuntimeError, Interrupted])
@pytest.mark.parametrize("before", ["nothing", "tokens", "a turn"])
@pytest.mark.parametrize("use", USES)
def test_whatever_is_done_first_after_a_failure(
    model: PreTrainedModel, use: str, before: str, error: type[BaseException]
) -> None:
    """The forwards after it are as if it had not been; as is what is told, but for Ctrl-C."""
    results: list[list[Any]] = []
    for fails in (False, True):
        cache = PolicyCache(SnapKV(retention_tokens=12))
        with cache.attached(model):
            if before != "nothing" or use == "crop":
                model(prompt(40), cache=cache)
                model(prompt(3, 2), cache=cache)
            if before == "a turn" and use != "crop":
                cache.start_turn()
            if fails:
                half_done(model, cache, prompt(20, 4), error)
            found = USES[use](cache)
            if isinstance(found, PolicyCache):
                cache, found = found, None
        with cache.attached(model):
            logits = model(prompt(20, 5), cache=cache).logits
        held = [each for layer in cache.layers for each in (layer.positions, layer.keys)]
        told = found if error is RuntimeError else None
        results.append([told, cache.get_seq_length(), logits, *held])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@torch.no_grad()
def test_a_generate_that_is_refused_starts_no_turn(model: PreTrainedModel) -> None:
    cache = PolicyCache(SnapKV(retention_tokens=12))
    with cache.attached(model):
        model(prompt(40), cache=cache)
        with pytest.raises(ValueError, match="not_an_argument"):
            model.generate(prompt(60), cache=cache, not_an_argument=1)
        model(prompt(1, 3), cache=cache)
    assert [layer.kept_len for layer in cache.layers] == [13] * 4


def test_a_refused_generate_binds_the_cache_to_nothing(model: PreTrainedModel) -> None:
    cache = PolicyCache(FASTKV)
    with pytest.raises(ValueError, match="not_an_argument"):
        tiny_model("llama", seed=0, num_layers=2).generate(
            prompt(60), cache=cache, not_an_argument=1
        )
    assert len(tokens_of(model, prompt(60), cache)[0]) == 7


@torch.no_grad()
def test_the_attention_implementation_may_change_between_forwards() -> None:
    logits = []
    for implementation in ("sdpa", "eager"):
        other = tiny_model("llama", seed=1)
        cache = PolicyCache(SnapKV(retention_tokens=12))
        with cache.attached(other):
            other(prompt(40), cache=cache)
            other.set_attn_implementation(implementation)
            logits.append(other(prompt(5, 3), cache=cache).logits)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


def test_a_base_model_without_its_head(model: PreTrainedModel) -> None:
    cache, whole = PolicyCache(FASTKV), PolicyCache(FASTKV)
    with torch.no_grad(), cache.attached(model.model):
        hidden = model.model(prompt(60), cache=cache, return_dict=False)[0]
    with torch.no_grad(), whole.attached(model):
        logits = model(prompt(60), cache=whole).logits
    assert hidden.shape[1] == 30
    assert torch.equal(model.lm_head(hidden), logits)


@torch.no_grad()
@pytest.mark.parametrize("half", [False, True])
def test_autocast_does_not_round_the_scores(half: bool) -> None:
    other = tiny_model("llama", seed=1)
    if half:
        other = other.to(torch.bfloat16)
    for seed in range(6):
        plain, cast = PolicyCache(SnapKV(0.3)), PolicyCache(SnapKV(0.3))
        with plain.attached(other):
            other(prompt(120, seed), cache=plain)
        with torch.autocast("cpu", torch.bfloat16), cast.attached(other):
            other(prompt(120, seed), cache=cast)
        for one, two in zip(plain.layers, cast.layers, strict=True):
            assert one.kept_len == two.kept_len == 36
            if half:  # a float32 model computes other keys under autocast
                assert torch.equal(one.positions, two.positions)


@torch.no_grad()
def test_hidden_states_before_a_drop_are_in_the_columns_order(model: PreTrainedModel) -> None:
    ids, mask = torch.cat([prompt(40), prompt(40, 1)]), torch.ones(2, 40, dtype=torch.int64)
    mask[1, 10:20] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True)
    dropping, keeping = PolicyCache(FASTKV), PolicyCache(FullContext())
    with dropping.attached(model), keeping.attached(model):
        inputs = {"attention_mask": mask, "position_ids": positions, "output_hidden_states": True}
        got = model(ids, cache=dropping, **inputs)
        plain = model.model(ids, cache=keeping, return_dict=False, **inputs)
    real = mask.bool()
    for index in range(3):  # up to the output of the TSP layer's predecessor, and its input
        want = expected.hidden_states[index][real]
        torch.testing.assert_close(plain[2][index][real], want, atol=1e-4, rtol=0)
        if index < 2:
            torch.testing.assert_close(got.hidden_states[index][real], want, atol=1e-4, rtol=0)
    assert got.hidden_states[2].shape[1] < 40


@attrs.frozen
class PassesAllByName(PropagationPolicy):
    """Names all tokens where None would say the same."""

    @property
    def needs_saliency(self) -> bool:
        return False

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        return frozenset({1})

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        return compress(context.new_valid, context.new_len)


@torch.no_grad()
def test_passing_everything_by_name_drops_nothing(model: PreTrainedModel) -> None:
    cache = PolicyCache(CachePolicy(None, KeepAllSelector(), PassesAllByName()))
    ids, mask = torch.cat([prompt(20), prompt(20, 1)]), torch.ones(2, 20, dtype=torch.int64)
    mask[1, 5:9] = 0
    with cache.attached(model):
        logits = model(ids, attention_mask=mask, cache=cache).logits
    assert cache.propagated == {}
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_copy_of_an_attached_model_is_attached_to_nothing(model: PreTrainedModel) -> None:
    cache = PolicyCache(FASTKV)
    with cache.attached(model):
        copied = copy.deepcopy(model)
    expected = tokens_of(model, prompt(60), PolicyCache(FASTKV))
    assert tokens_of(copied, prompt(60), PolicyCache(FASTKV)) == expected
    assert type(copied.model.layers[0].self_attn.config) is type(model.config)
    with cache.attached(copied):
        logits = copied(prompt(60), cache=cache).logits
    assert int(logits[0, -1].argmax()) == expected[0][0]
