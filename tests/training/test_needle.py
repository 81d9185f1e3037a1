"""The needle model's training: rows have their targets, and the export is the same model."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from kvpolicy.evaluation.tasks.needle.vocabulary import END, KEY, LINK, QUERY, QUERY2
from training.batches import IGNORED
from training.export import to_llama
from training.needle.batches import Batch
from training.needle.curriculum import STAGES, Stage
from training.network import HOP_LAYER, MAX_POSITION, Network, causal_attention

NEEDLE_STAGES = [stage for stage in STAGES if stage.pairs is not None]


def noisy_network() -> Network:
    """Return a network whose every weight matters; a fresh one has zeros in it."""
    network = Network()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    return network


def read_answers(row: list[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the next token at each answer position and the bridges, from the tokens alone."""
    pairs = {row[at + 1]: at for at, token in enumerate(row) if token == KEY}
    links = {row[at + 1]: row[at + 2] for at, token in enumerate(row) if token == LINK}
    answers, bridges = {}, {}
    for at, token in enumerate(row):
        if token not in (QUERY, QUERY2):
            continue
        name = row[at + 1]
        if token == QUERY2:
            name = bridges[at + 1] = links[name]
        values = row[pairs[name] + 2 : row.index(END, pairs[name]) + 1]
        answers |= {at + 1 + offset: value for offset, value in enumerate(values)}
    return answers, bridges


def targets(row: torch.Tensor) -> dict[int, int]:
    """Return a row of targets as a dictionary."""
    return {at: token for at, token in enumerate(row.tolist()) if token != IGNORED}


@given(stage=st.sampled_from(NEEDLE_STAGES), seed=st.integers(0, 10**6))
def test_targets_are_what_a_reader_finds(stage: Stage, seed: int) -> None:
    batch = stage.draw(random.Random(seed))
    for index, row in enumerate(batch.input_ids.tolist()):
        answers, bridges = read_answers(row)
        assert answers
        assert targets(batch.answers[index]) == answers
        assert targets(batch.bridges[index]) == bridges
        others = {at: row[at + 1] for at in range(len(row) - 1) if at not in answers}
        assert targets(batch.others[index]) == others


@given(stage=st.sampled_from(STAGES), seed=st.integers(0, 10**6))
def test_positions_ascend_within_the_models_span(stage: Stage, seed: int) -> None:
    positions = stage.draw(random.Random(seed)).positions
    assert positions.diff(dim=1).min() >= 1
    assert positions.min() >= 0
    assert positions.max() < MAX_POSITION


@given(seed=st.integers(0, 10**6))
def test_copy_rows_target_only_what_was_seen_before(seed: int) -> None:
    batch = STAGES[0].draw(random.Random(seed))
    row = batch.input_ids[0].tolist()
    for at, token in targets(batch.answers[0]).items():
        assert row[at + 1] == token
        earlier = row.index(row[at])
        assert earlier < at
        assert row[earlier + 1] == token


def test_links_first_rows_hold_no_pair_before_a_link() -> None:
    stage = next(stage for stage in STAGES if stage.links_first)
    for row in stage.draw(random.Random(3)).input_ids.tolist():
        assert max(at for at, token in enumerate(row) if token == LINK) < row.index(KEY)


@pytest.mark.parametrize("length", [5, 67, 131, 523])
def test_attention_in_blocks_equals_the_fused_kernel(length: int) -> None:
    queries, keys, values = (torch.randn(2, heads, length, 16) for heads in (6, 3, 3))
    expected = functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(causal_attention(queries, keys, values), expected)


def test_blindfolded_questions_do_not_see_pairs_up_to_the_hop_layer() -> None:
    batch: Batch = STAGES[-1].draw(random.Random(1))
    network = noisy_network()
    blindfold = (batch.in_questions, batch.in_pairs)
    changed = torch.where(batch.in_pairs.bool(), KEY, batch.input_ids)
    with torch.no_grad():
        before = network(batch.input_ids, batch.positions, blindfold)
        after = network(changed, batch.positions, blindfold)
    asking = batch.in_questions.bool()
    # Tokens behind a pair see it, and the question sees them one layer later: only the first layer
    # is untouched altogether.
    torch.testing.assert_close(before[0][asking], after[0][asking])
    assert not torch.allclose(before[HOP_LAYER + 1][asking], after[HOP_LAYER + 1][asking])


def test_the_export_computes_the_same_logits() -> None:
    network = noisy_network()
    ids = torch.randint(0, 224, (2, 71))
    positions = torch.arange(71).expand(2, 71)
    with torch.no_grad():
        expected = network.logits(network(ids, positions)[-1])
        torch.testing.assert_close(to_llama(network)(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_the_stacked_layer_is_a_copy_of_its_own() -> None:
    network = noisy_network()
    network.stack_hop_layer()
    low, high = network.layers()[HOP_LAYER : HOP_LAYER + 2]
    assert torch.equal(low.qkv.weight, high.qkv.weight)
    assert low.qkv.weight.data_ptr() != high.qkv.weight.data_ptr()
