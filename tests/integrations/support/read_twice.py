"""Reads a padded batch in two turns, and runs each whole row through the model's own code."""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from tests.integrations.hybrids.models import padded, tokens
from tests.integrations.model.builds.dense import Seen, dense_logits

SAID, MORE = 3, 2  # tokens decoded after each turn


@dataclass
class TwoTurns:
    """The tokens and logits of a batch that a cache has read in two turns.

    Attributes:
        rows: every row's tokens.
        ends: by row, the number of its tokens after each of the policy's two acts.
        acts: a copy of the cache after each act.
        logits: `[batch, vocab]` after every call.
    """

    rows: list[list[int]]
    ends: list[tuple[int, int]]
    acts: list[PolicyCache] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def found(self, row: int) -> Tensor:
        """Returns the cache's logits of a row, `[calls, vocab]`."""
        return torch.stack([each[row] for each in self.logits])

    def want(self, model: PreTrainedModel, row: int, *, whole: bool = False) -> Tensor:
        """Returns the expected logits of a row, by the model's own code without a cache.

        Args:
            model: the model whose code is run.
            row: index of the row in the batch.
            whole: whether every token sees all tokens before it.
        """
        first, second = self.ends[row]
        ids = self.rows[row]
        seen = [] if whole else self._seen(row)
        logits = dense_logits(model, ids, len(ids), seen)
        return logits[[*range(first - 1, first + SAID), *range(second - 1, second + MORE)]]

    def _seen(self, row: int) -> list[Seen]:
        """Returns a mask per layer of the keys that every token of a row attends to."""
        length, layers = len(self.rows[row]), []
        for index in range(len(self.acts[0].layers)):
            keys = None
            if self.acts[0].layers[index].positions is not None:
                heads = self.acts[0].layers[index].positions.shape[1]
                keys = torch.ones(heads, length, length, dtype=torch.bool)
                for end, store in zip(self.ends[row], self.acts, strict=True):
                    keys[:, end:, :end] = False
                    for head, kept in enumerate(store.layers[index].positions[row]):
                        keys[head, end:, kept[kept >= 0]] = True
            layers.append(Seen(keys, torch.ones(length, dtype=torch.bool)))
        return layers


@torch.no_grad()
def read_two_turns(
    model: PreTrainedModel, policy: CachePolicy, rows: list[list[int]], turns: tuple[int, ...]
) -> TwoTurns:
    """Reads prompts, decodes a few tokens, reads a second turn, and decodes a few tokens more.

    Args:
        model: to read with.
        policy: to act, at the prompts and at the turn.
        rows: the prompts.
        turns: tokens of each row in its second turn.
    """
    said = [tokens(10 + row, SAID + MORE) for row in range(len(rows))]
    later = [tokens(20 + row, count) for row, count in enumerate(turns)]
    steps = [
        (torch.tensor([[each[step]] for each in said]), torch.ones(len(rows), 1))
        for step in range(SAID + MORE)
    ]
    calls = [padded(rows), *steps[:SAID], padded(later), *steps[SAID:]]
    read = TwoTurns(
        [[*row, *a[:SAID], *b, *a[SAID:]] for row, a, b in zip(rows, said, later, strict=True)],
        [(len(row), len(row) + SAID + count) for row, count in zip(rows, turns, strict=True)],
    )
    store, mask = PolicyCache(policy), torch.zeros(len(rows), 0, dtype=torch.int64)
    with store.attached(model):
        for index, (ids, valid) in enumerate(calls):
            mask = torch.cat([mask, valid.long()], dim=1)
            acts = index in (0, 1 + SAID)
            if index and acts:
                store.start_turn()
            output = model(ids, attention_mask=mask, cache=store)
            read.logits.append(output.logits[:, -1])
            if acts:
                read.acts.append(copy.deepcopy(store))
    return read
