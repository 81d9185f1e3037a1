"""Requests for documents get the documents' entries in their blocks, or end, in a stub of vLLM."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.integrations.vllm import ServedDocument, export
from kvpolicy.integrations.vllm.folder import DocumentFolder
from kvpolicy.integrations.vllm.loading import DocumentLoader, own_heads
from kvpolicy.integrations.vllm.scheduling import DocumentScheduler
from kvpolicy.integrations.vllm.served_model import ServedModel
from kvpolicy.policies import SnapKV
from tests.integrations.vllm.plain import damage, read_prompt
from tests.integrations.vllm.stub import Engine, Pages, request_for
from tests.reference import tiny_model

LAYERS, HEADS, DIM = 4, 2, 8
LENGTHS = {"a": 15, "b": 32, "c": 9}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model, folder = tiny_model("llama", seed=1), tmp_path_factory.mktemp("documents")
    ids = torch.randint(0, 97, (1, 50), generator=torch.Generator().manual_seed(6))
    for name, length in LENGTHS.items():
        cache = read_prompt(model, SnapKV(retention_tokens=length, window_size=4), ids)
        export(cache, model, folder / f"{name}.safetensors")
    return model, folder


@pytest.fixture
def folder(made: Any, tmp_path: Path) -> Path:
    """Documents that a test may change."""
    return Path(shutil.copytree(made[1], tmp_path / "documents"))


def engine_of(
    model: Any,
    path: Path,
    block_size: int = 4,
    *,
    shares: bool = True,
    resident: int = 10**9,
    heads: slice = slice(0, HEADS),
    layers: range = range(LAYERS),
) -> tuple[Engine, Pages]:
    folder = DocumentFolder(path)
    pages = Pages(layers, 4000, heads.stop - heads.start, DIM)
    served = ServedModel(model.config, "float32")
    cpu = torch.device("cpu")
    loader = DocumentLoader(DocumentFolder(path), pages.writers(), heads, block_size, cpu, resident)
    return Engine(DocumentScheduler(folder, served, shares), loader, block_size), pages


def check_blocks(
    engine: Engine, pages: Pages, document: ServedDocument, name: str, heads: slice = slice(None)
) -> None:
    entries = document.entries(sorted(pages.of), heads)
    assert engine.loaded[name] >= document.length
    for index, pair in entries.items():
        got = pages.read(index, engine.blocks[name], document.length, engine.block_size)
        assert torch.equal(got, torch.stack(pair))


@settings(max_examples=25)
@given(
    block_size=st.sampled_from([1, 2, 3, 5, 8, 16, 64]),
    asked=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=6),
    shares=st.booleans(),
    together=st.booleans(),
)
def test_blocks_hold_the_entries(
    block_size: int, asked: list[Any], shares: bool, together: bool, made: Any
) -> None:
    """Whatever the block size, and whoever shares blocks with whom."""
    engine, pages = engine_of(made[0], made[1], block_size, shares=shares)
    documents = {name: ServedDocument.load(made[1] / f"{name}.safetensors") for name in LENGTHS}
    for at, (name, count) in enumerate(asked):
        question = list(range(at, at + count))
        engine.add(request_for(documents[name], question, request_id=str(at)))
        if not together:
            engine.run()
    engine.run()
    assert engine.failed == set()
    for at, (name, _) in enumerate(asked):
        check_blocks(engine, pages, documents[name], str(at))
    if shares:  # full blocks are loaded once, the rest for each request
        full = {name: LENGTHS[name] // block_size * block_size for name, _ in asked}
        rest = sum(LENGTHS[name] - full[name] for name, _ in asked)
        assert pages.written == LAYERS * (sum(full.values()) + rest)


def test_every_worker_loads_its_heads_and_layers(made: Any) -> None:
    document = ServedDocument.load(made[1] / "a.safetensors")
    for rank in (0, 1):
        heads = own_heads(rank, 2, HEADS)
        engine, pages = engine_of(
            made[0], made[1], heads=heads, layers=range(2 * rank, 2 * rank + 2)
        )
        engine.add(request_for(document, [5]))
        engine.run()
        check_blocks(engine, pages, document, "one", heads)


@given(st.integers(1, 16), st.integers(1, 16))
def test_heads_of_workers(size: int, heads: int) -> None:
    if heads % size and size % heads:
        return  # vLLM does not start
    own = [range(heads)[own_heads(rank, size, heads)] for rank in range(size)]
    assert {each for part in own for each in part} == set(range(heads))
    assert {len(part) for part in own} == {max(heads // size, 1)}
    assert [part[0] for part in own] == sorted(part[0] for part in own)


def test_requests_of_others_are_left_alone(made: Any) -> None:
    engine, pages = engine_of(made[0], made[1])
    document = ServedDocument.load(made[1] / "a.safetensors")
    plain = request_for(
        document, [5], prompt_token_ids=[1, 2, 3], cache_salt=None, kv_transfer_params=None
    )
    plain.skip_reading_prefix_cache = True
    engine.add(plain)
    assert plain.skip_reading_prefix_cache
    engine.run()
    assert engine.running == {"one"}
    assert pages.written == 0


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "prompt_logprobs": ({"prompt_logprobs": 1}, "must not have prompt_logprobs"),
    "penalty": ({"repetition_penalty": 1.2}, "must not have repetition_penalty"),
    "pooling": ({"sampling_params": None}, "must not have pooling_params"),
    "lora": ({"lora_request": object()}, "must not have a LoRA adapter"),
    "media": ({"mm_features": [object()]}, "must not have images"),
    "continued": ({"resumable": True}, "must not have an input that is continued"),
    "embeddings": ({"prompt_embeds": object()}, "prompt must be token ids"),
    "no salt": ({"cache_salt": None}, "got none"),
    "salt of the user": ({"cache_salt": "mine"}, "got another one"),
    "guessed salt": ({"cache_salt": "kvpolicy:" + "0" * 64}, "got another one"),
    "no such document": (
        {"kv_transfer_params": {"kvpolicy_document": "no"}},
        "is no document 'no'",
    ),
    "another document": ({"kv_transfer_params": {"kvpolicy_document": "b"}}, "got another one"),
    "path": ({"kv_transfer_params": {"kvpolicy_document": "../a"}}, "name must be letters"),
    "number": ({"kv_transfer_params": {"kvpolicy_document": 7}}, "name must be letters"),
    "not named": ({"kv_transfer_params": None}, "does not name it"),
    "neither name nor salt": (
        {"kv_transfer_params": None, "cache_salt": None},
        "has the placeholders of document 'a' but does not name it",
    ),
    "salt alone": (
        {"kv_transfer_params": None, "prompt_token_ids": list(range(40))},
        "has the salt of a document but does not name it",
    ),
    "one token": ({"prompt_token_ids": [5]}, "must begin with the 15 placeholders"),
    "text": ({"prompt_token_ids": list(range(40))}, "must begin with the 15 placeholders"),
}


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_served_ends(
    kind: str, warm: bool, made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends with the reason, nothing is shared of it, and a good request after it is right."""
    engine, pages = engine_of(made[0], made[1])
    document = ServedDocument.load(made[1] / "a.safetensors")
    changes, reason = BAD[kind]
    if warm:
        engine.add(request_for(document, [5, 6], request_id="before"))
        engine.run()
    shared = dict(engine.shared)
    engine.add(request_for(document, [5, 6], **changes))
    engine.run()
    assert engine.failed == {"one"}
    assert engine.shared == shared
    assert reason in caplog.text
    engine.add(request_for(document, [5, 6, 7], request_id="after"))
    engine.run()
    assert "after" in engine.running
    check_blocks(engine, pages, document, "after")


def test_placeholders_alone_are_no_request(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = engine_of(made[0], made[1])
    document = ServedDocument.load(made[1] / "a.safetensors")
    engine.add(request_for(document, [5], prompt_token_ids=list(document.placeholders)))
    engine.run()
    assert engine.failed == {"one"}
    assert "a question must follow the placeholders" in caplog.text


def _delete(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _replace(path: Path) -> None:
    shutil.copy(path.with_name("b.safetensors"), path)


@pytest.mark.parametrize("change", [_delete, _cut, damage, _replace])
@pytest.mark.parametrize("when", ["before", "between", "after it was scheduled"])
def test_files_that_change(
    change: Callable[[Path], None], when: str, made: Any, folder: Path
) -> None:
    """The request that needs the file ends; requests for other documents are served."""
    engine, pages = engine_of(made[0], folder, resident=0)
    path = folder / "a.safetensors"
    document, other = (ServedDocument.load(folder / f"{name}.safetensors") for name in "ac")
    if when == "between":
        engine.add(request_for(document, [5], request_id="first"))
        engine.run()
        assert engine.running == {"first"}
    engine.add(request_for(document, [7, 8]))
    if when == "after it was scheduled":
        for request in list(engine.waiting):
            engine.schedule(request)
    change(path)
    engine.add(request_for(other, [9], request_id="other"))
    engine.run()
    assert engine.failed == {"one"}
    check_blocks(engine, pages, other, "other")


def test_a_replaced_document(made: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, pages = engine_of(made[0], folder)
    old = ServedDocument.load(folder / "a.safetensors")
    engine.add(request_for(old, [5], request_id="first"))
    engine.run()
    shutil.copy(folder / "b.safetensors", folder / "new")
    os.replace(folder / "new", folder / "a.safetensors")
    new = ServedDocument.load(folder / "a.safetensors")
    engine.add(request_for(old, [5], request_id="second"))
    engine.add(request_for(new, [5], request_id="third"))
    engine.run()
    assert engine.failed == {"second"}
    assert "it may have been replaced" in caplog.text
    check_blocks(engine, pages, new, "third")


def test_documents_of_another_model_or_precision(made: Any, folder: Path) -> None:
    other = tiny_model("llama", seed=2)
    other.save_pretrained(folder / "weights")
    engine, _ = engine_of(other, folder)
    engine.scheduler.model.checkpoint = folder / "weights"
    document = ServedDocument.load(folder / "a.safetensors")
    engine.add(request_for(document, [5]))
    engine.run()
    assert engine.failed == {"one"}
    engine, _ = engine_of(made[0], folder)
    engine.scheduler.model.dtype = "bfloat16"
    engine.add(request_for(document, [5]))
    engine.run()
    assert engine.failed == {"one"}


def test_a_folder_that_is_gone(made: Any, folder: Path) -> None:
    """Requests for its documents end; all others are served on."""
    engine, _ = engine_of(made[0], folder)
    document = ServedDocument.load(folder / "a.safetensors")
    shutil.rmtree(folder)
    plain = {"cache_salt": None, "kv_transfer_params": None, "prompt_token_ids": [1] * 20}
    engine.add(request_for(document, [5], request_id="plain", **plain))
    engine.add(request_for(document, [5]))
    engine.run()
    assert engine.running == {"plain"}
    assert engine.failed == {"one"}


def test_residents_are_bounded(made: Any) -> None:
    documents = {name: ServedDocument.load(made[1] / f"{name}.safetensors") for name in "abc"}
    bound = documents["a"].nbytes + documents["c"].nbytes
    engine, _ = engine_of(made[0], made[1], 64, resident=bound)
    held = []
    for at, name in enumerate("acabcb"):
        engine.add(request_for(documents[name], [5], request_id=f"{at}"))
        engine.run()
        names = {document.digest: name for name, document in documents.items()}
        held.append("".join(names[digest] for digest in engine.loader._resident))
    assert held == ["a", "ac", "ca", "", "c", ""]  # b alone is larger than the bound


def test_an_aborted_load_lets_others_go_on(made: Any) -> None:
    engine, pages = engine_of(made[0], made[1])
    document = ServedDocument.load(made[1] / "a.safetensors")
    first = request_for(document, [5], request_id="first")
    engine.add(first)
    engine.schedule(first)
    engine.add(request_for(document, [5, 6]))
    engine.schedule(engine.waiting[0])
    assert len(engine.waiting) == 1  # it waits for the blocks of the first
    engine.scheduler.finish("first")  # as when its client goes away
    engine.run()
    check_blocks(engine, pages, document, "one")
