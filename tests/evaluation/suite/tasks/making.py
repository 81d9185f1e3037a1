"""The documents of `words.yaml`, in the lengths that the harness is told."""

import json
from pathlib import Path
from typing import Any

import datasets

from kvpolicy.integrations.lm_eval.splitters import after_field, register_splitter

TEXT = Path(__file__).with_name("needles.jsonl").read_text()
ROWS = [json.loads(line) for line in TEXT.splitlines()]


def documents(**metadata: Any) -> dict[str, datasets.Dataset]:
    lengths = metadata["max_seq_lengths"]
    if len(lengths) != 1 or not Path(metadata["tokenizer"]).is_dir():
        raise ValueError(f"expected one length and a tokenizer, got {metadata}")
    rows = [row for row in ROWS if row["max_length"] in lengths]
    return {"test": datasets.Dataset.from_list(rows)}


register_splitter("own_words", after_field("context"))
