"""The slow reference: each model's own logits where all is visible, and the text's reference."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from tests.reference.vision import KeepAll, SnapKV, StreamingLLM, VisionRow, read

from .models import FAMILIES
from .prompts import model_inputs, reference_row, tokens_of
from .rows import first_parts, model_of

OWN = 5e-5
APART = 1e-2


def largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())


@pytest.mark.parametrize("rows", [(0,), (1,), (0, 1)], ids=["one", "other", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_with_everything_visible_it_is_the_model(name: str, rows: tuple[int, ...]) -> None:
    """Every token of every row, also where the model reads them side by side."""
    family, model = FAMILIES[name], model_of(name, "eager")
    parts = [[first_parts(name)[row]] for row in rows]
    with torch.no_grad():
        own = cast(Any, model)(**model_inputs(family, parts)).logits
    for index, row in enumerate(parts):
        length = len(tokens_of(family, row[0]))
        found = read(reference_row(family, model, row), [(0, length)], KeepAll())
        assert largest(own[index, -length:] - found.at(range(length))) < OWN


def last_logits(row: VisionRow, method: Any) -> torch.Tensor:
    length = len(row.embeddings)
    return read(row, [(0, length - 1)], method).at([length - 1])


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_evicted_or_dropped_shows(name: str) -> None:
    """The tests of policies could not pass with the full context in their place."""
    family, model = FAMILIES[name], model_of(name, "eager")
    row = reference_row(family, model, [first_parts(name)[0]])
    full = last_logits(row, KeepAll())
    drops = SnapKV(1.0, 4, 3, tsp_layer=family.drops_after, tsp_rate=0.4)
    for method in (SnapKV(0.3, 4, 3), StreamingLLM(0.3), drops):
        assert largest(last_logits(row, method) - full) > APART


@pytest.mark.parametrize("name", ["gemma3", "paligemma"])
def test_attention_both_ways_shows(name: str) -> None:
    """Also among what is left of an image after a drop."""
    family = FAMILIES[name]
    row = reference_row(family, model_of(name, "eager"), [first_parts(name)[0]])
    causal = replace(row, blocks=[-1] * len(row.blocks))
    drops = SnapKV(0.3, 4, 3, tsp_layer=family.drops_after, tsp_rate=0.4)
    for method in (KeepAll(), drops):
        assert largest(last_logits(row, method) - last_logits(causal, method)) > APART


@pytest.mark.parametrize("layers", [(0,), (1,), (2,)])
def test_features_added_after_a_layer_show(layers: tuple[int, ...]) -> None:
    """Before, at and after the layer that drops."""
    row = reference_row(
        FAMILIES["qwen3_vl"], model_of("qwen3_vl", "eager"), [first_parts("qwen3_vl")[0]]
    )
    assert set(row.added) == {0, 1, 2}
    without = replace(row, added={at: each for at, each in row.added.items() if at not in layers})
    drops = SnapKV(0.3, 4, 3, tsp_layer=1, tsp_rate=0.4)
    for method in (KeepAll(), drops):
        assert largest(last_logits(row, method) - last_logits(without, method)) > APART


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_of_three_axes_show(name: str) -> None:
    row = reference_row(FAMILIES[name], model_of(name, "eager"), [first_parts(name)[0]])
    flat = replace(row, positions=torch.arange(len(row.embeddings)).expand(3, -1))
    assert largest(last_logits(row, KeepAll()) - last_logits(flat, KeepAll())) > APART
