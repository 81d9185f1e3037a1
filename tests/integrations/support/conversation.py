"""Runs two turns of a conversation through `generate` and through the reference."""

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    CLAA,
    H2O,
    TOVA,
    AdaKV,
    ChunkKV,
    Compactor,
    CriticalKV,
    ExpectedAttention,
    FastKV,
    FullContext,
    GemFilter,
    GQAGroupSelector,
    KeyDiff,
    LagKV,
    LazyLLM,
    NestedKV,
    PromptDistill,
    PyramidInfer,
    PyramidKV,
    ReplayKV,
    SlimInfer,
    SnapKV,
    SpireKV,
    StagedPropagation,
    StreamingLLM,
    TokenSelectivePropagation,
    UniPrefill,
    WindowMaxPoolScorer,
)
from kvpolicy.policy import CachePolicy
from tests import reference
from tests.reference import PAD_TOKEN_ID, Method, ReferenceState, TurnResult, random_tokens

NUM_DECODE = 16
TOLERANCE = 1e-4
# Tokens of each row's prompt in the first turn, and tokens that its user adds in the second turn.
FIRST_LENS = (67, 41, 23)
SECOND_LENS = (11, 29, 3)


def replaying(rate: float, window_size: int = 0, **drop: Any) -> CachePolicy:
    """A `ReplayKV` whose heads choose by themselves."""
    method = ReplayKV(rate, window_size=window_size, num_sinks=3, **drop)
    selector = GQAGroupSelector(rate, window_size=window_size, protect=3)
    return CachePolicy(method.scorer, selector, method.propagation)


METHODS: dict[str, tuple[CachePolicy, Method]] = {
    "full_context": (FullContext(), reference.FullContext()),
    "streamingllm": (StreamingLLM(0.3), reference.StreamingLLM(0.3)),
    "streaming_llm_tokens": (
        StreamingLLM(retention_tokens=14, num_sinks=2),
        reference.StreamingLLM(retention_tokens=14, num_sinks=2),
    ),
    "snapkv": (
        SnapKV(0.3, window_size=4, kernel_size=3),
        reference.SnapKV(0.3, window_size=4, kernel_size=3),
    ),
    "snapkv_defaults": (SnapKV(0.2), reference.SnapKV(0.2)),
    "snapkv_group_first": (
        SnapKV(0.3, window_size=4, kernel_size=3, group_first=True),
        reference.SnapKV(0.3, window_size=4, kernel_size=3, group_first=True),
    ),
    "h2o": (H2O(0.4, window_size=2), reference.H2O(0.4, window_size=2)),
    "tova": (TOVA(0.25), reference.TOVA(0.25)),
    # No KeyNorm: in the first layer a repeated token has equal norms, except for rounding.
    "keydiff": (KeyDiff(0.4, window_size=2), reference.KeyDiff(0.4, window_size=2)),
    "nestedkv": (
        NestedKV(0.4, window_size=2, local_size=5, block_size=16),
        reference.NestedKV(0.4, window_size=2, local_size=5, block_size=16),
    ),
    "lagkv": (
        LagKV(0.6, window_size=2, num_sinks=2, lag_size=8),
        reference.LagKV(0.6, window_size=2, num_sinks=2, lag_size=8),
    ),
    "chunkkv": (
        ChunkKV(0.3, window_size=4, kernel_size=3, chunk_size=5),
        reference.ChunkKV(0.3, window_size=4, kernel_size=3, chunk_length=5),
    ),
    "pyramidinfer": (PyramidInfer(min_context=8), reference.PyramidInfer(min_context=8)),
    "pyramidinfer_steep": (
        PyramidInfer(
            recent_rate=0.1, decay_ratio=0.3, distance_weight=2.0, num_sinks=2, min_context=3
        ),
        reference.PyramidInfer(0.1, 0.3, distance_weight=2.0, num_sinks=2, min_context=3),
    ),
    "fastkv": (
        FastKV(tsp_rate=0.4, retention_rate=0.25, window_size=4, kernel_size=3),
        reference.FastKV(0.25, window_size=4, kernel_size=3, tsp_rate=0.4),
    ),
    "fastkv_first_layer": (
        FastKV(tsp_layer=0, tsp_rate=0.5, retention_rate=0.5, window_size=5, kernel_size=1),
        reference.FastKV(0.5, window_size=5, kernel_size=1, tsp_rate=0.5, tsp_layer=0),
    ),
    "fastkv_tokens": (
        FastKV(tsp_layer=2, tsp_tokens=9, retention_tokens=9, window_size=3, kernel_size=5),
        reference.FastKV(
            retention_tokens=9, window_size=3, kernel_size=5, tsp_layer=2, tsp_tokens=9
        ),
    ),
    "fastkv_group_first": (
        CachePolicy(
            WindowMaxPoolScorer(4, kernel_size=5, group_first=True),
            GQAGroupSelector(0.25, window_size=4),
            TokenSelectivePropagation(tsp_rate=0.4, window_size=4),
        ),
        reference.FastKV(0.25, window_size=4, kernel_size=5, tsp_rate=0.4, group_first=True),
    ),
    "gemfilter": (GemFilter(retention_rate=0.3), reference.GemFilter(retention_rate=0.3)),
    "gem_filter_first_layer": (
        GemFilter(filter_layer=0, retention_tokens=13, kernel_size=3, protect=2),
        reference.GemFilter(0, retention_tokens=13, kernel_size=3, protect=2),
    ),
    "pyramidkv": (
        PyramidKV(0.3, window_size=4, kernel_size=3),
        reference.PyramidKV(0.3, window_size=4, kernel_size=3),
    ),
    "adakv": (
        AdaKV(0.33, window_size=4, kernel_size=3),
        reference.AdaKV(0.33, window_size=4, kernel_size=3),
    ),
    "ada_kv_group_first": (
        AdaKV(0.3, window_size=4, kernel_size=3, group_first=True),
        reference.AdaKV(0.3, window_size=4, kernel_size=3, group_first=True),
    ),
    "spirekv": (
        SpireKV(tsp_layer=1, retention_rate=0.3, window_size=4, kernel_size=3, tsp_rate=0.4),
        reference.SpireKV(0.3, window_size=4, kernel_size=3, tsp_layer=1, tsp_rate=0.4),
    ),
    "two_stages": (
        CachePolicy(
            WindowMaxPoolScorer(4, kernel_size=3),
            GQAGroupSelector(0.25, window_size=4),
            StagedPropagation(
                [
                    TokenSelectivePropagation(tsp_layer=0, tsp_rate=0.7, window_size=4),
                    TokenSelectivePropagation(tsp_layer=2, tsp_rate=0.35, window_size=4),
                ]
            ),
        ),
        reference.Staged(0.25, window_size=4, kernel_size=3, stages=((0, 0.7), (2, 0.35))),
    ),
    "claa": (
        CLAA(
            tsp_layer=1,
            retention_rate=0.25,
            window_size=4,
            kernel_size=3,
            voting_layers=3,
            whole_layers=1,
            tsp_rate=0.4,
        ),
        reference.CLAA(0.25, 4, 3, tsp_layer=1, tsp_rate=0.4, voting_layers=3, whole_layers=1),
    ),
    "claa_raw": (
        CLAA(
            tsp_layer=2,
            retention_rate=0.3,
            window_size=4,
            kernel_size=5,
            voting_layers=2,
            whole_layers=0,
            standardize=False,
            protect=3,
        ),
        reference.CLAA(
            0.3,
            window_size=4,
            kernel_size=5,
            protect=3,
            tsp_layer=2,
            tsp_rate=0.3,
            voting_layers=2,
            whole_layers=0,
            standardize=False,
        ),
    ),
    "replaykv": (replaying(0.29), reference.Replay(0.29, protect=3)),
    "replaykv_after_a_drop": (
        replaying(0.3, window_size=2, tsp_rate=0.5, tsp_layer=1),
        reference.DroppingReplay(0.3, window_size=2, protect=3, tsp_rate=0.5, tsp_layer=1),
    ),
    "expected_attention": (
        ExpectedAttention(0.4, window_size=3, num_sinks=2, future_len=20),
        reference.ExpectedAttention(0.4, 3, num_sinks=2, future_len=20),
    ),
    # One chunk: with several, repeated tokens have equal leverages in the first layer.
    "compactor": (
        Compactor(0.4, window_size=3, num_sinks=2, seed=5),
        reference.Compactor(0.4, 3, num_sinks=2, blending=0.6, seed=5),
    ),
    "criticalkv": (
        CriticalKV(0.3, window_size=4, kernel_size=3, first_share=0.6),
        reference.CriticalKV(0.3, 4, 3, first_share=0.6),
    ),
    "uniprefill": (
        UniPrefill(tsp_layers=[0, 2], mass=0.7, chunk_size=5, num_sinks=3, window_size=6),
        reference.UniPrefill((0, 2), 0.7, block_size=5, num_sinks=3, window_size=6),
    ),
    "promptdistill": (PromptDistill(tsp_rate=0.4), reference.PromptDistill(((0, 0.4),))),
    "lazyllm": (LazyLLM(tsp_rate=0.6), reference.LazyLLM(((0, 0.6), (1, 0.6**2), (2, 0.6**3)))),
    "sliminfer": (
        SlimInfer(tsp_rate=0.2, chunk_size=2, block_chunks=2),
        reference.SlimInfer(
            ((0, 0.8), (1, 0.4), (2, 0.2)), 4, protect=4, unit_size=2, block_units=2
        ),
    ),
    "snapkv_protected": (
        SnapKV(0.2, window_size=4, kernel_size=3, protect=5),
        reference.SnapKV(0.2, window_size=4, kernel_size=3, protect=5),
    ),
    "streaming_llm_protected": (
        StreamingLLM(0.3, num_sinks=1, protect=6),
        reference.StreamingLLM(0.3, num_sinks=1, protect=6),
    ),
    "fastkv_protected": (
        FastKV(tsp_rate=0.4, retention_rate=0.25, window_size=4, kernel_size=3, protect=5),
        reference.FastKV(0.25, window_size=4, kernel_size=3, tsp_rate=0.4, protect=5),
    ),
}


@dataclass(frozen=True)
class Lengths:
    """The lengths of a conversation's parts, in tokens."""

    first: tuple[int, ...] = FIRST_LENS
    second: tuple[int, ...] = SECOND_LENS
    num_decode: int = NUM_DECODE


USUAL = Lengths()


@dataclass
class Turn:
    """The results of one turn of `generate`, as `TurnResult` but with a batch axis."""

    logits: Tensor  # [batch, 1 + num_decode, vocab]
    tokens: Tensor  # [batch, 1 + num_decode]
    kept: list[list[list[list[int]]]]  # per row, layer and head
    propagated: dict[int, list[list[int]]]


class Weights:
    """A model that compares equal to any model of the same class, configuration and weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        config = {k: v for k, v in model.config.to_dict().items() if "attn_impl" not in k}
        said = repr((type(model), sorted(config.items()))).encode()
        tensors = (tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
        self.digest = hashlib.sha256(b"".join((said, *tensors))).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Weights) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def expected_turns(
    model: PreTrainedModel,
    method: Method,
    row: int,
    lengths: Lengths = USUAL,
    state_class: type[ReferenceState] = ReferenceState,
) -> tuple[TurnResult, ...]:
    """Returns the reference's results of both turns of one row, read alone."""
    return _expected(Weights(model), method, row, lengths, state_class)


@cache
def _expected(
    weights: Weights, method: Method, row: int, lengths: Lengths, state_class: type[ReferenceState]
) -> tuple[TurnResult, ...]:
    state = state_class(weights.model, method)
    first = state.turn(random_tokens(row, lengths.first[row]), lengths.num_decode)
    added = random_tokens(100 + row, lengths.second[row])
    return first, state.turn([first.tokens[-1], *added], lengths.num_decode)


def run_turn(
    model: PreTrainedModel,
    store: PolicyCache,
    ids: Tensor,
    mask: Tensor | None,
    num_decode: int = NUM_DECODE,
    **how: Any,
) -> Turn:
    """Calls `generate` once on the whole conversation `[batch, len]`."""
    output = model.generate(
        ids,
        attention_mask=mask,
        cache=store,
        max_new_tokens=1 + num_decode,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **how,
    )
    kept = [
        [kept_at(layer.positions, row, num_decode) for layer in store.layers]
        for row in range(ids.shape[0])
    ]
    propagated = {
        layer: [[p for p in row if p >= 0] for row in positions.tolist()]
        for layer, positions in store.propagated.items()
    }
    tokens = output.sequences[:, ids.shape[1] :]
    return Turn(torch.stack(output.logits, dim=1), tokens, kept, propagated)


def kept_at(positions: Tensor | None, row: int, num_decode: int) -> list[list[int]]:
    """Returns the positions that each head held before decoding; no heads if nothing was held."""
    if positions is None:
        return []
    held = positions[row, :, : positions.shape[2] - num_decode].tolist()
    return [[p for p in head if p >= 0] for head in held]


def prompt(length: int, seed: int = 0) -> Tensor:
    """Token ids ``[1, length]``."""
    return torch.tensor([random_tokens(seed, length)])


def left_padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Returns token ids and mask of left-padded rows, both `[batch, longest]`."""
    longest = max(map(len, rows))
    ids = torch.tensor([[PAD_TOKEN_ID] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def run_conversation(
    model: PreTrainedModel,
    policy: CachePolicy,
    rows: tuple[int, ...],
    lengths: Lengths = USUAL,
    **how: Any,
) -> tuple[PolicyCache, list[Turn]]:
    """Runs both turns of several rows as one batch."""
    store = PolicyCache(policy)
    ids, mask = left_padded([random_tokens(row, lengths.first[row]) for row in rows])
    first = run_turn(model, store, ids, mask, lengths.num_decode, **how)
    added, added_mask = left_padded([random_tokens(100 + row, lengths.second[row]) for row in rows])
    ids = torch.cat([ids, first.tokens, added], dim=1)
    mask = torch.cat([mask, torch.ones_like(first.tokens), added_mask], dim=1)
    return store, [first, run_turn(model, store, ids, mask, lengths.num_decode, **how)]


def assert_same(turn: Turn, index: int, expected: TurnResult) -> None:
    """Asserts that row `index` of a turn equals the reference's result for that row alone."""
    assert expected.margin > 5e-5, "the reference's choice is a near tie: take another seed"
    assert turn.kept[index] == expected.kept
    for layer, positions in turn.propagated.items():
        # A layer that drops tokens only in another row passes on all of this row's tokens.
        assert positions[index] == expected.propagated.get(layer, expected.reached[layer])
    assert set(expected.propagated) <= set(turn.propagated)
    want = torch.cat([expected.prefill_logits[None], expected.decode_logits])
    assert turn.logits[index].shape == want.shape
    difference = (turn.logits[index] - want).abs().max()
    assert difference <= TOLERANCE, f"logits differ by {difference}"
    assert turn.tokens[index].tolist() == expected.tokens


def assert_as_reference(
    model: PreTrainedModel,
    policy: CachePolicy,
    method: Method,
    rows: tuple[int, ...],
    lengths: Lengths = USUAL,
    state_class: type[ReferenceState] = ReferenceState,
    **how: Any,
) -> list[Turn]:
    """Asserts that both turns of a batch are what the reference gives for each row alone."""
    _, turns = run_conversation(model, policy, rows, lengths, **how)
    for index, row in enumerate(rows):
        expected = expected_turns(model, method, row, lengths, state_class)
        for turn, of_row in zip(turns, expected, strict=True):
            assert_same(turn, index, of_row)
    return turns


def assert_alike(found: list[Turn], want: list[Turn], tolerance: float = TOLERANCE) -> None:
    """Asserts that turns keep, pass on and say the same; logits up to a share of the largest."""
    for one, other in zip(found, want, strict=True):
        assert one.kept == other.kept
        assert one.propagated == other.propagated
        assert torch.equal(one.tokens, other.tokens)
        difference = (one.logits - other.logits).abs().max()
        assert difference <= tolerance * max(float(other.logits.abs().max()), 1)
