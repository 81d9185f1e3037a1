"""Score how much each token of a prompt matters to a small model."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_count, check_kernel_size, check_kind
from kvpolicy.context import LayerContext
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.evaluation.analysis.forward import ShowingSelector, final_state
from kvpolicy.evaluation.analysis.inputs import check_prompt
from kvpolicy.evaluation.analysis.oracle import most_of_heads
from kvpolicy.interfaces import Scorer
from kvpolicy.policies import (
    KeepAllSelector,
    LastQueryProductScorer,
    LastQueryScorer,
    PassAllPropagation,
    RestartPropagation,
)
from kvpolicy.policy import CachePolicy
from kvpolicy.short_repr import brief

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@attrs.frozen(eq=False)
class PromptSaliency:
    """A saliency for each prompt token, with the name of the scorer it comes from.

    Args:
        values: float ``[context_len]`` on the CPU, larger means keep.
        source: What it was computed by, for reports.
        unscored_tail: Last tokens that have no saliency, because they are always to be kept.
    """

    values: Tensor
    source: str
    unscored_tail: int = 0


class PromptScorer(abc.ABC):
    """Base of scorers that say how much each prompt token matters to a small model."""

    @abc.abstractmethod
    def score(self, model: PreTrainedModel, input_ids: Sequence[int] | Tensor) -> PromptSaliency:
        """Return a saliency for every prompt token, computed by the small model.

        Args:
            model: A decoder-only model of Transformers, in evaluation mode.
            input_ids: The prompt's tokens, ``[context_len]`` or ``[1, context_len]``.
        """


@attrs.frozen
class FilterLayerScorer(PromptScorer):
    """Scores prompt tokens by another scorer's saliency at one layer, averaged over heads.

    It runs the first pass of a prefill that restarts (`kvpolicy.policies.RestartPropagation`): the
    prompt is read up to the queries and keys of the filter layer, and later layers do not see it.
    The second pass, whose result is not used, reads as few tokens as possible.

    Args:
        scorer: Computes the saliency; GemFilter's by default.
        filter_layer: Index of the layer, from 0; None for ``num_layers // 2 - 1``, or the nearest
            that sees the whole context.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: ``filter_layer`` is below 0.

    Example:
        >>> print(FilterLayerScorer(LastQueryProductScorer(kernel_size=3)).scorer)
        LastQueryProductScorer(kernel_size=3)

    Source: GemFilter (arXiv 2409.17422), where the model that chooses is the one that answers.
    """

    scorer: Scorer = attrs.field(factory=LastQueryProductScorer)
    filter_layer: int | None = None

    def __attrs_post_init__(self) -> None:
        check_kind("scorer", self.scorer, Scorer)
        if self.filter_layer is not None:
            check_count("filter_layer", self.filter_layer)

    def score(self, model: PreTrainedModel, input_ids: Sequence[int] | Tensor) -> PromptSaliency:
        """Return a saliency for every token of a prompt; see `PromptScorer.score`.

        Raises:
            TypeError: See `check_prompt`.
            ValueError: Likewise; or the model has no such layer, or policies that restart the
                prefill are refused on it.
        """
        prompt = check_prompt(model, input_ids)
        found: list[PromptSaliency] = []
        tail = self.scorer.unscored_tail

        def show(saliency: Tensor, layer: int) -> None:
            source = f"{self.scorer} at layer {layer}"
            found.append(PromptSaliency(saliency.cpu(), source, tail))

        # As few tokens as possible go on, since the second pass is not needed.
        restart = _ShowingRestart(
            filter_layer=self.filter_layer,
            retention_tokens=1,
            window_size=max(tail, 1),
            show=show,
        )
        final_state(model, prompt, CachePolicy(self.scorer, KeepAllSelector(), restart))
        (saliency,) = found
        return saliency


@attrs.frozen
class _ShowingRestart(RestartPropagation):
    """A restart policy that also gives the saliency it chooses by to a function."""

    show: Callable[[Tensor, int], None] = attrs.field(kw_only=True, repr=False)

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor | None:
        """Give the layer's saliency to the function, then choose tokens as the base class does."""
        assert saliency is not None
        self.show(context.layer.heads.mean(saliency)[0], context.layer_idx)
        return super().propagate(saliency, context)


@attrs.frozen
class LookAheadScorer(PromptScorer):
    """Scores prompt tokens by the attention of the first answer tokens that the model generates.

    ``p[l, h, t, j]`` is the softmax over the prompt's tokens ``j`` alone of the scaled products of
    their keys with the query that predicts the ``t``-th token, at layer ``l`` and query head
    ``h``, average-pooled along ``j``; the saliency is the mean over ``t`` of the maximum over ``l``
    and ``h``. The prompt is read once.

    Args:
        steps: Tokens decoded, the likeliest each, at least 1; the end of the answer ends them.
        kernel_size: Width of the pooling, odd; 1 for none. Zeros beyond both ends count.
        forward_tokens: The prompt is read in forwards of at most so many tokens.

    Raises:
        TypeError: An argument is not an int.
        ValueError: One is out of its range.

    Example:
        >>> LookAheadScorer(steps=4).kernel_size
        13

    Source: SpecPrefill (arXiv 2502.02789). The query of the prompt's last token counts as the first
    step here, as in `kvpolicy.evaluation.analysis.oracle`. Layers that see a sliding window of a
    longer prompt have no say.
    """

    steps: int = 8
    kernel_size: int = 13
    forward_tokens: int = 8192

    def __attrs_post_init__(self) -> None:
        check_count("steps", self.steps, minimum=1)
        check_kernel_size(self.kernel_size)
        check_count("forward_tokens", self.forward_tokens, minimum=1)

    def score(self, model: PreTrainedModel, input_ids: Sequence[int] | Tensor) -> PromptSaliency:
        """Return a saliency for every token of a prompt; see `PromptScorer.score`.

        Raises:
            TypeError: See `check_prompt`.
            ValueError: Likewise; or no layer of the model sees the whole prompt.
        """
        from kvpolicy.integrations.transformers import PolicyCache  # slow to import

        prompt = check_prompt(model, input_ids)
        context_len = prompt.shape[1]
        step = torch.zeros(context_len)
        total = torch.zeros(context_len, dtype=torch.float64)

        def show(context: LayerContext, _: Tensor) -> None:
            most = most_of_heads(context, context_len, self.kernel_size)[-1]
            torch.maximum(step, most, out=step)

        selector = ShowingSelector(show, protected_tail=context_len + self.steps)
        cache = PolicyCache(CachePolicy(LastQueryScorer(), selector, PassAllPropagation()))
        ends = _ends(model)
        with torch.inference_mode(), cache.attached(model):
            cache.start_turn(prompt_len=context_len)
            for first in range(0, context_len, self.forward_tokens):
                part = prompt[:, first : first + self.forward_tokens]
                logits = _last_logits(model, part, cache)
            for done in range(1, self.steps + 1):
                total += step
                token = logits.argmax(dim=-1, keepdim=True)
                if done == self.steps or int(token) in ends:
                    break
                step.zero_()
                cache.start_turn()  # so that the scorer gets the next token's query too
                logits = _last_logits(model, token, cache)
        if not total.any():
            raise UnsupportedModelError(
                f"model must have a layer that sees all of the prompt's {context_len:,} tokens, "
                f"but all of {type(model).__name__}'s see a sliding window; take another model"
            )
        return PromptSaliency(total / done, brief(self))


def _last_logits(model: PreTrainedModel, input_ids: Tensor, cache: Any) -> Tensor:
    """Return the model's next-token logits ``[1, vocabulary]`` after given tokens."""
    # Logits of all tokens would take most of the memory; some models can return only all.
    known = "logits_to_keep" in inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": 1} if known else {}
    output: Any = model(input_ids, use_cache=True, cache=cache, **keep)
    logits: Tensor = output.logits[:, -1]
    return logits


def _ends(model: PreTrainedModel) -> set[int]:
    """Return the ids of the tokens at which the model ends an answer."""
    end = getattr(model.generation_config, "eos_token_id", None)
    return set() if end is None else set(end) if isinstance(end, list) else {end}
