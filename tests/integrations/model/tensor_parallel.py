"""One process of a tensor-parallel model: the conversations of `test_tensor_parallel`.

Run as ``python -m torch.distributed.run --nproc-per-node 2 -m
tests.integrations.model.tensor_parallel
FOLDER``; every process writes what it saw to a file of its rank.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, LayerContext
from kvpolicy.heads import Heads
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    H2O,
    AdaKV,
    GQAGroupSelector,
    Random,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from tests.contexts import with_layer
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.support.asking import (
    CarriedOnScorer,
    LargestOfLayers,
    OutputScorer,
    RememberingSelector,
    TurnedBackScorer,
)
from tests.integrations.support.content import MassPropagation
from tests.integrations.support.conversation import METHODS, left_padded, run_conversation
from tests.reference import Family, random_tokens, tiny_model

ROWS = (0, 1, 2)  # of unlike lengths, so that the batch is padded


class LocalPropagation(TokenSelectivePropagation):
    """A wrong one: every process takes the mean over the heads it has."""

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor | None:
        return super().propagate(saliency, with_layer(context, heads=Heads()))


LOCAL_FASTKV = CachePolicy(
    WindowMaxPoolScorer(4, kernel_size=3),
    GQAGroupSelector(0.25, window_size=4),
    LocalPropagation(tsp_rate=0.4, window_size=4),
)
POLICIES: dict[str, CachePolicy] = {
    **{name: policy for name, (policy, _) in METHODS.items()},
    "random": Random(0.3),
    "local": LOCAL_FASTKV,
    "by_content": CachePolicy(
        WindowMaxPoolScorer(4, kernel_size=3),
        GQAGroupSelector(0.3, window_size=4),
        MassPropagation((0, 2)),
    ),
    "turning": CachePolicy(
        TurnedBackScorer(),
        GQAGroupSelector(0.3, window_size=4),
        TokenSelectivePropagation(tsp_rate=0.4, window_size=4),
    ),
    "weighing": CachePolicy(
        OutputScorer(),
        GQAGroupSelector(0.3, window_size=4),
        TokenSelectivePropagation(tsp_rate=0.4, window_size=4),
    ),
    "looking_back": CachePolicy(
        CarriedOnScorer(4, kernel_size=3),
        RememberingSelector(0.3, window_size=4),
        LargestOfLayers(0.4, window_size=4, layers=(2,)),
    ),
    "bounded_h2o": H2O(0.25, decoding=H2O().decoding_rule(12, every=2)),
    "bounded_ada_kv": AdaKV(0.25, decoding=AdaKV(window_size=4).decoding_rule(12, every=3)),
}
SEEDS: dict[Family, int] = {"llama": 0, "qwen3": 1}
CASES: list[tuple[Family, str]] = [
    ("llama", "snapkv"),
    ("llama", "fastkv"),
    ("llama", "fastkv_first_layer"),
    ("llama", "fastkv_group_first"),
    ("llama", "gemfilter"),
    ("llama", "pyramidinfer"),
    ("llama", "two_stages"),
    ("llama", "adakv"),
    ("llama", "chunkkv"),
    ("llama", "random"),
    ("llama", "by_content"),
    ("llama", "looking_back"),
    ("llama", "turning"),
    ("llama", "weighing"),
    ("llama", "bounded_h2o"),
    ("llama", "bounded_ada_kv"),
    ("qwen3", "snapkv"),
    ("qwen3", "fastkv"),
    ("qwen3", "gemfilter"),
    ("qwen3", "pyramidinfer"),
]

# One with latents for all heads, one with recurrent layers; read in one turn, since a state skips
# no padding between two.
KINDS: list[tuple[str, str]] = [
    (name, policy)
    for name in ("deepseek_v2", "qwen3_next")
    for policy in ("snapkv", "fastkv", "gemfilter")
]
KINDS.append(("deepseek_v2", "snapkv_group_first"))


def build(family: Family) -> PreTrainedModel:
    """A model of 8 query heads and 4 KV heads, in groups of two."""
    return tiny_model(family, seed=SEEDS[family], query_heads=8, kv_heads=4, hidden_size=64)


def distributed_over_processes(model: PreTrainedModel) -> PreTrainedModel:
    """The model with this process's part of its weights, by Transformers' own plan.

    What ``from_pretrained(distributed_config=...)`` does, which needs accelerate as well.
    """
    from transformers.distributed import DistributedConfig

    # The oldest release supported wants to split the head's 97 tokens into equal parts.
    plan = {name: style for name, style in model.tp_plan.items() if name != "lm_head"}
    config, _, mesh = type(model).prepare_distribute_model(
        DistributedConfig(tp_size=int(distributed.get_world_size()), tp_plan=plan)
    )
    return type(model).maybe_distribute_model(model, config, mesh)


def seen(model: PreTrainedModel, policy: CachePolicy) -> dict[str, Any]:
    """Two turns of a padded batch, and the bytes held after them."""
    store, turns = run_conversation(model, policy, ROWS)
    return {
        "turns": [asdict(turn) for turn in turns],
        "held_bytes": store.report().total.held_bytes,
    }


def seen_of_kind(model: PreTrainedModel, policy: CachePolicy) -> dict[str, Any]:
    """One turn of a padded batch: tokens, logits, positions held, and bytes."""
    ids, mask = left_padded([random_tokens(seed, length) for seed, length in ((0, 47), (1, 31))])
    cache = PolicyCache(policy)
    said: Any = model.generate(
        ids,
        attention_mask=mask,
        cache=cache,
        max_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return {
        "tokens": said.sequences,
        "logits": torch.stack(said.logits),
        "kept": [layer.positions for layer in cache.layers],
        "propagated": dict(cache.propagated),
        "held_bytes": cache.report().total.held_bytes,
    }


def go_on_from_a_file(model: PreTrainedModel, folder: Path) -> None:
    """Raise unless a process goes on from the file of its heads, and from no other."""
    ids, added = (torch.tensor([random_tokens(seed, 50)]) for seed in (0, 1))
    cache = PolicyCache(METHODS["fastkv"][0])
    said: Any = model.generate(ids, cache=cache, max_new_tokens=5, do_sample=False)
    fixed = PolicyCache(METHODS["fastkv"][0], max_new_tokens=5)
    again: Any = model.generate(ids, cache=fixed, max_new_tokens=5, do_sample=False)
    assert torch.equal(said, again)
    cache.save(folder / f"{distributed.get_rank()}.safetensors")
    distributed.barrier()
    own, other = (
        PolicyCache.load(folder / f"{(distributed.get_rank() + step) % 2}.safetensors")
        for step in range(2)
    )
    whole = torch.cat([said, added], dim=1)
    found: list[Any] = [
        model.generate(whole, cache=each, max_new_tokens=5, do_sample=False)
        for each in (cache, own)
    ]
    assert torch.equal(*found)
    with pytest.raises(ValueError, match="got another one"), other.attached(model):
        pass


def main(folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    models = {family: distributed_over_processes(build(family)) for family in SEEDS}
    go_on_from_a_file(models["llama"], Path(folder))
    cases = [*CASES, *((family, "local") for family in SEEDS)]
    results = {(family, name): seen(models[family], POLICIES[name]) for family, name in cases}
    spread = {name: distributed_over_processes(builds()[name].model()) for name in dict(KINDS)}
    results |= {(name, each): seen_of_kind(spread[name], POLICIES[each]) for name, each in KINDS}
    torch.save(results, Path(folder) / f"{distributed.get_rank()}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
