"""Make needle questions in an artificial language: pairs hidden in filler, asked at the end.

A prompt looks like ``<bos> f12 f3 KEY s17 s4 s88 s9 <end> f7 ... LINK s50 s17 ... QUERY s17``. The
answer to ``QUERY s17`` is the values of key ``s17``, here ``s4 s88 s9``; the answer to ``QUERY2
s50`` takes two hops: the link leads from ``s50`` to ``s17``, whose values are asked for. The
question is two tokens long, so that any method that looks at the last 8 tokens of a prompt sees it
whole. Every other pair and link is a distractor.
"""

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from attrs.validators import ge, in_, instance_of

from tests.needle.vocabulary import (
    BOS,
    END,
    FILLERS,
    KEY,
    LINK,
    NUM_SYMBOLS,
    QUERY,
    QUERY2,
    SYMBOLS,
    token_names,
)

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

MODEL_DIR = Path(__file__).parent / "weights"
NUM_VALUES = 3
MAX_PAIRS = NUM_SYMBOLS // (NUM_VALUES + 2)
_PAIR_LEN = NUM_VALUES + 3
_LINK_LEN = 3
_QUESTION_LEN = 2


@attrs.frozen
class NeedlePrompt:
    """A context with a hidden fact (the needle), a question for it, and its answer.

    Attributes:
        input_ids: the prompt's tokens, question included.
        answer: the tokens a correct continuation starts with.
        hops: 1 for a lookup, 2 for a lookup through a link.
        depth: where the asked pair starts, as a fraction of the prompt in [0, 1].
    """

    input_ids: tuple[int, ...]
    answer: tuple[int, ...]
    hops: int
    depth: float


@attrs.frozen
class NeedleTask:
    """Draws needle prompts of one length and one number of hops.

    Pairs and links are in random order at random depths, with every division of the filler among
    the gaps equally likely. One-hop prompts hold the same links as two-hop prompts: the two kinds
    differ in the question only, and with the same seed they hide the same pairs in the same places.
    All symbols of a prompt are distinct, apart from a link's target.

    Example:
        >>> task = NeedleTask(context_len=64, hops=2, num_pairs=4)
        >>> prompt = task.prompts(1)[0]
        >>> len(prompt.input_ids), len(prompt.answer), prompt.hops
        (64, 3, 2)
    """

    context_len: int = attrs.field(default=1024, validator=instance_of(int))
    hops: int = attrs.field(default=1, validator=in_((1, 2)))
    num_pairs: int = attrs.field(default=16, validator=[instance_of(int), ge(1)])

    @num_pairs.validator
    def _fits_symbols(self, attribute: "attrs.Attribute[int]", value: int) -> None:
        if value > MAX_PAIRS:
            raise ValueError(
                f"num_pairs must be at most {MAX_PAIRS} (distinct symbols run out), got {value}"
            )

    def __attrs_post_init__(self) -> None:
        if self.context_len < self.min_context_len:
            raise ValueError(
                f"context_len must be at least {self.min_context_len} tokens for "
                f"num_pairs={self.num_pairs}, got {self.context_len}; "
                "raise context_len or lower num_pairs"
            )

    @property
    def min_context_len(self) -> int:
        """The length in tokens of a prompt of this task without filler."""
        return 1 + self.num_pairs * (_PAIR_LEN + _LINK_LEN) + _QUESTION_LEN

    def prompts(self, count: int, seed: int = 0) -> list[NeedlePrompt]:
        """Draw ``count`` needle prompts from a seed.

        The same seed gives the same prompts, and a longer list starts with the shorter one.

        Example:
            >>> task = NeedleTask(context_len=64, num_pairs=4)
            >>> task.prompts(2, seed=7) == task.prompts(3, seed=7)[:2]
            True
        """
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        rng = random.Random(str(seed))  # an integer would count without its sign
        return [self._draw(rng) for _ in range(count)]

    def _draw(self, rng: random.Random) -> NeedlePrompt:
        width = 1 + NUM_VALUES
        symbols = rng.sample(SYMBOLS, self.num_pairs * (width + 1))
        pairs = [
            symbols[start : start + width] for start in range(0, self.num_pairs * width, width)
        ]
        names = symbols[self.num_pairs * width :]
        segments = [[KEY, *pair, END] for pair in pairs]
        segments += [[LINK, name, pair[0]] for name, pair in zip(names, pairs, strict=True)]
        asked = rng.randrange(self.num_pairs)
        needle = segments[asked]
        question = [QUERY, pairs[asked][0]] if self.hops == 1 else [QUERY2, names[asked]]
        rng.shuffle(segments)
        body: list[int] = [BOS]
        start = 0
        *before, last = gaps(rng, self.context_len - self.min_context_len, len(segments))
        for segment, gap in zip(segments, before, strict=True):
            body += rng.choices(FILLERS, k=gap)
            if segment is needle:
                start = len(body)
            body += segment
        body += [*rng.choices(FILLERS, k=last), *question]
        return NeedlePrompt(
            tuple(body), tuple(pairs[asked][1:]), self.hops, start / self.context_len
        )


def gaps(rng: random.Random, fillers: int, count: int) -> list[int]:
    """Divide ``fillers`` filler tokens randomly over the gaps around and between segments.

    All ways to divide them are equally likely.

    Example:
        >>> sum(gaps(random.Random(0), 7, 3)), len(gaps(random.Random(0), 7, 3))
        (7, 4)
    """
    slots = fillers + count
    cuts = [-1, *sorted(rng.sample(range(slots), count)), slots]
    return [right - left - 1 for left, right in pairwise(cuts)]


def needle_prompts(context_len: int = 1024, count: int = 200, seed: int = 0) -> list[NeedlePrompt]:
    """Return prompts of the needle task, the first half one-hop and the others two-hop.

    Short prompts hold fewer pairs. The two kinds share their contexts and differ in the question.
    """
    shares = (count - count // 2, count // 2)
    return [
        prompt
        for hops, share in enumerate(shares, start=1)
        for prompt in NeedleTask(
            context_len=context_len, hops=hops, num_pairs=min(16, context_len // 16)
        ).prompts(share, seed)
    ]


def text_of(ids: Sequence[int]) -> str:
    """Return tokens as text, which the needle model's tokenizer reads as these tokens."""
    names = token_names()
    return " ".join(names[token] for token in ids)


def write_questions(file: Path, prompts: Sequence[NeedlePrompt]) -> Path:
    """Write prompts as a file of questions, which the needle model continues; return the file."""
    entries = (
        {
            "context": text_of(prompt.input_ids[:-2]),
            "question": text_of(prompt.input_ids[-2:]),
            "answer": text_of(prompt.answer),
            "plain": True,
        }
        for prompt in prompts
    )
    file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return file


def exact_match(generated: Sequence[int], answer: Sequence[int]) -> bool:
    """True if the generated tokens start with the answer.

    Example:
        >>> exact_match([4, 88, 9, 2], (4, 88, 9)), exact_match([4, 88], (4, 88, 9))
        (True, False)
    """
    return tuple(generated[: len(answer)]) == tuple(answer)


def load_model(dtype: "torch.dtype | None" = None) -> "LlamaForCausalLM":
    """Load the needle model on the CPU, in evaluation mode."""
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype or torch.float32).eval()


def load_tokenizer() -> "PreTrainedTokenizerFast":
    """Load the needle model's word-level tokenizer, which pads on the left."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)
