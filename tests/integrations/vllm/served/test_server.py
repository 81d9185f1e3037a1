"""The OpenAI server of vLLM over HTTP: raw requests, questions in words, chats, refusals."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvpolicy.integrations.vllm import export
from tests.integrations.vllm.served.support import (
    ENVIRONMENT,
    NEEDS_VLLM,
    NEW_TOKENS,
    QUESTIONS,
    VOCAB_SIZE,
    Written,
)

pytestmark = NEEDS_VLLM
NAMES = ("snapkv", "whole_blocks", "fastkv")
CHAT = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every word ``w0``, ``w1``, ..., and for the chat template's."""
    vocabulary = {f"w{index}": index for index in range(VOCAB_SIZE) if index not in (2, 3)}
    vocabulary |= {"[user]": 2, "[assistant]": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", chat_template=CHAT)


def words(ids: list[int]) -> str:
    return " ".join(f"w{each}" for each in ids)


class Server:
    """A running server, asked over HTTP."""

    def __init__(self, port: int, written: Written) -> None:
        self.address, self.written = f"http://127.0.0.1:{port}", written

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """The status and the JSON of an answer; of a streamed one the texts of its events."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}
        request = urllib.request.Request(f"{self.address}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                text = answer.read().decode()
                if not text.startswith("data: "):
                    return answer.status, json.loads(text)
                events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
                assert events.pop() == "[DONE]"
                return answer.status, [json.loads(each) for each in events]
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def answer(self, body: dict[str, Any], path: str = "/v1/completions") -> list[int]:
        status, found = self.ask(
            path, {"max_tokens": NEW_TOKENS, "temperature": 0, "return_token_ids": True, **body}
        )
        assert status == 200, found
        if isinstance(found, list):
            parts = [each["choices"][0].get("token_ids") or [] for each in found if each["choices"]]
            return [token for part in parts for token in part]
        ids: list[int] = found["choices"][0]["token_ids"]
        return ids


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    written = Written(folder, names=NAMES)
    word_tokenizer().save_pretrained(written.path)
    written.caches["talk"] = written.caches["snapkv"]
    written.documents["talk"] = export(
        written.caches["talk"],
        written.model,
        written.documents_path / "talk.safetensors",
        chat=True,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(written.path), "--served-model-name", "tiny", "--dtype", "float32"),
            *("--host", "127.0.0.1", "--port", str(port), "--api-key", "key"),
            *("--max-model-len", "512", "--block-size", "32", "--enforce-eager"),
            *("--kv-transfer-config", json.dumps(written.transfer_config())),
        ],
        env={**os.environ, **ENVIRONMENT, "VLLM_PLUGINS": "kvpolicy"},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + 400
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                text = Path(folder / "log").read_text()[-3000:]
                assert process.poll() is None, text
                assert time.monotonic() < deadline, text
                time.sleep(1)
        yield Server(port, written)
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def test_raw_requests_one_at_a_time_and_together(server: Server) -> None:
    asked = [(name, question) for name in NAMES for question in QUESTIONS]
    bodies = [server.written.documents[name].request(question) for name, question in asked]
    wanted = [server.written.wanted(name, question) for name, question in asked]
    assert [server.answer(body) for body in bodies] == wanted
    with ThreadPoolExecutor(21) as threads:
        assert list(threads.map(server.answer, bodies * 2)) == wanted * 2


def test_streamed(server: Server) -> None:
    body = server.written.documents["fastkv"].request(QUESTIONS[1])
    wanted = server.written.wanted("fastkv", QUESTIONS[1])
    assert server.answer({**body, "stream": True}) == wanted


def test_questions_in_words(server: Server) -> None:
    for name in NAMES:
        for question in QUESTIONS:
            wanted = server.written.wanted(name, question)
            for stream in (False, True):
                body = {"question": words(question), "stream": stream}
                assert server.answer(body, f"/v1/documents/{name}/completions") == wanted


def test_a_chat(server: Server) -> None:
    written, tokenizer = server.written, word_tokenizer()
    turns = [
        {"role": "user", "content": " w7 w8 w9"},
        {"role": "assistant", "content": "w33"},
        {"role": "user", "content": "w12 w90"},
    ]
    tail = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(tail.removeprefix("[user] "))["input_ids"]
    wanted = written.wanted("talk", ids)
    path = "/v1/documents/talk/chat/completions"
    assert server.answer({"messages": turns}, path) == wanted
    assert server.answer({"messages": turns, "stream": True}, path) == wanted
    raw = written.documents["talk"].chat_request(turns, ids)
    assert server.answer(raw, "/v1/chat/completions") == wanted


def test_refusals_reach_the_user(server: Server) -> None:
    document = server.written.documents["snapkv"]
    good = document.request([5])
    wanted = server.written.wanted("snapkv", [5])
    for change, status, reason in (
        ({"prompt_logprobs": 1}, 400, "prompt_logprobs must not be given"),
        ({"repetition_penalty": 1.2}, 400, "repetition_penalty must not be given"),
        ({"echo": True}, 400, "echo must not be given"),
        ({"cache_salt": "kvpolicy:guessed"}, 400, "cache_salt must be that of document"),
        ({"prompt": good["prompt"][:-1]}, 400, "a question must follow"),
        ({"kv_transfer_params": None}, 400, "but does not name it"),
        ({"kv_transfer_params": None, "cache_salt": None}, 400, "but does not name it"),
        ({"kv_transfer_params": {"kvpolicy_document": "no"}}, 404, "there is no document 'no'"),
        ({"kv_transfer_params": {"kvpolicy_document": "../x"}}, 404, "name must be letters"),
    ):
        got, found = server.ask("/v1/completions", {**good, **change})
        assert got == status
        assert reason in found["error"]["message"]
        assert server.answer(good) == wanted
    got, found = server.ask("/v1/documents/snapkv/completions", {"question": ""})
    assert (got, found["error"]["type"]) == (400, "invalid_request_error")


def test_what_only_the_engine_sees_is_an_error(server: Server) -> None:
    """Other routes are not looked at: the engine ends the request."""
    document = server.written.documents["snapkv"]
    good = document.request([5])
    named = {"cache_salt": document.cache_salt, "kv_transfer_params": good["kv_transfer_params"]}
    status, _ = server.ask("/v1/responses", {"input": "w5", "max_output_tokens": 4, **named})
    assert status == 500
    assert server.answer(good) == server.written.wanted("snapkv", [5])


def test_a_new_document_is_served_at_once(server: Server) -> None:
    written = server.written
    path = written.documents_path / "later.safetensors"
    document = export(written.caches["fastkv"], written.model, path)
    assert server.answer(document.request([5])) == written.wanted("fastkv", [5])
    status, found = server.ask("/v1/documents")
    assert status == 200
    assert "later" in [each["id"] for each in found["data"]]
    path.unlink()
    status, found = server.ask("/v1/completions", document.request([5]))
    assert (status, found["error"]["message"]) == (404, "there is no document 'later'")


def test_the_servers_key_is_asked_for(server: Server) -> None:
    request = urllib.request.Request(f"{server.address}/v1/documents")
    with pytest.raises(urllib.error.HTTPError) as said:
        urllib.request.urlopen(request, timeout=60)
    assert said.value.code == 401
