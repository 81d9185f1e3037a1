"""Questions in words become vLLM's own requests, or a 4xx that says why; without vLLM."""

import asyncio
import io
import json
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import AutoTokenizer

from kvpolicy.integrations.transformers import ReadDocument
from kvpolicy.integrations.vllm import ServedDocument, export
from kvpolicy.integrations.vllm.endpoint import DocumentDesk, DocumentEndpoint, DocumentRequests
from kvpolicy.integrations.vllm.folder import DocumentFolder
from kvpolicy.integrations.vllm.served_model import ServedModel
from kvpolicy.policies import SnapKV
from tests.integrations.lm_eval.support import char_tokenizer
from tests.reference import tiny_model

TEXT = "it was a dark night, and the rain fell in torrents; the street lamps were dim."


class Server:
    """The middleware before a server that answers with the path and body it got."""

    def __init__(self, desk: DocumentDesk) -> None:
        plugin = DocumentEndpoint()
        plugin.desk = desk
        self.app = DocumentRequests(self.echo, plugin)

    async def echo(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        lengths = [value for key, value in scope["headers"] if key == b"content-length"]
        assert lengths in ([], [str(len(body)).encode()])
        got = json.loads(body) if body[:1] == b"{" else None
        whole = json.dumps({"path": scope["path"], "got": got}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": whole})

    def ask(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        sent: list[Any] = []
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        parts = [raw[:7], raw[7:]]

        async def receive() -> Any:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-length", str(len(raw)).encode()), (b"x-id", b"7")]
        if method == "GET":
            parts, headers = [b""], []
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        asyncio.run(self.app(scope, receive, send))
        return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("documents"), tiny_model("llama", seed=1)
    for name, chat in (("report", False), ("talk", True)):
        read = ReadDocument(model, char_tokenizer(), TEXT, SnapKV(0.5, window_size=4), chat=chat)
        export(read.cache, model, folder / f"{name}.safetensors", chat=chat)
    return folder


@pytest.fixture
def server(documents: Path) -> Server:
    served = ServedModel(tiny_model("llama", seed=1).config, "float32")
    return Server(DocumentDesk(DocumentFolder(documents), served, char_tokenizer()))


def test_a_question(server: Server, documents: Path) -> None:
    document = ServedDocument.load(documents / "report.safetensors")
    tokenizer = char_tokenizer()
    body = {"question": " who fell?", "max_tokens": 9, "stream": True}
    ids = tokenizer(" who fell?")["input_ids"]
    wanted = {"max_tokens": 9, "stream": True, "repetition_penalty": 1.0, **document.request(ids)}
    found = {"path": "/v1/completions", "got": wanted}
    assert server.ask("/v1/documents/report/completions", body) == (200, found)
    assert server.ask("/v1/documents/report/completions", {**body, "question": ids}) == (200, found)


def test_a_chat(server: Server, documents: Path) -> None:
    document = ServedDocument.load(documents / "talk.safetensors")
    tokenizer = char_tokenizer()
    messages = [
        {"role": "user", "content": " who?"},
        {"role": "assistant", "content": "Nobody."},
        {"role": "user", "content": "Sure?"},
    ]
    status, found = server.ask("/v1/documents/talk/chat/completions", {"messages": messages})
    assert (status, found["path"]) == (200, "/v1/chat/completions")
    first = {**messages[0], "content": TEXT + " who?"}
    whole = tokenizer.apply_chat_template(
        [first, *messages[1:]], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(whole[whole.index(TEXT) + len(TEXT) :])["input_ids"]
    assert found["got"] == {"repetition_penalty": 1.0, **document.chat_request(messages, ids)}


def test_the_list_tells_no_salts(server: Server, documents: Path) -> None:
    status, found = server.ask("/v1/documents", method="GET")
    assert status == 200
    assert [each["id"] for each in found["data"]] == ["report", "talk"]
    assert found["data"][0]["tokens_read"] == len(TEXT)
    document = ServedDocument.load(documents / "report.safetensors")
    assert document.digest not in json.dumps(found)


ASK, CHAT = "/v1/documents/report/completions", "/v1/documents/talk/chat/completions"
USER = {"role": "user", "content": "who?"}


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/v1/documents/none/completions", {"question": "a"}, 404, "there is no document 'none'"),
        ("/v1/documents/..%2Fx/completions", {"question": "a"}, 404, "name must be letters"),
        (ASK, b"[1", 400, "must be JSON"),
        (ASK, [1], 400, "must be a JSON object"),
        (ASK, {"prompt": "a"}, 400, 'must have "question"'),
        (ASK, {"question": ""}, 400, 'must have "question"'),
        (ASK, {"question": [1, "a"]}, 400, "question_ids must be ints"),
        (ASK, {"question": [4000]}, 400, "question_ids must be in"),
        (ASK, {"question": "a", "cache_salt": "b"}, 400, "cache_salt must not be given"),
        (ASK, {"question": "a", "prompt_logprobs": 1}, 400, "prompt_logprobs must not be given"),
        (ASK, {"question": "a", "repetition_penalty": 1.1}, 400, "repetition_penalty must not"),
        (ASK, {"question": "a", "echo": True}, 400, "echo must not be given"),
        (ASK, {"question": "a", "truncate_prompt_tokens": 9}, 400, "truncate_prompt_tokens must"),
        ("/v1/documents/talk/completions", {"question": "a"}, 400, "begins a chat"),
        ("/v1/documents/report/chat/completions", {"messages": [USER]}, 400, "not read as a chat"),
        (CHAT, {"messages": []}, 400, 'must have "messages"'),
        (CHAT, {"messages": [{"role": "system", "content": "a"}, USER]}, 400, "first of the user"),
        (CHAT, {"messages": [USER], "tools": [{}]}, 400, "tools must not be given"),
    ],
)
def test_refusals(server: Server, path: str, body: Any, status: int, reason: str) -> None:
    got, found = server.ask(path, body)
    assert got == status
    assert reason in found["error"]["message"]


def test_the_examples_of_the_page(
    server: Server,
    documents: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What docs/vllm.md sends without the plugin is what the plugin makes of the same text."""
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text(encoding="utf-8")
    over_http, offline = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(documents.parent)
    if not Path("documents").exists():
        Path("documents").symlink_to(documents)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: char_tokenizer())
    sent: list[Any] = []

    def urlopen(request: urllib.request.Request) -> io.BytesIO:
        assert request.full_url == "http://localhost:8000/v1/completions"
        sent.append(json.loads(request.data))  # type: ignore[arg-type]
        return io.BytesIO(b'{"choices": [{"text": "Nobody."}]}')

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    names: dict[str, object] = {}
    exec(over_http, names)
    question = "\nQ: Who wrote the report?\nA:"
    body = {"question": question, "max_tokens": 64, "model": "meta-llama/Llama-3.1-8B"}
    _, found = server.ask(ASK, body)
    assert sent == [found["got"]]
    engine = Mock()
    engine.LLM.return_value.generate.return_value = [Mock(outputs=[Mock(text="No one.")])]
    monkeypatch.setitem(sys.modules, "vllm", engine)
    exec(offline, names)
    (prompt,), _ = engine.LLM.return_value.generate.call_args.args
    assert prompt == {
        "prompt_token_ids": found["got"]["prompt"],
        "cache_salt": found["got"]["cache_salt"],
    }
    extra_args = engine.SamplingParams.call_args.kwargs["extra_args"]
    assert extra_args["kv_transfer_params"] == found["got"]["kv_transfer_params"]
    assert capsys.readouterr().out.split("\n") == ["Nobody.", "No one.", ""]


def test_requests_to_the_own_routes(server: Server, documents: Path) -> None:
    document = ServedDocument.load(documents / "report.safetensors")
    good = document.request([5])
    assert server.ask("/v1/completions", good)[0] == 200
    assert server.ask("/v1/completions", {"prompt": "a", "echo": True})[0] == 200  # not ours
    assert server.ask("/v1/completions", b"no JSON")[0] == 200
    chat = document.chat_request([USER], [5])
    assert server.ask("/v1/chat/completions", chat)[0] == 200
    for change, reason in (
        ({"prompt": "a text"}, "must be one list of token ids"),
        ({"prompt": [good["prompt"]]}, "must be one list of token ids"),
        ({"prompt": good["prompt"][:-1]}, "a question must follow"),
        ({"prompt": [1, 2, 3]}, "must begin with the 39 placeholders"),
        ({"cache_salt": None}, "got none"),
        ({"prompt_logprobs": 0}, "prompt_logprobs must not"),
        ({"kv_transfer_params": None}, "has the placeholders of document 'report' but does not"),
        (
            {"kv_transfer_params": None, "cache_salt": None},
            "has the placeholders of document 'report' but does not",
        ),
        (
            {"kv_transfer_params": None, "prompt": "a text"},
            "has the salt of a document but does not",
        ),
    ):
        status, found = server.ask("/v1/completions", {**good, **change})
        assert status == 400
        assert reason in found["error"]["message"]


def test_a_model_whose_default_is_a_penalty(documents: Path) -> None:
    served = ServedModel(tiny_model("llama", seed=1).config, "float32")
    folder = DocumentFolder(documents)
    defaults = {"repetition_penalty": 1.05}
    server = Server(DocumentDesk(folder, served, char_tokenizer(), defaults=defaults))
    good = folder.get("report").request([5])
    assert server.ask("/v1/completions", good)[0] == 400
    assert server.ask("/v1/completions", {**good, "repetition_penalty": 1})[0] == 200
    assert server.ask(ASK, {"question": "a"})[0] == 200


def test_another_model(documents: Path) -> None:
    served = ServedModel(tiny_model("llama", seed=1, num_layers=3).config, "float32")
    server = Server(DocumentDesk(DocumentFolder(documents), served, char_tokenizer()))
    status, found = server.ask(ASK, {"question": "a"})
    assert status == 409
    assert "num_hidden_layers of its model is 4" in found["error"]["message"]


def test_the_plugin_needs_the_connector() -> None:
    from types import SimpleNamespace

    config = SimpleNamespace(kv_transfer_config=None)
    engine = SimpleNamespace(vllm_config=config)
    with pytest.raises(ValueError, match="needs --kv-transfer-config with PolicyConnector"):
        asyncio.run(DocumentEndpoint().init_state(engine, None, None))
