"""What the benchmarks share: JSON that comes back, prompts that repeat, ratios by hand."""

import doctest
import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import benchmarks
from benchmarks import common
from benchmarks.common import TINY, allowed_decode, as_json, random_prompt, spread
from kvpolicy.evaluation import shape_of
from kvpolicy.policies import FullContext, StreamingLLM

MODULES = [info.name for info in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_RECORDS = st.dictionaries(
    st.text(),
    st.recursive(
        _SCALARS.filter(lambda each: each not in (float("inf"), float("-inf"))),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=12,
    ),
)


@given(_RECORDS)
def test_json_comes_back_as_it_was(record: dict[str, Any]) -> None:
    assert json.loads(as_json(record)) == record


def test_json_has_lists_of_numbers_on_one_line_and_leaves_strings_alone() -> None:
    text = as_json({"ms": [1.0, -2.5e-7, 3], "name": "[ 1, 2 ]", "none": [], "mixed": [1, "a"]})
    assert ' "ms": [1.0, -2.5e-07, 3],\n "name": "[ 1, 2 ]",\n "none": [],\n' in text


def test_json_refuses_what_is_no_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json({"speedup": float("nan")})


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    common.write_json(tmp_path, "a.json", {"cells": [1]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        common.write_json(tmp_path, "a.json", {"cells": [float("inf")]})
    assert common.read_json(tmp_path / "a.json") == {"cells": [1]}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_prompts_repeat_and_are_no_constant() -> None:
    first, second = random_prompt(97, 1000, 2), random_prompt(97, 1000, 2)
    assert torch.equal(first, second)
    assert first.shape == (2, 1000)
    assert first.min() >= 0
    assert first.max() < 97
    assert len(first.unique()) > 60
    counts = torch.bincount(first.flatten(), minlength=97)
    # log(2) / log(97) = 15.2% of a distribution that falls as one over the rank is the first id.
    assert 0.12 < counts[0] / 2000 < 0.18
    assert not torch.equal(first[0], first[1])


def test_models_are_the_same_every_time() -> None:
    one, other = TINY.build(), TINY.build()
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    shape = shape_of(one.config)
    assert (shape.num_layers, len(set(shape.layers))) == (4, 1)
    assert shape.layers[0].token_bytes == 2 * 2 * 8 * 2
    assert one.config.eos_token_id is None


def test_allowed_decode_is_bytes_over_bytes() -> None:
    """Head and norms beside the layers, no embeddings; of 100 tokens 20 are kept."""
    model = TINY.build()
    attention = 48 * 8 * (6 + 2 * 2) + 48 * 48
    layer = attention + 3 * 48 * 80 + 2 * 48
    weights = 4 * (4 * layer + 48 + 48 * 97)
    slot = 4 * 2 * 2 * 8 * 4  # layers, keys and values, KV heads, head_dim, bytes of a float32
    shape = shape_of(model.config, dtype=torch.float32)
    allowed = allowed_decode(StreamingLLM(0.2), shape, 100, model)
    assert allowed == pytest.approx((weights + 100 * slot) / (weights + 20 * slot))
    assert allowed_decode(FullContext(), shape, 100, model) == 1.0


def test_spread() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0]) == {"median": 3.0, "lowest": 1.0, "highest": 5.0}
