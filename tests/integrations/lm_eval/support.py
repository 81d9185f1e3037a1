"""A tiny model with a tokenizer of characters, and tasks of the harness from local JSON lines."""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.reference.models import VOCAB_SIZE

PAD, EOS = "<pad>", "<eos>"
CHAT = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + (m['content'] | trim) + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: as many as the tiny models' vocabulary has."""
    names = [PAD, "\n", *(chr(code) for code in range(32, 126)), EOS]
    assert len(names) == VOCAB_SIZE
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        chat_template=CHAT,
    )


def sentence(rng: random.Random, words: int) -> str:
    """Words of random letters."""
    return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(2, 5))) for _ in range(words))


def documents(count: int = 5, *, words: int = 25) -> list[dict[str, Any]]:
    """Documents of different lengths, each with a question and four choices of unlike lengths."""
    rng = random.Random(3)
    return [
        {
            "context": sentence(rng, words - 3 * index) + ".",
            "question": f" {sentence(rng, 1 + index % 3)}?",
            "choices": [" a", " bc", " def", " dg"],
            "gold": index % 4,
            "answer": sentence(rng, 1),
        }
        for index in range(count)
    ]


def local_task(
    folder: Path, kind: str, docs: list[dict[str, Any]], **config: Any
) -> dict[str, Any]:
    """The configuration of a task that reads JSON lines, as a user would write it."""
    file = folder / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    kinds: dict[str, dict[str, Any]] = {
        "generate_until": {
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"max_gen_toks": 8, "do_sample": False, "until": ["\n"]},
            "metric_list": [
                {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
            ],
        },
        "multiple_choice": {"doc_to_choice": "{{choices}}", "doc_to_target": "gold"},
        "loglikelihood_rolling": {"doc_to_target": "{{context}}"},
    }
    text = "" if kind == "loglikelihood_rolling" else "{{context}}{{question}}"
    return {
        "task": f"local_{kind}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": kind,
        "doc_to_text": text,
        "target_delimiter": "",
        **kinds[kind],
        **config,
    }
