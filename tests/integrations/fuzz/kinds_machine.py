"""Conversations with models of every kind of layer: what happens to a cache, in any order.

Rows of a batch are held against the same rows alone, each read straight on with a cache of its
own, and the first turn against the model's own dense attention.
"""

import copy
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    H2O,
    RKV,
    TOVA,
    AdaKV,
    FastKV,
    FullContext,
    GemFilter,
    KeyDiff,
    PyramidInfer,
    SnapKV,
    StreamingLLM,
)
from tests.integrations.decoding.reading import Kept, held
from tests.integrations.decoding.seen import seen_at_every_step
from tests.integrations.fuzz.drawn_policies import RATES
from tests.integrations.fuzz.side_by_side import Interrupted
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.model.builds.dense import decoder_layers, dense_logits
from tests.integrations.model.builds.judge import apart, seen_after
from tests.reference import random_tokens

# A batch multiplies matrices otherwise than a row alone, and experts are sent other tokens then.
TOLERANCE = 3e-4


@dataclass(frozen=True)
class Kind:
    """Models with layers of one kind, and what cannot be done with them.

    Attributes:
        names: of builds.
        refused: of "append", "crop", "padding" between turns, "pyramid" and "restart"; the rest
            has to work.
        drops: whether tokens can be dropped at all.
        queries: whether policies can ask for queries.
    """

    names: tuple[str, ...]
    refused: frozenset[str] = frozenset()
    drops: bool = True
    queries: bool = True


STATES = frozenset({"crop", "padding"})
# Some layers see fewer tokens than any prompt has: no restart behind them, and no drop after each.
WINDOWS = frozenset({"restart", "pyramid"})
KINDS: dict[str, Kind] = {
    "sinks": Kind(("gpt_oss",), WINDOWS),
    "windows": Kind(("gemma3_text", "qwen3_windows"), WINDOWS),
    "latents": Kind(("deepseek_v2", "deepseek_v3", "glm4_moe_lite")),
    "repeated": Kind(("jetmoe",)),
    "recurrent": Kind(("qwen3_next", "nemotron_h", "granitemoehybrid"), STATES),
    "convolutions": Kind(("lfm2",), STATES),
    "attention and states": Kind(("falcon_h1", "zaya", "zamba2"), STATES),
    "distances": Kind(("inkling_text", "inkling2_text"), STATES | {"restart"}),
    "shared keys": Kind(("gemma3n_text", "gemma4_text_shared"), WINDOWS),
    "filled up": Kind(("gpt2",)),
    "indexers": Kind(("deepseek_v32", "glm_moe_dsa", "hy_v4"), frozenset({"pyramid"})),
    "chunks": Kind(("llama4_text",), WINDOWS),
    "BERT": Kind(("bert", "electra")),
    "no queries": Kind(("gptj", "falcon", "codegen"), drops=False, queries=False),
}


@cache
def built(name: str) -> PreTrainedModel:
    return builds()[name].model()


@st.composite
def policies(draw: st.DrawFn, kind: Kind, bounded: bool) -> CachePolicy:
    """Policies that the kind takes; with a bound on answers if they are to be ``bounded``."""
    rate = draw(RATES)
    keys_only = [FullContext(), StreamingLLM(rate), KeyDiff(rate, window_size=3)]
    queries = [SnapKV(rate, window_size=4, kernel_size=3), AdaKV(rate, window_size=4)]
    passed = draw(st.sampled_from([share for share in (0.3, 0.6, 1.0) if share >= rate] or [1.0]))
    dropping = [FastKV(tsp_rate=passed, retention_rate=rate, window_size=4)]
    if "restart" not in kind.refused:
        dropping.append(GemFilter(retention_rate=rate))
    if not {"padding", "pyramid"} & kind.refused and kind.names != ("jetmoe",):
        dropping.append(PyramidInfer(min_context=4, decay_ratio=0.3))
    found = keys_only + (queries if kind.queries else [])
    if bounded:
        rules = [StreamingLLM, KeyDiff, *([SnapKV, H2O, TOVA, RKV] if kind.queries else [])]
        tokens, every = draw(st.integers(9, 24)), draw(st.sampled_from([1, 2, 3, 7]))
        rule = draw(st.sampled_from(rules))().decoding_rule(tokens, every)
        return attrs.evolve(draw(st.sampled_from(found)), decoding=rule)
    return draw(st.sampled_from(found + (dropping if kind.queries and kind.drops else [])))


@dataclass
class Twin:
    """One row alone: what it has read, and the cache that has read it straight on."""

    cache: PolicyCache
    said: list[int] = field(default_factory=list)
    turns: int = 0
    prompt_len: int = 0
    # By the number of decoded tokens after which layers chose, what they held; 0 for the prompt.
    kept: dict[int, Kept] = field(default_factory=dict)


class KindConversation(RuleBasedStateMachine):
    """One model, one policy, one batch.

    Args:
        name: of the kind, of `KINDS`.
        bounded: whether its answers are.
    """

    model: PreTrainedModel
    cache: PolicyCache

    def __init__(self, name: str, *, bounded: bool = False) -> None:
        super().__init__()
        self.kind, self.bounded = KINDS[name], bounded
        self.rows: list[Twin] = []
        self.mask: list[list[int]] = []
        self.appended = 0

    @initialize(data=st.data(), batch=st.integers(1, 3))
    def begin(self, data: st.DataObject, batch: int) -> None:
        self.model = built(data.draw(st.sampled_from(self.kind.names)))
        policy = data.draw(policies(self.kind, self.bounded))
        self.cache = PolicyCache(policy)
        self.rows = [Twin(PolicyCache(policy)) for _ in range(batch)]
        self.mask = [[] for _ in range(batch)]
        self.prompt(data)

    def _read(self, new: Sequence[Sequence[int]], act: bool) -> None:
        """Read new tokens of every row, padded on the left, and compare what is said of them."""
        longest = max(map(len, new))
        ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in new])
        self.mask = [
            old + [0] * (longest - len(row)) + [1] * len(row)
            for old, row in zip(self.mask, new, strict=True)
        ]
        found = self._forward(self.cache, ids, torch.tensor(self.mask), act)
        tokens = self.cache.reader.tokens
        assert tokens is not None
        self.appended = tokens.appended.shape[1]
        for index, (twin, row) in enumerate(zip(self.rows, new, strict=True)):
            twin.said += row
            alone = torch.ones(1, len(twin.said), dtype=torch.int64)
            want = self._forward(twin.cache, torch.tensor([list(row)]), alone, act)
            assert apart(found[index, -1], want[0, -1]) < TOLERANCE
            if act:
                twin.turns += 1
                twin.prompt_len, twin.kept = len(twin.said), {}
            if not self.appended:
                twin.kept[len(twin.said) - twin.prompt_len] = held(twin.cache, 1)
            self._check_held(index, twin)
            # After a restart the tokens stand elsewhere than in the row.
            if twin.turns == 1 and not self.cache.policy.propagation.restarts:
                self._check_dense(twin, want[0, -1])

    def _forward(self, store: PolicyCache, ids: Tensor, mask: Tensor, act: bool) -> Tensor:
        if act and store.get_seq_length():
            store.start_turn()
        with torch.no_grad(), store.attached(self.model):
            said: Any = self.model(input_ids=ids, attention_mask=mask, past_key_values=store)
        return said.logits

    def _check_held(self, index: int, twin: Twin) -> None:
        """The same tokens, under the same keys."""
        assert self.cache.seen_lengths[index] == twin.cache.seen_lengths[0] == len(twin.said)
        for layer, alone in zip(self.cache.layers, twin.cache.layers, strict=True):
            if alone.positions is None:
                assert layer.positions is None
                continue
            for head in range(alone.positions.shape[1]):
                own, want = layer.positions[index, head], alone.positions[0, head]
                assert own[own >= 0].tolist() == want[want >= 0].tolist()

    def _check_dense(self, twin: Twin, found: Tensor) -> None:
        if self.cache.policy.decoding is None:
            seen = seen_after(twin.cache, 0, twin.prompt_len, len(twin.said))
        else:
            seen = seen_at_every_step(twin.kept, 0, twin.prompt_len, len(twin.said))
        tiled = self.kind.names == ("jetmoe",)
        want = dense_logits(self.model, twin.said, twin.prompt_len, seen, tiled=tiled)
        assert apart(found, want[-1]) < TOLERANCE

    @property
    def later(self) -> bool:
        return bool(self.mask[0])

    @rule(data=st.data())
    def prompt(self, data: st.DataObject) -> None:
        if len(self.mask[0]) > 160:
            return
        lengths = st.integers(9, 24) if self.later else st.integers(20, 47)
        count = data.draw(lengths)
        # A state skips no padding; nor may rows pass on unlike numbers of tokens, which are rates
        # of all that they have seen.
        state = "padding" in self.kind.refused
        even = state and (self.later or bool(self.cache.policy.propagation.acting_layers(9)))
        drawn = [count if even else data.draw(lengths) for _ in self.rows]
        seeds = [data.draw(st.integers(0, 999)) for _ in self.rows]
        new = [random_tokens(seed, length) for seed, length in zip(seeds, drawn, strict=True)]
        self._read(new, act=True)

    @rule(data=st.data(), steps=st.integers(1, 4))
    def decode(self, data: st.DataObject, steps: int) -> None:
        for _ in range(steps):
            self._read([[data.draw(st.integers(1, 90))] for _ in self.rows], act=False)

    @rule(seed=st.integers(0, 99), count=st.integers(2, 5))
    def append(self, seed: int, count: int) -> None:
        new = [random_tokens(seed + row, count) for row in range(len(self.rows))]
        if "append" not in self.kind.refused:
            self._read(new, act=False)
            return
        ids, mask = torch.tensor(new), [row + [1] * count for row in self.mask]
        with pytest.raises(ValueError, match="state|begin"):
            self._forward(self.cache, ids, torch.tensor(mask), act=False)

    @precondition(lambda self: self.appended)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.appended))
        if "crop" in self.kind.refused:
            with pytest.raises(ValueError, match="state"):
                self.cache.crop(-count)
            return
        self.cache.crop(-count)
        self.mask = [row[:-count] for row in self.mask]
        self.appended -= count
        for twin in self.rows:
            twin.cache.crop(-count)
            del twin.said[-count:]

    @rule(how=st.sampled_from(["copy", "deepcopy", "pickle"]))
    def fork(self, how: str) -> None:
        """Go on with a copy; the one it was made of reads something else, and is left."""
        left = self.cache
        self.cache = {
            "copy": copy.copy,
            "deepcopy": copy.deepcopy,
            "pickle": lambda each: pickle.loads(pickle.dumps(each)),
        }[how](left)
        mask = torch.tensor([[*row, 1] for row in self.mask])
        self._forward(left, torch.full((len(self.rows), 1), 7), mask, act=False)

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache"
            self._forward_nothing_before_saving()
            self.cache.save(path)
            self.cache = PolicyCache.load(path)

    def _forward_nothing_before_saving(self) -> None:
        """A copy does not know what model filled it, until it has read something itself."""
        # Another one each time: without rotary embedding keys of one token are ties.
        self._read([[1 + len(self.mask[0]) % 89]] * len(self.rows), act=False)

    @rule(data=st.data())
    def take_rows(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=3))
        self.cache.reorder_cache(torch.tensor(rows))
        self.rows = [copy.deepcopy(self.rows[row]) for row in rows]
        self.mask = [list(self.mask[row]) for row in rows]

    @rule(data=st.data(), error=st.sampled_from([RuntimeError, Interrupted]), act=st.booleans())
    def fail(self, data: st.DataObject, error: Any, act: bool) -> None:
        """A forward that fails in some layer leaves everything as it was."""
        layers = decoder_layers(self.model)
        layer = layers[data.draw(st.integers(0, len(layers) - 1))]

        def fails(*_: Any) -> None:
            raise error

        hook = layer.register_forward_hook if data.draw(st.booleans()) else None
        handle = (hook or layer.register_forward_pre_hook)(fails)
        count = 12 if act else 1
        ids = torch.tensor([random_tokens(row, count) for row in range(len(self.rows))])
        mask = torch.tensor([[*row, *[1] * count] for row in self.mask])
        try:
            with pytest.raises(error):
                self._forward(copy.copy(self.cache) if act else self.cache, ids, mask, act)
        finally:
            handle.remove()
