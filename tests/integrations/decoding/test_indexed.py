"""Bounded answers of layers with an indexer, which picks among what a layer holds at each step.

Index keys go with the tokens that are evicted. What is compared with: the slow reference, which
scores the index keys of what it holds one by one, and each family's own layers, run anew on what
they held and nothing else.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import OffloadedStorage, PolicyCache, QuantizedStorage
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import H2O, RKV, TOVA, ExpectedAttention, KeyDiff, SnapKV
from tests.integrations.decoding.support import (
    EVERY,
    KEEPING_ALL,
    RULES,
    Kept,
    Reading,
    bounded,
    held,
    read,
    seen_at_every_step,
    with_every,
)
from tests.integrations.hybrids.models import apart, generate
from tests.integrations.hybrids.models import tokens as random_ids
from tests.integrations.model.builds.catalogue import built
from tests.integrations.model.builds.dense import dense_logits
from tests.integrations.model.test_indexed import BLOCKS, FAMILY_NAMES, STATES, indexed
from tests.integrations.support.conversation import left_padded
from tests.reference import VOCAB_SIZE, random_tokens
from tests.reference.decoding import BoundedState, WatchedIndexedState
from tests.reference.latent import of_latents
from tests.reference.mixed_models import HAS_INDEXERS, indexed_model

TOLERANCE = 1e-4
STEPS, LENS = 300, (41, 29)
SHORT, SHORT_EVERY, SHORT_STEPS = 16, 13, 60
POLICIES: dict[str, CachePolicy] = {
    each.__name__: bounded(each, SHORT, SHORT_EVERY) for each in (H2O, SnapKV, RKV, KeyDiff)
} | {"TOVA": bounded(TOVA, SHORT, 1)}
# That turns queries and keys back, by how the layer turns them.
ASKING = {"ExpectedAttention": bounded(ExpectedAttention, SHORT, SHORT_EVERY)}
# One of each way to hold index keys: in every layer, lent, turned late, of blocks. The others hold
# them as the first or the third does, among windows or states.
WAYS = [
    name
    for name in ("deepseek_v32", "hy_v4", "qwen4_exp_text", "minimax_m3_vl_text_sparse")
    if name in FAMILY_NAMES
]
WITHOUT_STATES = [name for name in WAYS if name not in STATES]
LENDING = [name for name in ("hy_v4",) if name in FAMILY_NAMES]
CASES = [(name, rule) for name in FAMILY_NAMES for rule in POLICIES]
CASES += [("deepseek_v32", rule) for rule in ASKING]


def forced(steps: int, rows: int = 2, *, seed: int = 7, most: int = 90) -> Tensor:
    return torch.randint(1, most, (rows, steps), generator=torch.Generator().manual_seed(seed))


def rows_of(name: str) -> list[list[int]]:
    """Two prompts, the second of them padded where the model can be given one."""
    return [random_ids(0, 41), random_ids(1, 41 if name in BLOCKS else 29)]


def compare_with_reference(model: PreTrainedModel, name: str, every: int, steps: int) -> None:
    """A row padded in a batch and the same row alone against the reference."""
    policy, rule = RULES[name]
    policy = with_every(policy, every)
    rows = [random_tokens(seed=length, length=length) for length in LENS]
    answer = forced(steps, most=VOCAB_SIZE)
    state = BoundedState(model, KEEPING_ALL, of_latents(rule), every, kind=WatchedIndexedState)
    want = state.answer(rows[1], answer[1].tolist())
    assert want.margin > 1e-6, "the reference's choice is a near tie: take another seed"
    assert len(want.acts) == 1 + steps // every > 4
    size = max(1.0, float(want.logits.abs().max()))
    both, alone = read(model, policy, rows, answer), read(model, policy, rows[1:], answer[1:])
    for found, row in ((both, 1), (alone, 0)):
        kept = [found.kept[step][row] for step in sorted(found.kept)]
        assert kept == [act.kept for act in want.acts]
        assert (found.logits[row] - want.logits).abs().max() <= TOLERANCE * size


@pytest.mark.skipif(not HAS_INDEXERS, reason="no such model yet")
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("index_topk", [8, 512], ids=["picks among 32 to 69", "picks all"])
def test_a_long_answer_is_the_slow_references(index_topk: int, name: str) -> None:
    compare_with_reference(indexed_model(7, index_topk=index_topk), name, EVERY, STEPS)


@pytest.mark.skipif(not HAS_INDEXERS, reason="no such model yet")
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("every", [1, 3])
def test_choices_at_every_step_or_third(every: int, name: str) -> None:
    compare_with_reference(indexed_model(7), name, every, 60)


def compare_with_own_layers(model: PreTrainedModel, found: Reading, rows: list[list[int]]) -> None:
    """Every row read whole by the model's own layers, each on what it held."""
    assert len(found.kept) > 4
    answer = forced(found.logits.shape[1])
    for row, prompt in enumerate(rows):
        whole = prompt + answer[row].tolist()
        seen = seen_at_every_step(found.kept, row, len(prompt), len(whole))
        want = dense_logits(model, whole, len(prompt), seen)[len(prompt) :]
        assert apart(found.logits[row], want) < TOLERANCE
    full = dense_logits(model, whole, len(prompt))[len(prompt) :]
    assert apart(full, want) > 1e-3  # what went is missed


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_every_family_reads_with_its_own_layers_what_was_held(name: str, rule: str) -> None:
    if name not in FAMILY_NAMES:
        pytest.skip(f"this Transformers has no {name}")
    model, rows = built(name), rows_of(name)
    found = read(model, (POLICIES | ASKING)[rule], rows, forced(SHORT_STEPS))
    compare_with_own_layers(model, found, rows)
    assert indexed(found.cache)
    for layer in indexed(found.cache).values():
        assert layer.kept_len <= SHORT + SHORT_EVERY
        assert layer.index is not None
        assert layer.index.shape[2] == layer.kept_len


@pytest.mark.parametrize("rule", POLICIES)
@pytest.mark.parametrize("name", WITHOUT_STATES)
def test_index_keys_stay_with_their_tokens(name: str, rule: str) -> None:
    """In the first layer, whose input is the same whatever is evicted."""
    model, rows, answer = built(name), rows_of(name), forced(30)
    layer = read(model, POLICIES[rule], rows, answer).cache.layers[0]
    assert isinstance(layer, IndexedLayer)
    for row, prompt in enumerate(rows):
        own = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.tensor([prompt + answer[row].tolist()]), **{CACHE: own})
        full = own.layers[0]
        want = (full.idx_keys[:, 0] if name in BLOCKS else full.indexer_keys)[0]
        assert layer.positions is not None
        there = layer.positions[row, 0]
        keys = layer.index.read()[0][row, 0]
        torch.testing.assert_close(keys[there >= 0], want[there[there >= 0]])


@torch.no_grad()
@pytest.mark.parametrize("rule", POLICIES)
@pytest.mark.parametrize("name", [name for name in WITHOUT_STATES if name not in BLOCKS])
def test_rows_with_padding_among_their_answers(name: str, rule: str) -> None:
    """Layers bring it to the left when they choose, and index keys as well."""
    model, rows, answer = built(name), rows_of(name), forced(SHORT_STEPS)
    gaps = [step % 9 in (2, 5) for step in range(SHORT_STEPS)]  # of the second row
    ids, mask = left_padded(rows)
    cache, found = PolicyCache(POLICIES[rule]), []
    kept: list[dict[int, Kept]] = [{}, {}]
    read_of = [0, 0]
    with cache.attached(model):
        model(ids, attention_mask=mask, cache=cache)
        kept[0][0] = kept[1][0] = held(cache, 2)
        for step, gap in enumerate(gaps):
            mask = torch.cat([mask, torch.tensor([[1], [1 - gap]])], dim=1)
            column = answer[:, step : step + 1]
            found.append(model(column, attention_mask=mask, cache=cache).logits[:, -1])
            read_of = [read_of[0] + 1, read_of[1] + 1 - gap]
            if not cache._reader.tokens.appended.shape[1]:
                for row in range(2):
                    kept[row][read_of[row]] = held(cache, 2)
    for row, prompt in enumerate(rows):
        steps = [step for step, gap in enumerate(gaps) if not (row and gap)]
        whole = prompt + answer[row, steps].tolist()
        seen = seen_at_every_step(kept[row], row, len(prompt), len(whole))
        want = dense_logits(model, whole, len(prompt), seen)[len(prompt) :]
        assert apart(torch.stack(found)[steps, row], want) < TOLERANCE


@pytest.mark.parametrize("rule", POLICIES)
@pytest.mark.parametrize("name", LENDING)
def test_layers_that_borrow_slots_keep_what_the_lender_keeps(name: str, rule: str) -> None:
    """At every choice, in every row."""
    found = read(built(name), POLICIES[rule], rows_of(name), forced(SHORT_STEPS))
    for rows in found.kept.values():
        for layers in rows:
            assert layers[0] == layers[1]
            assert layers[2] == layers[3]
    last = found.kept[max(found.kept)][0]
    assert last[0] != last[2]


@pytest.mark.parametrize("rule", ["SnapKV", "TOVA"])
@pytest.mark.parametrize("name", WAYS)
def test_memory_had_in_advance_is_that_of_the_bound(name: str, rule: str) -> None:
    """Nothing is compiled; buffers of index keys have as much room as those beside them."""
    model, rows = built(name), rows_of(name)
    grows, roomy = PolicyCache(POLICIES[rule]), PolicyCache(POLICIES[rule], max_new_tokens=200)
    how = {"max_new_tokens": 50, "eos_token_id": None}
    (said, want), (found, logits) = (
        generate(model, each, *left_padded(rows), **how) for each in (grows, roomy)
    )
    assert torch.equal(found, said)
    assert torch.allclose(logits, want, atol=TOLERANCE)
    assert not roomy.is_compileable
    decoding = POLICIES[rule].decoding
    assert decoding is not None
    for layer in indexed(roomy).values():
        assert layer.index is not None
        assert layer.capacity == layer.index.capacity == SHORT + decoding.every


@pytest.mark.parametrize("storage", [OffloadedStorage(), QuantizedStorage(q_group_size=8)])
@pytest.mark.parametrize("name", WAYS)
def test_other_storages_choose_the_same_number(name: str, storage: Any) -> None:
    count = SHORT_EVERY + 2
    found = read(built(name), PolicyCache(POLICIES["H2O"], storage), rows_of(name), forced(count))
    for layer in indexed(found.cache).values():
        assert layer.kept_len == SHORT + 2
        assert layer.index.read()[0].shape[2] == layer.kept_len
