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
    visible = visible_after([act], model.config.num_attention_heads, len(token_ids))
    return dense_masked_logits(model, token_ids, visible)


@torch.no_grad()
def dense_masked_logits(
    model: PreTrainedModel, token_ids: Sequence[int], visible: Sequence[Tensor]
) -> Tensor:
    """Runs a whole row with a mask `[query_heads, len, len]` beside each layer's own."""
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
        logits: Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return logits
