"""A model that sees a prompt whole and a window of its answer (Unlimited OCR) is refused."""

from functools import cache

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.evaluation.estimate.shapes import shape_of
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.checking import check_model
from kvpolicy.policies import FullContext, SnapKV
from kvpolicy.policy import CachePolicy
from tests.integrations.hybrids.models import generate, tokens
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.support.reading import marks_on

if "unlimited_ocr" not in builds():
    pytest.skip("Transformers has no such model yet", allow_module_level=True)
REFUSAL = (
    "every layer must see the tokens of an answer as it sees those of a prompt, but layer 0 "
    r"\(reference window\) sees the whole of a first prompt, but only a window of later "
    "tokens; use Transformers' own cache with this model"
)
IDS = torch.tensor([tokens(0, 47)])


@cache
def model() -> PreTrainedModel:
    return builds()["unlimited_ocr"].model()


@pytest.mark.parametrize("policy", [FullContext(), SnapKV(0.35, window_size=4)], ids=str)
@pytest.mark.parametrize("room", [None, 8])
def test_it_is_refused_before_anything_is_computed(policy: CachePolicy, room: int | None) -> None:
    store, before, ran = PolicyCache(policy, max_new_tokens=room), marks_on(model()), []

    def note(module: nn.Module, args: object) -> None:
        ran.append(module)

    handles = [each.register_forward_pre_hook(note) for each in model().modules()]
    with pytest.raises(UnsupportedModelError, match=REFUSAL), store.attached(model()):
        pass
    with pytest.raises(UnsupportedModelError, match=REFUSAL):
        generate(model(), store, IDS)
    for handle in handles:
        handle.remove()
    assert not ran
    assert not store.layers
    assert store.get_seq_length() == 0
    assert marks_on(model()) == before
    generate(model(), DynamicCache(config=model().config), IDS)


def test_a_check_of_the_model_and_an_estimate_say_the_same() -> None:
    refusal = check_model(model()).refusal
    with pytest.raises(UnsupportedModelError, match=REFUSAL) as raised:
        shape_of(model().config)
    assert str(raised.value) == refusal
