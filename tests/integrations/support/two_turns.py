"""Compares two turns of a batch with each row's dense attention to its kept tokens."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.integrations.transformers import PolicyCache
from tests.integrations.hybrids.models import apart, generate, tokens
from tests.integrations.model.builds.dense import Seen, dense_logits
from tests.integrations.support.conversation import left_padded

READ = 3  # of the four tokens that a turn decodes


def seen_in_two_turns(
    kept: list[list[Tensor | None]], passed: list[dict[int, Tensor]], ends: list[int], length: int
) -> list[Seen]:
    """Returns a mask per layer of the keys that each token sees in a row read in two turns.

    Args:
        kept: By turn and layer, the positions held after its prompt; None without attention.
        passed: By turn, the positions that layers passed on, by layer.
        ends: Columns at the first prompt's end, at the second's start, and at its end.
        length: Of the row.
    """
    first, start, second = ends
    place = torch.arange(length)
    reaching, layers = torch.ones(length, dtype=torch.bool), []
    for index, (early, late) in enumerate(zip(*kept, strict=True)):
        keys = None
        if early is not None and late is not None:
            heads = []
            for one, other in zip(early, late, strict=True):
                see = reaching.expand(length, -1).clone()
                for held, since, until in ((one, first, second), (other, second, length)):
                    row = place >= since
                    row[held[held >= 0]] = True
                    see[since:until] = row & (reaching | (place < start))
                heads.append((see & (place[:, None] >= place)) | (place[:, None] == place))
            keys = torch.stack(heads)
        layers.append(Seen(keys, reaching))
        prompts = (slice(0, first), slice(start, second))
        reaching = reaching.clone()
        for turn, prompt in zip(passed, prompts, strict=True):
            if index in turn:
                reaching[prompt] = False
                own = turn[index][0]
                reaching[own[own >= 0]] = True
    return layers


def off_in_two_turns(
    model: PreTrainedModel, cache: PolicyCache, lens: list[int], added: list[int], **kwargs: Any
) -> tuple[float, float]:
    """Reads and answers a batch of unequal rows in two turns; returns the largest logit errors.

    Args:
        model: A decoder.
        cache: A new one.
        lens: Tokens of each row's first prompt.
        added: Tokens that its second turn adds.
        kwargs: Of `generate`.

    Returns:
        Two largest differences, each relative to the largest logit. First: the second turn's logits
        against dense attention to what was kept. Second: dense attention to what was kept against
        dense attention to everything.
    """
    rows = [tokens(row, count) for row, count in enumerate(lens)]
    ids, mask = left_padded(rows)
    held, passed = [], []
    said, _ = generate(model, cache, ids, mask, **kwargs)
    _note(cache, held, passed)
    more, more_mask = left_padded([tokens(10 + row, count) for row, count in enumerate(added)])
    answer = said[:, ids.shape[1] :]
    question = torch.cat([said, more], dim=1)
    whole_mask = torch.cat([mask, torch.ones_like(answer), more_mask], dim=1)
    whole, found = generate(model, cache, question, whole_mask, **kwargs)
    _note(cache, held, passed)
    worst = effect = 0.0
    for row, ids_of_row in enumerate(rows):
        prompt = [*ids_of_row, *answer[row].tolist(), *more[row, -added[row] :].tolist()]
        every = prompt + whole[row, question.shape[1] : -1].tolist()
        ends = [len(ids_of_row), len(ids_of_row) + READ, len(prompt)]
        kept = [[None if each is None else each[row] for each in turn] for turn in held]
        went = [{index: each[row : row + 1] for index, each in turn.items()} for turn in passed]
        seen = seen_in_two_turns(kept, went, ends, len(every))
        want = dense_logits(model, every, len(prompt), seen)[len(prompt) - 1 :]
        everything = dense_logits(model, every, len(prompt))[len(prompt) - 1 :]
        worst, effect = max(worst, apart(found[row], want)), max(effect, apart(everything, want))
    return worst, effect


def _note(
    cache: PolicyCache, held: list[list[Tensor | None]], passed: list[dict[int, Tensor]]
) -> None:
    found = [layer.positions for layer in cache.layers]
    held.append([None if each is None else each[:, :, :-READ] for each in found])
    passed.append(cache.propagated)
