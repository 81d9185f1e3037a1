"""Long answers under every rule against the slow reference and its dense attention under a mask."""

import pytest
import torch
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from tests.integrations.decoding.support import EVERY, KEEPING_ALL, RULES, read, with_every
from tests.reference import (
    FAMILIES,
    VOCAB_SIZE,
    Family,
    Method,
    dense_masked_logits,
    random_tokens,
    tiny_model,
    visible_after,
)
from tests.reference.decoding import BoundedState

STEPS = 300
LENS = (41, 29)
TOLERANCE = 1e-4


def read_and_compare(
    model: PreTrainedModel, policy: CachePolicy, rule: Method, every: int, steps: int
) -> None:
    """A padded batch, whose shorter row the reference reads alone."""
    rows = [random_tokens(seed=length, length=length) for length in LENS]
    forced = torch.randint(1, VOCAB_SIZE, (2, steps), generator=torch.Generator().manual_seed(7))
    found = read(model, policy, rows, forced)
    assert sorted(found.kept) == list(range(0, steps + 1, every))
    prompt, answer = rows[1], forced[1].tolist()
    want = BoundedState(model, KEEPING_ALL, rule, every).answer(prompt, answer)
    assert want.margin > 1e-6, "the reference's choice is a near tie: take another seed"
    kept = [found.kept[step][1] for step in sorted(found.kept)]
    assert kept == [act.kept for act in want.acts]
    size = max(1.0, float(want.logits.abs().max()))
    assert (found.logits[1] - want.logits).abs().max() <= TOLERANCE * size
    visible = visible_after(want.acts, model.config.num_attention_heads, LENS[1] + steps)
    dense = dense_masked_logits(model, [*prompt, *answer], visible)[LENS[1] :]
    assert (found.logits[1] - dense).abs().max() <= TOLERANCE * size


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_answer_of_a_padded_batch(family: Family, name: str) -> None:
    policy, rule = RULES[name]
    read_and_compare(tiny_model(family, seed=5), policy, rule, EVERY, STEPS)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("every", [1, 3])
def test_choices_that_come_before_all_observers_are_new(every: int, name: str) -> None:
    """The window of the last queries reaches back behind the last choice."""
    policy, rule = RULES[name]
    policy = with_every(policy, every)
    read_and_compare(tiny_model("llama", seed=5), policy, rule, every, 60)
