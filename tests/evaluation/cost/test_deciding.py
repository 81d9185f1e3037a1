"""What policies hold that ask for more of a layer than its keys."""

import pytest
import torch

from kvpolicy import CachePolicy, Scorer
from kvpolicy.evaluation.cost.deciding import deciding_bytes
from kvpolicy.evaluation.cost.model_shape import attention_layer
from kvpolicy.policies import GQAGroupSelector, PassAllPropagation
from tests.integrations.support.asking import (
    CarriedOnScorer,
    LargestOfLayers,
    OutputScorer,
    RememberingSelector,
    TurnedBackScorer,
)

# Two KV heads of four query heads, of 8 channels.
LAYER = attention_layer(32, 4, 2, 8, mlp=64)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("scorer", [CarriedOnScorer(), TurnedBackScorer(), OutputScorer()])
def test_parts_are_shown_what_they_ask_for(scorer: Scorer, device: str) -> None:
    """And what they make of it counts: at least as much as their saliency, in float32."""
    drop = LargestOfLayers(0.4, layers=(2,))
    for selector in (GQAGroupSelector(0.2), RememberingSelector(0.2)):
        for propagation in (PassAllPropagation(), drop):
            policy = CachePolicy(scorer, selector, propagation)
            found = deciding_bytes(policy, LAYER, (2, 4), 600, dtype=torch.bfloat16, device=device)
            assert found >= 4 * 2 * 600
