"""What layers hold of a prompt between its chunks, and that it changes no result."""

import copy
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import OffloadedStorage, PolicyCache, QuantizedStorage
from kvpolicy.policies import (
    CLAA,
    H2O,
    AdaKV,
    FastKV,
    GQAGroupSelector,
    PassAllPropagation,
    PeakAttentionScorer,
    SnapKV,
    StreamingLLM,
)
from tests.families import FAMILIES, WINDOW
from tests.integrations.hybrids.models import hybrid
from tests.integrations.support.conversation import (
    Lengths,
    assert_alike,
    left_padded,
    run_conversation,
    run_turn,
)
from tests.integrations.support.looks import Looks
from tests.integrations.test_generation import CHUNKS_GO_ON
from tests.reference import random_tokens

pytestmark = pytest.mark.skipif(
    not CHUNKS_GO_ON, reason="this Transformers cuts masks of chunks wrongly"
)

TOLERANCE = 1e-5  # of the largest logit
# Rows that are longer than the window from the first turn on, from the second on, and never. In the
# second turn the first row ends with padding alone in the chunks that the others begin with.
ROWS = Lengths(first=(67, 14, 5), second=(23, 38, 6), num_decode=2)
PROMPT = torch.tensor([random_tokens(0, 200)])
FAST = FastKV(tsp_rate=0.4, retention_rate=0.25, window_size=4, kernel_size=3)
POLICIES: dict[str, CachePolicy] = {
    "snapkv": SnapKV(0.6, window_size=2, kernel_size=3),
    "streamingllm": StreamingLLM(retention_tokens=9, num_sinks=2),
    "adakv": AdaKV(0.6, window_size=2, kernel_size=3),
    "sums": H2O(0.6, window_size=1),
    "sums_that_answers_go_on_with": H2O(retention_tokens=9, window_size=1, decoding=9),
    "all_queries": CachePolicy(
        PeakAttentionScorer(), GQAGroupSelector(0.6, window_size=1), PassAllPropagation()
    ),
}


@cache
def model_of(name: str) -> PreTrainedModel:
    if name in ("gemma3n_text", "llama4_text_mixed"):
        return hybrid(name)
    return FAMILIES[name].build(3)


@pytest.mark.parametrize("rows", [(0, 1, 2), (1,)], ids=["padded", "single"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", ["mistral_sliding", "gemma3", "gpt_oss", "llama4_text_mixed"])
def test_rows_around_the_window_over_two_turns(
    family: str, name: str, rows: tuple[int, ...]
) -> None:
    model, policy = model_of(family), POLICIES[name]
    _, want = run_conversation(model, policy, rows, ROWS)
    for chunk in (7, 21):
        found = run_conversation(model, policy, rows, ROWS, prefill_chunk_size=chunk)[1]
        assert_alike(found, want, TOLERANCE)


@pytest.mark.parametrize("rows", [(0,), (0, 1, 2)], ids=["single", "padded"])
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        (
            "gpt_oss",
            CLAA(
                tsp_layer=1,
                retention_rate=0.25,
                window_size=4,
                kernel_size=3,
                voting_layers=2,
                whole_layers=1,
                tsp_rate=0.4,
            ),
        ),
        ("gemma3n_text", POLICIES["snapkv"]),  # layers that borrow keys
        ("gemma3n_text", POLICIES["sums"]),
    ],
)
def test_drops_history_and_shared_keys(
    family: str, policy: CachePolicy, rows: tuple[int, ...]
) -> None:
    model = model_of(family)
    _, want = run_conversation(model, policy, rows, ROWS)
    assert_alike(
        run_conversation(model, policy, rows, ROWS, prefill_chunk_size=7)[1], want, TOLERANCE
    )


@torch.no_grad()
def read(
    model: PreTrainedModel, store: PolicyCache, ends: range, ids: Tensor = PROMPT, **how: Any
) -> Tensor:
    output: Any = None
    for start in ends:
        chunk = ids[:, start : min(start + ends.step, ends.stop)]
        output = model(chunk, cache=store, **how)
    return output.logits[:, -1]


def windowed(model: PreTrainedModel) -> list[bool]:
    kinds = getattr(model.config, "layer_types", None)
    kinds = kinds or ["sliding_attention"] * model.config.num_hidden_layers
    return [kind == "sliding_attention" for kind in kinds]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", ["mistral_sliding", "gemma3", "gpt_oss"])
def test_what_is_held_between_chunks(family: str, name: str) -> None:
    """A layer with a window: the window, no queries and no sums; any other layer: the prompt."""
    model, store = model_of(family), PolicyCache(POLICIES[name])
    with store.attached(model):
        store.start_turn(prompt_len=200)
        for start in range(0, 160, 40):
            read(model, store, range(start, start + 40, 40))
            assert store._reader.now.chunks is not None
            beside = store._reader.now.chunks.asked | store._reader.now.chunks.carried.keys()
            for index, (layer, bounded) in enumerate(
                zip(store.layers, windowed(model), strict=True)
            ):
                assert layer.capacity == (WINDOW - 1 if bounded else 200 + layer.room)
                slot = layer.nbytes() // layer.capacity
                assert layer.nbytes() == slot * layer.capacity
                assert not (bounded and index in beside)
                places = layer.positions[0, 0].tolist()
                assert places == list(range(start + 41 - WINDOW if bounded else 0, start + 40))
        read(model, store, range(160, 200, 40))
    assert store._reader.now.chunks is None


@pytest.mark.parametrize("length", [2 * WINDOW, 2 * WINDOW + 1])
def test_a_prompt_of_two_windows_is_held_whole(length: int) -> None:
    """While a chunk is read, two windows would be held in its place."""
    model, store = model_of("mistral_sliding"), PolicyCache(POLICIES["snapkv"])
    with store.attached(model):
        store.start_turn(prompt_len=length)
        for end in range(5, 31, 5):
            read(model, store, range(end - 5, end, 5))
            whole = length == 2 * WINDOW
            held = end if whole else min(end, WINDOW - 1)
            assert {layer.kept_len for layer in store.layers} == {held}
            assert {layer.capacity for layer in store.layers} == {length if whole else held}


def test_what_is_held_in_a_later_turn() -> None:
    """Behind a row that is shorter than the window, so that the policy has chosen in it."""
    model, store = model_of("mistral_sliding"), PolicyCache(POLICIES["streamingllm"])
    with store.attached(model):
        read(model, store, range(0, 14, 14))
        assert store.layers[0].positions[0, 0].tolist() == [0, 1, *range(7, 14)]
        store.start_turn(prompt_len=40)
        for start, first in ((14, 7), (18, 7), (22, 11)):
            read(model, store, range(start, start + 4, 4))
            assert store.layers[0].positions[0, 0].tolist() == list(range(first, start + 4))


def test_of_chunked_attention_the_last_piece_is_held() -> None:
    model, store = model_of("llama4_text_mixed"), PolicyCache(POLICIES["snapkv"])
    with store.attached(model):
        store.start_turn(prompt_len=200)
        for start in range(0, 160, 40):
            read(model, store, range(start, start + 40, 40))
            end = start + 40
            for index, first in enumerate((end - end % WINDOW, 0) * 2):
                assert store.layers[index].positions[0, 0].tolist() == list(range(first, end))


def test_memory_does_not_grow_with_the_prompt() -> None:
    """Neither in one row nor beside a row that begins later."""
    model, policy, held = model_of("mistral_sliding"), POLICIES["sums"], []
    for length in (100, 200):
        ids, mask = left_padded([random_tokens(0, length), random_tokens(1, 30)])
        store = PolicyCache(policy)
        with store.attached(model), torch.no_grad():
            store.start_turn(prompt_len=length)
            for stop in range(20, length, 20):
                chunk = ids[:, stop - 20 : stop]
                model(chunk, attention_mask=mask[:, :stop], cache=store)
                assert max(layer.capacity for layer in store.layers) <= WINDOW
            assert store._reader.now.chunks is not None
            sums = sum(each.nbytes for each in store._reader.now.chunks.carried.values())
            held.append((sum(layer.nbytes() for layer in store.layers), sums))
    assert held[0] == held[1]


def test_a_chunk_that_fails_or_is_copied() -> None:
    model, policy = model_of("gemma3"), POLICIES["sums"]
    want = PolicyCache(policy)
    with want.attached(model):
        expected = read(model, want, range(0, 200, 200))
    store = PolicyCache(policy)
    with store.attached(model):
        store.start_turn(prompt_len=200)
        read(model, store, range(0, 120, 40))
        before = [layer.contents for layer in store.layers]
        places = [layer.positions.tolist() for layer in store.layers]
        with pytest.raises(ValueError, match="position_ids"):
            read(
                model, store, range(120, 160, 40), position_ids=torch.zeros(1, 3, dtype=torch.long)
            )
        assert [layer.contents for layer in store.layers] == before
        assert [layer.positions.tolist() for layer in store.layers] == places
    for again in (copy.deepcopy(store), store):
        with again.attached(model):
            found = read(model, again, range(120, 200, 40))
        assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
        assert all(map(torch.equal, *([x.positions for x in y.layers] for y in (again, want))))


@pytest.mark.parametrize("kind", ["offloaded", "quantized"])
def test_other_storages(kind: str) -> None:
    """What is quantised is what is kept: the prompt's own tokens attend to exact keys."""
    if kind == "quantized":
        pytest.importorskip("optimum.quanto")
        model, storage = model_of("mistral_sliding"), QuantizedStorage("quanto", q_group_size=10)
    else:
        model, storage = model_of("gemma3"), OffloadedStorage()
    ids, _ = left_padded([random_tokens(0, ROWS.first[0])])
    turns = []
    for chunk in (None, 7):
        store = PolicyCache(POLICIES["snapkv"], storage=storage)
        turns.append(run_turn(model, store, ids, None, 2, prefill_chunk_size=chunk))
    assert_alike(turns[1:], turns[:1], TOLERANCE)


@pytest.mark.parametrize("name", ["streamingllm", "sums"])
def test_numbers_alone_say_what_is_held(name: str) -> None:
    """Of a first prompt without padding, so that nothing is read from the device for it."""
    model, store = model_of("mistral_sliding"), PolicyCache(POLICIES[name])
    with store.attached(model):
        store.start_turn(prompt_len=200)
        read(model, store, range(0, 80, 40))
        with Looks() as looks:
            read(model, store, range(80, 120, 40))
    for file in ("chunk_windows.py", "layer.py", "selection.py"):
        assert not any(f"/{file}:" in place for place in looks.places), looks.places


@pytest.mark.parametrize("name", ["snapkv", "fastkv"])
def test_what_a_turn_before_kept_is_held_once(name: str) -> None:
    """A layer has moved it into the memory that it has for the whole prompt."""
    model, store = model_of("llama"), PolicyCache({**POLICIES, "fastkv": FAST}[name])
    with store.attached(model):
        read(model, store, range(0, 40, 40))
        store.start_turn(prompt_len=40)
        kept = [weakref.ref(layer.contents.held.keys) for layer in store.layers[:2]]
        with torch.no_grad():
            model(PROMPT[:, 40:60], cache=store)
        assert [each() for each in kept] == [None, None]
