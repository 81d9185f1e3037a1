"""Layers that choose together, and prompts read twice, against the slow reference."""

from functools import cache
from typing import Any, cast

import pytest
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, Repetition
from kvpolicy.policies import (
    GlobalThresholdSelector,
    KVzip,
    PassAllPropagation,
    PeakAttentionScorer,
    ReplayKV,
    SameTokensSelector,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from tests.integrations.support.conversation import TOLERANCE, expected_turns, run_conversation
from tests.reference import (
    DroppingReplay,
    FastKV,
    Method,
    Repeat,
    Replay,
    SnapKV,
    Together,
    TogetherState,
    tiny_model,
)

WORDS = {"instruction_ids": (7, 8, 9), "later_ids": (11, 12), "answer_ids": (13,)}

METHODS: dict[str, tuple[CachePolicy, Together]] = {
    "threshold": (
        CachePolicy(
            WindowMaxPoolScorer(4, kernel_size=3),
            GlobalThresholdSelector(0.3, window_size=4),
            PassAllPropagation(),
        ),
        Together(0.3, window_size=4, base=SnapKV(window_size=4, kernel_size=3)),
    ),
    "threshold_tokens": (
        CachePolicy(
            WindowMaxPoolScorer(2, kernel_size=1),
            GlobalThresholdSelector(window_size=2, retention_tokens=13, protect=3),
            PassAllPropagation(),
        ),
        Together(
            retention_tokens=13, window_size=2, protect=3, base=SnapKV(window_size=2, kernel_size=1)
        ),
    ),
    "threshold_after_a_drop": (
        CachePolicy(
            WindowMaxPoolScorer(4, kernel_size=3),
            GlobalThresholdSelector(0.42, window_size=4),
            TokenSelectivePropagation(tsp_layer=1, tsp_rate=0.5, window_size=4),
        ),
        Together(
            0.42,
            window_size=4,
            base=FastKV(window_size=4, kernel_size=3, tsp_layer=1, tsp_rate=0.5),
        ),
    ),
    "same_tokens": (
        CachePolicy(
            WindowMaxPoolScorer(4, kernel_size=3),
            SameTokensSelector(0.3, window_size=4, protect=2, kernel_size=5),
            PassAllPropagation(),
        ),
        Together(
            0.3,
            window_size=4,
            protect=2,
            base=SnapKV(window_size=4, kernel_size=3),
            uniform=True,
            spans=5,
        ),
    ),
    "replaykv": (ReplayKV(0.35, num_sinks=3), Together(0.35, protect=3, base=Replay(), apart=True)),
    "replaykv_alike": (
        ReplayKV(0.35, num_sinks=3, head_uniform=True),
        Together(0.35, protect=3, base=Replay(), uniform=True, spans=7),
    ),
    "replaykv_alike_after_a_drop": (
        ReplayKV(0.44, num_sinks=2, window_size=4, tsp_rate=0.5, tsp_layer=1, head_uniform=True),
        Together(
            0.44,
            protect=2,
            window_size=4,
            base=DroppingReplay(window_size=4, protect=2, tsp_layer=1, tsp_rate=0.5),
            uniform=True,
            spans=7,
        ),
    ),
    "replaykv_after_a_drop": (
        ReplayKV(0.44, num_sinks=2, window_size=4, tsp_rate=0.5, tsp_layer=1),
        Together(
            0.44,
            protect=2,
            window_size=4,
            base=DroppingReplay(window_size=4, protect=2, tsp_layer=1, tsp_rate=0.5),
            apart=True,
        ),
    ),
    "threshold_apart": (
        CachePolicy(
            WindowMaxPoolScorer(4, kernel_size=3),
            GlobalThresholdSelector(
                window_size=4, retention_tokens=17, protect=2, turns_apart=True
            ),
            PassAllPropagation(),
        ),
        Together(
            retention_tokens=17,
            window_size=4,
            protect=2,
            base=SnapKV(window_size=4, kernel_size=3),
            apart=True,
        ),
    ),
    "kvzip": (
        KVzip(0.3, chunk_size=19, num_sinks=3, overlap=4),
        Together(0.3, protect=3, repeat=Repeat(19, 3, 4)),
    ),
    "kvzip_in_one_chunk": (
        KVzip(0.4, window_size=5, instruction_ids=[5, 6]),
        Together(0.4, window_size=5, protect=4, repeat=Repeat(2048, 4, 8, (5, 6), (5, 6))),
    ),
    "kvzip_uniform": (
        KVzip(0.26, chunk_size=16, head_uniform=True),
        Together(0.26, protect=4, repeat=Repeat(16, 4, 8), uniform=True),
    ),
    "kvzip_behind_a_system_prompt": (
        KVzip(0.3, chunk_size=19, num_sinks=2, overlap=4, whole_tokens=11),
        Together(0.3, whole=11, repeat=Repeat(19, 11, 4, begin=11)),
    ),
    # One row is shorter than its system prompt in the first turn, and not in the second.
    "kvzip_of_a_short_row": (
        KVzip(
            0.26,
            chunk_size=17,
            num_sinks=3,
            window_size=2,
            overlap=5,
            instruction_ids=[5, 6],
            head_uniform=True,
            whole_tokens=30,
        ),
        Together(
            0.26,
            window_size=2,
            protect=3,
            repeat=Repeat(17, 30, 5, (5, 6), (5, 6), begin=30),
            uniform=True,
            whole=30,
        ),
    ),
    "repeated_in_words": (
        CachePolicy(
            PeakAttentionScorer(),
            GlobalThresholdSelector(0.3, window_size=2),
            PassAllPropagation(),
            rereading=Repetition(23, num_sinks=0, overlap=30, **cast(Any, WORDS)),
        ),
        Together(0.3, window_size=2, repeat=Repeat(23, 0, 30, (7, 8, 9), (11, 12), (13,))),
    ),
    "behind_tokens_that_are_kept": (
        CachePolicy(
            PeakAttentionScorer(),
            GlobalThresholdSelector(0.4, window_size=2, protect=9),
            PassAllPropagation(),
            rereading=Repetition(23, num_sinks=9, overlap=4, unrepeated=9),
        ),
        Together(0.4, window_size=2, protect=9, repeat=Repeat(23, 9, 4, begin=9)),
    ),
}


@cache
def llama() -> PreTrainedModel:
    return tiny_model("llama", seed=3)


@pytest.mark.parametrize("name", ["threshold", "kvzip", "replaykv"])
def test_layers_and_heads_keep_unlike_numbers(name: str) -> None:
    """The tests above could not pass with a budget for every head."""
    method = cast(Method, METHODS[name][1])
    wanted = expected_turns(llama(), method, 0, state_class=TogetherState)[0]
    per_layer = {sum(map(len, layer)) for layer in wanted.kept}
    assert len(per_layer) > 1
    assert any(len(set(map(len, layer))) > 1 for layer in wanted.kept)


def test_what_is_repeated_decides() -> None:
    """The prompt's own attention, by the same rule, keeps other tokens."""
    again = METHODS["kvzip"][0]
    once = CachePolicy(again.scorer, again.selector, again.propagation)
    found = [run_conversation(llama(), each, rows=(0,))[1][0] for each in (again, once)]
    assert found[0].kept != found[1].kept
    # The prompt's last token is predicted from the first reading: nothing was evicted then.
    assert (found[0].logits[0, 0] - found[1].logits[0, 0]).abs().max() <= TOLERANCE
