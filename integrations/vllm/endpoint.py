"""Define routes of vLLM's OpenAI server that answer questions in text about documents.

It is vLLM's endpoint plugin ``kvpolicy``: ``VLLM_PLUGINS=kvpolicy`` turns it on. Then

- ``POST /v1/documents/NAME/completions`` is a completion with ``"question"`` in place of
  ``"prompt"``,
- ``POST /v1/documents/NAME/chat/completions`` is a chat completion whose first user message is
  continued from the document,
- ``GET /v1/documents`` lists the documents,
- any other request that names a document and cannot be served gets a 4xx that says why, before it
  reaches the engine.

A request is rewritten (placeholders, salt, name) and goes on to vLLM's own route. So streaming,
keys of the server and all other fields are vLLM's.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, ClassVar

import attrs

from kvpolicy.integrations.transformers.document import prompt_ids
from kvpolicy.integrations.vllm.document import SALT, ServedDocument
from kvpolicy.integrations.vllm.files import DocumentError
from kvpolicy.integrations.vllm.folder import DocumentFolder
from kvpolicy.integrations.vllm.refusing import check_prompt, named_document, unnamed
from kvpolicy.integrations.vllm.served_model import ServedModel

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ROUTE = re.compile(r"/v1/documents/([^/]*)/((?:chat/)?completions)")
OWN_ROUTES = ("/v1/completions", "/v1/chat/completions")
# Fields that read or change the prompt's ids, with the values that do nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "use_beam_search": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
}


class RequestError(ValueError):
    """Raised for a refused HTTP request; has the reason and the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@attrs.define(eq=False)
class DocumentDesk:
    """Turns questions about documents into vLLM's own requests, or raises `RequestError`.

    Args:
        chat_template: The server's chat template; None for the tokenizer's own.
        defaults: Sampling parameters that the server adds to requests.
    """

    folder: DocumentFolder
    model: ServedModel
    tokenizer: Any
    chat_template: str | None = None
    defaults: Mapping[str, Any] = attrs.field(factory=dict)

    def listed(self) -> dict[str, Any]:
        """Describe all readable documents, without their salts."""
        found = [
            {
                "id": each.name,
                "object": "document",
                "tokens_read": each.read_len,
                "tokens_held": each.length,
                "bytes": each.nbytes,
                "policy": each.facts.policy_text,
                "chat": each.facts.chat,
            }
            for each in self.folder.readable()
        ]
        return {"object": "list", "data": found}

    def completed(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of vLLM's completion request for a question about a document.

        ``body`` is a completion's with ``question``, a text or ids, in place of ``prompt``.
        """
        document = self._document(name)
        if document.facts.chat:
            raise RequestError(f"document {name!r} begins a chat; use chat/completions")
        question = body.get("question")
        if "prompt" in body or not question or not isinstance(question, str | list):
            raise RequestError(
                'the body must have "question", a text or token ids, and no "prompt"'
            )
        if isinstance(question, str):
            ids = prompt_ids(self.tokenizer, question, special=False)
        else:
            ids = question
        rest = {key: value for key, value in body.items() if key != "question"}
        return self._completed(document, rest, lambda: document.request(ids))

    def chatted(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of vLLM's chat completion request for a chat about a document.

        The first message in ``body`` is the question that follows the document in the user's
        message.
        """
        document = self._document(name)
        if not document.facts.chat:
            raise RequestError(f"document {name!r} was not read as a chat; use completions")
        messages = body.get("messages")
        texts = isinstance(messages, list) and all(
            isinstance(each, dict) and isinstance(each.get("content"), str) for each in messages
        )
        if not texts or not messages or messages[0].get("role") != "user":
            raise RequestError(
                'the body must have "messages" with texts as contents, the first of the user: it '
                "follows the document"
            )
        for field in ("tools", "chat_template", "chat_template_kwargs", "documents"):
            if body.get(field):
                raise RequestError(f"{field} must not be given: the document was read without it")
        ids = self._tail(messages)
        rest = {key: value for key, value in body.items() if key != "messages"}
        return self._completed(document, rest, lambda: document.chat_request(messages, ids))

    def _tail(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the token ids that the chat template puts after the document."""
        mark = f"document{secrets.token_hex(8)}"
        first = {**messages[0], "content": mark + messages[0]["content"]}
        given = {} if self.chat_template is None else {"chat_template": self.chat_template}
        try:
            text = self.tokenizer.apply_chat_template(
                [first, *messages[1:]], tokenize=False, add_generation_prompt=True, **given
            )
        except Exception as error:  # a template may raise any error
            raise RequestError(f"the chat template refuses the messages: {error}") from None
        _, found, after = text.partition(mark)
        if not found or mark in after:
            raise RequestError("the chat template must contain the first message as it is, once")
        return prompt_ids(self.tokenizer, after, special=False)

    def _document(self, name: str) -> ServedDocument:
        try:
            document = self.folder.get(name)
        except DocumentError as error:
            raise RequestError(str(error), status=404) from None
        try:
            self.model.check(document)
        except DocumentError as error:
            raise RequestError(str(error), status=409) from None
        return document

    def _completed(
        self, document: ServedDocument, rest: dict[str, Any], made: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        for field in ("cache_salt", "kv_transfer_params"):
            if field in rest:
                raise RequestError(f"{field} must not be given: the server fills it in")
        # The default of some models; the ids that it would read are placeholders.
        rest = {"repetition_penalty": 1.0, **rest}
        self._check_fields(document.name, rest)
        try:
            return {**rest, **made()}
        except (TypeError, ValueError) as error:
            raise RequestError(str(error)) from None

    def check(self, body: Mapping[str, Any]) -> None:
        """Check a request to one of vLLM's own routes, if it concerns documents."""
        parameters, salt = body.get("kv_transfer_params"), body.get("cache_salt")
        name, ids = named_document(parameters), body.get("prompt")
        if "messages" in body and isinstance(parameters, Mapping):
            ids = parameters.get("prompt_token_ids")
        are_ids = isinstance(ids, list) and all(isinstance(each, int) for each in ids)
        if name is None:
            begun = self.folder.begun_by(ids) if isinstance(ids, list) and are_ids else None
            if begun or (isinstance(salt, str) and salt.startswith(SALT)):
                raise RequestError(unnamed(begun))
            return
        document = self._document(name)
        if not isinstance(ids, list) or not are_ids:
            raise RequestError(
                f"the prompt of a request for document {name!r} must be one list of token ids; use "
                f"/v1/documents/{name} for texts"
            )
        try:
            check_prompt(document, ids, salt)
        except DocumentError as error:
            raise RequestError(str(error)) from None
        self._check_fields(name, {**self.defaults, **body})

    def _check_fields(self, name: str, body: Mapping[str, Any]) -> None:
        for field, harmless in REFUSED.items():
            if body.get(field) not in harmless:
                raise RequestError(
                    f"{field} must not be given for document {name!r}, whose ids in the prompt are "
                    f"placeholders, got {body[field]!r}"
                )


@attrs.define(eq=False)
class DocumentRequests:
    """ASGI middleware that rewrites requests for documents, or refuses them with the reason.

    The ``plugin`` has a desk once the server has started.
    """

    app: App
    plugin: DocumentEndpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request: rewrite it, refuse it, or pass it on."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        route = ROUTE.fullmatch(path)
        desk = self.plugin.desk
        is_list = scope.get("method") == "GET" and path == "/v1/documents"
        posted = scope.get("method") == "POST" and (route or path in OWN_ROUTES)
        if scope["type"] != "http" or desk is None or not (is_list or posted):
            await self.app(scope, receive, send)
            return
        if is_list:
            await _answer(send, 200, desk.listed())
            return
        whole = await _body(receive)
        if whole is None:
            return
        try:
            sent = _parsed(whole) if route else _maybe_parsed(whole)
            if route is None:
                desk.check(sent)
            else:
                name, kind = route.groups()
                made = desk.chatted if kind.startswith("chat") else desk.completed
                whole = json.dumps(made(name, sent)).encode()
                scope = {**scope, "path": f"/v1/{kind}", "raw_path": f"/v1/{kind}".encode()}
                scope["headers"] = [
                    (key, value)
                    for key, value in scope["headers"]
                    if key not in (b"content-length", b"content-type")
                ] + [
                    (b"content-length", str(len(whole)).encode()),
                    (b"content-type", b"application/json"),
                ]
        except RequestError as error:
            told = {"message": str(error), "type": "invalid_request_error", "code": error.status}
            await _answer(send, error.status, {"error": told})
            return
        await self.app(scope, _again(whole, receive), send)


async def _body(receive: Receive) -> bytes | None:
    """Read a request's whole body; None if the client has gone."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _again(whole: bytes, receive: Receive) -> Receive:
    """Return an ASGI ``receive`` function that gives a stored body once, then later events."""
    given = False

    async def received() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": whole, "more_body": False}

    return received


def _parsed(whole: bytes) -> dict[str, Any]:
    try:
        body = json.loads(whole)
    except ValueError as error:
        raise RequestError(f"the body must be JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _maybe_parsed(whole: bytes) -> dict[str, Any]:
    """Parse a request body for vLLM's own route; empty if invalid, which vLLM itself reports."""
    try:
        return _parsed(whole)
    except RequestError:
        return {}


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    whole = json.dumps(body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(whole)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": whole})


class DocumentEndpoint:
    """vLLM's endpoint plugin for documents; see the module."""

    name: ClassVar[str] = "kvpolicy"
    required_tasks: ClassVar[tuple[str, ...] | None] = ("generate",)

    def __init__(self) -> None:
        self.desk: DocumentDesk | None = None

    def attach_router(self, app: Any) -> None:
        """Add the middleware to the server."""
        app.add_middleware(DocumentRequests, plugin=self)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Get the folder, model and tokenizer from the engine's configuration.

        Raises:
            ValueError: The engine does not serve documents.
        """
        if engine_client is None:
            return
        config = engine_client.vllm_config
        transfer = config.kv_transfer_config
        if transfer is None or transfer.kv_connector != "PolicyConnector":
            raise ValueError(
                "the plugin kvpolicy needs --kv-transfer-config with PolicyConnector, got "
                f"{transfer and transfer.kv_connector}; add it, or remove the plugin from "
                "VLLM_PLUGINS"
            )
        model = config.model_config
        template = args.chat_template
        if template is not None and Path(template).is_file():
            template = Path(template).read_text()
        self.desk = DocumentDesk(
            DocumentFolder(Path(transfer.kv_connector_extra_config["documents"])),
            ServedModel.named(model.model, model.hf_text_config, model.dtype),
            engine_client.renderer.get_tokenizer(),
            template,
            model.get_diff_sampling_param(),
        )
