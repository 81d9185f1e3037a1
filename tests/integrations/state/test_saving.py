"""A cache as a file: saved, loaded, refused."""

import copy
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, LayerContext, Scorer, registered
from kvpolicy.description import describe, from_description
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.state.recurrent import EmptyLayer
from kvpolicy.policies import (
    H2O,
    AdaKV,
    AdaptiveHeadSelector,
    ChunkMeanScorer,
    FastKV,
    GQAGroupSelector,
    KVzip,
    LagKVScorer,
    LastQueryScorer,
    PassAllPropagation,
    SinkAndRecentSelector,
    SnapKV,
    SumScorer,
    WindowMaxPoolScorer,
)
from tests.integrations.fuzz.drawing import windowed
from tests.integrations.support.conversation import left_padded, prompt
from tests.integrations.support.reading import assert_same_positions
from tests.reference import random_tokens, tiny_model


def generate(model: PreTrainedModel, cache: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=7, do_sample=False)


def held(model: PreTrainedModel, policy: CachePolicy | None = None) -> PolicyCache:
    cache, ids = PolicyCache(policy or SnapKV(0.4)), prompt(60)
    generate(model, cache, ids, torch.ones_like(ids))
    return cache


def saved(model: PreTrainedModel, path: Path, policy: CachePolicy | None = None) -> Path:
    held(model, policy).save(path / "cache.safetensors")
    return path / "cache.safetensors"


def going_on(cache: PolicyCache, added: int = 14) -> Tensor:
    """What a cache has read, and some more tokens."""
    assert cache._reader.tokens is not None
    return torch.cat([cache._reader.tokens.ids, torch.tensor([random_tokens(5, added)])], dim=1)


@pytest.mark.parametrize(
    ("before", "after"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_the_same_model_in_another_precision(
    tmp_path: Path, before: torch.dtype, after: torch.dtype
) -> None:
    path = saved(tiny_model("llama", seed=1).to(torch.bfloat16).to(before), tmp_path)
    model = tiny_model("llama", seed=1).to(torch.bfloat16).to(after)
    cache = PolicyCache.load(path)
    stored = [(layer.keys, layer.values) for layer in cache.layers]
    with cache.attached(model):
        for layer, of_layer in zip(cache.layers, stored, strict=True):
            for tensor, was in zip((layer.keys, layer.values), of_layer, strict=True):
                assert torch.equal(tensor, was.to(after))
    ids = going_on(cache)
    generate(model, cache, ids, torch.ones_like(ids))
    assert all(layer.keys.dtype == layer.values.dtype == after for layer in cache.layers)
    assert all(layer.dtype == after for layer in cache.layers)


def test_another_policy_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    path = saved(model, tmp_path)
    with pytest.raises(ValueError, match="policy must be the one that filled the cache"):
        PolicyCache.load(path, SnapKV(0.2))
    PolicyCache.load(path, SnapKV(0.4))
    policy = POLICIES["parts"]
    path = saved(model, tmp_path, policy)
    with pytest.raises(ValueError, match="the one that filled the cache .* which is CachePolicy"):
        PolicyCache.load(path, attrs.evolve(policy, selector=GQAGroupSelector(0.5)))


@attrs.frozen
class Mine(Scorer):
    """The norm of values."""

    power: float = 1.0

    def score(self, context: LayerContext) -> Tensor:
        return context.values.float().norm(dim=-1) ** self.power


def test_a_policy_of_the_users_own_is_to_be_given(model: PreTrainedModel, tmp_path: Path) -> None:
    policy = CachePolicy(Mine(2.0), GQAGroupSelector(0.4), PassAllPropagation())
    path = saved(model, tmp_path, policy)
    with pytest.raises(ValueError, match="policy must be given to load .*Mine"):
        PolicyCache.load(path)
    assert PolicyCache.load(path, policy).policy is policy
    other = CachePolicy(Mine(3.0), GQAGroupSelector(0.4), PassAllPropagation())
    with pytest.raises(ValueError, match="policy must be the one"):
        PolicyCache.load(path, other)


def test_what_is_no_saved_cache(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PolicyCache.load(tmp_path / "nothing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="path must be a file of PolicyCache.save"):
        PolicyCache.load(tmp_path / "text")
    save_file({"weights": torch.zeros(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="path must be a file of PolicyCache.save.*format None"):
        PolicyCache.load(tmp_path / "weights.safetensors")
    metadata = {"format": "kvpolicy-cache", "version": "1"}
    save_file({"weights": torch.zeros(2)}, tmp_path / "part.safetensors", metadata)
    with pytest.raises(ValueError, match="path must be a whole file"):
        PolicyCache.load(tmp_path / "part.safetensors")


def test_what_cannot_be_saved(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cache must have read a prompt"):
        PolicyCache(SnapKV()).save(tmp_path / "cache")
    cache = held(model)
    with pytest.raises(ValueError, match="while the model that filled it exists"):
        copy.deepcopy(cache).save(tmp_path / "cache")
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "no folder" / "cache")
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        cache.save(tmp_path / "taken")
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]  # nothing half-written


def test_a_link_leads_to_the_file_that_is_written(model: PreTrainedModel, tmp_path: Path) -> None:
    cache, elsewhere = held(model), tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("there", "not yet"):
        (tmp_path / name).symlink_to(elsewhere / name)
    (elsewhere / "there").write_text("old")
    (elsewhere / "there").chmod(0o600)
    for name in ("there", "not yet"):
        cache.save(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert PolicyCache.load(elsewhere / name).get_seq_length() == cache.get_seq_length()
    assert (elsewhere / "there").stat().st_mode & 0o777 == 0o600
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with pytest.raises(OSError, match="round"):
        cache.save(tmp_path / "round")
    assert sorted(each.name for each in elsewhere.iterdir()) == ["not yet", "there"]


def test_what_is_no_regular_file(model: PreTrainedModel, tmp_path: Path) -> None:
    cache, pipe = held(model), tmp_path / "pipe"
    for use in (PolicyCache.load, cache.save):
        for no_path in (None, 3, True, b"cache"):
            message = f"path must be a str or os.PathLike, got {no_path!r}"
            with pytest.raises(TypeError, match=message):
                use(no_path)
    os.mkfifo(pipe)
    (tmp_path / "folder").mkdir()
    for path in (pipe, tmp_path / "folder"):
        with pytest.raises(OSError, match=f"path must be a regular file or a new one, got {path}"):
            cache.save(path)
        with pytest.raises(OSError, match=f"path must be a regular file, got {path}"):
            PolicyCache.load(path)
    assert pipe.is_fifo()
    with pytest.raises(ValueError, match="path must name a file, got ''"):
        cache.save("")
    with pytest.raises(OSError, match="too long"):
        cache.save(tmp_path / ("x" * 256))
    cache.save(tmp_path / ("x" * 255))
    assert sorted(each.name[:6] for each in tmp_path.iterdir()) == ["folder", "pipe", "x" * 6]


def contents(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """A file's strings and tensors by name."""
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118


def read(model: PreTrainedModel, cache: PolicyCache, ids: Tensor, mask: Tensor) -> None:
    with torch.no_grad(), cache.attached(model):
        model(ids, attention_mask=mask, cache=cache)


def two_rows(model: PreTrainedModel, path: Path) -> Path:
    """A file of two rows: a prompt, then a forward in which one of them has padding inside."""
    ids, mask = left_padded([random_tokens(0, 40), random_tokens(1, 29)])
    cache = PolicyCache(FastKV(tsp_rate=0.5, retention_rate=0.3, tsp_layer=1))
    read(model, cache, ids, mask)
    more = torch.ones(2, 8, dtype=mask.dtype)
    more[1, 1] = 0
    new = torch.tensor([random_tokens(2, 8), random_tokens(3, 8)])
    read(model, cache, new, torch.cat([mask, more], dim=1))
    cache.save(path / "cache.safetensors")
    return path / "cache.safetensors"


def changed(tensor: Tensor) -> Tensor:
    """The tensor with one other value; a bool is negated."""
    tensor = tensor.clone()
    first = tensor.view(-1)[:1]
    first.copy_(~first if tensor.dtype == torch.bool else first + 1)
    return tensor


def test_a_file_in_which_anything_was_changed(model: PreTrainedModel, tmp_path: Path) -> None:
    path = two_rows(model, tmp_path)
    metadata, tensors = contents(path)
    groups = {name.partition(".")[0] for name in tensors}
    assert groups == {"model", "tokens", "layers", "propagated"}

    def refused(metadata: dict[str, str], tensors: dict[str, Tensor], message: str) -> None:
        save_file(tensors, path, metadata)
        said = f"path must be a whole file of PolicyCache.save, got {path}: {message}"
        with pytest.raises(ValueError, match=re.escape(said)):
            PolicyCache.load(path)

    for name, tensor in tensors.items():
        without = {other: each for other, each in tensors.items() if other != name}
        refused(metadata, without, f"it lacks '{name}'")
        for other in (tensor[..., 1:].contiguous(), tensor.to(torch.float64), changed(tensor)):
            refused(metadata, {**tensors, name: other}, f"{name} was changed")
    refused(metadata, {**tensors, "layers.1.queries": torch.zeros(2)}, "layers.1.queries was")
    text = metadata["contents"]
    for other in (text.replace("true", "false"), text[:-1], "", "[]"):
        refused({**metadata, "contents": other}, tensors, "its contents were changed")
    for name in ("contents", "digest"):
        rest = {other: each for other, each in metadata.items() if other != name}
        refused(rest, tensors, f"it lacks '{name}'")
    save_file(tensors, path, metadata)
    whole = path.read_bytes()
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="path must be a file of PolicyCache.save") as raised:
            PolicyCache.load(path)
        assert str(path) in str(raised.value)
    path.write_bytes(whole)
    PolicyCache.load(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"PolicyLayer", {}', '"PolicyLayer", {"color": 3}'),
        ('"PolicyLayer"', '"system"'),
        ('"padded": true', '"coloured": true'),
        ('"layers": [', '"layers": [3, '),
        ('"starts_turn"', '"starts"'),
        ('"starts_turn"', '"deep": ' + "[" * 100_000 + "]" * 100_000 + ', "starts_turn"'),
    ],
)
def test_a_file_that_something_else_has_written(
    model: PreTrainedModel, tmp_path: Path, old: str, new: str
) -> None:
    """With the right digests."""
    path = two_rows(model, tmp_path)
    metadata, tensors = contents(path)
    assert old in metadata["contents"]
    text = metadata["contents"].replace(old, new)
    digest = hashlib.sha256(text.encode()).hexdigest()
    save_file(tensors, path, {**metadata, "contents": text, "digest": digest})
    with pytest.raises(ValueError, match="path must be a whole file of PolicyCache.save") as raised:
        PolicyCache.load(path)
    assert str(path) in str(raised.value)


def test_a_layer_of_another_kind_than_the_models(model: PreTrainedModel, tmp_path: Path) -> None:
    """As after an update by which the model's layers count as another kind."""
    cache = PolicyCache.load(saved(model, tmp_path))
    cache.layers[1] = EmptyLayer()
    message = "must hold what layer 1 of the model holds .kind: full attention"
    with pytest.raises(ValueError, match=message), cache.attached(model):
        pass


def loaded_from(cache: PolicyCache, path: Path) -> PolicyCache:
    cache.save(path / "cache.safetensors")
    loaded = PolicyCache.load(path / "cache.safetensors")
    assert_same_positions(loaded, cache)
    return loaded


def test_rows_without_a_token(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = PolicyCache(FastKV(tsp_rate=0.5, retention_rate=0.3, tsp_layer=1))
    mask = torch.tensor([[1], [0]])
    read(model, cache, torch.tensor([[5], [6]]), mask)
    assert loaded_from(cache, tmp_path).seen_lengths == (1, 0)
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 1]])
    read(model, cache, torch.tensor([[5, 6, 7]] * 2), mask)
    assert loaded_from(cache, tmp_path).seen_lengths == (3, 2)
    cache.start_turn()
    read(model, cache, torch.tensor([[5]] * 2), torch.cat([mask, mask[:, 1:2] * 0], dim=1))
    assert loaded_from(cache, tmp_path).seen_lengths == (3, 2)


def test_heads_that_get_nothing_of_their_layers_budget(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    selector = AdaptiveHeadSelector(retention_tokens=1, window_size=0, floor=0.0)
    cache = PolicyCache(CachePolicy(LastQueryScorer(), selector, PassAllPropagation()))
    read(model, cache, torch.tensor([random_tokens(0, 40)]), torch.ones(1, 40).long())
    assert any(bool((layer.positions < 0).all(dim=2).any()) for layer in cache.layers)
    loaded_from(cache, tmp_path)


def test_a_sliding_window_that_leaves_nothing(tmp_path: Path) -> None:
    model = windowed(("qwen3", 2, (2, 2), "sdpa", 0), (1, None))
    ids, mask = left_padded([random_tokens(0, 12), random_tokens(1, 1)])
    cache = PolicyCache(SnapKV(0.5))
    read(model, cache, ids, mask)
    assert cache.layers[0].positions.tolist() == [[[-1], [-1]], [[0], [0]]]
    loaded_from(cache, tmp_path)
    cache.batch_select_indices(torch.tensor([0]))
    loaded_from(cache, tmp_path)


@pytest.mark.parametrize("name", list(registered("policy")))
def test_every_policy_can_be_described_and_built_again(name: str) -> None:
    policy: Any = registered("policy")[name]()
    again = from_description(describe(policy))
    assert again == policy
    assert type(again) is type(policy)


# Heads that keep unlike numbers of tokens; a layer that drops tokens; the state of a scorer and the
# queries of an answer that is bounded; a second reading; a part in a part; an unregistered part.
POLICIES: dict[str, CachePolicy] = {
    "adakv": AdaKV(0.3),
    "fastkv": FastKV(0.2, tsp_layer=1, tsp_rate=0.5),
    "h2o": H2O(0.3, decoding=16),
    "kvzip": KVzip(0.3, chunk_size=16),
    "parts": CachePolicy(
        ChunkMeanScorer(LagKVScorer(num_sinks=1, lag_size=3), chunk_size=4),
        GQAGroupSelector(0.4),
        PassAllPropagation(),
    ),
    "sum": CachePolicy(
        SumScorer([WindowMaxPoolScorer(), LastQueryScorer()], weights=[1.0, 8.0]),
        GQAGroupSelector(0.4),
        PassAllPropagation(),
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_loaded_cache_goes_on_as_the_saved_one(
    model: PreTrainedModel, tmp_path: Path, name: str
) -> None:
    policy = POLICIES[name]
    cache = held(model, policy)
    loaded = loaded_from(cache, tmp_path)
    assert loaded.policy == policy
    assert PolicyCache.load(tmp_path / "cache.safetensors", policy).policy is policy
    assert loaded.seen_lengths == cache.seen_lengths == (66,)
    assert str(loaded.report()) == str(cache.report())
    assert all(layer.keys.shape[2] < 66 for layer in loaded.layers)
    for one, other in zip(loaded.layers, cache.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
    ids = going_on(cache)
    answers = [generate(model, each, ids, torch.ones_like(ids)) for each in (loaded, cache)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("version", ["0", "2", None])
def test_a_file_of_another_version(
    model: PreTrainedModel, tmp_path: Path, version: str | None
) -> None:
    path = saved(model, tmp_path)
    metadata, tensors = contents(path)
    del metadata["version"]
    save_file(tensors, path, metadata | ({} if version is None else {"version": version}))
    said = f"version 1, got {path} with format kvpolicy-cache {version or ''}"
    with pytest.raises(ValueError, match=re.escape(said)):
        PolicyCache.load(path)


def test_a_description_that_fits_nothing() -> None:
    with pytest.raises(ValueError, match="must be registered under kvpolicy.policies, got 'os:"):
        from_description({"type": "os:system", "fields": {}})
    with pytest.raises(ValueError, match="description must be that of a CachePolicy"):
        from_description(describe(GQAGroupSelector()))
    policy = CachePolicy(None, SinkAndRecentSelector(), PassAllPropagation())
    wrong = describe(policy)
    wrong["fields"]["selector"]["fields"]["colour"] = 3
    with pytest.raises(ValueError, match="sink_and_recent_selector must fit its fields"):
        from_description(wrong)
    wrong = describe(SnapKV())
    wrong["fields"]["colour"] = 3
    with pytest.raises(ValueError, match="snapkv must fit its fields"):
        from_description(wrong)
