"""What the tokens of a bounded answer see, step by step."""

import torch

from tests.integrations.decoding.reading import Kept
from tests.integrations.model.builds.dense import Seen


def seen_at_every_step(kept: dict[int, Kept], row: int, prompt_len: int, length: int) -> list[Seen]:
    """What each layer's queries see: what was kept at the last choice, and all that is newer."""
    everything = torch.ones(length, dtype=torch.bool)
    layers = []
    for index, heads in enumerate(kept[0][row]):
        keys = torch.ones(len(heads), length, length, dtype=torch.bool)
        for step in sorted(kept):
            first = prompt_len + step
            for head, positions in enumerate(kept[step][row][index]):
                keys[head, first:, :first] = False
                keys[head, first:, positions] = True
        layers.append(Seen(keys if heads else None, everything))
    return layers
