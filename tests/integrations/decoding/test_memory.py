"""What a process holds while a long answer is decoded: thousands of tokens, or hundreds quickly."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import H2O, TOVA, FullContext, Method, SnapKV

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
STATM = Path("/proc/self/statm")
LAYERS, HEADS, HEAD_DIM = 4, 8, 128
ENTRY = 2 * HEADS * HEAD_DIM * 4  # bytes of a token in a layer
BUDGET, EVERY, STEPS = (256, 128, 4000) if THOROUGH else (64, 32, 260)


def wide_model() -> LlamaForCausalLM:
    """Cheap to run, with much to hold."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def process_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Watch:
    """A streamer that looks at the cache and the process at every token."""

    def __init__(self, cache: PolicyCache, settled: int) -> None:
        self.cache, self.settled = cache, settled
        self.seen = self.most = self.most_bytes = self.at_first = self.at_last = 0

    def put(self, value: Any) -> None:
        self.seen += 1
        if self.seen > 1:
            self.most = max(self.most, *(layer.kept_len for layer in self.cache.layers))
            held = max(layer.nbytes() for layer in self.cache.layers)
            self.most_bytes = max(self.most_bytes, held)
        if self.seen == self.settled:
            self.at_first = process_bytes()

    def end(self) -> None:
        self.at_last = process_bytes()


def growth(policy: Method, steps: int, settled: int, room: int | None) -> tuple[Watch, int]:
    """Bytes by which the process grows after the first tokens."""
    cache = PolicyCache(policy, max_new_tokens=room)
    watch = Watch(cache, settled)
    with torch.no_grad():
        wide_model().generate(
            torch.arange(1, 65)[None],
            past_key_values=cache,
            max_new_tokens=steps,
            do_sample=False,
            streamer=watch,
        )
    return watch, watch.at_last - watch.at_first


@pytest.mark.skipif(not STATM.exists(), reason="the process's memory is read as Linux shows it")
@pytest.mark.parametrize("method", [H2O, SnapKV, TOVA])
@pytest.mark.parametrize("fixed", [False, True])
def test_an_answer_holds_no_more_than_its_bound(method: type[Method], fixed: bool) -> None:
    settled = BUDGET + 2 * EVERY  # a choice or two has been made
    policy, every = method(retention_tokens=BUDGET), min(EVERY, method.every)
    policy = method(retention_tokens=BUDGET, decoding=policy.decoding_rule(BUDGET, every))
    watch, grown = growth(policy, STEPS, settled, STEPS if fixed else None)
    assert BUDGET <= watch.most <= BUDGET + every
    room = max(every, 16)  # by which what grows does so at once
    assert watch.most_bytes <= (BUDGET + room) * ENTRY
    allowed = 2 * (BUDGET + EVERY) * ENTRY + 8 * 2**20  # a layer in the making, and the allocator
    assert grown <= allowed
    if THOROUGH:
        assert (STEPS - settled) * LAYERS * ENTRY > 5 * allowed  # what would be held without


@pytest.mark.skipif(not THOROUGH or not STATM.exists(), reason="so that the other can fail")
def test_without_a_bound_it_grows() -> None:
    _, grown = growth(FullContext(), STEPS, 768, None)
    assert grown > 3000 * LAYERS * ENTRY
