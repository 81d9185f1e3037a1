"""The comparison with kvpress: its rules by hand, our side on a tiny model, and its table."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import kvpress
from benchmarks.kvpress_rules import (
    PressAdaptiveSelector,
    PressChunkSelector,
    PressThresholdSelector,
    TiedLagScorer,
    TopKSelector,
)
from kvpolicy import LayerContext
from kvpolicy.layer_inputs import AttentionSettings
from tests.contexts import layer_context
from tests.reference import random_tokens, tiny_model

LAYERS, LENGTH = 4, 320
RATES = [0.5, 0.75]


def context(length: int) -> LayerContext:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(1, heads, length, 4, generator=generator) for heads in (6, 2, 2)
    )
    return layer_context(
        keys, num_layers=3, queries=queries, values=values, attention=AttentionSettings(0.5)
    )


def test_all_that_lagkv_always_keeps_scores_the_same() -> None:
    scores = TiedLagScorer(num_sinks=2, lag_size=4).score(context(16))[0]
    tied = scores == 1
    assert tied.tolist() == [[True] * 2 + [False] * 8 + [True] * 6] * 2
    assert scores.max() == 1
    expected = scores.topk(8).indices.sort().values
    selector = TopKSelector(0.5, window_size=0)
    assert torch.equal(selector.select(scores[None], context(16))[0], expected)


def test_chunks_are_kept_whole() -> None:
    saliency = torch.zeros(1, 2, 18)
    saliency[0, 0, 7], saliency[0, 1, 11] = 3.0, 2.0
    kept = PressChunkSelector(0.5, window_size=1, chunk_length=5).select(saliency, context(18))
    # Two of four chunks: that of token 7, and the last, whose token 17 scores most, at 3 for each.
    assert kept.tolist() == [[[5, 6, 7, 8, 9, 15, 16, 17]] * 2]


@pytest.mark.parametrize(("floor", "counts"), [(0.6, [14, 6]), (0.2, [16, 4]), (0.0, [16, 4])])
def test_a_floor_has_the_window_in_it(floor: float, counts: list[int]) -> None:
    saliency = torch.rand(1, 2, 20) + torch.tensor([[[1.0], [0.0]]])
    kept = PressAdaptiveSelector(0.5, window_size=4, floor=floor).select(saliency, context(20))
    assert (kept >= 0).sum(dim=-1).tolist() == [counts]
    assert (kept[0, :, -4:] == torch.arange(16, 20)).all()


def test_as_many_go_as_the_ratio_of_all() -> None:
    shown = [context(11)] * 3
    saliencies = list(torch.rand(3, 1, 2, 11))
    kept = PressThresholdSelector(0.3, window_size=0, protect=1).select_together(saliencies, shown)
    flat = torch.cat(saliencies)
    flat[..., 0] = 2.0
    least = flat.flatten().sort().values[int(66 * 0.7)]
    for layer, scores in zip(kept, flat, strict=True):
        for head in range(2):
            found = [place for place in layer[0, head].tolist() if place >= 0]
            assert found == (scores[head] >= least).nonzero()[:, 0].tolist()


def asked(model: str, **how: Any) -> dict[str, Any]:
    tokens = random_tokens(0, LENGTH)
    prompt = {"document": tokens[:-9], "question": tokens[-9:], "new_tokens": 3, "answers": ["7"]}
    repetition = {"instruction_ids": [5], "later_ids": [6], "answer_ids": [8], "unrepeated": 2}
    parts = {"rates": RATES, "methods": list(kvpress.METHODS), "prompts": [prompt]}
    return {"model": model, "repetition": repetition, **parts, **how}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which our side has answered."""
    folder = tmp_path_factory.mktemp("answers")
    model = tiny_model("llama", seed=0, num_layers=LAYERS)
    model.save_pretrained(folder / "model")
    (folder / "asked.json").write_text(json.dumps(asked(str(folder / "model"))))
    threads = torch.get_num_threads()
    kvpress.main(["--work", "kvpolicy", "--folder", str(folder)])
    torch.set_num_threads(threads)
    return folder


def test_every_method_keeps_its_rate(folder: Path) -> None:
    found = kvpress.answers_in(folder, "kvpolicy")
    assert list(found) == kvpress.keys_of(asked(""))
    assert found["full", 1.0, 0]["kept"] == []
    for (method, rate, _), row in found.items():
        assert len(row["tokens"]) <= 3
        if method == "full":
            continue
        read = LENGTH - 9 if kvpress.METHODS[method][2] else LENGTH
        counts = [[int(head, 16).bit_count() for head in layer] for layer in row["kept"]]
        assert [len(layer) for layer in counts] == [2] * LAYERS
        chunk = 20 if method == "chunkkv" else 1
        assert sum(map(sum, counts)) / (2 * LAYERS) == pytest.approx(rate * read, abs=chunk)
        assert max(int(head, 16).bit_length() for layer in row["kept"] for head in layer) <= read


def test_full_context_answers_as_generate(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    prompt = torch.tensor([random_tokens(0, LENGTH)])
    said = model.generate(prompt, max_new_tokens=3, do_sample=False)[0, LENGTH:]
    assert kvpress.answers_in(folder, "kvpolicy")["full", 1.0, 0]["tokens"] == said.tolist()


def test_what_was_answered_is_not_asked_again(folder: Path) -> None:
    path = folder / "kvpolicy.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-40])  # the last line is cut
    kvpress.work("kvpolicy", folder)
    assert path.read_text().splitlines()[:-2] == whole.splitlines()[:-1]
    old, new = (json.loads(text.splitlines()[-1]) for text in (whole, path.read_text()))
    assert new == {**old, "seconds": new["seconds"]}


def test_answers_to_other_prompts_are_refused(folder: Path) -> None:
    same = json.loads((folder / "asked.json").read_text())
    kvpress.check_same({**same, "rates": [0.1], "prompts": same["prompts"] * 2}, folder)
    with pytest.raises(ValueError, match="to the same prompts, got .*: delete it"):
        kvpress.check_same({**same, "prompts": [{}]}, folder)


def test_places_are_found_by_equal_keys() -> None:
    whole = torch.randn(7, 3)
    whole[4] = whole[1]
    assert kvpress.places_of(whole[[5, 1, 4, 0]], whole) == [5, 1, 4, 0]
    with pytest.raises(ValueError, match="one that is not left"):
        kvpress.places_of(whole[[1, 1, 4]], whole)


def test_rows_compare_texts_heads_and_right_answers(tmp_path: Path) -> None:
    def answer(tokens: list[int], kept: list[list[str]], seconds: float) -> str:
        row = {"method": "snapkv", "rate": 0.5, "prompt": 0, "tokens": tokens, "kept": kept}
        return json.dumps({**row, "seconds": seconds}) + "\n"

    (tmp_path / "kvpolicy.jsonl").write_text(answer([7, 8], [["b", "3"]], 2.0))
    (tmp_path / "kvpress.jsonl").write_text(answer([8], [["b", "5"]], 3.0))
    for name in kvpress.LIBRARIES:  # of an earlier start with more prompts
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write(answer([9], [["1", "1"]], 1.0).replace('"prompt": 0', '"prompt": 1'))
    only = asked("", rates=[0.5], methods=["snapkv"])
    (row,) = kvpress.rows_of(only, tmp_path, lambda ids: "\n".join(map(str, ids)))
    assert row == {
        "method": "snapkv",
        "press": "SnapKVPress",
        "setting": kvpress.METHODS["snapkv"][1],
        "rate": 0.5,
        "asked_later": False,
        "prompts": 1,
        "texts_equal": 0,
        "heads": 2,
        "heads_equal": 1,
        "heads_nested": 1,
        "shared": 2 * 4 / (5 + 5),
        "right": {"kvpolicy": 1, "kvpress": 0},
        "seconds": {"kvpolicy": 2.0, "kvpress": 3.0},
    }
    line = kvpress.table({"rows": [row]}).splitlines()[1]
    assert " ".join(line.split()) == "snapkv 50% known 0/1 1/2 1 0.8000 1/0 2.0/3.0"


def test_the_committed_result_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    kvpress.main(["--show", "benchmarks/results/kvpress.json"])
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[1:-1]} == set(kvpress.METHODS)
    assert max(map(len, lines)) <= 80


def test_showing_needs_no_interpreter() -> None:
    assert isinstance(kvpress.options_of(["--show", "x"]), argparse.Namespace)
