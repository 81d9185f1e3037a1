"""Latent attention, and keys that are repeated after the cache: one choice for all heads.

Every family of `make families` is held against its own dense attention there; here are what one
choice is, against a slow one, and what else a cache has to do with what it stores.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy.integrations.transformers import PolicyCache, QuantizedStorage
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import AdaKV, FastKV, FullContext, KeyNorm, SnapKV, StreamingLLM
from tests.families import FAMILIES
from tests.integrations.forward.test_static import Counting, everywhere
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.support.conversation import left_padded
from tests.integrations.test_generation import assert_same_state
from tests.reference.dense import Act
from tests.reference.family_dense import family_dense
from tests.reference.selection import head_mean, max_pool, window_and_highest

FAMILY_NAMES = ("deepseek_v2", "deepseek_v3", "mistral4", "jetmoe")
WINDOW, KERNEL, RATE = 4, 3, 0.4
SNAPKV = SnapKV(RATE, window_size=WINDOW, kernel_size=KERNEL)
PROMPTS, DECODED, TURNS = (41, 29), 2, (13, 7)


@cache
def model_of(name: str, implementation: str = "sdpa") -> PreTrainedModel:
    if name in FAMILIES:
        return FAMILIES[name].build(seed=1, attn_implementation=implementation)
    return builds()[name].model(attn_implementation=implementation)


def tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 60, (count,), generator=generator).tolist()


def positions_of(store: PolicyCache, row: int) -> list[list[int]]:
    """By layer, those of the one choice."""
    for layer in store.layers:
        assert layer.positions.shape == (len(PROMPTS), 1, layer.kept_len)
    return [
        [each for each in layer.positions[row, 0].tolist() if each >= 0] for layer in store.layers
    ]


def generate(model: PreTrainedModel, store: Any, rows: Any = None, **how: Any) -> Any:
    ids, mask = left_padded([tokens(row, count) for row, count in enumerate(PROMPTS)])
    if rows is not None:
        ids, mask = rows
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, attention_mask=mask, **{CACHE: store}, **given, **how)


def window_choice(
    weights: Tensor,
    held: Sequence[int],
    prompt: Sequence[int],
    count: int,
    *,
    window: int,
    kernel: int,
) -> list[int]:
    """The positions kept by a choice for all heads: the window, and those most attended to.

    ``weights`` are a layer's, ``[query_heads, len, len]``; ``held`` is what it holds from before.
    """
    entries = [*held, *prompt]
    observing, before = list(prompt)[-window:], entries[: len(entries) - window]
    by_head = [
        max_pool([sum(float(head[query, key]) for query in observing) for key in before], kernel)
        for head in weights
    ]
    chosen = window_and_highest(head_mean(by_head), len(entries), count)
    return [entries[index] for index in chosen]


def dense(model: PreTrainedModel, ids: list[int], acts: list[Act]) -> tuple[Tensor, list[Tensor]]:
    return family_dense(model, ids, acts, output_attentions=True)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_two_turns_against_a_slow_choice(name: str) -> None:
    """Kept positions and logits of both rows, each against the model's own attention alone."""
    model, eager = model_of(name), model_of(name, "eager")
    first = [tokens(row, count) for row, count in enumerate(PROMPTS)]
    said = [tokens(10 + row, DECODED) for row in range(2)]
    later = [tokens(20 + row, count) for row, count in enumerate(TURNS)]
    store, logits, mask, held = PolicyCache(SNAPKV), [], torch.zeros(2, 0), []
    steps = [
        left_padded(first),
        *((torch.tensor(said)[:, [i]], torch.ones(2, 1)) for i in range(2)),
    ]
    with store.attached(model):
        for index, (ids, valid) in enumerate([*steps, left_padded(later)]):
            mask = torch.cat([mask, valid], dim=1).long()
            if index == len(steps):
                store.start_turn()
            output = model(ids, attention_mask=mask, cache=store)
            logits.append(output.logits[:, -1])
            if index in (0, len(steps)):
                held.append([positions_of(store, row) for row in range(2)])
    for row in range(2):
        prompt, turn = len(first[row]), len(first[row]) + DECODED
        whole = first[row] + said[row] + later[row]
        full = [[list(range(prompt))]] * len(store.layers)
        _, weights = dense(eager, whole[:prompt], [Act(0, prompt, full)])
        how = {"window": WINDOW, "kernel": KERNEL}
        kept = [
            window_choice(each, [], range(prompt), int(RATE * prompt), **how) for each in weights
        ]
        assert held[0][row] == kept
        acts = [Act(0, prompt, [[each] for each in kept])]
        want, weights = dense(eager, whole, acts)
        for step, found in enumerate(logits):
            at = prompt - 1 + step if step < len(steps) else len(whole) - 1
            torch.testing.assert_close(found[row], want[at], atol=2e-4, rtol=1e-4)
        new = range(turn, len(whole))
        assert held[1][row] == [
            window_choice(each, [*old, *range(prompt, turn)], new, int(RATE * len(whole)), **how)
            for each, old in zip(weights, kept, strict=True)
        ]


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_what_goes_on_is_chosen_by_all_heads(name: str) -> None:
    """The layers behind the drop choose by the attention of what reached them."""
    model, eager = model_of(name), model_of(name, "eager")
    store = PolicyCache(FastKV(tsp_layer=1, tsp_rate=0.6, retention_rate=0.3, window_size=4))
    rows = [tokens(row, count) for row, count in enumerate(PROMPTS)]
    ids, mask = left_padded(rows)
    with store.attached(model), torch.no_grad():
        model(ids, attention_mask=mask, cache=store, logits_to_keep=1)
    for row, each in enumerate(rows):
        length, layers = len(each), len(store.layers)
        everything, full = list(range(length)), [[list(range(length))]] * layers
        _, weights = dense(eager, each, [Act(0, length, full)])
        how = {"window": 4, "kernel": 7}
        passed = window_choice(weights[1], [], everything, int(0.6 * length), **how)
        assert [p for p in store.propagated[1][row].tolist() if p >= 0] == passed
        reached = [everything] * 2 + [passed] * (layers - 2)
        _, weights = dense(eager, each, [Act(0, length, full, reached)])
        assert positions_of(store, row) == [
            window_choice(layer, [], there, int(0.3 * length), **how)
            for layer, there in zip(weights, reached, strict=True)
        ]


@pytest.mark.parametrize("name", ["deepseek_v3", "mistral4"])
def test_keys_alone_are_scored_as_attention_expands_them(name: str) -> None:
    model = model_of(name)
    whole, store = PolicyCache(FullContext()), PolicyCache(KeyNorm(retention_tokens=12))
    ids = torch.tensor([tokens(3, 40)])
    with torch.no_grad():
        for each in (whole, store):
            with each.attached(model):
                model(ids, cache=each)
        for index, (full, kept) in enumerate(zip(whole.layers, store.layers, strict=True)):
            keys, _ = model.get_decoder().layers[index].self_attn.expand_kv(full.keys, full.values)
            assert keys.shape[1] == model.config.num_attention_heads
            window = store.policy.selector.window_size
            norms = keys[0].norm(dim=-1).mean(dim=0)[: 40 - window].tolist()
            least = sorted(sorted(range(len(norms)), key=norms.__getitem__)[: 12 - window])
            assert kept.positions[0, 0].tolist() == [*least, *range(40 - window, 40)]


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_heads_have_no_budgets_of_their_own(name: str) -> None:
    """What shares a budget among heads has one to share it among."""
    model = model_of(name)
    one, other = PolicyCache(SnapKV(RATE)), PolicyCache(AdaKV(RATE))
    generate(model, one)
    generate(model, other)
    assert_same_state(one, other)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "mistral4"])
def test_latents_are_what_is_held(name: str) -> None:
    """Shapes and bytes; a full cache is the model's own."""
    model = model_of(name)
    ids = torch.tensor([tokens(3, 40)])
    own, store = DynamicCache(config=model.config), PolicyCache(StreamingLLM(retention_tokens=10))
    with torch.no_grad():
        model(ids, **{CACHE: own})
        with store.attached(model):
            model(ids, **{CACHE: store})
    config, report = model.config, store.report()
    for layer, line, full in zip(store.layers, report.layers, own.layers, strict=True):
        chosen = [*range(4), *range(34, 40)]
        assert layer.positions.tolist() == [[chosen]]
        assert layer.keys.shape == (1, 1, 10, config.kv_lora_rank)
        assert layer.values.shape == (1, 1, 10, config.qk_rope_head_dim)
        # In the first layer; behind it, hidden states are rounded otherwise where none is masked.
        torch.testing.assert_close(layer.keys, full.keys[:, :, chosen])
        torch.testing.assert_close(layer.values, full.values[:, :, chosen])
        assert line.kept == 10
        assert line.held_bytes == layer.keys.nbytes + layer.values.nbytes
        assert line.full_bytes == full.keys.nbytes + full.values.nbytes
        held = sum(each.untyped_storage().nbytes() for each in (layer.held.keys, layer.held.values))
        assert line.held_bytes == held


def test_fixed_decoding_is_one_graph() -> None:
    model = model_of("deepseek_v3")
    torch._dynamo.reset()
    backend = Counting()
    want = generate(model, PolicyCache(SNAPKV))
    found = generate(
        model, PolicyCache(SNAPKV, max_new_tokens=8), compile_config=everywhere(backend)
    )
    torch._dynamo.reset()
    assert torch.equal(want, found)
    assert (backend.graphs, backend.calls) == (1, 5)


@pytest.mark.skipif(find_spec("optimum") is None, reason="optimum-quanto is not installed")
def test_latents_may_be_quantised() -> None:
    """The same tokens, what is held of them near to what they are, in fewer bytes."""
    model = model_of("deepseek_v3")
    plain = PolicyCache(StreamingLLM(RATE))
    store = PolicyCache(StreamingLLM(RATE), QuantizedStorage(q_group_size=4))
    for each in (plain, store):
        with each.attached(model), torch.no_grad():
            model(torch.tensor([tokens(0, 40)]), cache=each)
    for layer, twin in zip(store.layers, plain.layers, strict=True):
        assert torch.equal(layer.positions, twin.positions)
        for found, want in ((layer.keys, twin.keys), (layer.values, twin.values)):
            assert 0 < float((found - want).abs().max()) < 0.1 * float(want.abs().max())
    assert store.report().total.full_bytes == plain.report().total.full_bytes
