"""Caches that were saved to files, which every later version of the library has to load.

`python -m tests.tools.saved_files` writes the files that do not exist yet, and prints the answers
that `tests/integrations/state/test_saved_files.py` expects. Files of released versions must not be
written again: their point is that they are old.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import H2O, AdaKV, FastKV, KVzip
from tests.reference import tiny_model

FOLDER = Path(__file__).parents[1] / "integrations" / "state" / "saved"
VOCABULARY = 40
# Heads that keep unlike numbers of tokens; a layer that drops tokens; the state of a scorer and the
# queries of an answer that is bounded; a second reading, which had another name before.
POLICIES: dict[str, CachePolicy] = {
    "ada_kv": AdaKV(retention_rate=0.3),
    "fastkv": FastKV(retention_rate=0.2, tsp_layer=1, tsp_rate=0.5),
    "h2o": H2O(retention_rate=0.3, decoding=16),
    "kvzip": KVzip(retention_rate=0.3, chunk_size=16),
}


def exact_model() -> PreTrainedModel:
    """Make a tiny Llama with the same weights on every machine."""
    model = tiny_model(
        "llama", seed=0, num_layers=3, query_heads=4, hidden_size=16, intermediate_size=16
    )
    numbers = random.Random(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.tensor([numbers.random() - 0.5 for _ in range(parameter.numel())])
            width = 1.0 if "norm" in name else 8.0 / parameter.shape[-1] ** 0.5
            drawn = 1 + drawn if "norm" in name else drawn * (4.0 if "embed" in name else width)
            parameter.copy_(drawn.view_as(parameter))
    return model


def tokens_of(seed: int, length: int) -> Tensor:
    """Draw token ids ``[1, length]``, the same on every machine."""
    numbers = random.Random(seed)
    return torch.tensor([[1 + int(numbers.random() * VOCABULARY) for _ in range(length)]])


def answer(model: PreTrainedModel, cache: PolicyCache, ids: Tensor, count: int) -> Tensor:
    """Return ids and the tokens that the model generates after them, greedily."""
    found: Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=count,
        do_sample=False,
    )
    return found


def conversation(model: PreTrainedModel, cache: PolicyCache) -> Tensor:
    """Read a prompt and answer it, up to where the cache was saved."""
    return answer(model, cache, tokens_of(2, 60), 21)


def goes_on(model: PreTrainedModel, cache: PolicyCache, before: Tensor) -> list[int]:
    """Read a second prompt and answer it; return the answer."""
    ids = torch.cat([before, tokens_of(3, 12)], dim=1)
    return answer(model, cache, ids, 20)[0, ids.shape[1] :].tolist()


def main() -> None:
    """Write the files that do not exist, and print the answers."""
    model = exact_model()
    for name, policy in POLICIES.items():
        cache, path = PolicyCache(policy), FOLDER / f"{name}.safetensors"
        before = conversation(model, cache)
        if not path.exists():
            cache.save(path)
        print(f'"{name}": {goes_on(model, cache, before)},  # {path.stat().st_size} bytes')


if __name__ == "__main__":
    main()
