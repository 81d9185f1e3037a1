"""What docs/kvpress.md says of every press composes a policy that reads a prompt."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import policies
from kvpolicy.integrations.transformers import PolicyCache
from tests.pages import ROOT, text_of
from tests.reference import random_tokens, tiny_model

PAGE = text_of("docs/kvpress.md")
COMPOSED = dict(re.findall(r"^\| `(\w+Press)` \| `(.+)` \| .+ \|$", PAGE, re.MULTILINE))
# Presses without an equivalent: the first cells of another section's table.
ONLY_THERE = PAGE.partition("## What only kvpress has")[2].partition("\n## ")[0]
OTHERS = re.findall(r"`(\w+Press)`[, ]", ONLY_THERE)
# What the table's compositions have in common.
(SHORTER,) = re.findall(r"```python\n(mean = .*?)```", PAGE, re.DOTALL)
EXPORTS = list(ROOT.glob(".venv-kvpress/lib/*/site-packages/kvpress/__init__.py"))
KEEPS_ALL = {"DecodingPress"}


def built(code: str, rate: float) -> Any:
    names = {name: getattr(policies, name) for name in policies.__all__}
    tokenizer = SimpleNamespace(encode=lambda text, **options: [len(text) % 7 + 1])
    names |= {name: getattr(kvpolicy, name) for name in ("CachePolicy", "Repetition")}
    exec(SHORTER, names)
    return eval(code, {**names, "rate": rate, "tokenizer": tokenizer})


def test_every_press_is_in_one_table() -> None:
    assert len(COMPOSED) > 20
    assert len(OTHERS) > 20
    assert len({*COMPOSED, *OTHERS}) == len(COMPOSED) + len(OTHERS)
    assert list(COMPOSED) == sorted(COMPOSED, key=str.lower)


@pytest.mark.skipif(not EXPORTS, reason="kvpress is not installed; `make bench-kvpress` does so")
def test_the_presses_are_those_that_kvpress_exports() -> None:
    exported = re.search(r"__all__ = \[(.*?)\]", EXPORTS[0].read_text(), re.DOTALL)
    assert exported is not None
    assert {*COMPOSED, *OTHERS} == set(re.findall(r'"(\w+Press)"', exported[1]))


@pytest.mark.parametrize("press", COMPOSED)
def test_a_composition_keeps_its_rate(press: str) -> None:
    policy = built(COMPOSED[press], rate=0.5)
    model, prompt = tiny_model("llama", seed=0), torch.tensor([random_tokens(0, 200)])
    cache = PolicyCache(policy)
    with cache.attached(model), torch.no_grad():
        model(prompt, cache=cache)
    held = [int((layer.positions >= 0).sum()) for layer in cache.layers]
    assert sum(held) == len(held) * 2 * (200 if press in KEEPS_ALL else 100)
