"""Measure how well scorers rank a prompt's tokens, by the attention that its answer gives them.

The answer-informed oracle: the model answers with full context, and what its answer attends to is
taken as the truth about which of the prompt's tokens matter. It is no method, since it needs the
answer, and no upper bound; it tells in a minute whether a scorer is worth a benchmark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_count, check_kernel_size
from kvpolicy.context import LayerContext
from kvpolicy.evaluation.analysis.attention import top_tokens
from kvpolicy.evaluation.analysis.forward import (
    ShowingSelector,
    WindowAttentionScorer,
    final_state,
    layer_saliencies,
)
from kvpolicy.evaluation.analysis.inputs import check_prompt, check_saliency
from kvpolicy.interfaces import Scorer
from kvpolicy.policies import PassAllPropagation
from kvpolicy.policy import CachePolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The share of the prompt's top tokens that are searched for among a scorer's top tokens.
TOP_SHARE = 0.1


@attrs.frozen(eq=False)
class AnswerAttention:
    """The attention that an answer's tokens give to the tokens of its prompt.

    Args:
        whole: float64 ``[context_len]``: for each token of the prompt the attention that a token of
            the answer gives it in the layer and head that give it most, mean over the answer.
        layers: By layer index, the same for that layer's heads only.
        answer: The answer's tokens.
    """

    whole: Tensor
    layers: dict[int, Tensor]
    answer: tuple[int, ...]


@attrs.frozen
class Ranking:
    """How well a scorer ranks a prompt's tokens, compared with the answer's own attention.

    Args:
        spearman: By layer index, the rank correlation with the oracle, in [-1, 1].
        found: By layer index, the share of the oracle's top tenth of the tokens that is also in the
            scorer's top tenth, in [0, 1]; a tenth by chance.
        own_spearman: As ``spearman``, compared with the answer's attention in that layer only.
        own_found: As ``found``, compared with the answer's attention in that layer only.
    """

    spearman: dict[int, float]
    found: dict[int, float]
    own_spearman: dict[int, float]
    own_found: dict[int, float]


def greedy_answer(
    model: PreTrainedModel, input_ids: Sequence[int] | Tensor, max_new_tokens: int
) -> tuple[int, ...]:
    """Generate the model's greedy answer to a prompt with full context.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        input_ids: The prompt's tokens, ``[context_len]`` or ``[1, context_len]``.
        max_new_tokens: The longest answer, in tokens, at least 1.
    """
    prompt = check_prompt(model, input_ids)
    check_count("max_new_tokens", max_new_tokens, minimum=1)
    generated: Any = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        min_new_tokens=1,
    )
    return tuple(generated[0, prompt.shape[1] :].tolist())


def answer_attention(
    model: PreTrainedModel,
    input_ids: Sequence[int] | Tensor,
    answer: Sequence[int],
    *,
    kernel_size: int = 13,
) -> AnswerAttention:
    """Measure, per layer, the attention that an answer's tokens give to its prompt's tokens.

    ``p[l, h, t, j]`` is the softmax over the prompt's tokens ``j`` alone of the scaled products of
    their keys with the query that predicts the ``t``-th token of the answer, at layer ``l`` and
    query head ``h``, average-pooled along ``j``. The oracle is the mean over ``t`` of the maximum
    over ``l`` and ``h``.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        input_ids: The prompt's tokens, ``[context_len]`` or ``[1, context_len]``.
        answer: The answer's token ids, at least one, such as `greedy_answer`'s.
        kernel_size: Width of the pooling, odd; 1 for none. Zeros beyond both ends count.

    Raises:
        TypeError: See `kvpolicy.evaluation.attention_recall`.
        ValueError: Likewise; or ``answer`` is empty, or ``kernel_size`` is even.

    Source: CLAA (arXiv 2602.16054), the oracle, with its code's pooling. Layers that see a sliding
    window of a longer prompt have no say, since a policy chooses nothing there.
    """
    prompt = check_prompt(model, input_ids)
    check_kernel_size(kernel_size)
    if not len(answer):
        raise ValueError("answer must have at least one token, got none")
    context_len, steps = prompt.shape[1], len(answer)
    whole = torch.zeros(steps, context_len)
    layers: dict[int, Tensor] = {}

    def show(context: LayerContext, _: Tensor) -> None:
        most = most_of_heads(context, context_len, kernel_size)
        layers[context.layer_idx] = most.double().mean(dim=0)
        torch.maximum(whole, most, out=whole)

    # A token's query predicts the next token, so the answer's last query is not used.
    fed = check_prompt(model, torch.cat([prompt[0].cpu(), torch.tensor(answer[:-1]).long()]))
    policy = CachePolicy(WindowAttentionScorer(steps), ShowingSelector(show), PassAllPropagation())
    final_state(model, fed, policy)
    return AnswerAttention(whole.double().mean(dim=0), layers, tuple(answer))


def most_of_heads(context: LayerContext, context_len: int, kernel_size: int) -> Tensor:
    """Return each query's attention to each prompt token: pooled, then the maximum over heads.

    Args:
        context: The layer; its first ``context_len`` keys are the prompt's. Batch of one.
        context_len: Tokens of the prompt; the softmax runs over these alone.
        kernel_size: Width of the average-pooling, odd.

    Returns:
        float32 ``[query_len, context_len]`` on the CPU.
    """
    group = context.query_heads // context.kv_heads
    most: Tensor | None = None
    for head in range(context.query_heads):
        keys = context.keys[0, head // group, :context_len].float()
        scores = context.queries[0, head].float() @ keys.T * context.attention.scaling
        softcap = context.attention.softcap
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.nn.functional.avg_pool1d(
            scores.softmax(dim=-1), kernel_size, stride=1, padding=kernel_size // 2
        )
        most = weights if most is None else torch.maximum(most, weights)
    assert most is not None
    return most.cpu()


def rank_scorers(
    model: PreTrainedModel,
    input_ids: Sequence[int] | Tensor,
    scorers: Mapping[str, Scorer],
    truth: AnswerAttention,
    *,
    window_size: int = 8,
) -> dict[str, Ranking]:
    """Compare how scorers rank a prompt's tokens with the ranking by the answer's attention.

    A layer's saliency is the mean over its heads. The last ``window_size`` tokens are left out,
    which most methods keep whatever their saliency.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        input_ids: The prompt's tokens, of which ``truth`` says what matters.
        scorers: By name.
        truth: See `answer_attention`.
        window_size: Last tokens that are not compared, at least 0.

    Raises:
        ValueError: Fewer than two tokens are left to rank.
    """
    prompt = check_prompt(model, input_ids)
    compared = prompt.shape[1] - check_count("window_size", window_size)
    if compared < 2:
        raise ValueError(
            f"prompt must have at least 2 tokens before the last {window_size}, got "
            f"{prompt.shape[1]} in all"
        )
    rankings = {}
    for name, scorer in scorers.items():
        saliency, _ = layer_saliencies(model, prompt, scorer)
        rows = dict(zip(truth.layers, saliency[:, :compared].double(), strict=True))
        whole = truth.whole[:compared]
        own = {layer: each[:compared] for layer, each in truth.layers.items()}
        rankings[name] = Ranking(
            {layer: spearman(whole, row) for layer, row in rows.items()},
            {layer: found_share(whole, row) for layer, row in rows.items()},
            {layer: spearman(own[layer], row) for layer, row in rows.items()},
            {layer: found_share(own[layer], row) for layer, row in rows.items()},
        )
    return rankings


def spearman(one: Tensor, other: Tensor) -> float:
    """Return Spearman's rank correlation of two value lists; equal values share a mean rank.

    Args:
        one: float ``[count]``.
        other: float ``[count]``.

    Returns:
        In [-1, 1]; 0 where all of either are equal.

    Example:
        >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, 5.0, 7.0])), 6)
        1.0
    """
    check_saliency(one, "count")
    check_saliency(other, "count")
    ranks = torch.stack([_ranks(one), _ranks(other)])
    centred = ranks - ranks.mean(dim=1, keepdim=True)
    scale = float(centred.norm(dim=1).prod())
    return float((centred[0] * centred[1]).sum()) / scale if scale else 0.0


def _ranks(values: Tensor) -> Tensor:
    unique: Any = torch.unique  # which has no types
    _, place, counts = unique(values, return_inverse=True, return_counts=True)
    ranks: Tensor = (counts.cumsum(0).double() - (counts.double() - 1) / 2)[place]
    return ranks


def found_share(truth: Tensor, saliency: Tensor, share: float = TOP_SHARE) -> float:
    """Return what share of the truly highest tokens is also among the most salient ones.

    Args:
        truth: float ``[count]``.
        saliency: float ``[count]``.
        share: Of the tokens, those that are looked for, rounded up.

    Example:
        >>> found_share(torch.tensor([9.0, 8.0, 0.0, 0.0]), torch.tensor([9.0, 0.0, 8.0, 0.0]), 0.5)
        0.5
    """
    count = math.ceil(share * len(truth))
    wanted, chosen = set(top_tokens(truth, count).tolist()), top_tokens(saliency, count).tolist()
    return len(wanted.intersection(chosen)) / count
