"""The cache as its users handle it: loops, turns, failures, what is left behind."""

import copy
import pickle
import subprocess
import sys
import threading
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
from tests.integrations.support.conversation import left_padded
from tests.reference import PAD_TOKEN_ID, random_tokens, tiny_model

FASTKV = FastKV(tsp_rate=0.5, retention_rate=0.3)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=1)


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.tensor([random_tokens(seed, length)])


def tokens_of(model: PreTrainedModel, ids: Tensor, cache: Any, **kwargs: Any) -> list[list[int]]:
    output = model.generate(ids, **{CACHE: cache}, max_new_tokens=7, do_sample=False, **kwargs)
    return output[:, ids.shape[1] :].tolist()


def trace_of(model: PreTrainedModel) -> list[Any]:
    """Everything of a model that attaching could leave a mark on."""
    return [
        (
            name,
            dict(module._forward_hooks),
            dict(module._forward_pre_hooks),
            sorted(module.__dict__),
            getattr(module, "config", None) is model.config,
        )
        for name, module in model.named_modules()
    ]


@torch.no_grad()
def decode_by_hand(
    model: PreTrainedModel, cache: PolicyCache, ids: Tensor, steps: int, **inputs: Any
) -> list[int]:
    logits = model(ids, cache=cache, **inputs).logits[:, -1]
    tokens = [int(logits.argmax())]
    for _ in range(steps):
        token = torch.tensor([[tokens[-1]]])
        tokens.append(int(model(token, cache=cache).logits[:, -1].argmax()))
    return tokens


def test_a_loop_by_hand_gives_what_generate_gives_over_two_turns(model: PreTrainedModel) -> None:
    automatic, manual = PolicyCache(FASTKV), PolicyCache(FASTKV)
    ids = prompt(60)
    first = tokens_of(model, ids, automatic)[0]
    with manual.attached(model):
        assert decode_by_hand(model, manual, ids, steps=6) == first
    added = torch.cat([torch.tensor([[first[-1]]]), prompt(40, seed=2)], dim=1)
    whole = torch.cat([ids, torch.tensor([first]), prompt(40, seed=2)], dim=1)
    second = tokens_of(model, whole, automatic)[0]
    with manual.attached(model):
        manual.start_turn()
        assert decode_by_hand(model, manual, added, steps=6) == second
    for one, other in zip(automatic.layers, manual.layers, strict=True):
        assert torch.equal(one.positions, other.positions)


def test_without_start_turn_a_long_forward_only_appends(model: PreTrainedModel) -> None:
    cache = PolicyCache(FASTKV)
    with torch.no_grad(), cache.attached(model):
        model(prompt(60), cache=cache)
        logits = model(prompt(5, seed=3), cache=cache).logits
        one_by_one = PolicyCache(FASTKV)
    assert logits.shape[1] == 5
    assert [layer.kept_len for layer in cache.layers] == [23] * 4
    with torch.no_grad(), one_by_one.attached(model):
        model(prompt(60), cache=one_by_one)
        steps = [
            model(token[None, None], cache=one_by_one).logits for token in prompt(5, seed=3)[0]
        ]
    torch.testing.assert_close(torch.cat(steps, dim=1), logits, atol=1e-4, rtol=0)


def test_new_tokens_alone_continue_a_conversation(model: PreTrainedModel) -> None:
    whole, partial = PolicyCache(FASTKV), PolicyCache(FASTKV)
    ids = prompt(60)
    first = torch.tensor(tokens_of(model, ids, whole))
    tokens_of(model, ids, partial)
    added = torch.cat([first[:, -1:], prompt(20, seed=2)], dim=1)
    conversation = torch.cat([ids, first[:, :-1], added], dim=1)
    mask = torch.ones_like(conversation)
    expected = tokens_of(model, conversation, whole)
    assert tokens_of(model, added, partial, attention_mask=mask) == expected
    assert whole.get_seq_length() == partial.get_seq_length() == conversation.shape[1] + 6


def test_inputs_embeds_give_what_input_ids_give(model: PreTrainedModel) -> None:
    embeds = model.get_input_embeddings()(prompt(60))
    cache, expected = PolicyCache(FASTKV), PolicyCache(FASTKV)
    output = model.generate(inputs_embeds=embeds, cache=cache, max_new_tokens=7, do_sample=False)
    assert output.tolist() == tokens_of(model, prompt(60), expected)
    assert cache.propagated[1].tolist() == expected.propagated[1].tolist()


def test_a_row_that_ended_early_goes_on_as_if_alone(model: PreTrainedModel) -> None:
    """In the second turn the mask declares the end-of-text padding of a row to be padding."""
    rows = [random_tokens(0, 50), random_tokens(1, 33)]
    ids, mask = left_padded(rows)
    batch = PolicyCache(FASTKV)
    model.generate(ids, attention_mask=mask, cache=batch, max_new_tokens=9)
    # Row 1 is taken to have ended after 3 of its 9 tokens; only 8 were fed.
    said = [batch_row[-9:] for batch_row in _sequences(model, ids, mask)]
    said[1] = [*said[1][:3], *[PAD_TOKEN_ID] * 6]
    added, added_mask = left_padded([random_tokens(7, 12), random_tokens(8, 15)])
    said_mask = torch.tensor([[1] * 9, [1] * 3 + [0] * 6])
    whole = torch.cat([ids, torch.tensor(said), added], dim=1)
    whole_mask = torch.cat([mask, said_mask, added_mask], dim=1)
    got = tokens_of(model, whole, batch, attention_mask=whole_mask)

    alone = PolicyCache(FASTKV)
    model.generate(torch.tensor([rows[1]]), cache=alone, max_new_tokens=4)
    conversation = torch.tensor([[*rows[1], *said[1][:3], *random_tokens(8, 15)]])
    with alone.attached(model):
        alone.crop(-1)  # the batch row said three tokens and was fed three
        assert alone.get_seq_length() == 33 + 2
    expected = tokens_of(model, conversation, alone)
    assert got[1] == expected[0]
    for here, there in zip(batch.layers, alone.layers, strict=True):
        assert [p for p in here.positions[1, 0].tolist() if p >= 0] == (
            there.positions[0, 0].tolist()
        )


def _sequences(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> list[list[int]]:
    cache = PolicyCache(FASTKV)
    return model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=9).tolist()


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
    before = trace_of(model)
    expected = tokens_of(model, prompt(60), DynamicCache())
    cache = PolicyCache(FASTKV)
    tokens_of(model, prompt(60), cache)
    with cache.attached(model):
        assert trace_of(model) != before
    assert trace_of(model) == before
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


def test_caches_of_different_policies_alternate_on_one_model(model: PreTrainedModel) -> None:
    policies = (FASTKV, SnapKV(0.2), FullContext())
    expected = []
    for policy in policies:
        cache = PolicyCache(policy)
        with cache.attached(model):
            expected.append(decode_by_hand(model, cache, prompt(60), steps=4))
    caches = [PolicyCache(policy) for policy in policies]
    got: list[list[int]] = [[] for _ in caches]
    with caches[0].attached(model), caches[1].attached(model), caches[2].attached(model):
        for step in range(5):
            for tokens, cache in zip(got, caches, strict=True):
                ids = prompt(60) if step == 0 else torch.tensor([[tokens[-1]]])
                logits = model(ids, cache=cache).logits
                tokens.append(int(logits[:, -1].argmax()))
    assert got == expected


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("turn", [1, 2])
def test_a_failure_in_mid_prefill_takes_nothing_with_it(
    model: PreTrainedModel, layer: int, turn: int
) -> None:
    before = trace_of(model)
    cache, other = PolicyCache(FASTKV), PolicyCache(FASTKV)
    ids = prompt(60)
    for done in range(turn - 1):
        said = tokens_of(model, ids, cache)
        tokens_of(model, ids, other)
        ids = torch.cat([ids, torch.tensor(said), prompt(30, seed=4 + done)], dim=1)

    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.model.layers[layer].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        tokens_of(model, ids, cache)
    handle.remove()
    assert trace_of(model) == before
    assert cache.get_seq_length() == other.get_seq_length()
    assert tokens_of(model, ids, cache) == tokens_of(model, ids, other)
    for one, two in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(one.positions, two.positions)


def test_crop_takes_back_what_was_appended(model: PreTrainedModel) -> None:
    cache = PolicyCache(FASTKV)
    with torch.no_grad(), cache.attached(model):
        model(prompt(60), cache=cache)
        before = [layer.positions for layer in cache.layers]
        logits = model(prompt(3, seed=5), cache=cache).logits
        cache.crop(-3)
        assert cache.get_seq_length() == 60
        for layer, positions in zip(cache.layers, before, strict=True):
            assert torch.equal(layer.positions, positions)
        again = model(prompt(3, seed=5), cache=cache).logits
        assert torch.equal(again, logits)
        with pytest.raises(ValueError, match="only 3 tokens were appended"):
            cache.crop(-4)
        with pytest.raises(ValueError, match="must be 0 or negative, got 2"):
            cache.crop(2)


def test_reset_starts_over(model: PreTrainedModel) -> None:
    cache = PolicyCache(FASTKV)
    first = tokens_of(model, prompt(60), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.batch_size == -1
    ids, mask = left_padded([random_tokens(0, 60), random_tokens(1, 20)])
    assert tokens_of(model, ids, cache, attention_mask=mask)[0] == first[0]


def test_report_counts_tokens_and_bytes(model: PreTrainedModel) -> None:
    ids, mask = left_padded([random_tokens(0, 50), random_tokens(1, 30)])
    cache = PolicyCache(SnapKV(0.2))
    assert cache.report().total.share == 0
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


@torch.no_grad()
def test_crop_through_a_chunk_with_padding_inside(model: PreTrainedModel) -> None:
    cache = PolicyCache(FullContext())
    ids, mask = torch.cat([prompt(10), prompt(10, 1)]), torch.ones(2, 10, dtype=torch.int64)
    whole = torch.cat([mask, torch.tensor([[1, 1, 1], [1, 0, 1]])], dim=1)
    with cache.attached(model):
        model(ids, attention_mask=mask, cache=cache)
        chunk = torch.tensor([[3, 4, 5]] * 2)
        model(chunk, attention_mask=whole, cache=cache)
        cache.crop(-2)
        assert cache.seen_lengths == (11, 11)
        assert cache.layers[0].positions[1, 0].tolist() == list(range(11))
        logits = model(
            torch.tensor([[7], [7]]), cache=cache, attention_mask=torch.ones(2, 12)
        ).logits
    alone = model(torch.cat([ids[1:], torch.tensor([[3, 7]])], dim=1)).logits
    torch.testing.assert_close(logits[1, -1], alone[0, -1], atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_padded_loop_without_position_ids_gives_each_row_its_own(model: PreTrainedModel) -> None:
    """Also in a later turn, whose padding stands between a row's tokens."""
    rows, added = [random_tokens(0, 30), random_tokens(1, 20)], [random_tokens(2, 9), [5, 6, 7]]
    cache, (ids, mask), (more, more_mask) = (
        PolicyCache(FASTKV),
        left_padded(rows),
        left_padded(added),
    )
    with cache.attached(model):
        model(ids, attention_mask=mask, cache=cache)
        cache.start_turn()
        whole = torch.cat([mask, more_mask], dim=1)
        logits = model(more, attention_mask=whole, cache=cache).logits[:, -1]
    for row in range(2):
        alone = PolicyCache(FASTKV)
        with alone.attached(model):
            model(torch.tensor([rows[row]]), cache=alone)
            alone.start_turn()
            expected = model(torch.tensor([added[row]]), cache=alone).logits[:, -1]
        torch.testing.assert_close(logits[row : row + 1], expected, atol=1e-4, rtol=0)


class Interrupted(BaseException):
    """Like KeyboardInterrupt, which hooks that run on failure do not see."""


@torch.no_grad()
@pytest.mark.parametrize("operation", ["crop", "start_turn", "report", "reset", "nothing"])
def test_the_cache_after_a_forward_that_failed_inside_the_block(
    model: PreTrainedModel, operation: str
) -> None:
    def interrupt(*args: Any) -> None:
        raise Interrupted

    results = []
    for fails in (False, True):
        cache = PolicyCache(SnapKV(retention_tokens=12))
        with cache.attached(model):
            model(prompt(40), cache=cache)
            model(prompt(3, 2), cache=cache)
            if fails:
                handle = model.model.layers[2].register_forward_pre_hook(interrupt)
                with pytest.raises(Interrupted):
                    model(prompt(1, 4), cache=cache)
                handle.remove()
            if operation == "crop":
                cache.crop(-2)
            elif operation != "nothing":
                getattr(cache, operation)()
            results.append(model(prompt(20, 5), cache=cache).logits)
            results.append(torch.stack([layer.positions for layer in cache.layers]))
            results.append(torch.stack([layer.keys for layer in cache.layers]))
    for before, after in zip(results[:3], results[3:], strict=True):
        assert torch.equal(before, after)


@torch.no_grad()
def test_report_after_a_first_forward_that_failed(model: PreTrainedModel) -> None:
    def interrupt(*args: Any) -> None:
        raise Interrupted

    cache = PolicyCache(FASTKV)
    with cache.attached(model):
        handle = model.model.layers[2].register_forward_pre_hook(interrupt)
        with pytest.raises(Interrupted):
            model(prompt(40), cache=cache)
        handle.remove()
        assert cache.report().total.held_bytes == 0


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


@torch.no_grad()
@pytest.mark.parametrize("attached", [True, False])
def test_a_copy_goes_its_own_way(model: PreTrainedModel, attached: bool) -> None:
    cache = PolicyCache(FASTKV)
    with cache.attached(model):
        model(prompt(60), cache=cache)
        if attached:
            fork = copy.deepcopy(cache)
            assert copy.deepcopy(model).config is not model.config
    if not attached:
        fork = pickle.loads(pickle.dumps(cache))
    question = torch.cat([prompt(60), prompt(9, 3)], dim=1)
    other = torch.cat([prompt(60), prompt(9, 4)], dim=1)
    expected = tokens_of(model, other, copy.deepcopy(cache))
    assert tokens_of(model, question, cache) != expected
    assert tokens_of(model, other, fork) == expected


def test_threads_share_a_model(model: PreTrainedModel) -> None:
    """Caches come and go in other threads while forwards run; plain calls are not disturbed."""
    policies = {0: FASTKV, 1: SnapKV(0.2), 2: None}
    expected = {
        seed: tokens_of(model, prompt(30, seed), policy and PolicyCache(policy))
        for seed, policy in policies.items()
    }
    failures: list[object] = []

    def work(seed: int) -> None:
        policy = policies[seed]
        try:
            for _ in range(40):
                got = tokens_of(model, prompt(30, seed), policy and PolicyCache(policy))
                if got != expected[seed]:
                    failures.append((seed, got))
        except BaseException as error:
            failures.append((seed, error))

    before, interval = trace_of(model), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in policies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    assert trace_of(model) == before


def test_a_base_model_without_its_head(model: PreTrainedModel) -> None:
    cache, whole = PolicyCache(FASTKV), PolicyCache(FASTKV)
    with torch.no_grad(), cache.attached(model.model):
        hidden = model.model(prompt(60), cache=cache, return_dict=False)[0]
    with torch.no_grad(), whole.attached(model):
        logits = model(prompt(60), cache=whole).logits
    assert hidden.shape[1] == 30
    assert torch.equal(model.lm_head(hidden), logits)


def test_memory_after_crop_is_that_of_what_is_left(model: PreTrainedModel) -> None:
    cache = PolicyCache(FullContext())
    with torch.no_grad(), cache.attached(model):
        model(prompt(40), cache=cache)
        model(prompt(6, 2), cache=cache)
        cache.crop(-3)
    assert cache.report().total.share == 1.0


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


def through_pickle(cache: PolicyCache) -> Any:
    return pickle.loads(pickle.dumps(cache))


def half_done(model: PreTrainedModel, cache: PolicyCache, ids: Tensor, error: Any) -> None:
    """A forward that fails in the third layer."""

    def fail(*args: Any) -> None:
        raise error

    handle = model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(error):
        model(ids, cache=cache)
    handle.remove()


@torch.no_grad()
@pytest.mark.parametrize("error", [RuntimeError, Interrupted])
@pytest.mark.parametrize("fork", [copy.copy, copy.deepcopy, through_pickle])
def test_a_copy_after_a_failed_forward_is_that_of_before(
    model: PreTrainedModel, fork: Any, error: type[BaseException]
) -> None:
    cache = PolicyCache(SnapKV(0.3))
    with cache.attached(model):
        model(prompt(40), cache=cache)
        cache.start_turn()
        half_done(model, cache, prompt(20, 2), error)
        other = fork(cache)
        assert [layer.kept_len for layer in other.layers] == [12] * 4
        expected = model(prompt(1, 3), cache=cache).logits
        got_len = cache.get_seq_length()
    with other.attached(model):
        other.start_turn()
        assert torch.equal(model(prompt(1, 3), cache=other).logits, expected)
    assert other.get_seq_length() == got_len


@torch.no_grad()
def test_a_shallow_copy_goes_its_own_way_too(model: PreTrainedModel) -> None:
    cache, alone = PolicyCache(SnapKV(0.3)), PolicyCache(SnapKV(0.3))
    for each in (cache, alone):
        with each.attached(model):
            model(prompt(40), cache=each)
    fork = copy.copy(cache)
    with fork.attached(model):
        model(prompt(3, 2), cache=fork)
    with cache.attached(model), alone.attached(model):
        got = model(prompt(1, 3), cache=cache).logits
        assert torch.equal(got, model(prompt(1, 3), cache=alone).logits)


@torch.no_grad()
def test_after_an_error_the_cache_shows_what_was_before(model: PreTrainedModel) -> None:
    cache = PolicyCache(SnapKV(0.3))
    with cache.attached(model):
        half_done(model, cache, prompt(40), RuntimeError)
        assert [layer.kept_len for layer in cache.layers] == [0] * 4
        model(prompt(40), cache=cache)
        sizes, report = cache.get_mask_sizes(1, 0), str(cache.report())
        cache.start_turn()
        half_done(model, cache, prompt(20, 2), RuntimeError)
        assert cache.get_mask_sizes(1, 0) == sizes
        assert str(cache.report()) == report


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
