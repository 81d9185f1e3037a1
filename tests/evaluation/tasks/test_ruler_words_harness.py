"""The word tasks in the harness: their documents, scores, and where prompts end their documents."""

import pytest

from kvpolicy.evaluation.needle import load_tokenizer as load_needle_tokenizer
from kvpolicy.evaluation.tasks.harness_tasks import load_tasks, task_manager
from kvpolicy.evaluation.tasks.ruler_words import KINDS, load_tokenizer, prompts
from kvpolicy.integrations.lm_eval.splitters import document_end

LENGTHS = (128, 256)


def test_tasks_ask_the_prompts_and_score_their_answers() -> None:
    tokenizer = load_tokenizer()
    manager = task_manager(lengths=LENGTHS, tokenizer=tokenizer)
    tasks = load_tasks(["ruler_words"], manager, tokenizer=tokenizer, limit=2)
    assert set(tasks) == {f"ruler_words_{kind.replace('-', '_')}" for kind in KINDS}
    for kind in KINDS:
        name = f"ruler_words_{kind.replace('-', '_')}"
        task = tasks[name]
        asked = [prompt for length in LENGTHS for prompt in prompts(kind, length, 2, seed=0)]
        for doc, prompt in zip(task.test_docs(), asked, strict=True):
            text = task.doc_to_text(doc)
            assert text == prompt.input
            assert text[: document_end(name, doc, text)] == prompt.document
            assert tuple(task.doc_to_target(doc)) == prompt.outputs
            assert task.process_results(doc, [prompt.answer]) == {"string_match": 1.0}
            half = prompt.outputs[: (len(prompt.outputs) + 1) // 2]
            assert task.process_results(doc, [" ".join(half)]) == {
                "string_match": len(half) / len(prompt.outputs)
            }


def test_another_tokenizer_is_refused() -> None:
    tokenizer = load_needle_tokenizer()
    manager = task_manager(lengths=LENGTHS, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="tokenizer must be that of the bundled model ruler_words"):
        load_tasks(["ruler_words_single"], manager, tokenizer=tokenizer, limit=1)
