"""Long answers in the harness: their documents, scores, and where prompts end their documents."""

import pytest

from kvpolicy.evaluation.needle import load_tokenizer as load_needle_tokenizer
from kvpolicy.evaluation.tasks.harness_tasks import load_tasks, task_manager
from kvpolicy.evaluation.tasks.long_answers import KINDS, LongAnswerTask, load_tokenizer
from kvpolicy.integrations.lm_eval.splitters import document_end

LENGTHS = (64, 100)


def test_tasks_ask_the_prompts_and_score_their_answers() -> None:
    tokenizer = load_tokenizer()
    manager = task_manager(lengths=LENGTHS, tokenizer=tokenizer)
    tasks = load_tasks(["long_answers"], manager, tokenizer=tokenizer, limit=2)
    assert set(tasks) == {f"long_answers_{kind}" for kind in KINDS}
    for name, task in tasks.items():
        kind = name.removeprefix("long_answers_")
        asked = [each for length in LENGTHS for each in LongAnswerTask(kind, length).prompts(2)]
        for doc, prompt in zip(task.test_docs(), asked, strict=True):
            text, answer = task.doc_to_text(doc), tokenizer.decode(prompt.answer)
            assert text == tokenizer.decode(prompt.input_ids)
            assert text[: document_end(name, doc, text)] == " ".join(text.split()[:-3])
            assert task.doc_to_target(doc) == answer
            right = {"right_steps": 1.0, "exact_match": 1.0}
            assert task.process_results(doc, [answer]) == right
            steps = len(prompt.answer) // 4
            half = " ".join(answer.split()[: 4 * (steps // 2)])
            wrong = {"right_steps": steps // 2 / steps, "exact_match": 0.0}
            assert task.process_results(doc, [half]) == wrong
        assert task.config.generation_kwargs["max_gen_toks"] == LongAnswerTask(kind).steps * 4


def test_another_tokenizer_and_short_prompts_are_refused() -> None:
    other, own = load_needle_tokenizer(), load_tokenizer()
    manager = task_manager(lengths=LENGTHS, tokenizer=other)
    with pytest.raises(ValueError, match="tokenizer must be that of the bundled model long_answer"):
        load_tasks(["long_answers_loop"], manager, tokenizer=other, limit=1)
    with pytest.raises(ValueError, match="lengths must be at least 64 tokens, got 63"):
        load_tasks(["long_answers_loop"], task_manager(lengths=[63], tokenizer=own), limit=1)
