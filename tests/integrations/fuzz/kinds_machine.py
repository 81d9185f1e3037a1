"""Conversations with models of every kind of layer: what happens to a cache, in any order.

Rows of a batch are held against the same rows alone, each read straight on with a cache of its
own, and these against the model's own dense attention.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
from tests.integrations.fuzz.drawn_policies import RATES
from tests.integrations.model.builds.catalogue import built
from tests.integrations.support.alone import BesideAlone
from tests.integrations.support.comparison import Columns
from tests.integrations.support.reading import Interrupted
from tests.integrations.support.reading_both import Call
from tests.reference import random_tokens


@dataclass(frozen=True)
class Kind:
    """Models with layers of one kind, and what cannot be done with them."""

    names: tuple[str, ...]  # of builds
    # Of "crop", "padding" between turns, "pyramid" and "restart"; the rest has to work.
    refused: frozenset[str] = frozenset()
    drops: bool = True  # whether tokens can be dropped at all
    queries: bool = True  # whether policies can ask for queries


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
    "no queries": Kind(("falcon", "falcon_grouped", "xglm"), drops=False, queries=False),
}


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


def may_append(machine: "KindConversation") -> bool:
    return not machine.side.starts


class KindConversation(RuleBasedStateMachine):
    """One model, one policy, one batch."""

    side: BesideAlone

    def __init__(self, name: str, *, bounded: bool = False) -> None:
        super().__init__()
        self.kind, self.bounded = KINDS[name], bounded

    @initialize(data=st.data(), batch=st.integers(1, 3))
    def begin(self, data: st.DataObject, batch: int) -> None:
        model = built(data.draw(st.sampled_from(self.kind.names)))
        policy = data.draw(policies(self.kind, self.bounded))
        how: Any = model, model, (), policy, None, PolicyCache(policy)
        self.side = BesideAlone(*how)
        self.read_prompt(data, batch)

    def read_prompt(self, data: st.DataObject, batch: int) -> None:
        later = self.side.batch > 0
        lengths = st.integers(9, 24) if later else st.integers(20, 47)
        count = data.draw(lengths)
        # A state skips no padding; nor may rows pass on unlike numbers of tokens, which are rates
        # of all that they have seen.
        state = "padding" in self.kind.refused
        even = state and (later or self.side.drops)
        drawn = [count if even else data.draw(lengths) for _ in range(batch)]
        new: Columns = [
            [*[None] * (max(drawn) - own), *random_tokens(data.draw(st.integers(0, 999)), own)]
            for own in drawn
        ]
        self.side.prompt(new, [0] * batch, Call())

    @precondition(lambda self: len(self.side.columns[0]) <= 160)
    @rule(data=st.data())
    def prompt(self, data: st.DataObject) -> None:
        self.read_prompt(data, self.side.batch)

    @precondition(may_append)
    @rule(data=st.data(), steps=st.integers(1, 4))
    def decode(self, data: st.DataObject, steps: int) -> None:
        for _ in range(steps):
            new = [[data.draw(st.integers(1, 90))] for _ in range(self.side.batch)]
            self.side.append(new, Call())

    @precondition(may_append)
    @rule(seed=st.integers(0, 99), count=st.integers(2, 5))
    def append(self, seed: int, count: int) -> None:
        new = [random_tokens(seed + row, count) for row in range(self.side.batch)]
        self.side.append(new, Call())

    @precondition(lambda self: self.side.appended)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.side.appended))
        if "crop" in self.kind.refused:
            with pytest.raises(ValueError, match="state"):
                self.side.cache.crop(-count)
        else:
            self.side.crop(count)

    @rule(how=st.sampled_from(["copy", "deepcopy", "pickle"]), take_copy=st.booleans())
    def fork(self, how: str, take_copy: bool) -> None:
        self.side.fork(how, take_copy=take_copy)

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.side.save_and_load(Path(folder) / "cache")

    @rule(data=st.data(), reorder=st.booleans())
    def take_rows(self, data: st.DataObject, reorder: bool) -> None:
        rows = st.lists(st.integers(0, self.side.batch - 1), min_size=1, max_size=3)
        self.side.take_rows(data.draw(rows), reorder=reorder)

    @rule(data=st.data(), error=st.sampled_from([RuntimeError, Interrupted]), act=st.booleans())
    def fail(self, data: st.DataObject, error: Any, act: bool) -> None:
        """A forward that fails in some layer leaves everything as it was."""
        layer = data.draw(st.integers(0, self.side.num_layers - 1))
        count = 12 if act else 1
        new = [random_tokens(row, count) for row in range(self.side.batch)]
        self.side.fail(new, "", layer, 0, error, "prompt" if act else "append")

    def teardown(self) -> None:
        if hasattr(self, "side"):
            self.side.close()

    @invariant()
    def is_each_row_alone(self) -> None:
        self.side.check()
