"""Prompts with images in chunks: what the prompt read at once gives, wherever a chunk ends."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import H2O, FastKV, FullContext, GemFilter, ReplayKV, SnapKV
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.test_generation import CHUNKS_GO_ON

from .models import FAMILIES
from .prompts import model_inputs
from .rows import first_parts, model_of

pytestmark = pytest.mark.skipif(
    not CHUNKS_GO_ON, reason="this Transformers gives no chunk the features of its images"
)

TOLERANCE = 1e-4
ONE_WAY = [name for name, family in FAMILIES.items() if family.both_ways == "nothing"]


def policy_of(name: str, method: str) -> CachePolicy:
    """A policy for the family, which drops in the middle of the features that are added."""
    if method == "fastkv":
        layer = FAMILIES[name].drops_after
        return FastKV(
            tsp_layer=layer, tsp_rate=0.4, retention_rate=0.25, window_size=4, kernel_size=3
        )
    return {
        "full_context": FullContext(),
        "snapkv": SnapKV(0.3, window_size=4, kernel_size=3),
        "h2o": H2O(0.3),
        "gemfilter": GemFilter(retention_rate=0.4),
        "replaykv": ReplayKV(0.3, tsp_rate=0.5),
        # The dropping layer itself is run for those that go on, and features added behind it.
        "early": FastKV(
            tsp_layer=0, tsp_rate=0.2, retention_rate=0.2, window_size=4, kernel_size=3
        ),
        # All of the layers with features are read twice, or by what went on.
        "late": FastKV(
            tsp_layer=2, tsp_rate=0.9, retention_rate=0.25, window_size=4, kernel_size=3
        ),
    }[method]


def inputs_of(name: str, rows: tuple[int, ...]) -> dict[str, Tensor]:
    return model_inputs(FAMILIES[name], [[first_parts(name)[row]] for row in rows])


def read(
    name: str, method: str, rows: tuple[int, ...], chunk: int | None
) -> tuple[Tensor, PolicyCache]:
    store = PolicyCache(policy_of(name, method))
    output: Any = model_of(name).generate(
        **inputs_of(name, rows),
        cache=store,
        max_new_tokens=3,
        do_sample=False,
        prefill_chunk_size=chunk,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(output.logits, dim=1), store


@cache
def read_whole(
    name: str, method: str, rows: tuple[int, ...]
) -> tuple[Tensor, list[Tensor], dict[int, Tensor]]:
    logits, store = read(name, method, rows, None)
    return logits, [layer.positions for layer in store.layers], dict(store.propagated)


def assert_as_whole(name: str, method: str, rows: tuple[int, ...], chunk: int) -> None:
    logits, kept, passed = read_whole(name, method, rows)
    found, store = read(name, method, rows, chunk)
    assert float((found - logits).abs().max()) <= TOLERANCE
    for layer, positions in zip(store.layers, kept, strict=True):
        assert torch.equal(layer.positions, positions)
    assert store.propagated.keys() == passed.keys()
    assert all(torch.equal(store.propagated[each], passed[each]) for each in passed)


# Chunks that cut images in the middle, that are shorter than any, and that end with an image in the
# last one; the first row's images lie within columns 10 to 65.
@pytest.mark.parametrize("chunk", [9, 48])
@pytest.mark.parametrize("method", ["snapkv", "fastkv", "replaykv"])
@pytest.mark.parametrize("name", ONE_WAY)
def test_images_are_cut_where_tokens_see_none_later(name: str, method: str, chunk: int) -> None:
    assert_as_whole(name, method, (0, 1), chunk)


@pytest.mark.parametrize("chunk", [1, 5, 48])
@pytest.mark.parametrize("method", ["full_context", "h2o", "early", "late"])
def test_features_added_between_layers(method: str, chunk: int) -> None:
    """Before, at and after the layer that drops: each to the tokens that are still there."""
    assert_as_whole("qwen3_vl", method, (0, 1), chunk)


def granite(policy: CachePolicy, chunk: int) -> Tensor:
    """Last hidden states of two rows, read by a decoder that adds features before its layers."""
    model: Any = builds()["granite4_vision"].model()
    decoder, generator = model.model.language_model, torch.Generator().manual_seed(0)
    count, size = 50, decoder.config.hidden_size
    embeds, mask = torch.randn(2, count, size, generator=generator), torch.zeros(2, count).bool()
    mask[0, 5:20] = mask[0, 40:47] = mask[1, 10:30] = True
    features = [torch.randn(int(mask.sum()), size, generator=generator) for _ in decoder.layers]
    rows = mask.flatten().cumsum(0).view(2, count) - 1
    store = PolicyCache(policy)
    with store.attached(model), torch.no_grad():
        store.start_turn(prompt_len=count)
        for start in range(0, count, chunk):
            here = slice(start, start + chunk)
            own = rows[:, here][mask[:, here]]
            output = decoder(
                inputs_embeds=embeds[:, here],
                vision_mask=mask[:, here],
                deepstack_features={index: each[own] for index, each in enumerate(features)},
                cache=store,
            )
    last: Tensor = output.last_hidden_state[:, -1]
    return last


@pytest.mark.skipif("granite4_vision" not in builds(), reason="a later Transformers has it")
@pytest.mark.parametrize(
    "policy",
    [
        FullContext(),
        FastKV(
            tsp_layer=1, tsp_rate=0.2, retention_rate=0.2, window_size=4
        ),  # the layer runs for few
        FastKV(
            tsp_layer=1, tsp_rate=0.9, retention_rate=0.2, window_size=4
        ),  # the layer runs for all
        GemFilter(filter_layer=2, retention_rate=0.3),
    ],
    ids=["full_context", "few_go_on", "most_go_on", "restart"],
)
def test_features_added_before_layers(policy: CachePolicy) -> None:
    want = granite(policy, 50)
    for chunk in (1, 9, 25):
        assert float((granite(policy, chunk) - want).abs().max()) <= TOLERANCE


BOTH_WAYS = [name for name, family in FAMILIES.items() if family.both_ways != "nothing"]


@pytest.mark.parametrize("method", ["full_context", "snapkv", "h2o"])
@pytest.mark.parametrize("rows", [(0,), (0, 1)], ids=["one", "padded"])
def test_a_chunk_between_images_whose_tokens_see_each_other(
    method: str, rows: tuple[int, ...]
) -> None:
    assert_as_whole("gemma3", method, rows, 90)
    whole, _, _ = read_whole("gemma3", method, (0,))
    store = PolicyCache(policy_of("gemma3", method))
    with store.attached(model_of("gemma3")), torch.no_grad():
        found = by_hand(store, (10, 36, 40, 49, 76))
    assert float((found - whole[:, 0]).abs().max()) <= TOLERANCE


def by_hand(store: PolicyCache, ends: tuple[int, ...]) -> Tensor:
    """Last logits of Gemma 3's first row, read in chunks by the cache that is attached.

    Its images lie in columns 10 to 34 and 50 to 74.
    """
    model, given = model_of("gemma3"), inputs_of("gemma3", (0,))
    ids, types = given["input_ids"], given["token_type_ids"]
    features = model.model.get_image_features(given["pixel_values"]).pooler_output
    embeds = model.get_input_embeddings()(ids)
    embeds[types == 1] = features.flatten(0, 1)
    store.start_turn(prompt_len=ids.shape[1])
    for start, stop in zip((0, *ends), (*ends, ids.shape[1]), strict=True):
        # As `generate` gives them: up to the chunk's end.
        output = model(
            inputs_embeds=embeds[:, start:stop], token_type_ids=types[:, :stop], cache=store
        )
    return output.logits[:, -1]


@pytest.mark.parametrize("method", ["full_context", "fastkv"])
@pytest.mark.parametrize("name", BOTH_WAYS)
@pytest.mark.parametrize("chunk", [1, 25])
def test_a_chunk_that_cuts_what_sees_each_other(name: str, method: str, chunk: int) -> None:
    """Refused before anything is read, and the cache goes on."""
    store = PolicyCache(policy_of(name, method))
    inputs = {**inputs_of(name, (0, 1)), CACHE: store, "max_new_tokens": 2}
    with pytest.raises(UnsupportedGenerationError, match=r"prefill_chunk_size.* see later ones"):
        model_of(name).generate(**inputs, prefill_chunk_size=chunk)
    assert not store.get_seq_length()
    model_of(name).generate(**inputs)


def test_a_size_that_cuts_nothing_is_named() -> None:
    inputs = {**inputs_of("gemma3", (0,)), CACHE: PolicyCache(FullContext())}
    with pytest.raises(UnsupportedGenerationError, match=r"column 20, .* got 20; give 38, or None"):
        model_of("gemma3").generate(**inputs, prefill_chunk_size=20)


@torch.no_grad()
@pytest.mark.parametrize("method", ["full_context", "snapkv"])
@pytest.mark.parametrize(
    ("ends", "words"),
    [
        # Of the first image one token alone is in each of two chunks, so that no mask shows it.
        ((11, 12), r"column 11, .* the chunk end at column 10\b"),
        ((34,), r"column 34, .* the chunk end at column 10 or at column 35\b"),
        ((36, 60), r"column 60, .* the chunk end at column 50 or at column 75\b"),
    ],
)
def test_a_chunk_by_hand_that_cuts_an_image(method: str, ends: tuple[int, ...], words: str) -> None:
    store = PolicyCache(policy_of("gemma3", method))
    with store.attached(model_of("gemma3")), pytest.raises(UnsupportedModelError, match=words):
        by_hand(store, ends)


@torch.no_grad()
def test_types_of_a_chunk_alone() -> None:
    """Which the model would take for those of the prompt's first tokens."""
    store, given = PolicyCache(FullContext()), inputs_of("gemma3", (0,))
    ids, types = given["input_ids"], given["token_type_ids"]
    with store.attached(model_of("gemma3")):
        store.start_turn(prompt_len=ids.shape[1])
        model_of("gemma3")(ids[:, :9], token_type_ids=types[:, :9], cache=store)
        with pytest.raises(UnsupportedModelError, match=r"token_type_ids must be .*\[batch, 36\]"):
            model_of("gemma3")(
                inputs_embeds=torch.zeros(1, 27, 48), token_type_ids=types[:, 9:36], cache=store
            )


@torch.no_grad()
def test_a_prompt_that_sees_itself_without_types() -> None:
    model, store = model_of("paligemma"), PolicyCache(FullContext())
    ids = inputs_of("paligemma", (0,))["input_ids"][:, 25:]
    with store.attached(model):
        store.start_turn(prompt_len=ids.shape[1])
        with pytest.raises(UnsupportedModelError, match="in one forward"):
            model(ids[:, :20], cache=store)


@torch.no_grad()
@pytest.mark.parametrize("method", ["full_context", "snapkv"])
def test_what_follows_a_prompt_that_sees_itself(method: str) -> None:
    """Its prefix in one chunk, the rest of it, which sees what is before alone, in others."""
    model, given = model_of("paligemma"), inputs_of("paligemma", (0,))
    types = given["token_type_ids"].clone()
    types[:, 40:] = 1
    outputs = []
    for ends in ((), (40,), (40, 41, 55)):
        store = PolicyCache(policy_of("paligemma", method))
        embeds = model.get_input_embeddings()(given["input_ids"].clamp(max=80))
        count = embeds.shape[1]
        with store.attached(model):
            store.start_turn(prompt_len=count)
            for start, stop in zip((0, *ends), (*ends, count), strict=True):
                output = model(
                    inputs_embeds=embeds[:, start:stop], token_type_ids=types[:, :stop], cache=store
                )
        outputs.append(output.logits[:, -1])
    for found in outputs[1:]:
        assert float((found - outputs[0]).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("method", ["full_context", "fastkv"])
@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_drafts_behind_images(name: str, method: str) -> None:
    """The prompt is read in a forward that brings draft tokens along, and taken as two."""
    inputs = {**inputs_of(name, (0,)), "max_new_tokens": 8, "do_sample": False}
    want = model_of(name).generate(**inputs, cache=PolicyCache(policy_of(name, method)))
    found = model_of(name).generate(
        **inputs, cache=PolicyCache(policy_of(name, method)), prompt_lookup_num_tokens=3
    )
    assert torch.equal(found, want)
