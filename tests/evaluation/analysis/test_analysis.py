"""The analyses: against dense attention and plain loops, by hand, and as the command shows them."""

import json
from collections.abc import Callable
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from matplotlib import image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from kvpolicy.evaluation import (
    OutputDistances,
    Overlap,
    attention_recall,
    load,
    needle_prompts,
    output_distances,
    topk_overlap,
    window_attention,
)
from kvpolicy.evaluation.analysis import plots as analysis_plots
from kvpolicy.evaluation.analysis import study
from kvpolicy.evaluation.analysis.attention import overlap_of, recall_of, top_tokens
from kvpolicy.evaluation.analysis.forward import ShowingSelector, WindowAttentionScorer
from kvpolicy.evaluation.analysis.plots import plot_distances, plot_overlap, plot_recall
from kvpolicy.evaluation.analysis.settings import AnalysisSettings
from kvpolicy.testing import check_scorer, check_selector
from tests.evaluation.support import Run
from tests.reference import random_tokens, tiny_model
from tests.reference.attention import attention_probabilities
from tests.reference.decoder import embed, finish_layer, project, rms_norm
from tests.reference.models import Family
from tests.reference.selection import highest, max_pool

PROMPT = random_tokens(11, 59)
WINDOW = 5
NUM_LAYERS = 4


WRONG: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    "model must be a Module, got None": (lambda: topk_overlap(cast(Any, None), [1], 1), TypeError),
    "model must be a Module, got 'm'": (lambda: output_distances(cast(Any, "m"), [[1]]), TypeError),
    "inputs must be a sequence of": (
        lambda: output_distances(model_of(), cast(Any, None)),
        TypeError,
    ),
    "layers must be a Sequence, got 3": (
        lambda: output_distances(model_of(), [PROMPT], layers=cast(Any, 3)),
        TypeError,
    ),
    "ks must be a Sequence, got 3": (
        lambda: attention_recall(model_of(), PROMPT, cast(Any, 3)),
        TypeError,
    ),
    "saliency must be a Tensor, got None": (lambda: overlap_of(cast(Any, None), 1), TypeError),
    "saliency must be of floats, got torch.int64": (
        lambda: recall_of(torch.ones(2, 3).long(), [1]),
        TypeError,
    ),
    r"saliency must be \[num_layers, context_len\], none of them 0, got \[3\]": (
        lambda: overlap_of(torch.ones(3), 1),
        ValueError,
    ),
    "count must be at most the prompt's 3 tokens, got 4": (
        lambda: top_tokens(torch.ones(3), 4),
        ValueError,
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_arguments_of_the_wrong_kind(message: str) -> None:
    call, error = WRONG[message]
    with pytest.raises(error, match=message):
        call()


@cache
def model_of(family: Family = "llama", attn_implementation: str = "sdpa") -> PreTrainedModel:
    return tiny_model(
        family, seed=7, num_layers=NUM_LAYERS, attn_implementation=attn_implementation
    )


@cache
def dense_attention(family: Family = "llama") -> list[Tensor]:
    """Per layer, what each query of each head gives each key: the model's own, in full."""
    model = cast(Any, model_of(family, "eager"))
    with torch.no_grad():
        output = model(torch.tensor([PROMPT]), output_attentions=True, use_cache=False)
    return [each[0].double() for each in output.attentions]


def dense_shares(family: Family = "llama", window: int = WINDOW) -> list[list[float]]:
    """Per layer, each token's share of the window's attention."""
    return [each[:, -window:].mean(dim=(0, 1)).tolist() for each in dense_attention(family)]


def highest_of(shares: list[float], count: int) -> set[int]:
    return set(sorted(range(len(shares)), key=lambda token: -shares[token])[:count])


# Where attention goes.


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("window", [1, WINDOW, len(PROMPT)])
def test_window_attention_is_that_of_the_model(family: Family, window: int) -> None:
    shares = window_attention(model_of(family), PROMPT, window)
    expected = torch.tensor(dense_shares(family, window), dtype=torch.float64)
    torch.testing.assert_close(shares, expected, atol=1e-6, rtol=1e-4)
    assert shares.std(dim=1).min() > 0.005  # peaked: a wrong layer or window would show


@pytest.mark.parametrize("k", [1, 7, 30, len(PROMPT)])
def test_overlap_against_sets(k: int) -> None:
    overlap = topk_overlap(model_of(), torch.tensor([PROMPT]), k, window_size=WINDOW)
    named = [highest_of(shares, k) for shares in dense_shares()]
    for one, row in zip(named, overlap.pairs, strict=True):
        assert list(row) == pytest.approx([len(one & other) / k for other in named])
    if k == 7:
        assert 0 < overlap.pairs[0][1] < 1  # or else any tokens would do
    for distance, mean in enumerate(overlap.by_distance()):
        pairs = [(a, a + distance) for a in range(NUM_LAYERS - distance)]
        expected = sum(len(named[a] & named[b]) / k for a, b in pairs) / len(pairs)
        assert mean == pytest.approx(expected)


def test_recall_against_sums() -> None:
    ks = [1, 7, len(PROMPT)]
    recall = attention_recall(model_of(), PROMPT, ks, window_size=WINDOW)
    assert list(recall) == ks
    for k, held in recall.items():
        expected = [
            sum(shares[token] for token in highest_of(shares, k)) for shares in dense_shares()
        ]
        assert list(held) == pytest.approx(expected, abs=1e-6)
    assert max(recall[1]) < 0.5 < min(recall[len(PROMPT)])


def test_overlap_and_recall_by_hand() -> None:
    """Layer 0 names {0, 1}, layer 1 {1, 3}, layer 2 {2, 3}; each row adds up to 10."""
    saliency = torch.tensor([[4.0, 3.0, 2.0, 1.0], [2.0, 3.0, 1.0, 4.0], [1.0, 2.0, 4.0, 3.0]])
    overlap = overlap_of(saliency, 2)
    assert overlap == Overlap(2, ((1.0, 0.5, 0.0), (0.5, 1.0, 0.5), (0.0, 0.5, 1.0)))
    assert overlap.by_distance() == (1.0, 0.5, 0.0)
    assert overlap.by_distance(range(2)) == (1.0, 0.5)
    expected = {1: (0.4, 0.4, 0.4), 2: (0.7, 0.7, 0.7), 4: (1.0, 1.0, 1.0)}
    found = recall_of(saliency, [1, 2, 4])
    assert found == {k: pytest.approx(held) for k, held in expected.items()}


def test_ties_go_to_the_earlier_token_and_a_tail_can_be_set() -> None:
    equal = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0])
    assert top_tokens(equal, 2).tolist() == [0, 1]
    assert top_tokens(equal, 3, protected_tail=2).tolist() == [1, 3, 4]


def test_parts_keep_their_contracts() -> None:
    check_scorer(WindowAttentionScorer(5))
    check_selector(ShowingSelector(lambda context, saliency: None))


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for each in output if isinstance(output, tuple | list) else [output]:
            if isinstance(each, Tensor):
                self.bytes = max(self.bytes, each.numel() * each.element_size())
        return output


def test_no_matrix_of_queries_times_keys() -> None:
    """At 8192 tokens one head's matrix has 256 MiB in float32; nothing is a tenth of it."""
    model = tiny_model("llama", seed=1, num_layers=2, query_heads=4, hidden_size=32)
    prompt = random_tokens(3, 8192)
    with Largest() as largest:
        window_attention(model, prompt)
        output_distances(model, [prompt], layers=[0])
    assert 1 << 20 < largest.bytes < 4 * 8192**2 // 10


# What dropping tokens costs.


class ByHand:
    """A prefill in plain loops over layers and heads, of the tokens at hand only."""

    def __init__(self, tokens: list[int]) -> None:
        self.model = model_of()
        self.hidden = embed(self.model, tokens)
        self.positions = list(range(len(tokens)))
        self.next_layer = 0

    def copy(self) -> "ByHand":
        other = ByHand.__new__(ByHand)
        other.__dict__.update(self.__dict__)
        return other

    def advance(self, layers: int) -> Tensor:
        """Run so many layers; return the last one's raw products of the last query, by head."""
        products = torch.empty(0)
        for _ in range(layers):
            queries, held = project(self.model, self.next_layer, self.hidden, self.positions)
            groups = [held[head * len(held) // len(queries)] for head in range(len(queries))]
            outputs = []
            for query, entries in zip(queries, groups, strict=True):
                weights = attention_probabilities(
                    query, self.positions, entries, query.shape[1] ** -0.5
                )
                outputs.append(weights @ torch.stack([entry.value for entry in entries]))
            products = torch.stack(
                [
                    torch.stack([entry.key for entry in entries]) @ query[-1]
                    for query, entries in zip(queries, groups, strict=True)
                ]
            )
            self.hidden = finish_layer(self.model, self.next_layer, self.hidden, outputs)
            self.next_layer += 1
        return products

    def cut(self, kept: list[int]) -> None:
        self.hidden = self.hidden[kept]
        self.positions = [self.positions[index] for index in kept]

    def final(self) -> Tensor:
        """The last token's final hidden state, once the other layers are run."""
        self.advance(NUM_LAYERS - self.next_layer)
        return rms_norm(self.hidden[-1], cast(Any, self.model).model.norm)


def propagated_by_hand(layer: int, count: int) -> list[int]:
    """The window, and the highest of the window's dense attention, max-pooled by 7."""
    before = len(PROMPT) - WINDOW
    rows = dense_attention()[layer][:, -WINDOW:, :before].sum(dim=1).tolist()
    pooled = [max_pool(row, 7) for row in rows]
    means = [sum(column) / len(column) for column in zip(*pooled, strict=True)]
    return sorted(highest(means, count - WINDOW)) + list(range(before, len(PROMPT)))


def restarted_by_hand(products: Tensor, count: int) -> list[int]:
    """The last token, and the highest of the products summed over heads, averaged over 5."""
    summed = [0.0, 0.0, *products.sum(dim=0).tolist(), 0.0, 0.0]
    pooled = [sum(summed[index : index + 5]) / 5 for index in range(len(PROMPT))]
    return [*sorted(highest(pooled[:-1], count - 1)), len(PROMPT) - 1]


@torch.no_grad()
@pytest.mark.parametrize("tsp_rate", [0.2, 0.5])
def test_distances_by_hand(tsp_rate: float) -> None:
    count = int(len(PROMPT) * tsp_rate)
    found = output_distances(model_of(), [PROMPT], tsp_rate, window_size=WINDOW)
    assert found.layers == (0, 1, 2, 3)
    assert found.tokens == (count,)
    full = ByHand(PROMPT).final()
    state = ByHand(PROMPT)
    for layer in found.layers:
        products = state.advance(1)
        dropped = state.copy()
        dropped.cut(propagated_by_hand(layer, count))
        again = ByHand([PROMPT[index] for index in restarted_by_hand(products, count)])
        for distances, other in (
            (found.propagated, dropped.final()),
            (found.restarted, again.final()),
        ):
            expected = float((other - full).norm() / full.norm())
            assert distances[0][layer] == pytest.approx(expected, rel=1e-4, abs=1e-5)
            assert expected > 0.05 or (layer == NUM_LAYERS - 1 and distances is found.propagated)


def test_distances_of_several_prompts_are_those_of_each() -> None:
    others = [PROMPT, random_tokens(5, 31)]
    both = output_distances(model_of(), others, 0.3, layers=[2, 0])
    for index, prompt in enumerate(others):
        alone = output_distances(model_of(), [prompt], 0.3)
        assert both.tokens[index] == alone.tokens[0]
        for mine, theirs in (
            (both.propagated, alone.propagated),
            (both.restarted, alone.restarted),
        ):
            assert mine[index] == (theirs[0][0], theirs[0][2])
    assert both.layers == (0, 2)
    first, second = both.propagated
    means = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
    assert list(both.mean_propagated) == pytest.approx(means)


def test_nothing_dropped_is_no_distance() -> None:
    """At a rate of 1; where the window is the whole prompt; and after the last layer."""
    for found in (
        output_distances(model_of(), [PROMPT], 1.0),
        output_distances(model_of(), [PROMPT], 0.1, window_size=len(PROMPT)),
    ):
        assert found.tokens == (len(PROMPT),)
        assert max(*found.propagated[0], *found.restarted[0]) < 1e-5
    last = output_distances(model_of(), [PROMPT], 0.1, layers=[NUM_LAYERS - 1])
    assert last.propagated[0][0] < 1e-5 < last.restarted[0][0]


def test_the_needle_model_has_retrieved_by_layer_2() -> None:
    """From there on propagation costs little, and a restart costs the second hop."""
    prompts = [each.input_ids for each in needle_prompts(256, count=8) if each.kind == "two-hop"]
    found = output_distances(load().model, prompts, 0.2)
    assert max(found.mean_propagated[2:]) < 0.2
    assert min(found.mean_propagated[:2]) > 0.5
    for near, far in list(zip(found.mean_propagated, found.mean_restarted, strict=True))[2:]:
        assert near < far


# Bad input.


@pytest.fixture
def untouched() -> Any:
    """A model that must not be run."""

    def run(*arguments: Any) -> None:
        raise AssertionError("the model was run")

    model = tiny_model("llama", seed=7, num_layers=NUM_LAYERS)
    cast(Any, model).model.embed_tokens.register_forward_hook(run)
    return model


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input_ids": []}, ValueError, r"at least one token, .*got shape \[0\]"),
        ({"input_ids": [[1, 2], [3, 4]]}, ValueError, r"one prompt .*got shape \[2, 2\]"),
        ({"input_ids": 3}, ValueError, r"got shape \[\]"),
        ({"input_ids": [0.5, 1.0]}, TypeError, "input_ids must be ints, got torch.float32"),
        ({"input_ids": "text"}, TypeError, "input_ids must be the token ids of one prompt"),
        ({"input_ids": [5] * 20 + [97]}, ValueError, r"in \[0, 96\], .* got 97"),
        ({"input_ids": [5] * 20 + [-1]}, ValueError, r"in \[0, 96\], .* got -1"),
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"k": 2.0}, TypeError, "k must be an int"),
        ({"k": 60}, ValueError, "k must be at most the prompt's 59 tokens, got 60"),
        ({"window_size": 60}, ValueError, "window_size must be at most the prompt's 59 tokens"),
        ({"window_size": 0}, ValueError, "window_size must be at least 1, got 0"),
        ({"window_size": 2.5}, TypeError, "window_size must be an int"),
    ],
)
def test_bad_overlap(
    untouched: Any, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"input_ids": PROMPT, "k": 3, **change}
    with pytest.raises(error, match=message):
        topk_overlap(untouched, **arguments)
    ks = [1, arguments.pop("k")]
    with pytest.raises(
        error,
        match=message.replace("k must", "each of ks must", 1)
        if message.startswith("k")
        else message,
    ):
        attention_recall(untouched, ks=ks, **arguments)


def test_models_that_give_no_numbers_to_measure(untouched: Any) -> None:
    untouched.train()
    for call in (topk_overlap, output_distances):
        with pytest.raises(ValueError, match="model must be in evaluation mode, got training"):
            call(untouched, [PROMPT], 1)
    broken = tiny_model("llama", seed=7)
    torch.nn.init.constant_(cast(Any, broken).model.norm.weight, torch.inf)
    with pytest.raises(ValueError, match="model must return finite final hidden states"):
        output_distances(broken, [PROMPT])


def test_bad_recall(untouched: Any) -> None:
    with pytest.raises(ValueError, match="ks must hold at least one number of tokens"):
        attention_recall(untouched, PROMPT, [])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"inputs": []}, ValueError, "inputs must hold at least one prompt, got none"),
        ({"inputs": [PROMPT, []]}, ValueError, "at least one token"),
        ({"inputs": PROMPT}, ValueError, "one prompt of at least one token"),
        ({"inputs": [PROMPT, [1, 2]]}, ValueError, "window_size must be at most the prompt's 2"),
        ({"tsp_rate": 0.0}, ValueError, r"tsp_rate must be in \(0, 1\], got 0.0"),
        ({"tsp_rate": 1.5}, ValueError, r"tsp_rate must be in \(0, 1\], got 1.5"),
        ({"tsp_rate": "x"}, TypeError, "tsp_rate must be a number"),
        ({"layers": []}, ValueError, "layers must hold at least one layer"),
        ({"layers": [1, 1]}, ValueError, r"each once, got \[1, 1\]"),
        ({"layers": [4]}, ValueError, r"in \[0, 3\] for a model of 4 layers, got 4"),
        ({"layers": [-1]}, ValueError, "each of layers must be at least 0, got -1"),
        ({"layers": [1.0]}, TypeError, "each of layers must be an int"),
    ],
)
def test_bad_distances(
    untouched: Any, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"inputs": [PROMPT], **change}
    with pytest.raises(error, match=message):
        output_distances(untouched, **arguments)


# The command.

SMALL = ("--context", 64, "--count", 2, "-k", 8)
FILES = ["analyze.json", "distances.png", "overlap.png", "recall.png"]


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, "analyze")


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (prompt, _) = needle_prompts(96, count=2, seed=5)
    file = tmp_path_factory.mktemp("prompts") / "needle.txt"
    file.write_text(load().tokenizer.decode(list(prompt.input_ids)) + "\n")
    return file


def test_command_prints_and_writes_what_the_functions_find(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    status, shown, _ = run(*SMALL, "--out", out)
    assert status == 0
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert max(len(line.rstrip()) for line in shown.split("\nwritten")[0].splitlines()) <= 80
    data = json.loads((out / "analyze.json").read_text())
    prompts = needle_prompts(64, count=2)
    assert data["prompts"] == {"one-hop": [64], "two-hop": [64]}
    assert data["overlap"]["chance"] == 8 / 64

    model = load().model
    one, other = (topk_overlap(model, prompt.input_ids, 8).pairs for prompt in prompts)
    means = [
        [(a + b) / 2 for a, b in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)
    ]
    for row, expected in zip(data["overlap"]["pairs"], means, strict=True):
        assert row == pytest.approx(expected)
    assert list(data["overlap"]["by_distance"]) == ["all layers", "layers 0-2", "layers 3-5"]
    assert [each["k"] for each in data["recall"]] == [2, 4, 8, 16, 32]
    for kind, prompt in zip(("one-hop", "two-hop"), prompts, strict=True):
        found = output_distances(model, [prompt.input_ids], 0.2)
        assert data["distances"][kind] == found.as_data()

    rows = [line.split() for line in shown.splitlines()]
    first = next(row for row in rows if row[:1] == ["0"])
    assert first[1] == f"{100 * means[0][1]:.1f}"
    assert first[2:] == [f"{100 * each['layers'][0]:.1f}" for each in data["recall"]]
    last = [row for row in rows if row[:1] == ["5"]][-1]
    propagation = data["distances"]["one-hop"]["propagation"]["mean"]
    assert last[1] == f"{propagation[5]:.4f}"


def test_many_shares_of_attention_take_several_tables(run: Run, tmp_path: Path) -> None:
    ks = range(40, 53)
    arguments = [each for k in ks for each in ("--recall-k", k)]
    status, shown, _ = run(*SMALL, *arguments, "--layer", 5, "--out", tmp_path)
    assert status == 0
    assert max(len(line.rstrip()) for line in shown.split("\nwritten")[0].splitlines()) <= 80
    recall = json.loads((tmp_path / "analyze.json").read_text())["recall"]
    assert [each["k"] for each in recall] == list(ks)
    rows = [line.split() for line in shown.splitlines()]
    second = [row[1:] for row in rows if row[:1] == ["1"]][:3]  # the layer's in each table
    assert [len(row) for row in second] == [6, 6, 2]
    assert [cell for row in second for cell in row][1:] == [
        f"{100 * each['layers'][1]:.1f}" for each in recall
    ]


def test_command_on_files(run: Run, prompt_file: Path, tmp_path: Path) -> None:
    """One prompt a file, other layers and numbers; a second run replaces the first one's files."""
    arguments = (
        "--recall-k",
        3,
        "--recall-k",
        1,
        "--layer",
        4,
        "--window-size",
        6,
        "--tsp-rate",
        0.5,
    )
    files = ("--prompt-file", prompt_file, "--prompt-file", prompt_file)
    out = tmp_path / "out"
    for _ in range(2):
        status, shown, _ = run(*files, "-k", 5, *arguments, "--out", out)
        assert status == 0
    assert sorted(path.name for path in out.iterdir()) == FILES
    data = json.loads((out / "analyze.json").read_text())
    assert data["prompts"] == {"prompts": [96, 96]}
    assert data["settings"]["prompt_files"] == [str(prompt_file)] * 2
    assert [each["k"] for each in data["recall"]] == [1, 3]
    assert data["distances"]["prompts"]["layers"] == [4]
    assert data["distances"]["prompts"]["tokens"] == [48, 48]
    assert "2 prompts of 96 tokens" in " ".join(shown.split())
    assert "50% of the tokens" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-k", "97"], "k must be at most the prompt's 96 tokens, got 97"),
        (["--recall-k", "97"], "each of ks must be at most the prompt's 96 tokens, got 97"),
        (["--window-size", "97"], "window_size must be at most the prompt's 96 tokens, got 97"),
        (["--layer", "6"], "each of layers must be in [0, 5] for a model of 6 layers, got 6"),
        (["--layer", "1", "--layer", "1"], "each once, got [1, 1]"),
        (["--tsp-rate", "0"], "tsp_rate must be in (0, 1], got 0.0"),
        (["--tsp-rate", "nan"], "tsp_rate must be in (0, 1], got nan"),
        (["--prompt-file", "no-such.txt"], "prompt file no-such.txt does not exist"),
        (["--model", "./no/such"], "model ./no/such does not exist"),
        (["--dtype", "int7"], "dtype must be one of auto"),
        (["--chat"], "--chat needs a chat template"),
    ],
)
def test_bad_input_leaves_no_file(
    run: Run, prompt_file: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    out = tmp_path / "out"
    status, shown, err = run("--prompt-file", prompt_file, "-k", 8, "--out", out, *arguments)
    assert (status, shown) == (1, "")
    (line,) = (line for line in err.splitlines() if line.strip())
    assert line.startswith("error: ")
    assert said in line
    assert not out.exists()


@pytest.mark.parametrize(
    "change", [{"k": 65}, {"recall_ks": (1, 65)}, {"window_size": 65}, {"layers": (6,)}]
)
def test_settings_are_held_against_all_prompts_before_any_is_read(change: dict[str, Any]) -> None:
    said: list[str] = []
    settings = AnalysisSettings(**{"context": 64, "count": 2, "k": 8, **change})
    with pytest.raises(ValueError, match=r"got 65|got 6$"):
        study.run(settings, [], load(), lambda stage, done, total: said.append(stage))
    assert said == []


def test_bad_files_and_folders(run: Run, prompt_file: Path, tmp_path: Path) -> None:
    assert "--prompt-file must be given with --model some/model" in run("--model", "some/model")[2]
    assert "out must be a folder" in run(*SMALL, "--out", prompt_file)[2]
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    assert "is empty" in run("--prompt-file", empty, "--out", tmp_path / "out")[2]
    assert run("-k", 0)[0] == 2
    assert list(tmp_path.iterdir()) == [empty]


def test_a_picture_that_fails_leaves_no_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> bytes:
        raise ValueError("no picture today")

    monkeypatch.setattr(study, "plot_distances", fail)
    status, _, err = run(*SMALL, "--out", tmp_path / "out")
    assert (status, err.strip()) == (1, "error: no picture today")
    assert not (tmp_path / "out").exists()


def test_a_long_prompt_is_noted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load()
    monkeypatch.setattr(loaded.model.config, "max_position_embeddings", 63)
    monkeypatch.setattr(
        "kvpolicy.evaluation.commands.work.analyze.load_shown", lambda *each: loaded
    )
    said = "Prompts of up to 64 tokens exceed the 63 positions that the model is made for."
    status, out, err = run(*SMALL)
    assert (status, out) == (1, "")
    assert "prompts must fit into the 63 positions of needle, got a prompt of 64 tokens" in err
    assert said in " ".join(run(*SMALL, "--beyond-positions")[1].split())


# The pictures.


def pixels(picture: bytes) -> Any:
    return image.imread(BytesIO(picture), format="png")


@pytest.mark.parametrize("num_layers", [1, 2, 40])
def test_pictures_of_any_depth(num_layers: int) -> None:
    """No warning is raised, and what is drawn depends on the numbers."""
    row = tuple(layer / num_layers for layer in range(num_layers))
    pairs = tuple(tuple(1 - abs(a - b) for b in row) for a in row)
    halves = {"all layers": range(num_layers), "layers": range(num_layers // 2)}
    overlap = pixels(plot_overlap(Overlap(8, pairs), halves, 0.1))
    assert (overlap != pixels(plot_overlap(Overlap(8, pairs), halves, 0.3))).any()
    assert (
        pixels(plot_recall({8: row})) != pixels(plot_recall({8: tuple(1 - each for each in row)}))
    ).any()
    layers = tuple(range(num_layers))
    near = OutputDistances(0.2, layers, (4, 4), (row, row), (row, row))
    far = OutputDistances(0.2, layers, (4, 4), (row, row), (row, tuple(2 * x for x in row)))
    alone, both = (pixels(plot_distances({"prompts": each})) for each in (near, far))
    assert alone.shape == both.shape
    assert (alone != both).any() == (num_layers > 1)
    twice = pixels(plot_distances({"one-hop": near, "two-hop": far}))
    assert twice.shape[1] > alone.shape[1]


@pytest.mark.parametrize("count", [1, 5, 16, 17, 31, 100])
@pytest.mark.parametrize("factor", [1, 1310])
def test_the_legend_of_any_number_of_lines(
    monkeypatch: pytest.MonkeyPatch, count: int, factor: int
) -> None:
    """It shows whole, beside lines that keep their room."""
    figures: list[Any] = []
    write = analysis_plots._png
    monkeypatch.setattr(analysis_plots, "_png", lambda each: figures.append(each) or write(each))
    plot_recall({factor * k: (0.2, 0.3, 0.9) for k in range(1, count + 1)})
    (figure,) = figures
    (axes,), (legend,) = figure.axes, figure.legends
    figure.draw_without_rendering()
    box = legend.get_window_extent()
    assert len(legend.get_texts()) == count
    assert 0 <= box.y0 < box.y1 <= figure.bbox.y1
    assert axes.get_tightbbox().x1 <= box.x0 < box.x1 <= figure.bbox.x1
    assert axes.get_window_extent().width > 4 * figure.dpi
