"""The kernels that sum attention on a GPU, in Triton's interpreter on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch

from kvpolicy import DecodingInputs, LayerContext, attention
from kvpolicy.attention import causal_attention_peaks, causal_attention_sums
from tests.contexts import layer_context, with_attention

pytest.importorskip("triton")
from kvpolicy import fused

COUNT, LENGTH = 70, 100


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "FUSED_DEVICES", {"cpu"})
    attention._has_kernels.cache_clear()


def drawn(dtype: torch.dtype = torch.float16, head_dim: int = 24) -> LayerContext:
    """A later turn: two rows, two KV heads of three query heads each, peaked attention."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(2, 2, LENGTH, head_dim, generator=generator).to(dtype)
    queries = 2 * torch.randn(2, 6, COUNT, head_dim, generator=generator).to(dtype)
    valid = torch.ones(2, COUNT, dtype=torch.bool)
    return layer_context(keys, queries=queries, new_valid=valid)


def padded() -> LayerContext:
    """The second row holds fewer tokens, in each head another number, and has fewer new ones."""
    whole = drawn()
    positions, valid = whole.positions.clone(), whole.new_valid.clone()
    valid[1, :5] = False
    own = torch.arange(LENGTH)
    for head, first in enumerate((3, 12)):
        kept = (own >= first) & ~((own >= LENGTH - COUNT) & (own < LENGTH - COUNT + 5))
        positions[1, head] = torch.where(kept, own, -1)
    return attrs.evolve(whole, positions=positions, new_valid=valid)


CONTEXTS = {
    "whole": drawn,
    "first turn": lambda: attrs.evolve(
        drawn(),
        keys=drawn().keys[:, :, -COUNT:],
        values=drawn().values[:, :, -COUNT:],
        positions=drawn().positions[..., :COUNT],
    ),
    "padded": padded,
    "sinks": lambda: with_attention(padded(), sinks=torch.linspace(-2, 3, 6)),
    "capped": lambda: with_attention(drawn(), softcap=10.0),
    "wide heads": lambda: drawn(head_dim=64),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_sums_and_peaks_are_those_of_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = CONTEXTS[name]()
    found = [fused.attention_columns(context, largest=largest) for largest in (False, True)]
    used = [causal_attention_sums(context), causal_attention_peaks(context)]
    monkeypatch.setattr(attention, "FUSED_DEVICES", set())
    blocks = [causal_attention_sums(context), causal_attention_peaks(context)]
    for one, other, expected in zip(found, used, blocks, strict=True):
        torch.testing.assert_close(one, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(one, other)
        assert (one.dtype, expected.amax() > 0.5) == (torch.float32, True)


@pytest.mark.parametrize("what", ["float32", "few", "weights", "placed"])
def test_blocks_are_for_the_rest(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For float32, which they compute exactly, few queries, and such as count unequally.

    And for those of an answer, some of whose tokens may be gone.
    """
    context = drawn(torch.float32) if what == "float32" else drawn()
    if what == "few":
        context = context._showing(attention.FEW_QUERIES)
    if what == "placed":
        places = torch.arange(LENGTH - COUNT, LENGTH).expand(2, -1)
        context = attrs.evolve(context, decoding=DecodingInputs(None, places))
    weights = torch.ones(2, COUNT) if what == "weights" else None
    monkeypatch.setattr(fused, "attention_columns", None)
    assert causal_attention_sums(context, weights).amax() > 0.5


def test_a_kernel_that_gives_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where it cannot be compiled: once, with a warning."""
    right = fused.attention_columns
    monkeypatch.setattr(fused, "attention_columns", lambda *_, **how: 1.01 * right(*_, **how))
    context = drawn()
    with pytest.warns(RuntimeWarning, match="in blocks, which takes longer.*float16.*Assertion"):
        sums = causal_attention_sums(context)
    assert torch.equal(sums, causal_attention_sums(context))
    monkeypatch.setattr(attention, "FUSED_DEVICES", set())
    assert torch.equal(sums, causal_attention_sums(context))


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_can_be_compiled_for_a_gpu(capability: int, tmp_path: Path) -> None:
    """By a process that does not interpret; every such GPU has the shared memory they need."""
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.core.compiled_kernels", str(capability)]
    said = subprocess.run(command, env=os.environ | own, check=True, capture_output=True, text=True)
    shared = [int(line) for line in said.stdout.splitlines()]
    assert len(shared) == 6
    assert 0 < min(shared) <= max(shared) <= 99 * 1024
