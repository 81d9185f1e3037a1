"""`PolicyCache` inside `generate` with images, against plain generation and the slow reference."""

from functools import cache

import pytest
import torch
from transformers import DynamicCache

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    FastKV,
    FastV,
    FullContext,
    KeepAllSelector,
    LastQueryScorer,
    ReplayKV,
    StagedPropagation,
    StreamingLLM,
    VisualTokenPropagation,
)
from kvpolicy.policies import SnapKV as SnapKVPolicy
from tests.reference.vision import Observed, SnapKV, VisionMethod, VisualTokens
from tests.reference.vision import StreamingLLM as SlowStreamingLLM

from .conversation import Talk, by_reference, converse
from .models import FAMILIES, IMAGE
from .prompts import model_inputs, tokens_of, words
from .rows import model_of, prompts_of

TOLERANCE = 1e-4
ROWS = [(0,), (1,), (0, 1)]
ROW_NAMES = ["one", "other", "padded"]
METHODS = ["streamingllm", "snapkv", "fastkv", "fastkv_tokens"]


def both(name: str, method: str) -> tuple[CachePolicy, VisionMethod]:
    """A policy for the family, and the slow one that decides the same."""
    layer = FAMILIES[name].drops_after
    if method == "streamingllm":
        return StreamingLLM(0.3), SlowStreamingLLM(0.3)
    if method == "snapkv":
        return SnapKVPolicy(0.3, window_size=4, kernel_size=3), SnapKV(0.3, 4, 3)
    if method == "fastkv":
        return (
            FastKV(
                tsp_layer=layer, tsp_rate=0.4, retention_rate=0.25, window_size=4, kernel_size=3
            ),
            SnapKV(0.25, 4, 3, tsp_layer=layer, tsp_rate=0.4),
        )
    # Fewer than either turn adds, so that both drop.
    return (
        FastKV(tsp_layer=layer, tsp_tokens=10, retention_tokens=10, window_size=3, kernel_size=5),
        SnapKV(None, 3, 5, tokens=10, tsp_layer=layer, tsp_tokens=10),
    )


@cache
def talk_of(name: str, rows: tuple[int, ...], method: str) -> Talk:
    """Two turns under a policy."""
    policy = ReplayKV(0.3, tsp_rate=0.5) if method == "replaykv" else both(name, method)[0]
    prompts = prompts_of(name, rows, turns=2)
    return converse(FAMILIES[name], model_of(name), PolicyCache(policy), prompts)


def assert_same(name: str, talk: Talk, index: int, method: VisionMethod) -> None:
    """Row `index` is what dense attention gives under the same choices, in every turn."""
    outcome, logits = by_reference(
        FAMILIES[name], model_of(name, "eager"), talk.rows[index], method
    )
    assert outcome.margin > 1e-4, "the reference's choice is a near tie: take another seed"
    for number, (turn, expected) in enumerate(zip(talk.turns, logits, strict=True)):
        assert turn.kept is not None
        assert turn.passed is not None
        assert turn.kept[index] == outcome.kept[number], number
        for layer, positions in turn.passed[index].items():
            # A layer that drops in another row alone passes all of this row's tokens.
            assert positions == outcome.passed[number].get(layer, positions)
        assert set(outcome.passed[number]) <= set(turn.passed[index])
        difference = (turn.logits[index] - expected).abs().max()
        assert difference <= TOLERANCE, f"logits of turn {number} differ by {difference}"


@pytest.mark.parametrize("turns", [1, 2], ids=["one_turn", "two_turns"])
@pytest.mark.parametrize("rows", ROWS, ids=ROW_NAMES)
@pytest.mark.parametrize("name", FAMILIES)
def test_keeping_everything_is_plain_generation(
    name: str, rows: tuple[int, ...], turns: int
) -> None:
    family, model = FAMILIES[name], model_of(name)
    prompts = prompts_of(name, rows, turns=turns)
    own = converse(family, model, DynamicCache(config=model.config.get_text_config()), prompts)
    found = converse(family, model, PolicyCache(FullContext()), prompts)
    for mine, plain in zip(found.turns, own.turns, strict=True):
        assert torch.equal(mine.tokens, plain.tokens)
        assert float((mine.logits - plain.logits).abs().max()) <= TOLERANCE


def assert_dense(name: str, talk: Talk, index: int) -> Observed:
    """Whatever was chosen, row `index` says what the tokens that were kept and passed on say."""
    chosen = Observed(
        [turn.kept[index] for turn in talk.turns if turn.kept is not None],
        [turn.passed[index] for turn in talk.turns if turn.passed is not None],
    )
    _, logits = by_reference(FAMILIES[name], model_of(name, "eager"), talk.rows[index], chosen)
    for turn, expected in zip(talk.turns, logits, strict=True):
        difference = (turn.logits[index] - expected).abs().max()
        assert difference <= TOLERANCE, f"logits differ by {difference}"
    return chosen


# Whose prompt attends both ways: whether the last queries are scored so as well is the
# integration's to say.
@pytest.mark.parametrize("method", [*METHODS, "replaykv"])
@pytest.mark.parametrize("rows", ROWS, ids=ROW_NAMES)
def test_under_its_own_choices_it_is_dense_attention(rows: tuple[int, ...], method: str) -> None:
    """And a padded row chooses and says what it does alone."""
    name, talk = "paligemma", talk_of("paligemma", rows, method)
    for index, row in enumerate(rows):
        chosen = assert_dense(name, talk, index)
        if method.startswith("fastkv"):
            reached = chosen.passed[0][FAMILIES[name].drops_after]
            assert len(reached) < len(tokens_of(FAMILIES[name], talk.rows[index][0]))
        for side, own in zip(talk.turns, talk_of(name, (row,), method).turns, strict=True):
            assert side.kept is not None
            assert own.kept is not None
            assert side.kept[index] == own.kept[0]
            assert torch.equal(side.tokens[index], own.tokens[0])
            assert float((side.logits[index] - own.logits[0]).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("method", ["streamingllm", "snapkv", "fastkv"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_further_prompt_is_padded_in_the_middle(name: str, method: str) -> None:
    """Rows that ask questions of unlike length about the images that they have read."""
    family, model = FAMILIES[name], model_of(name)
    questions = [words(6, 5), words(8, 14)]
    prompts = [
        [*row, question]
        for row, question in zip(prompts_of(name, (0, 1), turns=1), questions, strict=True)
    ]
    talk = converse(family, model, PolicyCache(both(name, method)[0]), prompts)
    for index in range(2):
        assert_dense(name, talk, index)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", ROWS, ids=ROW_NAMES)
@pytest.mark.parametrize("name", [each for each in FAMILIES if each != "paligemma"])
def test_it_chooses_as_the_slow_reference(name: str, rows: tuple[int, ...], method: str) -> None:
    """Each row the same alone and padded."""
    talk = talk_of(name, rows, method)
    for index in range(len(rows)):
        assert_same(name, talk, index, both(name, method)[1])


@pytest.mark.parametrize("rows", ROWS, ids=ROW_NAMES)
@pytest.mark.parametrize(
    "name", [each for each, family in FAMILIES.items() if family.both_ways == "nothing"]
)
@pytest.mark.parametrize("method", ["fastv", "pyramid_drop"])
def test_only_tokens_of_images_are_dropped(method: str, name: str, rows: tuple[int, ...]) -> None:
    """By the kinds of tokens that the policy is shown, in both turns."""
    family = FAMILIES[name]
    stages = {1: 0.5} if method == "fastv" else {0: 0.5, 2: 0.5}
    policy: CachePolicy = FastV(tsp_rate=0.5)
    if method == "pyramid_drop":
        parts = [
            VisualTokenPropagation(tsp_layer=layer, tsp_rate=rate) for layer, rate in stages.items()
        ]
        policy = CachePolicy(LastQueryScorer(), KeepAllSelector(), StagedPropagation(parts))
    prompts = prompts_of(name, rows, turns=2)
    talk = converse(family, model_of(name), PolicyCache(policy), prompts)
    for index in range(len(rows)):
        tokens = [token for part in talk.rows[index] for token in tokens_of(family, part)]
        images = frozenset(at for at, token in enumerate(tokens) if token == IMAGE)
        observers = None if method == "fastv" else 1
        assert_same(name, talk, index, VisualTokens(images, stages, observers))
        assert talk.turns[0].passed is not None
        assert set(talk.turns[0].passed[index]) == set(stages)


@pytest.mark.parametrize("method", ["snapkv", "fastkv"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_forward_by_hand_is_what_generate_computes(name: str, method: str) -> None:
    """The whole prompt's logits, or of a policy that drops the last one's."""
    family, model = FAMILIES[name], model_of(name)
    prompts = prompts_of(name, (0, 1), turns=1)
    expected = talk_of(name, (0, 1), method).turns[0].logits[:, 0]
    store = PolicyCache(both(name, method)[0])
    inputs = model_inputs(family, prompts)
    # `generate` counts a padded row's positions from its first token.
    inputs["position_ids"] = positions_by_hand(name, inputs)
    with torch.no_grad(), store.attached(model):
        logits = model(**inputs, cache=store, logits_to_keep=1).logits
    assert float((logits[:, -1] - expected).abs().max()) <= TOLERANCE
    assert store.get_seq_length() == inputs["input_ids"].shape[1]


def positions_by_hand(name: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What `generate` gives as position ids."""
    family, model = FAMILIES[name], model_of(name)
    mask = inputs["attention_mask"]
    text = (mask.cumsum(dim=1) - 1).clamp(min=0)
    if family.axes == 1:
        return text + family.first
    axes, _ = model.model.get_rope_index(**{k: v for k, v in inputs.items() if k != "pixel_values"})
    return torch.cat([text[None], axes])
