"""Make prompts with long answers: a walk from symbol to symbol, written step by step.

A prompt looks like ``<bos> f12 LET s17 s4 f3 f7 LET s4 s88 ... FROM s17 ;``, its answer like ``s17
-> s4 ; s4 -> s88 ; ...``: each step goes where the prompt's statement of the symbol leads. A step
says again where it comes from, so that the model's own words tell it where it is; where to go next
stands in the prompt alone.

In a ``loop`` the walk goes round and round over half of the statements; those of the other half
lead round a loop that nobody enters, and which half is which shows only as the walk goes on. The
same facts are needed over and over, while the answer grows far beyond any bound. In a ``chain``
every statement is needed once, in an order that no statement's place foretells: what is needed is
what nothing has attended to yet.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from attrs.validators import ge, in_, instance_of

from kvpolicy.evaluation.tasks.needle.filler import scattered

from .vocabulary import ARROW, BOS, FROM, LET, STOP, SYMBOLS

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

MODEL_DIR = Path(__file__).parent / "weights"
KINDS = ("loop", "chain")
STEP_TOKENS = 4
MAX_STATEMENTS = 64
MAX_STEPS = 128
_STATEMENTS = {"loop": 24, "chain": 48}
_STATEMENT_LEN = 3
_QUESTION_LEN = 3


@attrs.frozen
class LongPrompt:
    """A prompt whose right answer is long, with that answer.

    Attributes:
        kind: one of `KINDS`.
        input_ids: the prompt's tokens; the question is the last three.
        answer: the tokens of a right answer, ``STEP_TOKENS`` to a step.
    """

    kind: str
    input_ids: tuple[int, ...]
    answer: tuple[int, ...]


@attrs.frozen
class LongAnswerTask:
    """Draws prompts of one kind and length, with long answers of one length.

    Statements are in random order at random depths, with every division of the filler among the
    gaps equally likely.

    Args:
        kind: ``"loop"`` or ``"chain"``.
        context_len: exact prompt length in tokens.
        num_statements: of a loop an even number from 4, of a chain from 2; 64 at most. By default
            24 and 48, or as many as a fifth of the prompt's tokens where that is less.
        steps: steps of the answer, at least 1; of a chain at most its statements, which is the
            default. By default a loop's answer has twice the prompt's tokens, 128 steps at most.

    Raises:
        ValueError: a value is out of its range, or ``context_len`` leaves no room for the
            statements and the question.

    Example:
        >>> task = LongAnswerTask("loop", context_len=64)
        >>> prompt = task.prompts(1)[0]
        >>> task.num_statements, task.steps, len(prompt.input_ids), len(prompt.answer)
        (12, 32, 64, 128)
    """

    kind: str = attrs.field(default="loop", validator=in_(KINDS))
    context_len: int = attrs.field(default=256, validator=instance_of(int))
    num_statements: int = attrs.field(
        default=attrs.Factory(lambda self: _default_statements(self), takes_self=True),
        validator=instance_of(int),
    )
    steps: int = attrs.field(
        default=attrs.Factory(lambda self: _default_steps(self), takes_self=True),
        validator=[instance_of(int), ge(1)],
    )

    def __attrs_post_init__(self) -> None:
        count, loop = self.num_statements, self.kind == "loop"
        if loop and (count % 2 or not 4 <= count <= MAX_STATEMENTS):
            raise ValueError(
                f"num_statements must be even and in [4, {MAX_STATEMENTS}] for a loop, got {count}"
            )
        if not 2 <= count <= MAX_STATEMENTS:
            raise ValueError(f"num_statements must be in [2, {MAX_STATEMENTS}], got {count}")
        if not loop and self.steps > count:
            raise ValueError(f"steps must be at most {count}, the chain's length, got {self.steps}")
        if self.context_len < self.min_context_len:
            raise ValueError(
                f"context_len must be at least {self.min_context_len} tokens for "
                f"num_statements={count}, got {self.context_len}; raise context_len or lower "
                "num_statements"
            )

    @property
    def min_context_len(self) -> int:
        """The length in tokens of a prompt of this task without filler."""
        return 1 + self.num_statements * _STATEMENT_LEN + _QUESTION_LEN

    def prompts(self, count: int, seed: int = 0) -> list[LongPrompt]:
        """Draw ``count`` prompts of this task from a seed.

        The same seed gives the same prompts, and a longer list starts with the shorter one.

        Args:
            count: number of prompts, at least 0.
            seed: any integer; torch's and Python's global generators play no part.

        Raises:
            ValueError: ``count`` is negative.
        """
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        rng = random.Random(f"{self.kind}/{seed}")
        return [self.draw(rng) for _ in range(count)]

    def draw(self, rng: random.Random) -> LongPrompt:
        """Draw one prompt of this task with a random generator."""
        leads = self._statements(rng)
        here = next(iter(leads))
        stated = rng.sample([[LET, *pair] for pair in leads.items()], len(leads))
        pieces = [[BOS], *scattered(rng, stated, self.context_len - self.min_context_len)]
        pieces.append([FROM, here, STOP])
        answer: list[int] = []
        for _ in range(self.steps):
            answer += [here, ARROW, leads[here], STOP]
            here = leads[here]
        return LongPrompt(
            self.kind, tuple(token for piece in pieces for token in piece), tuple(answer)
        )

    def _statements(self, rng: random.Random) -> dict[int, int]:
        """Draw the prompt's statements: which symbol follows each symbol."""
        if self.kind == "chain":
            return dict(pairwise(rng.sample(SYMBOLS, self.num_statements + 1)))
        symbols, half = rng.sample(SYMBOLS, self.num_statements), self.num_statements // 2
        loops = (symbols[:half], symbols[half:])
        return {
            here: there
            for loop in loops
            for here, there in zip(loop, [*loop[1:], loop[0]], strict=True)
        }


# Defaults are computed before arguments are checked, so a wrong argument gets any default.
def _default_statements(task: LongAnswerTask) -> int:
    if task.kind not in KINDS or not isinstance(task.context_len, int):
        return 1
    return min(_STATEMENTS[task.kind], task.context_len // 10 * 2)


def _default_steps(task: LongAnswerTask) -> int:
    if task.kind == "chain":
        return task.num_statements
    return min(MAX_STEPS, task.context_len // 2) if isinstance(task.context_len, int) else 1


def right_steps(
    generated: Sequence[object], answer: Sequence[object], step_tokens: int = STEP_TOKENS
) -> float:
    """Return the fraction of an answer's steps before its first wrong one, in [0, 1].

    Args:
        generated: what was generated after the prompt, as token ids or words; what follows the
            answer does not count.
        answer: the right answer, in the same form, at least one step.
        step_tokens: entries of a step.

    Example:
        >>> answer = "s1 -> s2 ; s2 -> s3 ; s3 -> s1 ; s1 -> s2 ;".split()
        >>> right_steps("s1 -> s2 ; s2 -> s9 ; s3 -> s1 ; s1 -> s2 ;".split(), answer)
        0.25
    """
    starts = range(0, len(answer), step_tokens)
    if not starts:
        raise ValueError("answer must hold at least one step, got none")
    for number, start in enumerate(starts):
        step = slice(start, start + step_tokens)
        if tuple(generated[step]) != tuple(answer[step]):
            return number / len(starts)
    return 1.0


def load_model(dtype: torch.dtype | None = None) -> LlamaForCausalLM:
    """Load the bundled long-answer model on the CPU, in evaluation mode.

    Args:
        dtype: of the weights; None means float32. The file holds bfloat16.

    Returns:
        A plain ``transformers.LlamaForCausalLM``: 4 layers, 8 query and 2 KV heads of 16, 0.59
        million parameters.
    """
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype or torch.float32).eval()


def load_tokenizer() -> PreTrainedTokenizerFast:
    """Load the bundled model's word-level tokenizer, which pads on the left."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)
