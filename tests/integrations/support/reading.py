"""Prompts that are read by hand, and what caches and models show afterwards."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE


@torch.no_grad()
def read(
    model: PreTrainedModel,
    policy: CachePolicy,
    ids: Tensor | None = None,
    mask: Tensor | None = None,
    **inputs: Any,
) -> tuple[PolicyCache, Tensor]:
    """A cache that has read prompts ``[batch, len]`` in one forward, and the forward's logits."""
    cache = PolicyCache(policy)
    with cache.attached(model):
        output: Any = model(**{"input_ids": ids, "attention_mask": mask, CACHE: cache, **inputs})
    return cache, output.logits


def assert_same_positions(one: PolicyCache, other: PolicyCache) -> None:
    for layer, twin in zip(one.layers, other.layers, strict=True):
        assert torch.equal(layer.positions, twin.positions)


class Interrupted(BaseException):
    """Like KeyboardInterrupt, which hooks that run on failure do not see."""


class Counts:
    """How many tokens each kind of module of each layer has computed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tokens: Counter[tuple[str, int]] = Counter()
        self.layers = model.model.layers
        for index, layer in enumerate(self.layers):
            for name in ("q_proj", "k_proj", "o_proj"):
                self._count(layer.self_attn.get_submodule(name), name, index)
            self._count(layer.mlp, "mlp", index)

    def _count(self, module: nn.Module, name: str, index: int) -> None:
        def add(module: nn.Module, args: tuple[Tensor]) -> None:
            self.tokens[name, index] += args[0].shape[1]

        module.register_forward_pre_hook(add)

    def of(self, name: str) -> list[int]:
        return [self.tokens[name, index] for index in range(len(self.layers))]


def marks_on(model: nn.Module) -> list[Any]:
    """Everything of a model that attaching could leave a mark on."""
    compiled = {"_compiled_call", "_last_compile_config"}  # what Transformers' `generate` leaves
    return [
        (
            name,
            dict(part._forward_hooks),
            dict(part._forward_pre_hooks),
            sorted(part.__dict__.keys() - compiled),
        )
        for name, part in model.named_modules()
    ] + [part.config is model.config for part in model.modules() if hasattr(part, "config")]
