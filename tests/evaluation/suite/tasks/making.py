"""Documents of the tests' tasks: needle prompts as words, which the bundled model reads."""

from typing import Any

import datasets

from kvpolicy.evaluation.tasks.needle import NeedleTask, load_tokenizer

COUNT = 5


def documents(**metadata: Any) -> dict[str, datasets.Dataset]:
    """One-hop prompts of each length, the question apart from its context."""
    tokenizer = load_tokenizer()
    rows = []
    for length in metadata.get("max_seq_lengths", [128]):
        task = NeedleTask(context_len=length, num_pairs=min(16, length // 16))
        for prompt in task.prompts(COUNT, seed=1):
            words = tokenizer.convert_ids_to_tokens(list(prompt.input_ids))
            answer = " ".join(tokenizer.convert_ids_to_tokens(list(prompt.answer)))
            wrong = " ".join(reversed(answer.split()))
            rows.append(
                {
                    "context": " ".join(words[:-2]),
                    "question": " ".join(words[-2:]),
                    "answer": answer,
                    "choices": [wrong, answer],
                    "max_length": length,
                    "depth": prompt.depth,
                }
            )
    return {"test": datasets.Dataset.from_list(rows)}
