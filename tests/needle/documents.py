"""Needle questions as documents of lm-evaluation-harness, for the tasks of this folder."""

from collections.abc import Sequence
from typing import Any

import datasets

from kvpolicy.integrations.lm_eval import register_splitter
from tests.needle import NeedleTask, text_of

register_splitter("needle_*", lambda doc, prompt: len(doc["context"]))


def one_hop(**metadata: Any) -> dict[str, Any]:
    """The documents of the task ``needle_one_hop``."""
    return needle_documents(1, **metadata)


def two_hop(**metadata: Any) -> dict[str, Any]:
    """The documents of the task ``needle_two_hop``."""
    return needle_documents(2, **metadata)


def needle_documents(hops: int, max_seq_lengths: Sequence[int], **_: Any) -> dict[str, Any]:
    """Fifty documents of each length in tokens."""
    rows = [
        {
            "context": text_of(prompt.input_ids[:-2]),
            "question": text_of(prompt.input_ids[-2:]),
            "answer": text_of(prompt.answer),
        }
        for length in max_seq_lengths
        for prompt in NeedleTask(context_len=length, hops=hops).prompts(50)
    ]
    return {"test": datasets.Dataset.from_list(rows)}
