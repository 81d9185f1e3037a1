"""What a real vLLM must not answer ends with an error, and a good request after it is right."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.plain import damage
from tests.integrations.vllm.served.support import (
    NEEDS_VLLM,
    Written,
    ask,
    check_answers,
    engine,
    sampling,
)

pytestmark = NEEDS_VLLM
NAMES = ("snapkv", "whole_blocks")
QUESTION = [7, 8, 9, 10, 11]
SETTINGS: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 1},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "skips the prefix cache": {"skip_reading_prefix_cache": True},
}
BAD = (
    *SETTINGS,
    "no salt",
    "another salt",
    "salt of another document",
    "not named",
    "bare placeholders",
    "unknown name",
    "a path",
    "another document",
    "one token",
    "placeholders alone",
    "a text",
    "half of the placeholders",
)
SERVED = {"skips the prefix cache"}  # it changes nothing: the document is loaded all the same


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Written]]:
    written = Written(tmp_path_factory.mktemp("guards"), names=NAMES)
    with engine(written) as llm:
        yield llm, written


def bad_request(written: Written, name: str, kind: str) -> tuple[dict[str, Any], Any]:
    document = written.documents[name]
    (other,) = (each for each in written.documents.values() if each is not document)
    prompt, named = document.prompt(QUESTION), name
    ids = prompt["prompt_token_ids"]
    if kind in ("no salt", "bare placeholders"):
        del prompt["cache_salt"]
    elif kind == "another salt":
        prompt["cache_salt"] = "kvpolicy:" + "0" * 64
    elif kind == "salt of another document":
        prompt["cache_salt"] = other.cache_salt
    names = {
        "not named": None,
        "bare placeholders": None,
        "unknown name": "none",
        "a path": "../documents/" + name,
        "another document": other.name,
    }
    prompts = {
        "one token": [5],
        "placeholders alone": list(document.placeholders),
        "a text": list(range(60)),
        "half of the placeholders": [*ids[: document.length // 2], *QUESTION],
    }
    prompt["prompt_token_ids"] = prompts.get(kind, ids)
    return prompt, sampling(names.get(kind, named), **SETTINGS.get(kind, {}))


@pytest.mark.parametrize("kind", BAD)
def test_bad_requests_cold_and_warm(kind: str, served: tuple[Any, Written]) -> None:
    llm, written = served
    for name in NAMES:
        prompt, chosen = bad_request(written, name, kind)
        for warm in (False, True):
            assert llm.llm_engine.reset_prefix_cache()
            if warm:
                check_answers(written, [(name, QUESTION)], ask(llm, written, [(name, QUESTION)]))
            (output,) = llm.generate([prompt], [chosen], use_tqdm=False)
            if kind in SERVED:
                check_answers(written, [(name, QUESTION)], [output])
            else:
                assert output.outputs[0].finish_reason == "error"
                assert list(output.outputs[0].token_ids) == []
            asked = [(name, QUESTION), (name, [5]), (name, [*QUESTION, 4])]
            check_answers(written, asked, ask(llm, written, asked))


def test_bad_and_good_ones_together(served: tuple[Any, Written]) -> None:
    llm, written = served
    assert llm.llm_engine.reset_prefix_cache()
    prompts, chosen = [], []
    for name in NAMES:
        for kind in BAD:
            for prompt, how in (
                bad_request(written, name, kind),
                (written.documents[name].prompt(QUESTION), sampling(name)),
            ):
                prompts.append(prompt)
                chosen.append(how)
    outputs = llm.generate(prompts, chosen, use_tqdm=False)
    assert len(outputs) == 2 * 2 * len(BAD)
    good = outputs[1::2]
    check_answers(written, [(name, QUESTION) for name in NAMES for _ in BAD], good)
    ended = [output.outputs[0].finish_reason for output in outputs[::2]]
    assert ended == [("length" if kind in SERVED else "error") for kind in BAD] * len(NAMES)


@pytest.mark.parametrize("change", ["deleted", "cut short", "damaged", "replaced"])
def test_files_that_change_while_they_are_served(
    change: str, served: tuple[Any, Written], tmp_path: Path
) -> None:
    llm, written = served
    document, kept = written.documents["snapkv"], tmp_path / "kept"
    shutil.copy(document.path, kept)
    asked = [("snapkv", QUESTION)]
    try:
        check_answers(written, asked, ask(llm, written, asked))
        if change == "deleted":
            document.path.unlink()
        elif change == "cut short":
            document.path.write_bytes(kept.read_bytes()[: kept.stat().st_size // 2])
        elif change == "replaced":
            shutil.copy(written.documents["whole_blocks"].path, document.path)
        else:
            damage(document.path)
            # Blocks and memory of before are still right, so forget them.
            assert llm.llm_engine.reset_prefix_cache()
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            get_kv_transfer_group()._loader._resident.clear()
        (output,) = ask(llm, written, asked)
        assert output.outputs[0].finish_reason == "error"
        others = [("whole_blocks", QUESTION)]
        check_answers(written, others, ask(llm, written, others))
    finally:
        shutil.copy(kept, document.path)
    check_answers(written, asked, ask(llm, written, asked))


def test_documents_of_another_model_or_precision(served: tuple[Any, Written]) -> None:
    import torch

    from kvpolicy.integrations.vllm import export
    from tests.integrations.vllm.plain import read_prompt
    from tests.integrations.vllm.served.support import POLICIES, random_model

    llm, written = served
    lower = random_model("llama", torch.bfloat16)
    other = random_model("llama")
    other.model.layers[0].self_attn.k_proj.weight.data *= 1.5
    for model in (lower, other):
        path = written.documents_path / "wrong.safetensors"
        document = export(read_prompt(model, POLICIES["snapkv"], written.ids), model, path)
        (output,) = llm.generate([document.prompt(QUESTION)], [sampling("wrong")], use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
    path.unlink()


def test_two_servers_on_one_folder(served: tuple[Any, Written]) -> None:
    """A second engine answers from the same files, and from its own blocks."""
    _, written = served
    with engine(written, processes=True) as second:
        asked = [("snapkv", QUESTION), ("whole_blocks", [5])]
        check_answers(written, asked, ask(second, written, asked))
