"""A used cache that is given another text says so, wherever it can know."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FastKV, FullContext, GemFilter, SnapKV
from tests.integrations.support.conversation import left_padded, prompt
from tests.integrations.support.reading import read
from tests.reference import PAD_TOKEN_ID, random_tokens

POLICIES = {
    "snapkv": SnapKV(0.3),
    "fastkv": FastKV(tsp_rate=0.5, retention_rate=0.3),
    "gemfilter": GemFilter(retention_tokens=17),
}
MESSAGE = r"in row {} the token at position {} was \d+, got \d+; .*reset\(\)"


def generate(model: PreTrainedModel, ids: Tensor, cache: PolicyCache, **how: Any) -> Tensor:
    """The whole conversation, answer included."""
    how = {"max_new_tokens": 7, "do_sample": False, **how}
    return model.generate(ids, cache=cache, **how)


def changed(ids: Tensor, row: int, column: int) -> Tensor:
    ids = ids.clone()
    ids[row, column] = ids[row, column] % 96 + 1
    return ids


def check_knows(
    model: PreTrainedModel, cache: PolicyCache, said: Tensor, mask: Tensor | None = None
) -> None:
    """Each token that was read, and no other, may not be another one."""
    rows, seen = len(said), cache.get_seq_length()
    mask = torch.ones_like(said) if mask is None else mask
    whole = torch.cat([said, prompt(9, seed=5).expand(rows, -1)], dim=1)
    whole_mask = torch.cat([mask, torch.ones(rows, 9, dtype=mask.dtype)], dim=1)
    for row in range(rows):
        for column in (0, 3, seen // 2, seen - 2, seen - 1):
            if not mask[row, column]:
                continue
            other = changed(whole, row, column)
            position = int(mask[row, :column].sum())
            with pytest.raises(ValueError, match=MESSAGE.format(row, position)):
                generate(model, other, cache, attention_mask=whole_mask)
    assert cache.get_seq_length() == seen
    padded = torch.where(whole_mask.bool(), whole, 3)  # what stands on padding is nobody's matter
    fork = copy.deepcopy(cache)
    generate(model, changed(padded, 0, seen), fork, attention_mask=whole_mask)
    assert fork.get_seq_length() == seen + 16


@pytest.mark.parametrize("fixed", [None, 16])
@pytest.mark.parametrize("name", POLICIES)
def test_every_token_that_was_read_is_known(
    model: PreTrainedModel, name: str, fixed: int | None
) -> None:
    cache = PolicyCache(POLICIES[name], max_new_tokens=fixed)
    ids, mask = left_padded([random_tokens(0, 40), random_tokens(1, 29)])
    for turn in range(2):
        said = generate(model, ids, cache, attention_mask=mask)
        mask = torch.cat([mask, torch.ones(2, 7, dtype=mask.dtype)], dim=1)
        check_knows(model, cache, said, mask)
        added, added_mask = left_padded([random_tokens(7 + turn, 5), random_tokens(9, 12)])
        ids, mask = torch.cat([said, added], dim=1), torch.cat([mask, added_mask], dim=1)


def test_another_document(model: PreTrainedModel) -> None:
    cache = PolicyCache(SnapKV(0.3))
    generate(model, prompt(60), cache)
    for length in (67, 200):
        with pytest.raises(ValueError, match=MESSAGE.format(0, 0)):
            generate(model, prompt(length, seed=1), cache)
    cache.reset()
    generate(model, prompt(67, seed=1), cache)


def through_a_file(model: PreTrainedModel, cache: PolicyCache, path: Path) -> PolicyCache:
    cache.save(path / "cache")
    return PolicyCache.load(path / "cache")


def by_hand(model: PreTrainedModel, cache: PolicyCache, path: Path) -> PolicyCache:
    ids = cache._reader.tokens.ids  # type: ignore[union-attr]
    other = PolicyCache(cache.policy)
    with torch.no_grad(), other.attached(model):
        model(ids[:, :40], cache=other)
        for token in ids[:, 40:].split(3, dim=1):
            model(token, cache=other)
    return other


def in_chunks(model: PreTrainedModel, cache: PolicyCache, path: Path) -> PolicyCache:
    other = PolicyCache(cache.policy)
    generate(model, prompt(60), other, prefill_chunk_size=16)
    return other


def with_drafts(model: PreTrainedModel, cache: PolicyCache, path: Path) -> PolicyCache:
    other = PolicyCache(cache.policy)
    generate(model, prompt(60), other, prompt_lookup_num_tokens=3)
    return other


def read_again_after_crop(model: PreTrainedModel, cache: PolicyCache, path: Path) -> PolicyCache:
    ids = cache._reader.tokens.ids  # type: ignore[union-attr]
    with torch.no_grad(), cache.attached(model):
        model(prompt(3, seed=8), cache=cache)
        cache.crop(-5)
        model(ids[:, -2:], cache=cache)
    return cache


WAYS: dict[str, Callable[[PreTrainedModel, PolicyCache, Path], PolicyCache]] = {
    "a copy": lambda model, cache, path: copy.deepcopy(cache),
    "a file": through_a_file,
    "a loop": by_hand,
    "chunks": in_chunks,
    "drafts": with_drafts,
    "crop": read_again_after_crop,
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_known_in_whatever_way_it_was_read(
    model: PreTrainedModel, tmp_path: Path, way: str
) -> None:
    cache = PolicyCache(SnapKV(0.3))
    said = generate(model, prompt(60), cache)
    check_knows(model, WAYS[way](model, cache, tmp_path), said)


def test_rows_take_their_ids_along(model: PreTrainedModel) -> None:
    cache = PolicyCache(SnapKV(0.3))
    said = generate(model, torch.cat([prompt(30), prompt(30, 1), prompt(30, 2)]), cache)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    check_knows(model, cache, said[[2, 0, 0]])
    cache.batch_select_indices(torch.tensor([1]))
    check_knows(model, cache, said[:1])


def test_answers_to_one_prompt(model: PreTrainedModel) -> None:
    """`generate` reads one row for each answer, all from the same ids."""
    cache = PolicyCache(SnapKV(0.3))
    ids = prompt(40)
    said = generate(model, ids, cache, num_return_sequences=3, do_sample=True)
    check_knows(model, cache, said)
    again = torch.cat([ids, prompt(30, seed=4)], dim=1)
    with pytest.raises(ValueError, match=MESSAGE.format(0, 40)):
        generate(model, again, cache, num_return_sequences=3, do_sample=True)
    cache, _ = read(model, SnapKV(0.3), ids.expand(3, -1))
    generate(model, again, cache, num_return_sequences=3, do_sample=True)
    assert cache.get_seq_length() == 76


def test_beams_that_lost(model: PreTrainedModel) -> None:
    """After a beam search the cache holds the last beams, not the answer: they may differ."""
    cache = PolicyCache(FullContext())
    generate(model, prompt(40), cache, num_beams=3, max_new_tokens=9)
    read = cache._reader.tokens.ids  # type: ignore[union-attr]
    assert read.shape == (3, 48)
    assert torch.equal(read[:, :40], prompt(40).expand(3, -1))
    logits = model(read).logits[:, -1]
    again = torch.cat([read, prompt(5, 2).expand(3, -1)], dim=1)
    expected = model(again).logits[:, -1]
    with torch.no_grad(), cache.attached(model):
        got = model(again[:, 48:], cache=cache).logits[:, -1]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)  # these are the rows it holds
    assert not torch.allclose(logits, expected)


def test_what_a_row_said_after_its_end_may_be_padding_later(model: PreTrainedModel) -> None:
    cache = PolicyCache(SnapKV(0.3))
    ids = torch.cat([prompt(40), prompt(40, seed=1)])
    said = generate(model, ids, cache)
    mask = torch.ones_like(said)
    mask[1, 43:] = 0
    whole = torch.where(mask.bool(), said, PAD_TOKEN_ID)
    check_knows(model, cache, whole, mask)


def test_embeddings_have_no_ids(model: PreTrainedModel) -> None:
    cache = PolicyCache(SnapKV(0.3))
    embeds = model.get_input_embeddings()(prompt(40))
    answer = model.generate(inputs_embeds=embeds, cache=cache, max_new_tokens=7, do_sample=False)
    other = torch.cat([prompt(40, seed=3), answer, prompt(9, seed=5)], dim=1)
    with pytest.raises(ValueError, match=MESSAGE.format(0, 42)):
        generate(model, changed(other, 0, 42), cache)
    generate(model, other, cache)


def test_new_tokens_alone_are_taken_as_they_are(model: PreTrainedModel) -> None:
    cache, whole = PolicyCache(SnapKV(0.3)), PolicyCache(SnapKV(0.3))
    said = generate(model, prompt(40), cache)
    generate(model, prompt(40), whole)
    new = torch.cat([said[:, -1:], prompt(9, seed=5)], dim=1)
    mask = torch.ones(1, 46 + 10, dtype=torch.int64)
    got = generate(model, new, cache, attention_mask=mask)
    expected = generate(model, torch.cat([said[:, :-1], new], dim=1), whole)
    assert torch.equal(got[:, 10:], expected[:, 56:])
    check_knows(model, cache, expected)
