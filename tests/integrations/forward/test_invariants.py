"""What must always hold: see the list in docs/architecture.md."""

import gc
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy import CachePolicy, LayerContext
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import (
    H2O,
    TOVA,
    FastKV,
    FullContext,
    GQAGroupSelector,
    KeyDiff,
    KeyNorm,
    PassAllPropagation,
    Random,
    SnapKV,
    StreamingLLM,
    WindowMaxPoolScorer,
)
from tests.integrations.support.conversation import left_padded, prompt
from tests.integrations.support.reading import read
from tests.reference import FAMILIES, random_tokens, tiny_model

KEEP_EVERYTHING = [
    FullContext(),
    StreamingLLM(1.0),
    SnapKV(1.0),
    FastKV(tsp_rate=1.0, retention_rate=1.0),
]
EVICTING = [
    StreamingLLM(0.3),
    SnapKV(0.3),
    FastKV(tsp_rate=0.5, retention_rate=0.3),
    H2O(0.3),
    TOVA(0.3),
    KeyNorm(0.3),
    KeyDiff(0.3),
    Random(0.3, seed=1),
]
NAMES = [type(policy).__name__ for policy in EVICTING]


def generate(model: PreTrainedModel, ids: Tensor, past: Any, **kwargs: Any) -> Any:
    return model.generate(
        ids,
        **{CACHE: past},
        max_new_tokens=kwargs.pop("max_new_tokens", 9),
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )


@pytest.mark.parametrize("policy", KEEP_EVERYTHING, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_keeping_everything_equals_no_policy(family: str, policy: CachePolicy) -> None:
    model = tiny_model(family, seed=1)
    ids, mask = left_padded([random_tokens(0, 50), random_tokens(1, 31)])
    expected = generate(model, ids, DynamicCache(), attention_mask=mask, do_sample=False)
    got = generate(model, ids, PolicyCache(policy), attention_mask=mask, do_sample=False)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits))


def test_sampling_equals_no_policy_when_everything_is_kept() -> None:
    model = tiny_model("llama", seed=1)
    torch.manual_seed(5)
    expected = generate(model, prompt(50), DynamicCache(), do_sample=True, num_return_sequences=3)
    torch.manual_seed(5)
    cache = PolicyCache(SnapKV(1.0))
    got = generate(model, prompt(50), cache, do_sample=True, num_return_sequences=3)
    assert torch.equal(got.sequences, expected.sequences)
    assert len({tuple(row) for row in got.sequences.tolist()}) == 3


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_bfloat16_decodes_as_from_the_kept_entries_of_a_full_cache(implementation: str) -> None:
    model = tiny_model("llama", seed=4, attn_implementation=implementation).to(torch.bfloat16)
    ids = prompt(70)
    cache = PolicyCache(SnapKV(0.3))
    output = generate(model, ids, cache, do_sample=False)

    full = DynamicCache()
    first = model(ids, **{CACHE: full}).logits[:, -1]
    assert torch.equal(first.float(), output.logits[0])
    for held, layer in zip(full.layers, cache.layers, strict=True):
        index = layer.positions[:, :, : -(len(output.logits) - 1)]
        index = index[..., None].expand(-1, -1, -1, held.keys.shape[-1])
        held.keys, held.values = held.keys.gather(2, index), held.values.gather(2, index)
        assert layer.keys.dtype == torch.bfloat16
        assert index.shape[2] == 21
    for step, token in enumerate(output.sequences[0, 70:-1].tolist()):
        position = torch.tensor([[70 + step]])
        logits = model(torch.tensor([[token]]), **{CACHE: full}, position_ids=position).logits[
            :, -1
        ]
        assert torch.equal(logits.float(), output.logits[step + 1])


@pytest.mark.parametrize("policy", EVICTING, ids=NAMES)
def test_padded_rows_in_bfloat16_keep_what_they_keep_alone(policy: CachePolicy) -> None:
    model = tiny_model("llama", seed=4).to(torch.bfloat16)
    rows = [random_tokens(0, 64), random_tokens(1, 37)]
    ids, mask = left_padded(rows)
    cache = PolicyCache(policy)
    generate(model, ids, cache, attention_mask=mask, do_sample=False, max_new_tokens=1)
    for row, tokens in enumerate(rows):
        alone = PolicyCache(policy)
        generate(model, torch.tensor([tokens]), alone, do_sample=False, max_new_tokens=1)
        for here, there in zip(cache.layers, alone.layers, strict=True):
            for head in range(2):
                got = here.positions[row, head][here.positions[row, head] >= 0]
                # Rounding in a batch differs from rounding alone; a few near ties may turn.
                common = torch.isin(got, there.positions[0, head]).float().mean()
                assert got.numel() == there.kept_len
                assert common >= 0.8


@pytest.mark.parametrize("policy", [FullContext(), *EVICTING], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_after_prefill_the_bytes_held_are_those_of_the_kept(
    family: str, policy: CachePolicy
) -> None:
    model = tiny_model(family, seed=1)
    cache, _ = read(model, policy, prompt(90))
    for layer in cache.layers:
        kept = layer.positions[0, 0].numel()
        assert kept == (90 if isinstance(policy, FullContext) else 27)
        slot = layer.keys.shape[-1] * layer.keys.element_size()
        for tensor in (layer.keys, layer.values):
            assert tensor.untyped_storage().nbytes() == 2 * kept * slot
    assert cache.report().total.held_bytes == sum(2 * 2 * kept * slot for _ in cache.layers)


def test_nothing_keeps_the_evicted_tensors_alive() -> None:
    model = tiny_model("llama", seed=1)
    cache = PolicyCache(SnapKV(0.1))
    with torch.no_grad(), cache.attached(model):
        logits = model(prompt(211), cache=cache, logits_to_keep=1).logits
        del logits
        gc.collect()
        alive = [
            tensor.shape
            for tensor in gc.get_objects()
            if type(tensor) is Tensor and tensor.is_floating_point() and 211 in tensor.shape
        ]
    assert alive == []


@attrs.frozen
class CountingScorer(WindowMaxPoolScorer):
    """Counts its calls in a list outside itself."""

    calls: list[int] = attrs.field(factory=list, eq=False)

    def score(self, context: LayerContext) -> Tensor:
        self.calls.append(context.layer_idx)
        return super().score(context)


def test_saliency_is_computed_once_a_layer_and_only_where_needed() -> None:
    model = tiny_model("llama", seed=1)
    fastkv = FastKV(tsp_rate=0.5)
    both = CountingScorer()
    policy = CachePolicy(both, fastkv.selector, fastkv.propagation)
    generate(model, prompt(60), PolicyCache(policy))
    assert both.calls == [0, 1, 2, 3]

    one = CountingScorer()
    policy = CachePolicy(one, StreamingLLM().selector, fastkv.propagation)
    generate(model, prompt(60), PolicyCache(policy))
    assert one.calls == [1]


def test_a_larger_budget_only_adds_tokens() -> None:
    model = tiny_model("llama", seed=1)
    smaller: list[set[int]] | None = None
    for rate in (0.15, 0.3, 0.6, 1.0):
        cache = PolicyCache(
            CachePolicy(WindowMaxPoolScorer(), GQAGroupSelector(rate), PassAllPropagation())
        )
        generate(model, prompt(80), cache, max_new_tokens=1)
        kept = [set(head) for layer in cache.layers for head in layer.positions[0].tolist()]
        assert all(len(head) == int(80 * rate) for head in kept)
        if smaller is not None:
            assert all(few < many for few, many in zip(smaller, kept, strict=True))
        smaller = kept
