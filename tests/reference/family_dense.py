"""Runs a model's own code without a cache, with evicted tokens masked."""

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
    lowest = torch.finfo(torch.float32).min
    visible = visible_after(acts, model.config.num_attention_heads, len(token_ids))

    def narrowed(index: int) -> Any:
        extra = torch.where(visible[index], 0.0, lowest)[None]

        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
            given = {**given, **given.pop("kwargs", {})}
            own = given["attention_mask"]
            return (), {**given, "attention_mask": torch.clamp(own + extra, min=lowest)}

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
