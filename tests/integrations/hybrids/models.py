"""Tiny hybrids, what they generate, and what they say of a row read whole."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.state.recurrent import RecurrentLayer
from kvpolicy.integrations.transformers.surface import CACHE
from tests.integrations.model.builds.catalogue import Build, builds
from tests.integrations.model.builds.sizes import FIRST_SPECIAL_ID

# Held against dense attention in all that is tested here.
_NAMES = (
    "bamba",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    # Attention and states in one layer.
    "falcon_h1",
    "inkling2_text",
    "inkling_text",
    "zamba2",
    "zaya",
    # Asks for a cache of its own class.
    "minimax",
)
FAMILIES = tuple(name for name in _NAMES if name in builds())
# Whose layers begin anew where several tokens follow what was read, with any cache.
BEGIN_ANEW = ("jamba", "zamba")
# That take no DynamicCache.
OWN_CACHE = ("minimax",)
# That ask the cache how far keys lie from queries.
BY_COLUMNS = ("inkling_text", "inkling2_text")
# One of each kind of state: gated delta rule, convolution alone, Mamba 2 beside bare MLPs, one
# beside attention, several beside attention that counts columns, one without a convolution.
KINDS = tuple(
    name
    for name in ("qwen3_next", "lfm2", "nemotron_h", "falcon_h1", "inkling_text", "minimax")
    if name in builds()
)
TOLERANCE = 1e-4


# With a recurrence behind the first attention layer, and an MLP at the end.
_TYPES = ["linear_attention", "moe", "full_attention", "linear_attention", "full_attention", "mlp"]
_OPTIONS: dict[str, dict[str, Any]] = {
    "nemotron_h": {"layer_types": _TYPES, "num_hidden_layers": len(_TYPES)}
}


@cache
def hybrid(name: str) -> PreTrainedModel:
    return Build(name, builds()[name].model_type, hybrid_options(name)).model()


def hybrid_options(name: str) -> dict[str, Any]:
    """Fields of the configuration of a tiny model."""
    return {**builds()[name].patch, **_OPTIONS.get(name, {})}


def tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, FIRST_SPECIAL_ID - 1, (count,), generator=generator).tolist()


def generate(
    model: PreTrainedModel, store: Any, ids: Tensor, mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Tokens `[batch, len + new]` and logits `[batch, new, vocab]`, decoded greedily."""
    output: Any = model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        **{CACHE: store},
        **{"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **kwargs},
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences, torch.stack(output.logits, dim=1)


def apart(found: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest number."""
    return float((found - want).abs().max() / want.abs().max())


def states_of(cache: PolicyCache) -> list[Tensor]:
    """Every state that a cache holds, copied."""
    found = []
    for layer in cache.layers:
        if isinstance(layer, RecurrentLayer):
            found += [each.clone() for each in layer.beside().values()]
    assert found
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
