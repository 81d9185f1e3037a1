"""Matching, summaries, tables, worker processes and kvpress's rules, without kvpress."""

import doctest
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compare import EXPERIMENTS, options_of, whole
from sidebyside import processes, prompts, summary, tables
from sidebyside.behaviours import kept_of, padded_batch, second_turn
from sidebyside.dense import dense_logits, difference, visible_after
from sidebyside.press_selectors import PressPyramidSelector
from sidebyside.reading import PAD, Reading, left_padded, match_rows
from sidebyside.rules import as_kvpress
from sidebyside.summary import (
    agreements,
    kept_counts,
    ratio_to_full,
    share_right,
    turns_of,
)
from sidebyside.tables import show
from sidebyside.timing import peak_memory, timed_turn
from transformers import PreTrainedModel

from kvpolicy import LayerContext
from kvpolicy.layer_inputs import AttentionSettings
from tests.reference import random_tokens, tiny_model

METHODS = ("snapkv", "streamingllm", "h2o", "tova", "keydiff", "pyramidkv")
SETTINGS = {"rate": 0.3, "window_size": 4, "kernel_size": 3, "num_sinks": 2}


@pytest.fixture(scope="module")
def library() -> Any:
    from run_ours import Kvpolicy

    return Kvpolicy()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=0)


@pytest.mark.parametrize("module", [summary, tables])
def test_examples(module: ModuleType) -> None:
    failures, tried = doctest.testmod(module)
    assert (failures, tried > 0) == (0, True)


def test_kept_keys_are_found_by_equality() -> None:
    full = torch.tensor([[1.0, 2], [3, 4], [1, 2], [5, 6]])
    assert match_rows(full[[3, 1]], full) == [1, 3]
    assert match_rows(full[[2, 0]], full) == [0, 2]  # equal keys take their places in turn


@pytest.mark.parametrize("row", [[[1.0, 2.0000002]], [[3.0, 4.0], [3.0, 4.0]]])
def test_a_key_that_is_not_there_is_an_error(row: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="kept must hold rows of full"):
        match_rows(torch.tensor(row), torch.tensor([[1.0, 2], [3, 4]]))


def test_agreement_of_choices() -> None:
    ours, theirs = [[[0, 1, 2, 9], [5]], [[1], [2]]], [[[0, 1, 2, 8], [5, 6, 7]], [[1], [3]]]
    assert agreements(ours, theirs) == [0.75, 0.5, 1.0, 0.0]
    with pytest.raises(ValueError, match=r"heads per layer \[2, 2\], got \[2\]"):
        agreements(ours, theirs[:1])


def test_counts_per_layer() -> None:
    assert kept_counts([[[1, 2], [3, 4]], [[1], [2, 3, 4, 5]]]) == [2, 2]


def test_only_whole_answers_count() -> None:
    assert share_right([[1, 2], [1, 3], [2, 1]], [(1, 2), (1, 2), (1, 2)]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_every_round_has_every_turn_once(number: int) -> None:
    turns = list(turns_of(["a", "b", "c"], number))
    assert len(turns) == len(set(turns)) == 6
    assert turns[0] == (["a", "b", "c"][number], "kvpress" if number % 2 else "kvpolicy")


def time_row(method: str, library: str, seconds: list[float]) -> dict[str, Any]:
    return {
        "method": method,
        "library": library,
        "context": 8192,
        "prefill_s": seconds,
        "prefill_cpu_s": seconds,
        "decode_s": [each / 50 for each in seconds],
        "decode_cpu_s": [each / 100 for each in seconds],
        "peak_bytes": [5_000_000_000],
    }


def test_ratios_are_taken_round_by_round_within_a_library() -> None:
    rows = [
        time_row("full", "kvpress", [100.0, 100.0, 100.0]),
        time_row("full", "kvpolicy", [1.0, 2.0, 4.0]),
        time_row("snapkv", "kvpolicy", [2.0, 2.0, 2.0]),
    ]
    assert ratio_to_full(rows, rows[2], "prefill_s") == (1.0, 0.5, 2.0)


def record() -> dict[str, Any]:
    long = "streamingllm"
    batch = {"kept_alone": 102400, "kept": 102400, "kept_padding": 99999, "kept_in_both": 99999}
    batch |= {"visible": 4096, "second_step_difference": 12.5, "difference_from_kept": 1e-6}
    turn = {"new_tokens": 4096, "computed": 8192, "first_position": 8192, "held": [8192, 4096]}
    who = {"method": long, "library": "kvpolicy"}
    return {
        "times": [
            time_row("full", "kvpress", [10.123, 10.123]),
            time_row(long, "kvpress", [90.4, 100.6]),
        ],
        "kept": [
            {
                "method": long,
                "model": "random",
                "context": 8192,
                "kvpolicy": [1558, 80],
                "kvpress": [819, 819],
                "agreements": [1.0, 0.5],
                "agreements_by_rule": [1.0, 1.0],
            }
        ],
        "answers": [{"method": long, "rate": 0.05, "kvpolicy": [1.0, 0.5], "kvpress": [0.0, 1.0]}],
        "batch": [{**who, **batch}, {**who, **batch, "visible": None}],
        "turns": [
            {**who, "way": "generate", **turn, "difference_from_kept": 2.5},
            {**who, "way": "generate", "error": "RuntimeError: " + "long " * 30},
        ],
    }


def test_tables_are_narrow_and_say_the_figures() -> None:
    text = show(record())
    assert max(map(len, text.splitlines())) <= 80
    for figure in (
        "10.1 (10.1-10.1)",
        "96 (90-101)",
        " 9.43 ",
        "5000",
        "1558-80",
        "0.750 (0.500)",
        "100 / 50",
        "2.5e+00",
    ):
        assert figure in text


def test_left_padding() -> None:
    ids, mask = left_padded([[5, 6], [7, 8, 9]])
    assert ids.tolist() == [[PAD, 5, 6], [7, 8, 9]]
    assert mask.tolist() == [[0, 1, 1], [1, 1, 1]]


def test_masks_hide_what_was_evicted_from_later_tokens_only() -> None:
    (mask,) = visible_after([[[0, 2], [1]]], first_len=3, length=5)
    causal = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert mask[0].int().tolist() == [*causal, [1, 0, 1, 1, 0], [1, 0, 1, 1, 1]]
    assert mask[1].int().tolist() == [*causal, [0, 1, 0, 1, 0], [0, 1, 0, 1, 1]]


def test_dense_attention_to_all_is_the_model(model: PreTrainedModel) -> None:
    ids = random_tokens(0, 20)
    everything = [[list(range(15))] * 2] * 4
    expected = model(torch.tensor([ids])).logits[0, -1].detach()
    assert difference(dense_logits(model, ids, everything, 15), expected) < 1e-4
    nothing = [[[]] * 2] * 4
    assert difference(dense_logits(model, ids, nothing, 15), expected) > 0.1
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("method", METHODS)
def test_behaviours_of_kvpolicy(library: Any, model: PreTrainedModel, method: str) -> None:
    rows = [random_tokens(1, 40), random_tokens(2, 60)]
    padded, _ = padded_batch(library, model, method, SETTINGS, rows)
    assert padded["padding"] == 20
    assert padded["kept_alone"] == padded["kept"] == padded["kept_in_both"] == 12 * 8
    assert padded["kept_padding"] == 0
    assert padded["same_tokens"]
    assert max(padded["second_step_difference"], padded["difference_from_kept"]) < 1e-4
    for way in ("generate", "loop"):
        facts = second_turn(library, model, method, SETTINGS, rows[1], rows[0][:10], way=way)
        assert facts["computed"] == 11
        assert facts["first_position"] == 63
        assert sum(facts["held"]) == 4 * int(74 * 0.3)
        assert facts["difference_from_kept"] < 1e-4


def test_without_a_method_everything_is_held(library: Any, model: PreTrainedModel) -> None:
    turn = timed_turn(library.begin(model, "full", SETTINGS), random_tokens(0, 50), 3)
    assert turn["held_bytes"] == 50 * 4 * 2 * 2 * 8 * 4  # layers, KV heads, both, head_dim, bytes
    assert turn["prefill"]["wall_s"] > 0
    evicting = timed_turn(library.begin(model, "tova", SETTINGS), random_tokens(0, 50), 3)
    assert evicting["held_bytes"] == 15 * 4 * 2 * 2 * 8 * 4


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_memory_sees_what_was_freed_again(model: PreTrainedModel) -> None:
    class Wasteful(Reading):
        def prefilling(self) -> Any:
            torch.ones(25_000_000)  # 100 MB
            return super().prefilling()

    frugal = peak_memory(Reading(model), random_tokens(0, 30))
    wasteful = peak_memory(Wasteful(model), random_tokens(0, 30))
    assert wasteful - frugal > 90_000_000


def context(keys: torch.Tensor, queries: torch.Tensor, layer_idx: int = 0) -> LayerContext:
    length = keys.shape[2]
    return LayerContext(
        layer_idx=layer_idx,
        num_layers=4,
        queries=queries,
        keys=keys,
        values=keys,
        positions=torch.arange(length).expand(1, keys.shape[1], length),
        new_valid=torch.ones(1, length, dtype=torch.bool),
        seen_len=(length,),
        attention=AttentionSettings(0.5),
    )


def press_scores(method: str, attention: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """A press's scores ``[1, kv_heads, length]``, in loops, of attention ``[heads, q, length]``."""
    heads, length = attention.shape[0], attention.shape[2]
    scores = torch.full((heads, length), torch.inf)
    for head in range(heads):
        for key in range(length):
            column = attention[head, :, key]
            if method == "h2o":
                scores[head, key] = column.sum() / (length - key)
            elif method == "snapkv" and key < length - 4:
                near = [j for j in (key - 1, key, key + 1) if 0 <= j < length - 4]
                scores[head, key] = sum(attention[head, -4:, j].mean() for j in near) / 3
            elif method == "tova" and key < length - 1:
                scores[head, key] = attention[:, -1, key].mean()
    return scores.view(1, kv_heads, -1, length).mean(dim=2)


@pytest.mark.parametrize("method", ["snapkv", "h2o", "tova"])
def test_rules_of_kvpress(method: str) -> None:
    keys, queries = 3 * torch.randn(1, 2, 30, 4), torch.randn(1, 6, 30, 4)
    logits = queries @ keys.repeat_interleave(3, dim=1).transpose(-1, -2) * 0.5
    hidden = torch.ones(30, 30, dtype=torch.bool).triu(1)
    attention = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)[0]
    policy = as_kvpress(method, SETTINGS)
    shown = queries if policy.num_queries is None else queries[:, :, -policy.num_queries :]
    kept = policy.decide(context(keys, shown)).kept
    expected = press_scores(method, attention, kv_heads=2).topk(9).indices.sort().values
    assert torch.equal(kept, expected)


def test_key_diff_by_its_rule_protects_nothing() -> None:
    keys = torch.randn(1, 1, 20, 4)
    keys[0, 0, -1] = keys[0, 0].mean(dim=0)  # the last key is the least distinct
    kept = as_kvpress("keydiff", SETTINGS).decide(context(keys, torch.empty(1, 1, 0, 4))).kept
    assert 19 not in kept[0, 0].tolist()


def test_pyramid_budgets_of_kvpress() -> None:
    selector = PressPyramidSelector(0.25, window_size=8)
    # 200 of 800: from 390 to 10 in steps of 380 / 7.
    counts = [selector.count(800, 8, layer, 8) for layer in range(8)]
    assert counts == [390, 336, 281, 227, 173, 119, 64, 10]
    # 100 of 400: the last layer's 5 are fewer than the window, so that all keep as many.
    assert {selector.count(400, 8, layer, 8) for layer in range(8)} == {100}


def test_kept_positions_of_one_prompt(library: Any, model: PreTrainedModel) -> None:
    kept = kept_of(library, model, "streamingllm", SETTINGS, random_tokens(0, 20))
    assert kept == [[[0, 1, 16, 17, 18, 19]] * 2] * 4


def test_the_random_model_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        prompts.save_random_llama(tmp_path / name, 64)
        torch.manual_seed(17)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]
    assert 0 not in prompts.random_prompt(3, 500)


def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> processes.Worker:
    (tmp_path / "script.py").write_text(code)
    monkeypatch.setattr(processes, "SCRIPTS", tmp_path)
    return processes.Worker(Path(sys.executable), "script.py", tmp_path / "log", threads=1)


def test_a_worker_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import json, os\nanswer = [json.loads(input()), os.environ['OMP_NUM_THREADS']]\n"
    with worker(tmp_path, monkeypatch, code + "print(json.dumps(answer))") as started:
        assert started.ask("count", rate=0.5) == [{"do": "count", "rate": 0.5}, "1"]


def test_a_worker_that_ends_leaves_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        worker(tmp_path, monkeypatch, "input(); raise SystemExit('no memory')") as started,
        pytest.raises(RuntimeError, match="(?s)asked to do 'time'.*no memory"),
    ):
        started.ask("time")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kvpress-python", "/nowhere/python"], "make bench-kvpress"),
        (["--kvpress-python", sys.executable, "--rounds", "0"], "--rounds must be at least 1"),
        (["--kvpress-python", sys.executable, "--only", "kept", "--out", "."], "--only needs the"),
        (["--kvpress-python", sys.executable, "--lengths", "64"], "at least 128 tokens, got 64"),
    ],
)
def test_the_command_line_is_checked(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options_of(arguments)
    assert message in capsys.readouterr().err


def test_experiments_left_out_stay_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "kvpress.json"
    path.write_text('{"settings": 1, "kept": [1], "times": [2]}')
    assert whole({"settings": 9, "kept": [3]}, path) == {"settings": 1, "kept": [3], "times": [2]}
    every = dict.fromkeys(EXPERIMENTS, 0)
    assert whole(every, path) == every
