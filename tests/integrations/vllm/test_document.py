"""The file of a document: whole or not at all, checked when read, and the requests made of it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.integrations.vllm import DocumentError, ServedDocument, export, files
from kvpolicy.integrations.vllm.document import placeholder_ids
from kvpolicy.policies import SnapKV
from tests.integrations.vllm.plain import damage, read_prompt
from tests.reference import tiny_model

PROMPT = torch.randint(0, 97, (1, 50), generator=torch.Generator().manual_seed(6))


@pytest.fixture
def document(model: Any, tmp_path: Path) -> ServedDocument:
    cache = read_prompt(model, SnapKV(0.3, window_size=4), PROMPT)
    return export(cache, model, tmp_path / "report.safetensors")


def test_requests(document: ServedDocument) -> None:
    again = ServedDocument.load(document.path)
    ids = list(document.placeholders)
    assert len(ids) == document.length == 15
    assert again.placeholders == document.placeholders
    assert again.cache_salt == document.cache_salt
    assert again.prompt([5, 6]) == {
        "prompt_token_ids": [*ids, 5, 6],
        "cache_salt": document.cache_salt,
    }
    assert again.request([5]) == {
        "prompt": [*ids, 5],
        "cache_salt": document.cache_salt,
        "kv_transfer_params": {"kvpolicy_document": "report"},
    }
    messages = [{"role": "user", "content": "Why?"}]
    assert again.chat_request(messages, [7]) == {
        "messages": messages,
        "cache_salt": document.cache_salt,
        "kv_transfer_params": {"kvpolicy_document": "report", "prompt_token_ids": [*ids, 7]},
    }
    for wrong, error in (
        ([], ValueError),
        ([97], ValueError),
        ([-1], ValueError),
        (["a"], TypeError),
    ):
        with pytest.raises(error, match="question_ids must be"):
            document.prompt(wrong)


def test_bytes_are_those_of_the_entries(document: ServedDocument) -> None:
    entries = document.entries(range(4))
    held = sum(each.nbytes for pair in entries.values() for each in pair)
    assert document.nbytes == held == document.length * 4 * 2 * (8 + 8) * 4


@given(st.integers(0, 100), st.integers(1, 40000), st.text("0123456789abcdef", min_size=4))
def test_placeholders(length: int, vocab_size: int, digest: str) -> None:
    ids = placeholder_ids(digest, length, vocab_size)
    assert len(ids) == length
    assert all(0 <= each < vocab_size for each in ids)
    assert ids[: length // 2] == placeholder_ids(digest, length // 2, vocab_size)
    if vocab_size >= 8 and length:  # special tokens are at the ends
        assert min(ids) >= vocab_size // 4
        assert max(ids) < vocab_size // 2
    if length > 8 and vocab_size > 1000:
        assert ids != placeholder_ids(digest + "0", length, vocab_size)


def test_two_exports_of_one_cache_share_no_salt(document: ServedDocument, model: Any) -> None:
    cache = read_prompt(model, SnapKV(0.3, window_size=4), PROMPT)
    other = export(cache, model, document.path.with_name("other.safetensors"))
    assert other.cache_salt != document.cache_salt
    assert other.placeholders != document.placeholders


def test_some_heads(document: ServedDocument) -> None:
    whole = document.entries([1, 2])
    for heads in (slice(0, 1), slice(1, 2)):
        part = document.entries([1, 2], heads)
        for layer in (1, 2):
            for mine, all_ in zip(part[layer], whole[layer], strict=True):
                assert torch.equal(mine, all_[:, heads])


def test_a_failed_write_leaves_the_old_file(
    document: ServedDocument, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = document.path.read_bytes()
    synced: list[str] = []

    def fails(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        raise OSError("no space left on device")

    monkeypatch.setattr(files.os, "fsync", fails)
    cache = read_prompt(model, SnapKV(0.5, window_size=4), PROMPT)
    with pytest.raises(OSError, match="no space"):
        export(cache, model, document.path)
    assert synced[0] != str(document.path)
    assert document.path.read_bytes() == before
    assert list(document.path.parent.iterdir()) == [document.path]


def test_every_changed_byte_is_found(document: ServedDocument) -> None:
    document.verify()
    whole = document.path.read_bytes()
    for name in ("layers.2.keys", "layers.0.values", "digests", "model.samples"):
        document.path.write_bytes(whole)
        damage(document.path, name)
        with pytest.raises(DocumentError, match=r"damaged|changed"):
            ServedDocument.load(document.path).verify()
    text = whole.replace(b'\\"length\\": 15', b'\\"length\\": 14')
    assert text != whole
    document.path.write_bytes(text)
    with pytest.raises(DocumentError, match="changed after it was written"):
        ServedDocument.load(document.path)


@pytest.mark.parametrize("share", [0, 0.001, 0.3, 0.9, 0.999])
def test_a_file_cut_short(share: float, document: ServedDocument) -> None:
    whole = document.path.read_bytes()
    document.path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DocumentError, match="not a whole safetensors file"):
        ServedDocument.load(document.path)


def test_a_file_cut_short_while_it_is_read(document: ServedDocument) -> None:
    """It is an error: a mapped file would kill the process."""
    with files.TensorFile(document.path) as file:
        os.truncate(document.path, document.path.stat().st_size // 2)
        with pytest.raises(DocumentError, match="ends too early"):
            file.read("layers.3.values")


def test_other_files(document: ServedDocument, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(DocumentError, match=r"none\.safetensors cannot be read: No such file"):
        ServedDocument.load(tmp_path / "none.safetensors")
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    with pytest.raises(DocumentError, match=r"must be a file of .*export"):
        ServedDocument.load(tmp_path / "a.safetensors")


def test_a_replaced_document_is_not_taken_for_the_old_one(
    document: ServedDocument, model: Any
) -> None:
    cache = read_prompt(model, SnapKV(0.3, window_size=4), PROMPT)
    export(cache, model, document.path)  # the same entries, another salt
    with pytest.raises(DocumentError, match="replaced by another one"):
        document.entries([0])


def test_which_models_fit(document: ServedDocument, model: Any, tmp_path: Path) -> None:
    own = tmp_path / "own"
    model.save_pretrained(own)
    document.check(model.config, dtype="float32", checkpoint=own)
    with pytest.raises(DocumentError, match=r"in float32, the model is served in bfloat16"):
        document.check(model.config, dtype="bfloat16")
    other = tiny_model("llama", seed=2)
    other.save_pretrained(tmp_path / "other")
    document.check(other.config)  # only weights tell
    with pytest.raises(DocumentError, match=r"values of layers\.0\.self_attn\.k_proj\.weight"):
        document.check(other.config, checkpoint=tmp_path / "other")
    with pytest.raises(DocumentError, match="num_hidden_layers of its model is 4"):
        document.check(tiny_model("llama", seed=1, num_layers=3).config)
    with pytest.raises(DocumentError, match="model_type of its model is llama"):
        document.check(tiny_model("mistral", seed=1).config)
    config = type(model.config).from_dict(model.config.to_dict())
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 1.0}
    with pytest.raises(DocumentError, match="rope_theta"):
        document.check(config)


def test_weights_that_cannot_be_read(document: ServedDocument, model: Any, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(DocumentError, match="k_proj.weight cannot be read from"):
        document.check(model.config, checkpoint=tmp_path / "weights")


def test_weights_in_shards_and_in_lower_precision(document: ServedDocument, model: Any) -> None:
    shards = document.path.parent / "shards"
    model.save_pretrained(shards, max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    document.check(model.config, checkpoint=shards)
    lower = document.path.parent / "lower"
    tiny_model("llama", seed=1).to(torch.bfloat16).save_pretrained(lower)
    document.check(model.config, checkpoint=lower)
