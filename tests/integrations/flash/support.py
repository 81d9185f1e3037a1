"""Runs the same under sdpa and under the stand-in, and compares."""

import dataclasses
import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from tests.families import FAMILIES
from tests.integrations.flash.stand_in import CALLS, under_flash
from tests.integrations.support.conversation import Lengths, assert_alike, run_conversation

TOLERANCE = 5e-5
ROWS = {"one": (0,), "padded": (0, 1, 2)}
# Prompts longer than the windows, which are of 16 tokens; the second turn is padded as well.
LENGTHS = Lengths(first=(47, 31, 23), second=(11, 19, 3), num_decode=4)
# Head dimensions that all versions take, or that Transformers can pad values to.
OPTIONS = {"gpt_oss": {"head_dim": 8}, "deepseek_v3": {"v_head_dim": 8}}


@cache
def model_of(name: str, flash: str = "") -> PreTrainedModel:
    """A tiny model, always with the same weights; under sdpa, or eager if it has no sdpa."""
    if flash:
        return under_flash(model_of(name), flash)
    family = FAMILIES[name]
    options = {**family.options, **OPTIONS.get(name, {})}
    return dataclasses.replace(family, options=options).build(1)


def assert_as_sdpa(
    name: str,
    policy: CachePolicy,
    rows: str = "padded",
    flash: str = "flash_attention_2",
    lengths: Lengths = LENGTHS,
    **how: Any,
) -> None:
    """Asserts that two turns of `generate` give the same under sdpa and under flash attention."""
    _, expected = run_conversation(model_of(name), policy, ROWS[rows], lengths, **how)
    CALLS.clear()
    _, found = run_conversation(model_of(name, flash), policy, ROWS[rows], lengths, **how)
    assert CALLS["dense" if rows == "one" else "varlen"]
    assert_alike(found, expected, 1e-5)


def assert_close(found: Tensor, expected: Tensor) -> None:
    difference = (found - expected).abs().max()
    assert difference <= TOLERANCE, f"logits differ by {difference}"


@torch.no_grad()
def forward(model: Any, store: PolicyCache, ids: Tensor, **how: Any) -> Tensor:
    """Logits `[batch, new_len, vocab]` of one call of a model, outside of `generate`."""
    named = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in named else "past_key_values"
    logits: Tensor = model(ids, **{name: store}, **how).logits
    return logits
