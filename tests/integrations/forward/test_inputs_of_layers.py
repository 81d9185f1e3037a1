"""What a model makes before its decoder runs: inputs of every layer, and masks by columns.

They are cut and moved with the tokens that they belong to.
"""

import pytest
import torch
from torch import Tensor

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FastKV, GemFilter, SnapKV
from tests.integrations.model.builds.catalogue import built
from tests.integrations.model.builds.judge import apart
from tests.reference import random_tokens

ROWS = [random_tokens(1, 16), random_tokens(2, 11)]


def logits(name: str, rows: list[list[int | None]], policy: CachePolicy) -> Tensor:
    """`[batch, vocab]` of the token after the rows, in which None is padding."""
    ids = torch.tensor([[token or 0 for token in row] for row in rows])
    mask = torch.tensor([[int(token is not None) for token in row] for row in rows])
    held = PolicyCache(policy)
    with torch.no_grad(), held.attached(built(name)):
        # As `generate` gives them: this outer model itself would count columns.
        places = (mask.cumsum(dim=1) - 1).clamp(min=0)
        said: Tensor = built(name)(
            input_ids=ids, attention_mask=mask, position_ids=places, cache=held
        ).logits
    return said[:, -1]


@pytest.mark.parametrize("name", ["gemma4", "gemma3"])
@pytest.mark.parametrize(
    "policy", [GemFilter(retention_rate=0.5), FastKV(), SnapKV(0.3, window_size=4)], ids=str
)
def test_a_padded_row_is_read_as_alone(name: str, policy: CachePolicy) -> None:
    """On the left, and inside the row, where columns are moved."""
    first, second = ROWS
    for padded in ([None] * 5 + second, second[:4] + [None] * 5 + second[4:]):
        both = logits(name, [list(first), padded], policy)
        assert apart(both[0], logits(name, [list(first)], policy)[0]) < 1e-4
        assert apart(both[1], logits(name, [list(second)], policy)[0]) < 1e-4
