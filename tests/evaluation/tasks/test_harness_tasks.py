"""Tasks of the harness from local data, and made for a tokenizer, without a network."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.task import Task

from kvpolicy.evaluation.needle import NeedleTask, load_tokenizer
from kvpolicy.evaluation.tasks.harness_tasks import load_tasks, task_manager
from kvpolicy.evaluation.tasks.harness_tasks.essays import read_essays, sentences_of
from kvpolicy.evaluation.tasks.harness_tasks.loading import LocalTaskManager
from kvpolicy.evaluation.tasks.harness_tasks.ruler import seeded
from kvpolicy.evaluation.tasks.haystack.grid import NEEDLE
from kvpolicy.integrations.lm_eval.splitters import document_end

ROOT = Path(__file__).parents[3]
# Real examples, where a checkout has them beside it.
SHARED = [each / "shared/data" for each in ROOT.parents if (each / "shared/data").is_dir()]
pytestmark = pytest.mark.filterwarnings(
    "ignore:Using slow pure-python SequenceMatcher:UserWarning", "ignore::SyntaxWarning"
)

NEWS = {
    "input": "",
    "context": "Passage 1:\nRain fell.\u2028Passage 2:\nThe sun shone.\n",
    "answers": "['Rain, then sun.', \"It's wet.\"]",
    "length": 9,
    "dataset": "multi_news",
    "language": "en",
    "all_classes": None,
    "_id": "a1",
}
CLASSES = {
    "input": "Question: Who was he?\nType:",
    "context": "Question: Where is it?\nType: Location",
    "answers": ["Person"],
    "all_classes": ["Location", "Person"],
    "_id": "b1",
}
KEYS = {
    "index": 0,
    "input": "A special magic uuid is hidden.\nOne of them for ab is: 12.\nWhat is the special "
    "magic uuid for ab mentioned in the provided text? The special magic uuid for ab mentioned in "
    "the provided text is",
    "outputs": ["12"],
    "length": 700,
}


def lines(file: Path, *entries: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in entries))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the form of the real one."""
    folder = tmp_path_factory.mktemp("data")
    lines(folder / "longbench/multi_news.jsonl", NEWS, {**NEWS, "answers": "plain, not a list"})
    lines(folder / "longbench/trec.jsonl", CLASSES)
    lines(folder / "ruler/niah_multikey_3.jsonl", KEYS, {**KEYS, "length": 300})
    rng = random.Random(0)
    for name in ("b", "a"):
        (folder / "essays").mkdir(exist_ok=True)
        sentences = [
            " ".join(rng.choices(["sea", "sand", "salt", "wind"], k=9)).capitalize() + "."
            for _ in range(120)
        ]
        (folder / f"essays/{name}.txt").write_text(f"Essay {name}. " + " ".join(sentences))
    return folder


@pytest.fixture(scope="module")
def manager(data: Path) -> LocalTaskManager:
    return task_manager(data, [512, 1024], load_tokenizer())


def docs(task: Task) -> list[dict[str, Any]]:
    return list(task.eval_docs)


def test_longbench_from_its_own_files(manager: LocalTaskManager) -> None:
    tasks = load_tasks(["longbench_multi_news", "longbench_trec"], manager)
    news, trec = tasks["longbench_multi_news"], tasks["longbench_trec"]
    first, second = docs(news)
    assert first["context"] == NEWS["context"]
    assert first["answers"] == ["Rain, then sun.", "It's wet."]  # and not its characters
    assert second["answers"] == ["plain, not a list"]
    assert news.config.metadata["made_of"] == {"documents": "longbench/multi_news.jsonl"}
    assert news.process_results(first, ["Rain, then sun."])["score"] == pytest.approx(1.0)
    (doc,) = docs(trec)
    prompt = trec.doc_to_text(doc)
    assert prompt.endswith(f"{CLASSES['context']}\n{CLASSES['input']}")
    assert prompt[document_end("longbench_trec", doc, prompt) :] == f"\n{CLASSES['input']}"
    assert trec.process_results(doc, ["Person"])["score"] == 1.0


def test_prompts_of_ruler_from_files_where_they_have_the_length(manager: LocalTaskManager) -> None:
    task = load_tasks(["niah_multikey_3"], manager, limit=2)["niah_multikey_3"]
    rows = {length: [d for d in docs(task) if d["max_length"] == length] for length in (512, 1024)}
    assert [len(each) for each in rows.values()] == [1, 1]
    row = rows[1024][0]
    assert row["input"].endswith("uuid for ab mentioned in the provided text?")
    assert row["gen_prefix"] == "The special magic uuid for ab mentioned in the provided text is"
    text = task.doc_to_text(row)
    assert text[document_end("niah_multikey_3", row, text) :].startswith("What is the special")
    # The harness's metrics are called by lengths.
    assert task.process_results(row, [" 12."]) == {"1024": 1.0}
    assert {"512", "1024"} == set(task.aggregation())
    made_of = task.config.metadata["made_of"]
    assert made_of["1024"] == {"prompts": "ruler/niah_multikey_3.jsonl, of the lengths it says"}


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multiquery", "ruler_vt", "ruler_cwe"])
def test_prompts_of_ruler_as_the_harness_makes_them(manager: LocalTaskManager, name: str) -> None:
    lengths, tokenizer = [900, 1024], load_tokenizer()
    found = docs(load_tasks([name], manager, lengths, limit=3)[name])
    assert [each["max_length"] for each in found] == [900] * 3 + [1024] * 3
    for doc in found:
        assert len(tokenizer(doc["input"])["input_ids"]) < doc["max_length"]
        assert all(answer in doc["input"] for answer in doc["outputs"])
    # The same again, and a smaller number begins alike.
    assert docs(load_tasks([name], manager, lengths, limit=2)[name]) == found[:2] + found[3:5]


def test_other_draws_go_on_as_they_would_have() -> None:
    random.seed(5)
    np.random.seed(5)
    wanted = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    with seeded():
        made = random.random(), np.random.random()
    assert (random.random(), np.random.random()) == wanted != made


def test_essays_of_ruler_are_the_folder_s(manager: LocalTaskManager) -> None:
    task = load_tasks(["niah_single_2"], manager, [1024], limit=1)["niah_single_2"]
    (doc,) = docs(task)
    assert "Essay a. " in doc["input"]
    made_of = task.config.metadata["made_of"]["1024"]
    assert made_of["essays"] == "essays/*.txt"
    assert made_of["sentences"].startswith("split by kvpolicy")
    with pytest.raises(ValueError, match="data must hold essays of at least 8192 tokens"):
        load_tasks(["niah_single_2"], manager, [8192], limit=1)


def test_the_haystack_is_a_grid_of_lengths_and_depths(manager: LocalTaskManager) -> None:
    task = load_tasks(["haystack"], manager)["haystack"]
    found, tokenizer = docs(task), load_tokenizer()
    assert [(doc["max_length"], doc["depth"]) for doc in found] == [
        (length, percent / 100) for length in (512, 1024) for percent in range(0, 101, 10)
    ]
    for doc in found:
        prompt = task.doc_to_text(doc)
        tokens = len(tokenizer(prompt)["input_ids"])
        assert 0.8 * doc["max_length"] < tokens + 64 <= doc["max_length"]
        before, needle, after = doc["context"].partition(NEEDLE)
        share = len(before) / (len(before) + len(after))
        assert needle
        assert share == pytest.approx(doc["depth"], abs=0.06)
        assert prompt[document_end("haystack", doc, prompt) :].startswith(" </book>.\nBased on")
    assert task.process_results(found[0], [NEEDLE])["rouge1"] == 1.0
    assert 0 < task.process_results(found[0], ["Eat a sandwich."])["rouge1"] < 0.5
    few = docs(load_tasks(["haystack"], manager, [512], limit=3)["haystack"])
    assert [doc["depth"] for doc in few] == [0, 0.5, 1]


def test_the_needle_questions_are_the_task_s(manager: LocalTaskManager) -> None:
    tasks = load_tasks(["needle_one_hop", "needle_two_hop"], manager, limit=2)
    tokenizer = load_tokenizer()
    for name, hops in (("needle_one_hop", 1), ("needle_two_hop", 2)):
        task, found = tasks[name], docs(tasks[name])
        wanted = [
            prompt
            for length in (512, 1024)
            for prompt in NeedleTask(context_len=length, hops=hops).prompts(2)
        ]
        for doc, prompt in zip(found, wanted, strict=True):
            text = task.doc_to_text(doc)
            assert tokenizer(text)["input_ids"] == list(prompt.input_ids)
            assert tokenizer(doc["answer"])["input_ids"] == list(prompt.answer)
            question = tokenizer(text[document_end(name, doc, text) :])["input_ids"]
            assert question == list(prompt.input_ids[-2:])


@pytest.mark.skipif(not SHARED, reason="no real data beside the checkout")
def test_real_files() -> None:
    manager = task_manager(SHARED[0], [4096], load_tokenizer())
    names = ["longbench_multi_news", "longbench_passage_retrieval_zh", "niah_multikey_3"]
    tasks = load_tasks([*names, "haystack"], manager, limit=3)
    for name in names:
        found = docs(tasks[name])
        assert len(found) == 3
        for doc in found:
            prompt = tasks[name].doc_to_text(doc)
            assert 0 < document_end(name, doc, prompt) < len(prompt)
    answers = docs(tasks["longbench_multi_news"])[0]["answers"]
    assert len(answers) == 1
    assert answers[0].startswith("The Occupy LA encampment")
    assert all(NEEDLE in doc["context"] for doc in docs(tasks["haystack"]))
    assert len(sentences_of(read_essays(SHARED[0]))) > 1000


def test_groups_and_tags(data: Path) -> None:
    manager = task_manager(data, [512], load_tokenizer())
    tasks = load_tasks(["needle"], manager, limit=1)
    assert list(tasks) == ["needle_one_hop", "needle_two_hop"]
    with pytest.raises(ValueError, match=r"longbench/lcc.jsonl for the task longbench_lcc, got"):
        load_tasks(["longbench"], manager)


def test_tasks_of_one_s_own(data: Path, tmp_path: Path) -> None:
    lines(tmp_path / "mine.jsonl", *({"text": f"{index}", "answer": "a"} for index in range(5)))
    config: dict[str, Any] = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "mine.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
    }
    config["dataset_kwargs"]["cache_dir"] = str(tmp_path / "cache")
    (tmp_path / "mine.yaml").write_text(json.dumps(config))  # JSON is YAML
    manager = task_manager(data, include=[tmp_path])
    found = docs(load_tasks(["mine"], manager, limit=2)["mine"])
    assert [doc["text"] for doc in found] == ["0", "1"]


@pytest.mark.parametrize(
    ("name", "lengths", "message"),
    [
        ("ruler_vt", [200], "lengths must be at least .* for the task ruler_vt, got 200"),
        ("ruler_cwe", [200], "lengths must be at least .* for the task ruler_cwe, got 200"),
        ("ruler_fwe", [200], "lengths must be at least .* for the task ruler_fwe, got 200"),
        ("haystack", [140], "lengths must leave room for a sentence"),
        ("haystack", [9000], "data must hold essays of at least 9000 tokens"),
        ("needle_one_hop", [63], "lengths must be at least 64 tokens, got 63"),
        ("longbench_qasper", [512], "data must hold longbench/qasper.jsonl"),
    ],
)
def test_what_cannot_be_made(
    manager: LocalTaskManager, name: str, lengths: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_tasks([name], manager, lengths)


def test_bad_input(tmp_path: Path, data: Path) -> None:
    with pytest.raises(ValueError, match="data must be a folder"):
        task_manager(tmp_path / "none")
    without = task_manager(data)
    with pytest.raises(ValueError, match="tokenizer must be given for the task ruler_vt"):
        load_tasks(["ruler_vt"], without)
    with pytest.raises(ValueError, match="limit must be at least 1"):
        load_tasks(["longbench_trec"], without, limit=0)
    (tmp_path / "longbench").mkdir()
    file = tmp_path / "longbench/trec.jsonl"
    manager = task_manager(tmp_path)
    for text, message in (
        ("{", "line 1 of trec.jsonl must be a JSON object, got no JSON"),
        ("[]", "line 1 of trec.jsonl must be a JSON object, got list"),
        ('{"context": "a"}', "line 1 of trec.jsonl must have a context, an input"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_tasks(["longbench_trec"], manager)
    with pytest.raises(ValueError, match="data must hold essays"):
        load_tasks(["haystack"], manager, tokenizer=load_tokenizer())
    with pytest.raises(ValueError, match="tokenizer must be the bundled model's"):
        load_tasks(["needle_one_hop"], manager, tokenizer=_Other())


class _Other:
    name_or_path = "other"

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}


def test_unknown_names_say_which_are_near(manager: LocalTaskManager) -> None:
    with pytest.raises(ValueError, match="got 'niah_singel_1'; near: niah_single_1"):
        load_tasks(["niah_singel_1"], manager)
