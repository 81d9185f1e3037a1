"""Scores tokens by the attention that the prompt's queries would give right after the prompt."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import causal_attention_peaks
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer
from kvpolicy.layer_inputs import DecodingInputs

# Queries that are held in float32 at a time.
BLOCK = 1024


@attrs.frozen
class ReplayedAttentionScorer(Scorer):
    """Scores tokens by the largest attention of the prompt's queries, replayed after the prompt.

    A question that comes later asks from behind the prompt, and sees all of it. So every new query
    is taken before rotary embedding and rotated to the position after the row's last token; its
    softmax runs over all keys, later ones too. With ``q'`` such a query, ``saliency[g, j] = max
    over new queries i and the query heads h of KV head g of softmax(q'_i . k * scaling)[j]``, in
    float32.

    Unlike the queries of a second reading (`Repetition`), these have not attended to the whole
    prompt, but they cost no further pass of the model. For ``N`` tokens there are ``N * N``
    products of queries and keys per head, twice those of causal attention, computed in blocks.

    Example:
        >>> ReplayedAttentionScorer().needs_rotary
        True

    Source: This project; the maximum over queries is KVzip's (arXiv 2505.23416).
    """

    @property
    def num_queries(self) -> None:
        """Always None: the scorer reads all queries."""
        return

    @property
    def needs_rotary(self) -> bool:
        """Always True: the scorer rotates queries to another position."""
        return True

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        assert context.layer.rotary is not None
        peaks = torch.zeros(context.positions.shape, device=context.keys.device)
        after = context.positions[:, 0, -1:] + 1  # the last slot is every row's last token
        for start in range(0, context.query_len, BLOCK):
            places = context.query_places[:, start : start + BLOCK]
            queries = context.queries[:, :, start : start + BLOCK].float()
            queries = context.layer.rotary.turned_back(queries, places[:, None])
            queries = context.layer.rotary.turned(
                queries, after[:, None].expand(-1, 1, places.shape[1])
            )
            replayed = attrs.evolve(
                context,
                queries=queries,
                decoding=DecodingInputs(query_positions=after.where(places >= 0, -1)),
            )
            found = causal_attention_peaks(replayed, from_behind=True)
            peaks = torch.maximum(
                peaks, found.view(*peaks.shape[:2], -1, peaks.shape[2]).amax(dim=2)
            )
        return peaks
