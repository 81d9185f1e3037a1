"""Make prompts of seven kinds of word tasks after RULER's, and load their bundled model.

A prompt is a document of English-like sentences and a question behind it. The document alone shows
nothing of what will be asked: all kinds of lookups may stand in it, in words of one set. An answer
counts by the part of its words that are found, as RULER's string match does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from .documents import LookupPlan, common_document, frequent_document, lookup_document
from .questions import KINDS
from .vocabulary import BOS, NOUN_LIST, SPECIAL_TOKENS

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

MODEL_DIR = Path(__file__).parent / "weights"
MIN_LENGTH = 128


@attrs.frozen
class WordPrompt:
    """A document of words, a question about it and the right answer.

    Attributes:
        kind: one of `KINDS`.
        document: the text of the document, ``<bos>`` first.
        question: the text of the question.
        outputs: the words that a right answer holds.
        answer: the text of the right answer.
    """

    kind: str
    document: str
    question: str
    outputs: tuple[str, ...]
    answer: str

    @property
    def input(self) -> str:
        """The document and the question as one text."""
        return f"{self.document} {self.question}"

    @property
    def max_new_tokens(self) -> int:
        """The number of tokens of the right answer."""
        return len(self.answer.split())


def prompts(kind: str, length: int = 1024, count: int = 50, seed: int = 0) -> list[WordPrompt]:
    """Draw RULER-like prompts of one kind, such as two-hop or common words.

    The same seed gives the same prompts, and a longer list starts with the shorter one.

    Args:
        kind: one of `KINDS`.
        length: tokens of every prompt, question included, at least 128.
        count: number of prompts, at least 0.
        seed: any integer.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> prompt = prompts("multi-query", length=256, count=1)[0]
        >>> len(prompt.input.split()), len(prompt.outputs)
        (256, 12)
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if length < MIN_LENGTH:
        raise ValueError(f"length must be at least {MIN_LENGTH} tokens, got {length}")
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}")
    rng = random.Random(f"{kind}/{length}/{seed}")
    return [_draw(rng, kind, length) for _ in range(count)]


def _draw(rng: random.Random, kind: str, length: int) -> WordPrompt:
    size = length - 1  # <bos>
    if kind == "common":
        sentences, question = common_document(rng, NOUN_LIST, size)
    elif kind == "frequent":
        sentences, question = frequent_document(rng, NOUN_LIST, size)
    else:
        sentences, question = lookup_document(rng, _plan(kind, length), size)
    words = [SPECIAL_TOKENS[BOS], *(word for sentence in sentences for word in sentence)]
    return WordPrompt(
        kind, " ".join(words), " ".join(question.words), question.outputs, " ".join(question.answer)
    )


def _plan(kind: str, length: int) -> LookupPlan:
    """Return how many named keys and node chains a lookup document of a kind and length has."""
    others = min(length // 32, 48)
    if kind == "single":
        return LookupPlan()
    if kind == "multi-key":
        return LookupPlan(num_others=min(length // 16, 96) - 1)
    if kind == "multi-query":
        return LookupPlan(num_asked=6, num_others=others - 2)
    if kind == "two-hop":
        return LookupPlan(num_others=others - 1, num_links=others // 2)
    return LookupPlan(num_others=others - 4, num_nodes=4, num_chains=min(length // 64, 16))


def score(generated: str, outputs: Sequence[str]) -> float:
    """Return the fraction of expected words that a generated text contains, in [0, 1].

    RULER's string match, by whole words: a word of the answer counts wherever it is.

    Args:
        generated: the continuation's text.
        outputs: expected words, at least one.

    Example:
        >>> score("river amber fox , river blue", ["amber", "fox", "blue", "moon"])
        0.75
    """
    if not outputs:
        raise ValueError("outputs must hold at least one word, got none")
    words = set(generated.split())
    return sum(word in words for word in outputs) / len(outputs)


def load_model(dtype: torch.dtype | None = None) -> LlamaForCausalLM:
    """Load the bundled model of the RULER-like tasks on the CPU, in evaluation mode.

    Args:
        dtype: of the weights; None means float32. The file holds bfloat16.
    """
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype or torch.float32).eval()


def load_tokenizer() -> PreTrainedTokenizerFast:
    """Load the bundled model's word-level tokenizer, which pads on the left."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)
