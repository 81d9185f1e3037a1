"""Compares beam search under an evicting policy with the model's own dense attention."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import FullContext, StreamingLLM
from tests.integrations.hybrids.models import tokens
from tests.integrations.model.builds.catalogue import built
from tests.integrations.model.builds.dense import Seen, dense_logits


@pytest.mark.parametrize("name", ["bert", "roberta", "falcon"])
def test_each_beam_scores_as_dense_attention_to_what_it_holds(name: str) -> None:
    """Of a prompt of which the policy keeps the first 4 and last 8 tokens."""
    model, ids = built(name), torch.tensor([tokens(0, 40)])
    asked: dict[str, Any] = {
        "num_beams": 3,
        "num_return_sequences": 3,
        "max_new_tokens": 5,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "length_penalty": 0.0,
    }
    own: Any = model.generate(ids, **{CACHE: DynamicCache(config=model.config)}, **asked)
    full: Any = model.generate(ids, cache=PolicyCache(FullContext()), **asked)
    assert torch.equal(full.sequences, own.sequences)
    found: Any = model.generate(ids, cache=PolicyCache(StreamingLLM(0.3)), **asked)
    length, place = 44, torch.arange(44)
    kept = (place < 4) | (place >= 32)
    see = torch.where((place >= 40)[:, None], kept, True) & (place[:, None] >= place)
    seen = [Seen(see[None], torch.ones(length, dtype=torch.bool))] * 4
    for row, score in zip(found.sequences, found.sequences_scores, strict=True):
        logits = dense_logits(model, row[:-1].tolist(), 40, seen)[39:]
        said = logits.log_softmax(dim=-1).gather(1, row[40:, None]).sum()
        torch.testing.assert_close(score, said, atol=1e-3, rtol=1e-4)
