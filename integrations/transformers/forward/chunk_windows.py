"""Keep only the tokens in a layer's window between the chunks of a long prompt.

No later token of the prompt sees the others, and at its end the layer forgets them anyway; see
`WindowSurvivors`. A row that is no longer than the window at the prompt's end, so that the policy
chooses in it, has lost nothing before. Other layers hold the whole prompt until then: its last
token attends to all of it.
"""

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.forward.layer_contexts import widened
from kvpolicy.integrations.transformers.forward.passes import PassState, Stored
from kvpolicy.integrations.transformers.model.masks import first_seen
from kvpolicy.integrations.transformers.state.layers import follow
from kvpolicy.selection import compress

# A prompt's length, in windows, up to which a layer holds all of it: while a chunk is read, it
# holds two windows, since the earlier one is needed to undo the chunk if it fails.
MIN_WINDOWS = 2


class ChunkWindows:
    """The layers with a window in a pass, which hold only the tokens in it after the chunk."""

    def __init__(self, at: PassState) -> None:
        self._at = at
        self._windows = {
            index: window
            for index, window in enumerate(at.call.model.windows)
            if window is not None
            and at.prompt_end > MIN_WINDOWS * window
            and at.layers[index].indexed is None
        }
        self.layers = frozenset(self._windows)
        self._narrowed: set[int] = set()

    def never_choose(self, index: int) -> bool:
        """True if all rows outgrow a layer's window, so that the policy never chooses there."""
        return index in self.layers and min(self._at.seen_len) > self._windows[index]

    def narrow(self, index: int, stored: Stored, *, one_choice: bool) -> Tensor:
        """Evict what a layer's window no longer sees after the chunk; return the slots held."""
        at, window, keys = self._at, self._windows[index], stored[0]
        layer, heads = at.layers[index], 1 if one_choice else keys.shape[1]
        positions = at.masks.positions(layer, heads, keys.device)
        counts = self._counts(window)
        if counts is None:
            # 0 in rows without a token in this chunk, of which nothing is forgotten.
            ends = at.reach.positions.to(keys.device).amax(dim=1)[:, None, None] + 1
            near = (positions >= 0) & (positions >= first_seen(ends, window))
            kept = compress(near, int(near.sum(dim=-1).max()))
        else:
            slots = torch.arange(keys.shape[2] - counts[0], keys.shape[2], device=keys.device)
            kept = slots.expand(*positions.shape[:2], -1)
        whole = None if counts is None else counts[0] == keys.shape[2]
        observed = layer.observed
        carried = None if observed.carried is None else widened(observed.carried, keys.shape[2])
        # Tokens are chosen before quantisation, since a prompt's own tokens attend to exact keys.
        storage = layer.storage.beside()
        layer.store(
            *stored, positions, kept, carried, room=0, counts=counts, whole=whole, storage=storage
        )
        layer.observed = attrs.evolve(observed, carried=layer.observed.carried)
        self._narrowed.add(index)
        return kept

    def _counts(self, window: int) -> tuple[int, ...] | None:
        """Return how many of the last slots each row keeps; None if positions must be read."""
        at, end = self._at, self._at.tokens.seen
        if at.reach.padded or at.before.acted_ids.shape[1] or not at.reach.counts_held:
            return None
        count = end - max(first_seen(end, window), 0)
        return (count,) * at.before.batch

    def settle(self, index: int) -> None:
        """Mark all tokens in a layer as kept by a choice, none as appended since."""
        if index not in self._narrowed:
            return
        tokens = self._at.tokens
        none = tokens.appended[:, :0]
        tokens = attrs.evolve(tokens, appended=none, appended_ids=none)
        follow([self._at.layers[index]], tokens)
