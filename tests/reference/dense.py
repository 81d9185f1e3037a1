"""The masks under which dense attention hides what a policy evicts or drops."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Act:
    """One prefill, with the tokens that a policy kept and passed on after it.

    Attributes:
        start: tokens seen before it.
        end: tokens seen after it; the rows from `start` to `end` are its prompt.
        kept: per layer and KV head the positions kept, each of them below `end`.
        reached: per layer the positions of the prompt that reached it; None when all reached all.
    """

    start: int
    end: int
    kept: Sequence[Sequence[Sequence[int]]]
    reached: Sequence[Sequence[int]] | None = None


def visible_after(acts: Sequence[Act], query_heads: int, length: int) -> list[Tensor]:
    """Returns the masks of a row with eviction after each of its prompts.

    A prompt's rows see, causally, what was held before it and those of the prompt that reached the
    layer; later rows see what the prompt's act kept and all newer tokens. Every token sees itself.
    """
    assert acts[0].start == 0, "the first act starts at 0"
    masks = []
    for layer in range(len(acts[0].kept)):
        group = query_heads // len(acts[0].kept[layer])
        mask = torch.zeros(query_heads, length, length, dtype=torch.bool)
        for head in range(query_heads):
            held: set[int] = set()
            never_reached: set[int] = set()
            for row in range(length):
                for act in acts:
                    if row == act.end:
                        held = set(act.kept[layer][head // group])
                    if row == act.start and act.reached is not None:
                        never_reached |= set(range(act.start, act.end)) - set(act.reached[layer])
                if row not in never_reached:
                    held.add(row)
                mask[head, row, sorted(held | {row})] = True
        masks.append(mask)
    return masks
