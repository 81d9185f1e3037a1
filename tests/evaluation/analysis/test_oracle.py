"""The answer-informed oracle: against the model's own attention weights, by hand, as a command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.evaluation.analysis.oracle import (
    AnswerAttention,
    answer_attention,
    found_share,
    greedy_answer,
    rank_scorers,
    spearman,
)
from kvpolicy.evaluation.cli import main
from kvpolicy.policies import KeyNormScorer, LastQueryScorer, WindowMaxPoolScorer
from tests.reference import random_tokens, tiny_model

PROMPT = random_tokens(11, 61)
ANSWER = (5, 17, 3, 29)


def model_of(family: Any = "llama", implementation: str = "eager") -> PreTrainedModel:
    return tiny_model(family, seed=3, num_layers=3, attn_implementation=implementation)


def own_weights(model: PreTrainedModel, answer: tuple[int, ...]) -> list[Tensor]:
    """By layer ``[heads, len(answer), prompt]``: of the model's weights those on the prompt."""
    ids = torch.tensor([[*PROMPT, *answer[:-1]]])
    with torch.no_grad():
        attentions = model(ids, output_attentions=True, use_cache=False).attentions
    found = []
    for each in attentions:
        asked = each[0, :, len(PROMPT) - 1 :, : len(PROMPT)]
        found.append(asked / asked.sum(dim=-1, keepdim=True))
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("kernel_size", [1, 5])
def test_what_an_answer_attends_to(family: Any, kernel_size: int) -> None:
    weights = own_weights(model_of(family), ANSWER)
    found = answer_attention(model_of(family, "sdpa"), PROMPT, ANSWER, kernel_size=kernel_size)
    most_of_layers = []
    for layer, each in enumerate(weights):
        padded = torch.nn.functional.pad(each, (kernel_size // 2,) * 2)
        pooled = padded.unfold(-1, kernel_size, 1).mean(dim=-1)
        most = pooled.amax(dim=0)
        most_of_layers.append(most)
        torch.testing.assert_close(found.layers[layer].float(), most.mean(dim=0))
    whole = torch.stack(most_of_layers).amax(dim=0).mean(dim=0)
    torch.testing.assert_close(found.whole.float(), whole)
    assert found.whole.max() > 3 / len(PROMPT)  # attention is peaked
    assert found.answer == ANSWER


def test_a_shorter_answer_asks_less() -> None:
    """Of one token the last query of the prompt alone says what matters."""
    found = answer_attention(model_of(), PROMPT, ANSWER[:1], kernel_size=1)
    scored = rank_scorers(model_of(), PROMPT, {"last": LastQueryScorer()}, found, window_size=0)[
        "last"
    ]
    weights = own_weights(model_of(), ANSWER[:1])
    for layer, each in enumerate(weights):
        want = spearman(each[:, 0].mean(dim=0), found.layers[layer].float())
        assert scored.own_spearman[layer] == pytest.approx(want, abs=1e-3)


def test_the_answer_is_generates_own() -> None:
    model = model_of()
    ids = torch.tensor([PROMPT])
    want = model.generate(ids, do_sample=False, max_new_tokens=5)[0, len(PROMPT) :].tolist()
    assert list(greedy_answer(model, PROMPT, 5)) == want
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        greedy_answer(model, PROMPT, 0)


def test_spearman_by_hand() -> None:
    rising, falling = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([9.0, 5.0, 1.0, 0.0])
    assert spearman(rising, rising.exp()) == pytest.approx(1.0)
    assert spearman(rising, falling) == pytest.approx(-1.0)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 over the root of 4.5 times 5.
    ties = torch.tensor([0.0, 7.0, 7.0, 8.0])
    assert spearman(rising, ties) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman(rising, torch.ones(4)) == 0.0


def test_what_is_found_by_hand() -> None:
    truth = torch.tensor([9.0, 8.0, 7.0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1.0])
    assert found_share(truth, truth) == 1.0
    assert found_share(truth, -truth) == 0.0
    guess = torch.zeros(21)
    guess[[1, 2, 5]] = 1.0  # three are a tenth of 21, rounded up
    assert found_share(truth, guess) == pytest.approx(2 / 3)


def test_the_truth_ranks_itself() -> None:
    """A window over the answer would know; here scorers see the prompt and are told apart."""
    model = model_of()
    truth = answer_attention(model, PROMPT, ANSWER, kernel_size=1)
    scorers = {"window": WindowMaxPoolScorer(4, kernel_size=1), "norm": KeyNormScorer()}
    found = rank_scorers(model, PROMPT, scorers, truth, window_size=4)
    assert set(found) == set(scorers)
    for each in found.values():
        assert list(each.spearman) == [0, 1, 2]
        assert all(-1 <= value <= 1 for value in each.spearman.values())
        assert all(0 <= value <= 1 for value in each.found.values())
    mean = {name: sum(each.own_spearman.values()) / 3 for name, each in found.items()}
    assert mean["window"] > mean["norm"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answer": ()}, "answer must have at least one token"),
        ({"kernel_size": 4}, "kernel_size must be odd, .* got 4"),
        ({"answer": (1, 10**6, 2)}, "input_ids must be in"),
    ],
)
def test_bad_input(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"answer": ANSWER, "kernel_size": 3, **change}
    with pytest.raises(ValueError, match=said):
        answer_attention(model_of(), PROMPT, given["answer"], kernel_size=given["kernel_size"])


def test_too_few_tokens_to_rank() -> None:
    truth = AnswerAttention(torch.ones(61), {0: torch.ones(61)}, ANSWER)
    with pytest.raises(ValueError, match="at least 2 tokens before the last 60, got 61 in all"):
        rank_scorers(model_of(), PROMPT, {}, truth, window_size=60)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["analyze", "--oracle", "--context", "128", "--count", "2", "--answer-tokens", "1"]
    out = ["--kernel-size", "1", "--out", str(tmp_path)]
    assert main([*common, "--scorer", "last_query", "--scorer", "key_norm_scorer", *out]) == 0
    printed = capsys.readouterr().out
    data = json.loads((tmp_path / "oracle.json").read_text())
    assert list(data["scorers"]) == ["last_query", "key_norm_scorer"]
    assert (data["answers"], data["prompts"], data["layers"]) == ([1, 1], [128] * 2, [*range(6)])
    row = next(line for line in printed.splitlines() if line.startswith("last_query"))
    shown = [float(cell) for cell in row.split()[1:]]
    assert shown == pytest.approx(data["scorers"]["last_query"]["spearman"], abs=0.006)
    assert (tmp_path / "oracle.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scorer", "last_query"], "--scorer may be given only with --oracle"),
        (["--answer-tokens", "3"], "--answer-tokens may be given only with --oracle"),
        (["--oracle", "--scorer", "best"], "no scorer is named 'best'; known: accumulated"),
        (["--oracle", "--scorer", "last_query:width=3"], "--scorer last_query:width=3: "),
        (["--oracle", "--kernel-size", "4"], "kernel_size must be odd"),
    ],
)
def test_options_that_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", *arguments]) == 1
    assert said in capsys.readouterr().err
