"""PolicyCache on latent attention against the slow reference, which sees one row at a time."""

from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from tests.integrations.support.conversation import (
    METHODS,
    TOLERANCE,
    Lengths,
    assert_as_reference,
    assert_same,
    expected_turns,
    run_conversation,
    run_turn,
)
from tests.reference import random_tokens
from tests.reference.latent import LatentState
from tests.reference.mixed_models import latent_model

LENGTHS = Lengths(first=(45, 31, 19), second=(9, 17, 3), num_decode=8)
# The reference has no leverages of the keys that a latent expands to, which Compactor goes by.
# CriticalKV reads output weights, head by head, where one choice is for all heads.
ALLOWED = [name for name in METHODS if name not in ("compactor", "criticalkv")]
ALL_ROWS = tuple(range(len(LENGTHS.first)))


@cache
def model_of(implementation: str = "sdpa") -> PreTrainedModel:
    return latent_model(3, attn_implementation=implementation)


@pytest.mark.parametrize("name", ALLOWED)
def test_padded_batch_over_two_turns(name: str) -> None:
    assert_as_reference(model_of(), *METHODS[name], ALL_ROWS, LENGTHS, LatentState)


def test_output_weights_are_refused_where_all_heads_share_what_is_stored() -> None:
    """Nothing is held of the prompt, and the model reads it as before."""
    store = PolicyCache(METHODS["criticalkv"][0])
    ids = torch.tensor([random_tokens(0, 31)])
    with pytest.raises(UnsupportedModelError, match="must not rotate keys or read output weights"):
        run_turn(model_of(), store, ids, None, 1)
    assert store.get_seq_length() == 0
    assert store.report().total.held_bytes == 0
    read = run_turn(model_of(), PolicyCache(METHODS["snapkv"][0]), ids, None, 1)
    (expected, _) = expected_turns(
        model_of(), METHODS["snapkv"][1], 0, Lengths((31,), (3,), 1), LatentState
    )
    assert_same(read, 0, expected)


@pytest.mark.parametrize("name", ["snapkv", "keydiff", "pyramidinfer_steep", "fastkv"])
def test_single_row_with_eager_attention(name: str) -> None:
    turns = assert_as_reference(model_of("eager"), *METHODS[name], (1,), LENGTHS, LatentState)
    assert all(len(heads) == 1 for turn in turns for heads in turn.kept[0])


@pytest.mark.parametrize("name", ["snapkv", "fastkv", "gemfilter"])
def test_the_methods_evict_what_matters(name: str) -> None:
    """The tests above could not pass with the full context in the place of the method."""
    turns, full = (
        run_conversation(model_of(), METHODS[each][0], (0,), LENGTHS)[1][0].logits
        for each in (name, "full_context")
    )
    assert (turns - full)[:, 1:].abs().max() > 100 * TOLERANCE
