"""The slow reference: each model's own logits where all is visible, and the text's reference."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import DynamicCache

from tests import reference
from tests.integrations.test_generation import CHUNKS_GO_ON
from tests.reference.vision import KeepAll, SnapKV, StreamingLLM, VisionRow, read

from .conversation import ANSWER, by_reference, converse
from .models import FAMILIES
from .prompts import model_inputs, reference_row, tokens_of, words
from .rows import first_parts, model_of, prompts_of

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


@pytest.mark.parametrize("rows", [(0,), (0, 1)], ids=["one", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_generation_over_two_turns(name: str, rows: tuple[int, ...]) -> None:
    """By the family's own cache, with a further image in the second turn where it takes one."""
    if name == "gemma3" and not CHUNKS_GO_ON:
        pytest.skip("this Transformers cuts the masks of a later turn's images wrongly")
    family, model = FAMILIES[name], model_of(name)
    store = DynamicCache(config=model.config.get_text_config())
    talk = converse(family, model, store, prompts_of(name, rows, turns=2))
    for index, row in enumerate(talk.rows):
        _, logits = by_reference(family, model_of(name, "eager"), row, KeepAll())
        for turn, expected in zip(talk.turns, logits, strict=True):
            assert turn.logits.shape[1] == ANSWER
            assert largest(turn.logits[index] - expected) < 2 * OWN


def of_text(method: SnapKV) -> reference.FastKV:
    """The same choice by the reference of text models."""
    return reference.FastKV(
        retention_rate=method.rate,
        window_size=method.window,
        kernel_size=method.kernel,
        tsp_layer=method.tsp_layer,
        tsp_rate=method.tsp_rate,
    )


def test_without_an_image_it_is_the_reference_of_text() -> None:
    """Choices, what goes on and logits of two prompts with an answer between."""
    family, model = FAMILIES["llava"], cast(Any, model_of("llava", "eager"))
    decoder = model.model.language_model
    text = SimpleNamespace(config=decoder.config, model=decoder, lm_head=model.lm_head)
    method = SnapKV(0.3, 4, 3, tsp_layer=1, tsp_rate=0.4)
    state = reference.ReferenceState(cast(Any, text), of_text(method))
    first, answer, second, last = words(1, 61), words(2, 5), words(3, 50), words(4, 3)
    turns = [state.turn(first, 4, forced=answer[:4]), state.turn([answer[4], *second], 3, last)]
    row = reference_row(family, model, [first, answer, second, last])
    found = read(row, [(0, 61), (65, 116)], method)
    assert found.passed == [turn.propagated for turn in turns]
    assert found.kept == [turn.kept for turn in turns]
    for turn, end in zip(turns, (61, 116), strict=True):
        expected = torch.cat([turn.prefill_logits[None], turn.decode_logits])
        assert largest(found.at(range(end - 1, end - 1 + len(expected))) - expected) < OWN


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
