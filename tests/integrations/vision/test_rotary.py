"""Parts that rotate keys, in models whose image tokens have a row and a column as positions."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy import CachePolicy, LayerContext, Scorer
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.model.rotary import GivenPlaces, frequencies_of
from kvpolicy.policies import (
    Compactor,
    GQAGroupSelector,
    KeepAllSelector,
    PassAllPropagation,
    ReplayKV,
)
from tests.integrations.model.test_rotary import FAMILY_KEYS, NORM, PROJECTION, Comparing

from .conversation import converse
from .models import FAMILIES
from .prompts import model_inputs, rotary_positions
from .rows import model_of, prompts_of

KEYS = {"gemma3": FAMILY_KEYS["gemma3"], "qwen3_vl": NORM}
AXES = ["qwen2_5_vl", "qwen3_vl"]


@pytest.mark.parametrize("rows", [(0,), (0, 1)], ids=["one", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_turned_back_is_what_was_projected(name: str, rows: tuple[int, ...]) -> None:
    """Of two turns, the tokens of images and what was held of the first turn among them."""
    family, model = FAMILIES[name], FAMILIES[name].build(1)
    scorer = Comparing(KEYS.get(name, PROJECTION)(model))
    cache = PolicyCache(CachePolicy(scorer, GQAGroupSelector(0.8), PassAllPropagation()))
    converse(family, model, cache, prompts_of(name, rows, turns=2))
    for new, held_too in scorer.compared.values():
        assert held_too > new > 60


def test_which_axis_turns_which_channels_is_asked_of_the_decoders_own_embedding() -> None:
    decoder: Any = model_of("qwen3_vl").get_decoder()
    places, valid = torch.arange(15).view(1, 5, 3), torch.ones(1, 5, dtype=torch.bool)
    given = decoder.rotary_emb(torch.zeros(1, 1, 1), places.permute(2, 0, 1))
    found = frequencies_of(decoder, given, places, valid)
    assert found is not None
    assert found[3] is not None
    assert {*found[3].tolist()} == {0, 1, 2}
    elsewhere = torch.nn.ModuleDict({"turning": decoder.rotary_emb})
    assert frequencies_of(elsewhere, given, places, valid) is None


@attrs.frozen
class TurnedBehind(Scorer):
    """Turns keys, with rotary embedding undone, to the place behind the row."""

    found: dict[int, tuple[Tensor, Tensor]] = attrs.field(factory=dict)
    needs_rotary = True

    def score(self, context: LayerContext) -> Tensor:
        rotary, after = context.layer.rotary, context.positions[:, :1, -1:] + 1
        assert rotary is not None
        after = after.expand_as(context.positions)
        back = rotary.turned_back(context.keys, context.positions)
        moved = rotary.moved(context.keys, context.positions, after)
        torch.testing.assert_close(moved, rotary.turned(back, after), atol=1e-4, rtol=1e-4)
        self.found.setdefault(context.layer_idx, (back, moved))
        return context.keys.float().norm(dim=-1)


def turned_by_hand(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = states.shape[-1] // 2
    other = torch.cat([-states[..., half:], states[..., :half]], dim=-1)
    return states * cos + other * sin


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("name", [*AXES, "paligemma", "llava"])
def test_behind_the_row_comes_the_next_text(name: str, row: int) -> None:
    """Where the model itself would read one more word."""
    family, model, scorer = FAMILIES[name], model_of(name), TurnedBehind()
    cache = PolicyCache(CachePolicy(scorer, KeepAllSelector(), PassAllPropagation()))
    prompts = prompts_of(name, (row,), turns=1)
    converse(family, model, cache, prompts)
    decoder: Any = model.get_decoder()
    place = torch.tensor(rotary_positions(family, [*prompts[0], [7]])[-1])[:, None, None]
    cos, sin = decoder.rotary_emb(torch.zeros(1, 1, 1), place if family.axes > 1 else place[0])
    for back, moved in scorer.found.values():
        torch.testing.assert_close(moved, turned_by_hand(back, cos, sin), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", [Compactor(0.5), ReplayKV(0.5)], ids=["compactor", "replaykv"])
@pytest.mark.parametrize("name", AXES)
def test_a_saved_cache_knows_the_places(name: str, policy: CachePolicy, tmp_path: Path) -> None:
    """In a later turn, where rows have come in another order."""
    model: Any = model_of(name)
    caches = [PolicyCache(policy) for _ in range(2)]
    rows = prompts_of(name, (0, 1), turns=2)
    talks = [converse(FAMILIES[name], model, each, [row[:1] for row in rows]) for each in caches]
    caches[1].save(tmp_path / "cache")
    caches[1] = PolicyCache.load(tmp_path / "cache")
    caches[1].reorder_cache(torch.tensor([1, 0]))
    found, deltas = [], model.model.rope_deltas  # the model's own record of the rows
    for talk, cache, order in zip(talks, caches, ([0, 1], [1, 0]), strict=True):
        spoken = [[*talk.rows[row], rows[row][1]] for row in order]
        inputs = model_inputs(FAMILIES[name], spoken, last=1)
        model.model.rope_deltas = deltas[order]
        model.generate(**inputs, cache=cache, max_new_tokens=2)
        found.append([layer.positions[order] for layer in cache.layers])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_places_by_hand() -> None:
    """An image of two by two behind two words, and text; then an end of text is padding."""
    image = [(2, 2, 2), (2, 2, 3), (2, 3, 2), (2, 3, 3)]
    text = [(0, 0, 0), (1, 1, 1)]
    given = torch.tensor([[*text, *image, (4, 4, 4)], [(9, 9, 9), *text, *image]]).movedim(-1, 0)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [-1, 0, 1, 2, 3, 4, 5]])
    known = GivenPlaces.of_text(2, torch.device("cpu"))
    known = known.extended(given, positions, torch.tensor([7, 6]))
    asked = torch.tensor([[0, 3, 5, 6, 7, 9]]).expand(2, 1, -1)
    assert known.places(asked)[0, 0].tolist() == [
        [0, 0, 0],
        [2, 2, 3],
        [2, 3, 3],
        *([each] * 3 for each in (4, 5, 7)),
    ]
    assert torch.equal(known.places(asked)[1], known.places(asked)[0])
    cut = known.cut(torch.tensor([4, 6]))
    assert cut.places(asked)[0, 0, 2:].tolist() == [[each] * 3 for each in (5, 6, 7, 9)]
    assert torch.equal(cut.places(asked)[1], known.places(asked)[1])
    assert not known.counts_tokens
    assert known.cut(torch.tensor([2, 1])).counts_tokens
    more = cut.extended(torch.full((1, 1, 1), 20), torch.tensor([[4], [6]]), torch.tensor([5, 7]))
    assert more.places(asked)[:, 0, 3].tolist() == [[22] * 3, [20] * 3]
