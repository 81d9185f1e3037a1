"""Measure how often a model answers correctly under a policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs
import torch

from kvpolicy.evaluation.intervals import share_interval
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.evaluation.tasks.prompts import Prompt
from kvpolicy.policy import CachePolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens that one batch reads at most: enough to keep a processor busy at 1024 tokens a prompt.
BATCH_TOKENS = 16384


@attrs.frozen
class Score:
    """The number of prompts answered correctly, out of all prompts asked.

    Args:
        matches: Prompts answered exactly.
        count: Prompts asked, at least 1.

    Example:
        >>> score = Score(matches=96, count=100)
        >>> score.rate, [round(bound, 3) for bound in score.interval]
        (0.96, [0.902, 0.984])
    """

    matches: int
    count: int

    @property
    def rate(self) -> float:
        """The fraction of prompts answered correctly, in [0, 1]."""
        return self.matches / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the fraction of prompts answered correctly."""
        return share_interval(self.rate, self.count)


def measure_accuracy(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    policy: CachePolicy,
    *,
    progress: Progress = silent,
    stage: str = "accuracy",
) -> dict[str, Score]:
    """Measure how many prompts a model answers right under a policy, by kind.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        prompts: At least one.
        policy: Which tokens to keep.
        progress: Told of every batch.
        stage: The name it is told under.

    Returns:
        A score for every kind, in the order in which the prompts first have them.

    Raises:
        ValueError: There are no prompts.
    """
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    outcomes: dict[str, list[bool]] = {prompt.kind: [] for prompt in prompts}
    done = 0
    for batch in batches(prompts):
        progress(stage, done, len(prompts))
        for prompt, tokens in zip(batch, continuations(model, batch, policy), strict=True):
            outcomes[prompt.kind].append(prompt.is_match(tokens))
        done += len(batch)
    progress(stage, done, len(prompts))
    return {name: Score(sum(values), len(values)) for name, values in outcomes.items()}


def continuations(
    model: PreTrainedModel, batch: Sequence[Prompt], policy: CachePolicy
) -> list[list[int]]:
    """Generate greedy continuations of a batch of prompts, as long as its longest answer."""
    from kvpolicy.integrations.transformers import PolicyCache  # Transformers takes seconds

    input_ids = torch.tensor([prompt.input_ids for prompt in batch], device=model.device)
    config = model.generation_config
    # Built before `model.generate` is looked up: the first cache of a process is what makes
    # generate know caches of its kind.
    cache = PolicyCache(policy)
    generated = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        cache=cache,
        max_new_tokens=max(prompt.max_new_tokens for prompt in batch),
        do_sample=False,
        # What comes after an end-of-text token is not read, but generate asks for a filler.
        pad_token_id=0 if config.pad_token_id is None else config.pad_token_id,
    )
    return [[int(token) for token in row] for row in generated[:, input_ids.shape[1] :].tolist()]


def batches(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Group prompts into batches of equal length, so that no prompt needs padding."""
    by_length: dict[int, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_length[len(prompt.input_ids)].append(prompt)
    for length, group in by_length.items():
        size = max(BATCH_TOKENS // length, 1)
        for start in range(0, len(group), size):
            yield group[start : start + size]
