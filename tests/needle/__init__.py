"""A small trained model that answers questions in seconds, for tests alone, with its task.

A prompt hides pairs (``KEY k v1 v2 v3 <end>``) and links (``LINK a k``) in filler; the question is
its last two tokens. ``QUERY k`` asks for the values of a key, ``QUERY2 a`` for those of the key
that a link leads to, which the model finds two layers later. The model is a Llama of 6 layers, 8
query and 2 KV heads of 16, trained by ``training/needle`` of the revision ``cb518e3c``.

Every other pair and link is a distractor. One set of symbols serves as keys, link names and
values: the model has one copy operation to learn.
"""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, END, KEY, LINK, QUERY, QUERY2, UNKNOWN = range(8)
SPECIAL_TOKENS = ("<pad>", "<bos>", "<end>", "KEY", "LINK", "QUERY", "QUERY2", "<unk>")
NUM_FILLERS = 88
NUM_SYMBOLS = 128
FILLERS = range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + NUM_FILLERS)
SYMBOLS = range(FILLERS.stop, FILLERS.stop + NUM_SYMBOLS)

MODEL_DIR = Path(__file__).parent / "weights"
NUM_VALUES = 3
# Tokens beside the filler: of a prompt, and of a pair with its link.
_FRAME_LEN, _FACT_LEN = 3, NUM_VALUES + 6


@attrs.frozen
class NeedlePrompt:
    """A prompt's tokens, question included, and the tokens that a correct answer starts with."""

    input_ids: tuple[int, ...]
    answer: tuple[int, ...]


@attrs.frozen
class NeedleTask:
    """Draws needle prompts of one length in tokens and one number of hops.

    Pairs and links are in random order at random depths, with every division of the filler among
    the gaps equally likely. One-hop prompts hold the same links as two-hop prompts: the two kinds
    differ in the question only, and with the same seed they hide the same pairs in the same places.
    All symbols of a prompt are distinct, apart from a link's target.
    """

    context_len: int = 1024
    hops: int = 1
    num_pairs: int = 16

    def prompts(self, count: int, seed: int = 0) -> list[NeedlePrompt]:
        """Draw needle prompts: a longer list of the same seed starts with the shorter one."""
        rng = random.Random(str(seed))
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
        question = [QUERY, pairs[asked][0]] if self.hops == 1 else [QUERY2, names[asked]]
        rng.shuffle(segments)
        body: list[int] = [BOS]
        fillers = self.context_len - _FRAME_LEN - self.num_pairs * _FACT_LEN
        *before, last = gaps(rng, fillers, len(segments))
        for segment, gap in zip(segments, before, strict=True):
            body += [*rng.choices(FILLERS, k=gap), *segment]
        body += [*rng.choices(FILLERS, k=last), *question]
        return NeedlePrompt(tuple(body), tuple(pairs[asked][1:]))


def gaps(rng: random.Random, fillers: int, count: int) -> list[int]:
    """Divide ``fillers`` filler tokens over the gaps around and between segments.

    All ways to divide them are equally likely.
    """
    slots = fillers + count
    cuts = [-1, *sorted(rng.sample(range(slots), count)), slots]
    return [right - left - 1 for left, right in pairwise(cuts)]


def needle_prompts(context_len: int = 1024, count: int = 200, seed: int = 0) -> list[NeedlePrompt]:
    """Return prompts of the needle task, the first half one-hop and the others two-hop.

    Short prompts hold fewer pairs. The two kinds share their contexts and differ in the question.
    """
    pairs = min(16, context_len // 16)
    one, two = (NeedleTask(context_len, hops, pairs) for hops in (1, 2))
    return [*one.prompts(count - count // 2, seed), *two.prompts(count // 2, seed)]


def text_of(ids: Sequence[int]) -> str:
    """Return tokens as text, which the needle model's tokenizer reads as these tokens."""
    names = token_names()
    return " ".join(names[token] for token in ids)


def load_model(dtype: "torch.dtype | None" = None) -> "LlamaForCausalLM":
    """Load the needle model on the CPU, in evaluation mode."""
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype or torch.float32).eval()


def load_tokenizer() -> "PreTrainedTokenizerFast":
    """Load the needle model's word-level tokenizer, which pads on the left."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)


def token_names() -> list[str]:
    """Return the text of every token in the needle model's vocabulary, in the order of ids."""
    fillers = [f"f{index}" for index in range(NUM_FILLERS)]
    symbols = [f"s{index}" for index in range(NUM_SYMBOLS)]
    return [*SPECIAL_TOKENS, *fillers, *symbols]
