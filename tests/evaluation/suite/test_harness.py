"""The harness's tasks asked by our loop, against the harness's own loop."""

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from kvpolicy.evaluation import Loaded, load, variants
from kvpolicy.evaluation.suite.harness import HarnessRunner
from kvpolicy.evaluation.suite.sample import Cell
from kvpolicy.evaluation.suite.scoring import depth_of, scores_of
from kvpolicy.evaluation.tasks import harness_tasks
from kvpolicy.integrations.lm_eval import PolicyLM
from kvpolicy.policy import CachePolicy
from tests.evaluation.suite.tasks import TASKS
from tests.integrations.lm_eval.support import char_tokenizer, documents, local_task
from tests.integrations.model.builds.catalogue import builds
from tests.reference import VOCAB_SIZE, tiny_model

LENGTHS = [128, 192]
METHODS = ("full_context", "snapkv 0.1")


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load()


@pytest.fixture(scope="module")
def policies() -> dict[str, CachePolicy]:
    return {each.label: each.policy for each in variants(["full_context", "snapkv"], [0.1])}


def manager() -> TaskManager:
    return TaskManager(
        include_path=TASKS, include_defaults=False, metadata={"max_seq_lengths": LENGTHS}
    )


def load_tasks(*names: str) -> dict[str, Task]:
    tasks: dict[str, Task] = manager().load(list(names))["tasks"]
    return tasks


def runner(
    loaded: Loaded, policies: dict[str, CachePolicy], *names: str, **more: Any
) -> HarnessRunner:
    return HarnessRunner(loaded, load_tasks(*names), policies, **more)


@pytest.mark.parametrize(
    ("task", "metric"), [("needle_words", "exact_match"), ("needle_choice", "acc")]
)
@pytest.mark.parametrize("question", ["with", "later"])
def test_answers_are_those_of_the_harness(
    loaded: Loaded, policies: dict[str, CachePolicy], task: str, metric: str, question: str
) -> None:
    asking = runner(loaded, policies, task, questions=("with", "later"), batch_size=3)
    found = asking.documents()
    assert [(key, len(group)) for key, group in found.items()] == [
        ((task, 128), 5),
        ((task, 192), 5),
    ]
    wrong = 0
    for method in METHODS:
        model = PolicyLM(
            pretrained=loaded.model,
            tokenizer=loaded.tokenizer,
            policy=policies[method],
            question=question,
            batch_size=3,
        )
        results = simple_evaluate(
            model=model, tasks=[task], task_manager=manager(), bootstrap_iters=0
        )
        wanted = {each["doc_id"]: each for each in results["samples"][task]}
        for (_, length), group in found.items():
            answers = asking.answer(Cell(task, length, question, method), group)
            for document, answer in zip(group, answers, strict=True):
                sample = wanted[document.id]
                assert answer.scores == {metric: sample[metric]}
                if task == "needle_words":
                    assert answer.prediction == sample["filtered_resps"][0]
                assert document.references == (sample["doc"]["answer"],)
                assert document.prompt == sample["arguments"][0][0]
                assert document.depth == sample["doc"]["depth"]
                wrong += answer.scores[metric] == 0
    assert wrong > 0  # a comparison in which everything is right shows little


def test_costs_are_of_the_policy(loaded: Loaded, policies: dict[str, CachePolicy]) -> None:
    asking = runner(loaded, policies, "needle_words", limit=2)
    (_, short), (_, long) = asking.documents().items()
    assert len(short) == len(long) == 2
    for length, group in ((128, short), (192, long)):
        full, snap = (
            asking.answer(Cell("needle_words", length, "with", method), group)[0]
            for method in METHODS
        )
        assert full.tokens_seen == snap.tokens_seen == length
        assert full.tokens_kept == length
        assert snap.tokens_kept == int(length * 0.1)
        per_token = 6 * 2 * 2 * 16 * 4  # layers, keys and values, heads, size, float32
        assert full.bytes_held == length * per_token
        assert snap.bytes_held == int(length * 0.1) * per_token
        assert 0 < snap.prefill_seconds < snap.total_seconds


def test_documents_are_the_same_every_time(
    loaded: Loaded, policies: dict[str, CachePolicy]
) -> None:
    first, second = (runner(loaded, policies, "needle_words").documents() for _ in range(2))
    assert first == second


def test_prompts_that_do_not_fit(loaded: Loaded, policies: dict[str, CachePolicy]) -> None:
    task = load_tasks("needle_words")
    task["needle_words"].set_config("generation_kwargs", {"max_gen_toks": 4224 - 191})
    asking = HarnessRunner(loaded, task, policies)
    with pytest.raises(
        ValueError,
        match=r"4,224 positions of needle, got document 5 .* 192 tokens .* up to 4,033; give",
    ):
        asking.documents()


def test_questions_that_cannot_be_asked_later(
    policies: dict[str, CachePolicy], tmp_path: Path
) -> None:
    loaded = Loaded("tiny", tiny_model("llama", seed=1), char_tokenizer())
    config = local_task(tmp_path, "generate_until", documents(2))
    tasks = manager().load([config])["tasks"]
    with pytest.raises(ValueError, match="question must be 'with' for the task"):
        HarnessRunner(loaded, tasks, policies, questions=("with", "later")).documents()


def test_prompts_in_a_chat_template(policies: dict[str, CachePolicy], tmp_path: Path) -> None:
    """As a user's turn, asked with and later, and answered by both methods."""
    config = local_task(tmp_path, "generate_until", documents(2))
    tasks = manager().load([{**config, "task": "needle_local"}])["tasks"]
    loaded = Loaded("tiny", tiny_model("llama", seed=1), char_tokenizer())
    asking = HarnessRunner(loaded, tasks, policies, questions=("with", "later"), chat_template=True)
    (group,) = asking.documents().values()
    for document, doc in zip(group, documents(2), strict=True):
        text = f"{doc['context']}{doc['question']}"
        assert document.prompt == f"[user]{text}\n[assistant]"
    for question in ("with", "later"):
        for method in METHODS:
            cell = Cell("needle_local", None, question, method)
            answers = asking.answer(cell, group)
            assert [each.tokens_seen for each in answers] == [len(each.prompt) for each in group]


def test_ruler_is_one_score_at_each_length(policies: dict[str, CachePolicy]) -> None:
    """Of a model that says nothing right, and reads a token for every character."""
    model = tiny_model("llama", seed=1, num_layers=2)
    model.config.max_position_embeddings = 2048
    model.generation_config.eos_token_id = list(range(VOCAB_SIZE))  # one token answers
    loaded = Loaded("tiny", model, char_tokenizer())
    lengths = (1600, 1900)
    listed = harness_tasks.task_manager(None, lengths, loaded.tokenizer)
    tasks = harness_tasks.load_tasks(["niah_single_1"], listed, limit=1)
    asking = HarnessRunner(loaded, tasks, policies, questions=("with", "later"))
    found = asking.documents()
    assert list(found) == [("niah_single_1", length) for length in lengths]
    for (task, length), group in found.items():
        for question in ("with", "later"):
            answers = asking.answer(Cell(task, length, question, "snapkv 0.1"), group)
            assert [each.scores for each in answers] == [{"score": 0.0}]
        for document in group:
            (reference,) = document.references
            assert document.depth == document.prompt.index(reference) / len(document.prompt)


def test_whole_texts_have_no_prompt(
    loaded: Loaded, policies: dict[str, CachePolicy], tmp_path: Path
) -> None:
    config = local_task(tmp_path, "loglikelihood_rolling", documents(2))
    tasks = manager().load([config])["tasks"]
    with pytest.raises(ValueError, match="tasks must have prompts"):
        HarnessRunner(loaded, tasks, policies).documents()


def test_a_policy_that_cannot_be_applied(loaded: Loaded) -> None:
    (policy,) = (each.policy for each in variants(["fastkv"], [0.1], tsp_layer=9))
    full = {each.label: each.policy for each in variants(["full_context"])}
    asking = runner(loaded, {**full, "fastkv 0.1": policy}, "needle_words")
    with pytest.raises(ValueError, match="9"):
        asking.documents()


def test_a_refusal_in_the_words_of_the_command_line(tmp_path: Path) -> None:
    """Every layer of the model sees a window of 16 tokens."""
    model = builds()["ministral"].model()
    chosen = variants(["full_context", "gemfilter"], [0.1])
    tasks = manager().load([local_task(tmp_path, "generate_until", documents(2))])["tasks"]
    policies = {each.label: each.policy for each in chosen}
    asking = HarnessRunner(Loaded("tiny", model, char_tokenizer()), tasks, policies)
    with pytest.raises(ValueError, match=r"^gemfilter 0\.1 cannot be applied to tiny: ") as error:
        asking.documents()
    reason = str(error.value).partition(": ")[2]
    assert "if gemfilter 0.1 restarts the prefill" in reason
    assert "GemFilter" not in reason
    assert "(" not in reason


def test_depth_of_a_needle_by_hand() -> None:
    prompt = "0123456789" * 9 + "the needle"
    assert depth_of("niah_single_1", {}, prompt, ["needle"]) == 0.94
    assert depth_of("niah_single_1", {}, prompt * 2, ["needle"]) is None
    assert depth_of("niah_multivalue", {}, prompt, ["needle", "01"]) is None
    assert depth_of("qasper", {}, prompt, ["needle"]) is None
    assert depth_of("qasper", {"depth": 0.25}, prompt, ["needle"]) == 0.25


class Scored:
    """A task that scores as it is told to."""

    task_name = "told"

    def __init__(self, scores: dict[str, Any]) -> None:
        self.scores = scores

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        return self.scores

    def aggregation(self) -> dict[str, Any]:
        from lm_eval.api.metrics import mean, perplexity

        return {"acc": mean, "perplexity": perplexity}


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ({"acc": 1, "perplexity": -3.5}, {"acc": 1.0}),
        ({"4096": -1.0, "8192": 0.5, "16384": -1.0}, {"score": 0.5}),
        ({"own": 0.25, "pair": (1, 2)}, {"own": 0.25}),
    ],
)
def test_scores_of_one_document(scores: dict[str, Any], wanted: dict[str, float]) -> None:
    task: Any = Scored(scores)
    assert scores_of(task, 8192, [request()]) == wanted


@pytest.mark.parametrize("scores", [{"perplexity": -3.5}, {"own": -1.0}, {"own": 100.5}, {}])
def test_tasks_without_a_score_of_one_document(scores: dict[str, Any]) -> None:
    task: Any = Scored(scores)
    with pytest.raises(ValueError, match="tasks must score every document"):
        scores_of(task, None, [request()])


def request() -> Any:
    from lm_eval.api.instance import Instance

    made = Instance("generate_until", {}, ("prompt", {}), 0, metadata=("told", 0, 1))
    made.filtered_resps["none"] = json.dumps("answer")
    return made
