"""Runs a model's own code without a cache, with evicted tokens masked.

A policy that evicts tokens must give the same result as dense attention in which those tokens are
masked. The same holds for a policy that drops tokens in prefill: a token that did not reach a layer
is masked for all queries of that layer.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .dense import Act, visible_after


def layer_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the model's decoder layers, whatever the attribute is named."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    return list(next(each for each in lists if len(each) == count))


def family_logits(model: PreTrainedModel, token_ids: Sequence[int], act: Act) -> Tensor:
    """Runs a whole row with every layer's own mask hiding what was evicted."""
    return family_dense(model, token_ids, [act])[0]


@torch.no_grad()
def family_dense(
    model: PreTrainedModel, token_ids: Sequence[int], acts: Sequence[Act], **asked: Any
) -> tuple[Tensor, list[Tensor]]:
    """Returns logits `[len, vocab]`, and if asked weights `[query_heads, len, len]` by layer."""
    visible = visible_after(acts, model.config.num_attention_heads, len(token_ids))
    return under_masks(model, token_ids, visible, **asked)


@torch.no_grad()
def dense_masked_logits(
    model: PreTrainedModel, token_ids: Sequence[int], visible: Sequence[Tensor]
) -> Tensor:
    """Runs a whole row with masks `[query_heads, len, len]`, one for each layer."""
    return under_masks(model, token_ids, visible)[0]


def under_masks(
    model: PreTrainedModel, token_ids: Sequence[int], visible: Sequence[Tensor], **asked: Any
) -> tuple[Tensor, list[Tensor]]:
    """Runs a whole row with a mask beside each layer's own; returns as `family_dense`."""
    lowest = torch.finfo(torch.float32).min

    def narrowed(index: int) -> Any:
        extra = torch.where(visible[index], 0.0, lowest)[None]

        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
            given = {**given, **given.pop("kwargs", {})}
            own = given["attention_mask"]
            mask = extra if own is None else torch.clamp(own + extra, min=lowest)
            return (), {**given, "attention_mask": mask}

        return hook

    handles = [
        layer.register_forward_pre_hook(narrowed(index), with_kwargs=True)
        for index, layer in enumerate(layer_modules(model))
    ]
    try:
        output: Any = model(torch.tensor([list(token_ids)]), use_cache=False, **asked)
    finally:
        for handle in handles:
            handle.remove()
    return output.logits[0], [each[0] for each in output.get("attentions") or ()]
