"""Record each layer's saliency during a forward, and the last token's final hidden state.

A policy that evicts nothing of what the prefill reads is the window through which every layer's
queries and keys are seen: no code of the model is copied, and attention is summed in blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import causal_attention_sums
from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import KVSelector, Scorer
from kvpolicy.policies import PassAllPropagation
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import compress

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@attrs.frozen
class WindowAttentionScorer(Scorer):
    """Scores all tokens of a prompt by the attention of the prompt's last tokens.

    ``saliency[h, j] = sum over window queries i >= j of softmax(q_i . k_j * scaling)`` per query
    head ``h``, in float32. Unlike `kvpolicy.policies.WindowMaxPoolScorer` it is not pooled and the
    window is scored too, so that a head's saliency adds up to ``window_size``: what is measured is
    where attention goes, not what a method would keep.

    Args:
        window_size: Tokens of the observation window, at least 1.

    Raises:
        TypeError: ``window_size`` is not an int.
        ValueError: ``window_size`` is below 1.

    Example:
        >>> WindowAttentionScorer(window_size=4).num_queries
        4
    """

    window_size: int = 8

    def __attrs_post_init__(self) -> None:
        check_count("window_size", self.window_size, minimum=1)

    @property
    def num_queries(self) -> int:
        """The number of last queries whose attention the scorer reads."""
        return self.window_size

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, query_heads, key_len]``; see `Scorer.score`."""
        return causal_attention_sums(context)


@attrs.frozen
class ShowingSelector(KVSelector):
    """Calls a function with each layer's saliency; keeps only the prompt's last tokens.

    Eviction comes after a layer's attention, so what a forward computes is what it computes with a
    full cache; where nothing is decoded afterwards, no more needs to be kept.

    Args:
        show: Called at every layer that chooses, in their order, with what the layer shows and the
            saliency ``[batch, query_heads or kv_heads, key_len]``.
        protected_tail: Last tokens that are kept, at least 1 and those that the scorer leaves
            unscored.
    """

    show: Callable[[LayerContext, Tensor], None]
    protected_tail: int = 1

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return the kept indices ``[batch, kv_heads, kept_len]``; see `KVSelector.select`."""
        assert saliency is not None
        self.show(context, saliency)
        return compress(self.protected(context), min(self.protected_tail, context.key_len))


def layer_saliencies(
    model: PreTrainedModel, input_ids: Tensor, scorer: Scorer
) -> tuple[Tensor, Tensor]:
    """Run a full prefill; return every layer's saliency and the final hidden state.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        input_ids: ``[1, context_len]``, from `kvpolicy.evaluation.analysis.inputs.check_prompt`.
        scorer: What to compute at every layer.

    Returns:
        float32 ``[num_layers, context_len]`` on the CPU, the saliency averaged over the heads; and
        `final_state`'s result.
    """
    seen: list[Tensor] = []
    selector = ShowingSelector(
        lambda _, saliency: seen.append(saliency[0].mean(dim=0).cpu()),
        max(scorer.unscored_tail, 1),
    )
    final = final_state(model, input_ids, CachePolicy(scorer, selector, PassAllPropagation()))
    return torch.stack(seen), final


def final_state(
    model: PreTrainedModel, input_ids: Tensor, policy: CachePolicy | None = None
) -> Tensor:
    """Return the last token's hidden state after the model's final norm.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        input_ids: ``[1, context_len]``; their positions are ``0..context_len-1``.
        policy: Applied while the prompt is read; None for the plain model without a cache.

    Returns:
        float64 ``[hidden_size]`` on the CPU.
    """
    from kvpolicy.integrations.transformers import PolicyCache  # slow to import

    # The decoder alone: logits of all tokens would be larger than anything else here.
    decoder: Any = model.get_decoder()
    with torch.inference_mode():
        if policy is None:
            output = decoder(input_ids, use_cache=False)
        else:
            cache = PolicyCache(policy)
            with cache.attached(model):
                output = decoder(input_ids, use_cache=True, cache=cache)
    hidden: Tensor = output.last_hidden_state[0, -1]
    return hidden.cpu().double()
