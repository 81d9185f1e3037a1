"""PolicyCache on hybrids against the slow reference, which sees one row at a time."""

from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    CLAA,
    FastKV,
    GemFilter,
    GQAGroupSelector,
    KeepAllSelector,
    LazyLLM,
    SlimInfer,
    StagedPropagation,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from tests import reference
from tests.integrations.support.conversation import (
    METHODS,
    TOLERANCE,
    Lengths,
    Turn,
    assert_as_reference,
    left_padded,
    run_conversation,
    run_turn,
)
from tests.reference import Act, Method, random_tokens
from tests.reference.cut import cut_logits
from tests.reference.hybrid import HybridState, default_layer
from tests.reference.mixed_models import FULL, LINEAR, hybrid_model

# A state skips no padding: in the second turn all rows are given as many tokens, and few enough
# that those which go on by rates are all of them.
LENGTHS = Lengths(first=(43, 31, 23), second=(11, 11, 11), num_decode=8)
ALL_ROWS = tuple(range(len(LENGTHS.first)))
# Of one length, and enough in the second turn for rates to drop some.
ALIKE = Lengths(first=(31, 31), second=(29, 29), num_decode=8)
# Rows of unlike length of which rates pass on unlike numbers in the second turn too.
UNLIKE = Lengths(first=(37, 23), second=(29, 29), num_decode=4)
# PyramidInfer drops after every layer, and behind a recurrent one nothing says what goes on.
# SpireKV, ReplayKV and one CLAA drop after layer 1, which is recurrent in ATTENDING_FIRST, LazyLLM
# and SlimInfer in three stages, for which two layers that attend are too few. UniPrefill passes on
# numbers that differ between rows.
REFUSED = ("spirekv", "replaykv_after_a_drop", "claa", "lazyllm", "sliminfer", "uniprefill")
ALLOWED = [name for name in METHODS if not name.startswith("pyramidinfer") and name not in REFUSED]
# What METHODS drop at are layers 0 and 2; of these the nearest to the middle is 2.
ATTENDING_FIRST = (FULL, LINEAR, FULL, LINEAR)
RECURRENT_FIRST = (LINEAR, FULL, LINEAR, FULL, LINEAR)
# As many layers that attend as there are default stages.
THREE_ATTENDING = (FULL, LINEAR, FULL, LINEAR, FULL, LINEAR)
DROPPING: dict[str, tuple[CachePolicy, Method]] = {
    "fastkv": (
        FastKV(tsp_rate=0.35, retention_rate=0.3, window_size=4),
        reference.FastKV(0.3, window_size=4, tsp_rate=0.35),
    ),
    "fastkv_last": (
        FastKV(tsp_layer=3, tsp_rate=0.3, retention_rate=0.3, window_size=4),
        reference.FastKV(0.3, window_size=4, tsp_rate=0.3, tsp_layer=3),
    ),
    "two_stages": (
        CachePolicy(
            WindowMaxPoolScorer(4, kernel_size=3),
            GQAGroupSelector(0.2, window_size=4),
            StagedPropagation(
                [
                    TokenSelectivePropagation(tsp_layer=1, tsp_rate=0.4, window_size=4),
                    TokenSelectivePropagation(tsp_layer=3, tsp_rate=0.25, window_size=4),
                ]
            ),
        ),
        reference.Staged(0.2, window_size=4, kernel_size=3, stages=((1, 0.4), (3, 0.25))),
    ),
    "gemfilter": (GemFilter(retention_rate=0.3), reference.GemFilter(retention_rate=0.3)),
}


@cache
def model_of(layer_types: tuple[str, ...], implementation: str = "sdpa") -> PreTrainedModel:
    return hybrid_model(3, layer_types=layer_types, attn_implementation=implementation)


@pytest.mark.parametrize("name", ALLOWED)
def test_padded_batch_over_two_turns(name: str) -> None:
    assert_as_reference(model_of(ATTENDING_FIRST), *METHODS[name], ALL_ROWS, LENGTHS, HybridState)


@pytest.mark.parametrize("name", DROPPING)
def test_rows_of_one_length_drop_in_both_turns(name: str) -> None:
    turns = assert_as_reference(
        model_of(RECURRENT_FIRST), *DROPPING[name], (0, 1), ALIKE, HybridState
    )
    assert all(turn.propagated for turn in turns)


STAGED: dict[str, tuple[CachePolicy, Method]] = {
    "sliminfer": (
        SlimInfer(tsp_rate=0.2, chunk_size=2, block_chunks=2),
        reference.SlimInfer(
            ((0, 0.8), (2, 0.4), (4, 0.2)), 4, protect=4, unit_size=2, block_units=2
        ),
    ),
    "lazyllm": (LazyLLM(tsp_rate=0.6), reference.LazyLLM(((0, 0.6), (2, 0.6**2), (4, 0.6**3)))),
}


@pytest.mark.parametrize("name", STAGED)
def test_default_stages_act_after_attending_layers_of_their_own(name: str) -> None:
    turns = assert_as_reference(
        model_of(THREE_ATTENDING), *STAGED[name], (0, 1), ALIKE, HybridState
    )
    assert set(turns[0].propagated) == {0, 2, 4}


@pytest.mark.parametrize("name", STAGED)
def test_stages_for_which_too_few_layers_attend(name: str) -> None:
    store = PolicyCache(METHODS[name][0])
    with pytest.raises(ValueError, match=r"stages must each drop after.*these are free: \[0, 2\]"):
        run_turn(model_of(ATTENDING_FIRST), store, torch.tensor([random_tokens(0, 20)]), None, 1)
    assert store.get_seq_length() == 0


@pytest.mark.parametrize("name", ["spirekv", "claa"])
def test_a_recurrent_layer_cannot_say_what_goes_on(name: str) -> None:
    store = PolicyCache(METHODS[name][0])
    with pytest.raises(UnsupportedModelError, match=r"must attend, but layers \[1\]"):
        run_turn(model_of(ATTENDING_FIRST), store, torch.tensor([random_tokens(0, 20)]), None, 1)
    assert store.get_seq_length() == 0


def test_votes_are_those_of_the_last_layers_that_attend() -> None:
    """Layers 4 and 2: not 3, which is recurrent, nor 0, of which there would be one too many."""
    policy = CLAA(
        tsp_layer=4,
        retention_rate=0.25,
        window_size=4,
        kernel_size=3,
        voting_layers=2,
        whole_layers=1,
        tsp_rate=0.4,
    )
    method = reference.CLAA(0.25, 4, 3, tsp_layer=4, tsp_rate=0.4, voting_layers=2, whole_layers=1)
    model = model_of(THREE_ATTENDING)
    turns = assert_as_reference(model, policy, method, (0, 1), ALIKE, HybridState)
    assert all(turn.propagated for turn in turns)


@pytest.mark.parametrize("attending", [(3, 7), (1, 5), (0, 6), (7,)], ids=str)
@pytest.mark.parametrize("policy", [FastKV(), GemFilter()], ids=["fastkv", "gemfilter"])
def test_defaults_take_the_layer_nearest_to_half_depth(
    policy: CachePolicy, attending: tuple[int, ...]
) -> None:
    layer_types = tuple(FULL if index in attending else LINEAR for index in range(8))
    store = PolicyCache(policy)
    run_turn(model_of(layer_types), store, torch.tensor([random_tokens(0, 60)]), None, 1)
    assert list(store.propagated) == [default_layer(attending, 8)]


@pytest.mark.parametrize("row", ALL_ROWS)
def test_blocks_by_content_in_rows_alone(row: int) -> None:
    turns = assert_as_reference(
        model_of(ATTENDING_FIRST), *METHODS["uniprefill"], (row,), LENGTHS, HybridState
    )
    assert turns[0].propagated


@pytest.mark.parametrize("name", ["snapkv", "fastkv"])
def test_single_row_with_eager_attention(name: str) -> None:
    model = model_of(ATTENDING_FIRST, "eager")
    assert_as_reference(model, *METHODS[name], (1,), LENGTHS, HybridState)


@pytest.mark.parametrize("name", ["fastkv", "two_stages", "gemfilter", "uniprefill"])
def test_unlike_numbers_that_go_on_in_a_later_turn(name: str) -> None:
    """A state would read the padding of the row that passes on fewer."""
    policy, _ = METHODS[name]
    with pytest.raises(UnsupportedModelError, match="pass on equally many tokens.*but row 1 pass"):
        run_conversation(model_of(ATTENDING_FIRST), policy, (0, 1), UNLIKE)


def act_of(turn: Turn, row: int, length: int, num_layers: int) -> Act:
    """A first turn of a prompt of so many tokens as the cut decoder is told it."""
    reached, there = [], list(range(length))
    for layer in range(num_layers):
        reached.append(there)
        there = turn.propagated[layer][row] if layer in turn.propagated else there
    return Act(0, length, turn.kept[row], reached)


@pytest.mark.parametrize("layer_types", [ATTENDING_FIRST, RECURRENT_FIRST], ids=["4", "5"])
@pytest.mark.parametrize("evicts", [False, True])
def test_the_decoder_cut_in_two(evicts: bool, layer_types: tuple[str, ...]) -> None:
    """By the model's own modules alone: the upper ones read what went on, and then the answer."""
    model, layer = model_of(layer_types), layer_types.index(FULL)
    propagation = TokenSelectivePropagation(tsp_layer=layer, tsp_rate=0.4, window_size=4)
    selector = GQAGroupSelector(0.3, window_size=4) if evicts else KeepAllSelector()
    store = PolicyCache(CachePolicy(WindowMaxPoolScorer(4), selector, propagation))
    ids, mask = left_padded([random_tokens(row, LENGTHS.first[row]) for row in ALL_ROWS])
    turn = run_turn(model, store, ids, mask, LENGTHS.num_decode)
    for row, length in enumerate(LENGTHS.first):
        whole = [*random_tokens(row, length), *turn.tokens[row].tolist()[:-1]]
        act = act_of(turn, row, length, len(layer_types))
        assert [len(reached) for reached in act.reached or ()][layer:][:2] == [
            length,
            int(0.4 * length),
        ]
        assert (turn.logits[row] - cut_logits(model, whole, act)).abs().max() <= TOLERANCE
        uncut = Act(0, length, act.kept, [list(range(length))] * len(layer_types))
        assert (turn.logits[row] - cut_logits(model, whole, uncut)).abs().max() > 100 * TOLERANCE
