"""Where a prompt may be cut: against the model's own mask of all of the prompt's tokens."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.model.both_ways import cuts_of
from kvpolicy.integrations.transformers.surface import CACHE
from tests.integrations.model.builds.catalogue import builds

# What a model calls the types of tokens.
FAMILIES = {
    name: types
    for name, types in {
        "gemma3": "token_type_ids",
        "gemma4": "mm_token_type_ids",
        "gemma4_unified": "mm_token_type_ids",
        "molmo2": "mm_token_type_ids",
        "paligemma": "token_type_ids",
    }.items()
    if name in builds()
}
# Two images apart, of one token, at either end, none; in a row that is padded, and all of it.
TYPES = torch.tensor(
    [
        [0, 0, 1, 1, 1, 0, 0, 1, 1, 0],
        [1, 1, 0, 1, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 0, 1, 1],
    ]
)
VALID = torch.tensor([[1] * 10, [1] * 10, [1] * 10, [0] * 3 + [1] * 7]).bool()


def model_of(name: str) -> Any:
    model = builds()[name].model()
    if name == "gemma4":
        model.config.get_text_config().use_bidirectional_attention = "vision"
    return model


def seen_across(model: Any, name: str, types: Tensor, begun: int) -> list[bool]:
    """By column whether, of one row without padding, a token before it sees one behind."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    made = type(model).create_masks_for_generate(
        config=config,
        inputs_embeds=torch.zeros(1, len(types), 1),
        attention_mask=None,
        **{CACHE: None},
        position_ids=None,
        is_first_iteration=True,
        **{name: types[None]},
    )
    masks = list(made.values()) if isinstance(made, dict) else [made]
    sees = torch.stack([mask[0, 0] >= 0 for mask in masks]).any(dim=0)
    columns = range(len(types) + 1)
    return [bool(sees[begun:at, max(at, begun) :].any()) for at in columns]


@pytest.mark.parametrize("begun", [0, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_cuts_are_those_of_the_models_mask(name: str, begun: int) -> None:
    model, types = model_of(name), FAMILIES[name]
    forbidden = []
    for row, own in enumerate(VALID):
        cuts = cuts_of(model, {types: TYPES[row, None]}, own[None], begun)
        assert cuts is not None
        first = int((~own).sum())
        want = seen_across(model, types, TYPES[row, first:], max(begun - first, 0))
        assert cuts.forbidden.tolist() == [False] * first + want
        forbidden.append(cuts.forbidden)
    assert any(each.any() for each in forbidden)
    batch = cuts_of(model, {types: TYPES}, VALID, begun)
    assert batch is not None
    assert torch.equal(batch.forbidden, torch.stack(forbidden).any(dim=0))


def test_nothing_is_said_where_masks_go_by_no_types() -> None:
    model = builds()["qwen3_vl"].model()
    assert cuts_of(model, {"mm_token_type_ids": TYPES}, VALID, 0) is None
    assert cuts_of(model_of("gemma3"), {}, VALID, 0) is None
