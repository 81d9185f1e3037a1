"""The study of readings: its saliencies against plain loops and against the library's scorers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.front.readings import one_reading, second_reading, study, table, times
from benchmarks.front.readings.given import given, selector
from benchmarks.front.readings.questions import Questions, questions
from benchmarks.front.readings.reading import Reading, read, rotated
from benchmarks.front.readings.rules import BASES, SCALES, Rule, Saliency, ranks
from kvpolicy import CachePolicy, Scorer
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    AccumulatedAttentionScorer,
    CURScorer,
    GlobalThresholdSelector,
    KeyDiffScorer,
    KVzip,
    PassAllPropagation,
    PeakAttentionScorer,
)

LENGTH, LAYERS, HEADS, KV_HEADS = 37, 3, 6, 2
IDS = torch.randint(3, 53, (2, LENGTH), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A model whose attention is peaked: with small weights all tokens would be alike."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=53, hidden_size=48, intermediate_size=32, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=8,
        initializer_range=0.5, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def reading(model: LlamaForCausalLM) -> Reading:
    return read(model, IDS)


def kept(model: LlamaForCausalLM, policy: CachePolicy) -> list[list[list[set[int]]]]:
    """Return the kept positions of every layer, row and KV head."""
    cache = PolicyCache(policy)
    with cache.attached(model), torch.no_grad():
        model(IDS, cache=cache)
    return [
        [[{at for at in head if at >= 0} for head in row] for row in layer.positions.tolist()]
        for layer in cache.layers
    ]


def close(found: Saliency, wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def places_of(rule: str, length: int) -> list[int]:
    return {
        "fixed": [length] * length,
        "shifted": list(range(length, 2 * length)),
        "own-unmasked": list(range(length)),
    }[rule]


@pytest.mark.parametrize("rule", ["fixed", "shifted", "own-unmasked"])
def test_the_largest_attention_of_turned_queries(rule: str, reading: Reading) -> None:
    wanted = []
    for states in reading.layers:
        of_layer = torch.zeros(2, KV_HEADS, LENGTH)
        keys = rotated(reading.model, states.keys, torch.arange(LENGTH))
        for head in range(HEADS):
            own = of_layer[:, head // 3]
            for index, place in enumerate(places_of(rule, LENGTH)):
                query = states.queries[:, head : head + 1, index : index + 1]
                query = rotated(reading.model, query, torch.tensor([place]))[:, 0, 0]
                logits = torch.einsum("bd,bkd->bk", query, keys[:, head // 3]) / 8**0.5
                own.copy_(torch.maximum(own, logits.softmax(dim=-1)))
        wanted.append(of_layer)
    close(BASES[rule].of(reading), wanted)
    assert max(float(each.max()) for each in wanted) > 0.8  # the weights are peaked


def test_fewer_queries_chunks_groups_and_copies_of_the_main_rule(reading: Reading) -> None:
    every, main = one_reading.fixed(reading, every=2), one_reading.fixed(reading)
    assert all((few <= all_).all() for few, all_ in zip(every, main, strict=True))
    assert not all(torch.equal(few, all_) for few, all_ in zip(every, main, strict=True))
    close(one_reading.fixed_in_chunks(reading, LENGTH), list(main))
    first = one_reading.fixed_in_chunks(reading, 19)[1][..., :19]
    assert (first >= main[1][..., :19] - 1e-6).mean(dtype=torch.float32) > 0.5
    least, mean = (one_reading.fixed(reading, group=how)[1] for how in ("min", "mean"))
    assert (least <= mean).all()
    assert (mean <= main[1]).all()
    copied = one_reading.copied_down(reading, 2)
    assert copied[0] is copied[1]
    assert torch.equal(copied[0], main[2])
    sums = one_reading.fixed(reading, total=True)[0].sum(dim=-1)
    assert (sums >= LENGTH).all()  # every query gives 1, and the group's largest counts


@pytest.mark.parametrize(
    ("base", "scorer", "chosen"),
    [
        (one_reading.own_sums, AccumulatedAttentionScorer(), "global"),
        (one_reading.own_peaks, PeakAttentionScorer(), "global"),
        (one_reading.key_difference, KeyDiffScorer(), "global"),
        # The library divides by each head's sum, so that one threshold would choose differently.
        (one_reading.leverage, CURScorer(), "equal"),
    ],
    ids=["sums", "peaks", "keydiff", "leverage"],
)
def test_gives_what_the_librarys_scorer_gives(
    base: Any, scorer: Scorer, chosen: str, model: LlamaForCausalLM, reading: Reading
) -> None:
    theirs = CachePolicy(scorer, selector(chosen, 0.3), PassAllPropagation())
    assert kept(model, given(base(reading), chosen, 0.3)) == kept(model, theirs)


def test_a_whole_second_reading_is_kvzip(model: LlamaForCausalLM, reading: Reading) -> None:
    found = kept(model, given(second_reading.whole(reading), "global", 0.3))
    assert found == kept(model, KVzip(0.3))
    assert found != kept(model, given(one_reading.fixed(reading), "global", 0.3))


def test_parts_of_a_second_reading_agree_with_the_whole(reading: Reading) -> None:
    whole, main = second_reading.whole(reading), one_reading.fixed(reading)
    first = second_reading.first_layers(reading, 2)
    close(first, [*whole[:2], main[2]])
    last = second_reading.last_layers(reading, 1)
    close(last[:1], [main[0]])
    assert not torch.allclose(last[1], whole[1])  # other states enter than in the whole
    close(second_reading.every_second(reading, 1), list(whole))
    fewer = second_reading.fewer_behind(reading, 0, 0.5)
    close(fewer[:1], list(whole[:1]))
    assert not torch.allclose(fewer[2], whole[2])


def test_the_oracle_is_the_attention_of_what_truly_follows(
    model: LlamaForCausalLM, reading: Reading
) -> None:
    following = IDS[:, :5].flip(1)
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            found = model(torch.cat([IDS, following], dim=1), output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    wanted = [each[:, :, LENGTH:, :LENGTH].amax(dim=2) for each in found]
    close(
        second_reading.oracle(reading, following.tolist()),
        [each.unflatten(1, (KV_HEADS, -1)).amax(dim=2) for each in wanted],
    )


def test_surprise_is_minus_the_log_of_the_chance(reading: Reading) -> None:
    chance = reading.logits.softmax(dim=-1)[1, 6, IDS[1, 7]]
    found = one_reading.surprise(reading)
    assert found[0].shape == (2, KV_HEADS, LENGTH)
    torch.testing.assert_close(found[2][1, 1, 7], -chance.log())


def test_output_norms_are_those_of_what_a_value_adds(reading: Reading) -> None:
    weight = reading.model.model.layers[1].self_attn.o_proj.weight
    alone = torch.zeros(2, LENGTH, HEADS, 8)
    alone[:, :, 4] = reading.layers[1].values[:, 1]
    one = (alone.flatten(2) @ weight.T).norm(dim=-1)
    found = one_reading.output_norms(reading)[1][:, 1]
    assert (found >= one - 1e-5).all()
    assert torch.isclose(found, one).any()


def test_scales_and_joins_by_hand() -> None:
    one = torch.tensor([[[1.0, 3.0], [2.0, 6.0]]])
    assert SCALES["mean"](one).tolist() == [[[0.5, 1.5], [0.5, 1.5]]]
    torch.testing.assert_close(SCALES["layer"](one), torch.tensor([[[1 / 3, 1.0], [2 / 3, 2.0]]]))
    torch.testing.assert_close(SCALES["std"](one), torch.tensor([[[-(0.5**0.5), 0.5**0.5]] * 2]))
    sinks = torch.tensor([[[99.0, 9, 9, 9, 1, 3]]])
    assert SCALES["mean4"](sinks).tolist() == [[[0, 0, 0, 0, 0.5, 1.5]]]
    assert ranks(torch.tensor([5.0, 1.0, 9.0])).tolist() == [0.5, 0, 1]
    left, right = torch.tensor([[[1.0, 5, 9]]]), torch.tensor([[[7.0, 3, 2]]])
    joined = {
        sign: Rule.named(f"fixed{sign}values").joined((left,), (right,))[0].tolist()
        for sign in "*&|"
    }
    assert joined == {"*": [[[7, 15, 18]]], "&": [[[0, 0.25, 0]]], "|": [[[1, 0.5, 1]]]}


@pytest.mark.parametrize("name", ["other", "fixed*other", "fixed+other", "fixed/other", "fixed*"])
def test_unknown_rules_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="rule must be BASE"):
        Rule.named(name)


def test_given_saliencies_choose_by_one_threshold(
    model: LlamaForCausalLM, reading: Reading
) -> None:
    of_layers = tuple(torch.full((2, KV_HEADS, LENGTH), 1.0 * each) for each in range(LAYERS))
    found = kept(model, given(of_layers, "global", 0.3))
    # 6 heads of 11 tokens; beside the sinks, the last layer's first head has all of its 33.
    assert [[len(head) for head in layer[0]] for layer in found] == [[4, 4], [4, 4], [37, 13]]


@pytest.mark.parametrize("task", ["needle", "words", "long"])
def test_what_follows_is_the_question_and_a_right_answer(task: str) -> None:
    module: Any = study.MODULES[task]
    kind = study.KINDS[task][0]
    block = questions(task, module.load_tokenizer(), kind, 160, 3, 9)
    part = block.rows(1, 3)
    assert len(part.asked.documents) == len(part.following) == 2
    for index, ids in enumerate(part.following):
        question = part.asked.questions[index].tolist()
        assert ids[: len(question)] == question
        answer = [*ids[len(question) :], *_last(module, block, ids)]
        assert part.asked.score(index, answer) == 1.0
        assert part.asked.score(index, [0] * len(answer)) == 0.0


def _last(module: Any, block: Questions, ids: Any) -> list[int]:
    """Return the token that a trained model writes last, found by trying."""
    model = module.load_model()
    document = next(
        row
        for row, each in zip(block.asked.documents, block.following, strict=True)
        if each is ids or list(each) == list(ids)
    )
    with torch.no_grad():
        logits = model(torch.cat([document, torch.tensor(ids)])[None]).logits
    return [int(logits[0, -1].argmax())]


def test_the_study_measures_and_its_table_is_paired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "f.json"
    small = ["--length", "160", "--count", "3", "--batch", "2", "--each", "--out", str(out)]
    rules = ["full_context", "kvzip", "curdkv", "fixed+std", "fixed*values+mean/equal", "oracle"]
    study.main([*small, "--seeds", "3", "--rates", "0.3", "--rules", *rules])
    data = json.loads(out.read_text())
    rows = {row["name"]: row for row in data["rows"]}
    assert list(rows) == rules
    assert rows["full_context"]["scores"] == {"one-hop": 1.0, "two-hop": 1.0}
    assert rows["fixed+std"]["held"] == pytest.approx(47 / 158, abs=0.01)
    assert (rows["fixed+std"]["work"], rows["fixed+std"]["products"]) == (1.0, 3.0)
    assert (rows["kvzip"]["work"], rows["kvzip"]["products"]) == (2.0, 7.0)
    assert rows["oracle"]["scores"]["one-hop"] == 1.0
    study.main([*small, "--seeds", "3", "--rates", "0.3", "--rules", *rules])
    assert json.loads(out.read_text()) == data  # nothing is measured twice
    table.main([str(out), "--against", "kvzip"])
    said = capsys.readouterr().out
    assert "| fixed+std | 1.00 | 3.0 |" in said
    assert "± " in said


def test_the_choice_takes_time_beyond_the_prefill(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    times.main(
        ["--rules", "kvzip", "fixed+mean", "--rounds", "2", "--length", "160", "--out", str(out)]
    )
    data = json.loads(out.read_text())
    taken = {row["name"]: row["choice_s"] for row in data["rows"]}
    assert list(taken) == ["kvzip", "fixed+mean"]
    assert min(data["prefill_s"], *taken.values()) > 0


def test_the_selectors_protect_the_sinks_alone() -> None:
    chosen = selector("global", 0.2)
    assert isinstance(chosen, GlobalThresholdSelector)
    assert (chosen.protect, chosen.window_size) == (4, 0)
