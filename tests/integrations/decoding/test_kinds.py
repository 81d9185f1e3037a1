"""Kinds of layers under a bound on answers: against dense attention, or refused by name."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import H2O, RKV, KeyDiff, SnapKV, StreamingLLM
from tests.integrations.decoding.support import Kept, bounded, held, read, seen_at_every_step
from tests.integrations.hybrids.models import apart, generate, hybrid
from tests.integrations.hybrids.models import tokens as random_ids
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.model.builds.dense import Seen, dense_logits
from tests.integrations.support.conversation import left_padded
from tests.integrations.vision.test_cross_attention import CROSS, image, images

TOKENS, EVERY, STEPS = 16, 13, 60
ROWS = [random_ids(0, 41), random_ids(1, 29)]
TOLERANCE = 1e-4
LOOKING = {each.__name__: bounded(each, TOKENS, EVERY) for each in (H2O, SnapKV, RKV)}
BLIND = {each.__name__: bounded(each, TOKENS, EVERY) for each in (StreamingLLM, KeyDiff)}
SHARED = ("gemma3n_text", "gemma4_text_shared")


def model_of(name: str) -> PreTrainedModel:
    return builds()[name].model() if name == "mllama" else hybrid(name)


def check_bounded(kept: dict[int, Kept], most: Sequence[int]) -> None:
    """Layers chose several times, and did not keep all."""
    assert len(kept) >= 5
    assert max(most) <= len(ROWS[0]) + EVERY
    last = [head for layer in kept[max(kept)][0] for head in layer]
    assert last
    assert all(len(head) <= TOKENS or head[0] > 0 for head in last)  # the window's, or chosen


@pytest.mark.parametrize("name", SHARED)
def test_borrowers_hold_what_their_producers_have_chosen(name: str) -> None:
    forced = torch.randint(1, 90, (2, 30), generator=torch.Generator().manual_seed(7))
    cache = read(hybrid(name), LOOKING["SnapKV"], ROWS, forced).cache
    borrowers = [layer for layer in cache.layers if layer.producer is not None]
    assert borrowers
    for layer in borrowers:
        assert torch.equal(layer.positions, cache.layers[layer.producer].positions)


@pytest.mark.parametrize("rule", ["H2O", "SnapKV", "KeyDiff"])
def test_an_answer_about_an_image(rule: str) -> None:
    """What is held of the image stays as it is."""
    model, kept, ids = model_of("mllama"), {}, ROWS[0]
    cache = PolicyCache(LOOKING[rule] if rule in LOOKING else BLIND[rule])

    class Looking:
        calls = -1

        def put(self, value: Tensor) -> None:
            tokens, self.calls = cache._reader.tokens, self.calls + 1
            if tokens is not None and not tokens.appended.shape[1]:
                kept[self.calls - 1] = held(cache, 1)

        def end(self) -> None:
            """Nothing to do."""

    given: dict[str, Any] = {"max_new_tokens": STEPS, "streamer": Looking()}
    said, logits = generate(model, cache, *left_padded([ids]), **images([ids]), **given)
    whole = ids + said[0, -STEPS:-1].tolist()
    check_bounded(kept, [layer.kept_len for layer in cache.layers])
    seen = seen_at_every_step(kept, 0, len(ids), len(whole))
    seen[CROSS] = Seen(None, seen[CROSS].tokens)
    want = dense_logits(model, whole, len(ids), seen, beside=image(0, len(whole), len(whole)))
    assert apart(logits[0], want[len(ids) - 1 :]) < TOLERANCE
