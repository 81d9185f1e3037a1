"""Positions given by the caller, from whose gaps Transformers would infer packed sequences.

Its flash attention then gives each query only the keys of its own sequence, counted from the first
key of the cache. Tokens that a policy drops leave the same gaps: see test_same_as_sdpa.py.
"""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import SnapKV
from tests.integrations.flash.support import assert_close, forward, model_of
from tests.reference import random_tokens

PLACES = {"even": [*range(0, 80, 2)], "restarting": [*range(20), *range(20)]}


def read(model: PreTrainedModel, places: list[int], *, chunked: bool) -> Tensor:
    """A prompt, drafted tokens, an answer's token and a second turn, all at given positions."""
    store, found = PolicyCache(SnapKV(0.5, window_size=3)), []
    last = max(places)
    ahead = [last + 3, last + 5, last + 6], [last + 9], [last + 10, last + 10, last + 13]
    with store.attached(model):
        store.start_turn(prompt_len=len(places))
        prompt = (places[:23], places[23:]) if chunked else (places,)
        for index, each in enumerate([*prompt, *ahead]):
            if each is ahead[2]:
                store.start_turn()
            ids = torch.tensor([random_tokens(index, len(each))])
            logits = forward(model, store, ids, position_ids=torch.tensor([each]))
            found.append(logits[:, -1])
    return torch.stack(found)


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "in_chunks"])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", ["llama", "gemma3n"])  # the second has layers that share keys
def test_positions_with_gaps(name: str, places: str, chunked: bool) -> None:
    expected = read(model_of(name), PLACES[places], chunked=chunked)
    found = read(model_of(name, "flash_attention_2"), PLACES[places], chunked=chunked)
    assert_close(found, expected)
