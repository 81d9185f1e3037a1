"""vLLM's scheduler and worker, as far as a connector sees them."""

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.vllm import ServedDocument
from kvpolicy.integrations.vllm.loading import DocumentLoader
from kvpolicy.integrations.vllm.scheduling import DocumentScheduler


def request_for(document: ServedDocument, question: Sequence[int], **changes: Any) -> Any:
    """A request of vLLM for a document, with some attributes changed."""
    sampling = {"prompt_logprobs": None, "repetition_penalty": 1.0}
    sampling |= {name: changes.pop(name) for name in list(changes) if name in sampling}
    made = document.request(question)
    fields: dict[str, Any] = {
        "request_id": "one",
        "prompt_token_ids": made["prompt"],
        "prompt_embeds": None,
        "cache_salt": made["cache_salt"],
        "kv_transfer_params": made["kv_transfer_params"],
        "sampling_params": SimpleNamespace(**sampling),
        "lora_request": None,
        "mm_features": [],
        "resumable": False,
        "skip_reading_prefix_cache": sampling["prompt_logprobs"] is not None,
    }
    return SimpleNamespace(**{**fields, **changes})


@attrs.define
class Engine:
    """A step of vLLM, as version 0.32 takes it: match, allocate, load, report.

    Blocks are known by their ids up to their end, and the salt.
    """

    scheduler: DocumentScheduler
    loader: DocumentLoader
    block_size: int
    shared: dict[Any, int] = attrs.field(factory=dict)
    next_block: int = 1
    waiting: list[Any] = attrs.field(factory=list)
    blocks: dict[str, list[int]] = attrs.field(factory=dict)
    loaded: dict[str, int] = attrs.field(factory=dict)
    failed: set[str] = attrs.field(factory=set)
    running: set[str] = attrs.field(factory=set)
    requests: dict[str, Any] = attrs.field(factory=dict)

    def add(self, request: Any) -> None:
        self.waiting.append(request)
        self.scheduler.add(request)

    def _hit(self, request: Any) -> list[int]:
        """The shared blocks a request begins with; its last token is always computed."""
        found: list[int] = []
        while len(found) * self.block_size < len(request.prompt_token_ids):
            end = (len(found) + 1) * self.block_size
            if end >= len(request.prompt_token_ids) or self._key(request, end) not in self.shared:
                break
            found.append(self.shared[self._key(request, end)])
        return found

    def _key(self, request: Any, end: int) -> Any:
        return request.cache_salt, tuple(request.prompt_token_ids[:end])

    def run(self, steps: int = 200) -> None:
        """Step until nothing waits."""
        for _ in range(steps):
            for request in list(self.waiting):
                self.schedule(request)
            self.loader.start(self.scheduler.take_loads())
            ended, failed = self.loader.poll()
            for name in ended:
                self._end(name, failed)
            if not self.waiting and not self.blocks.keys() - self.running - self.failed:
                return
            time.sleep(0.001)
        raise AssertionError("requests wait for ever")

    def schedule(self, request: Any) -> None:
        hit = [] if request.skip_reading_prefix_cache else self._hit(request)
        count, later = self.scheduler.match(request, len(hit) * self.block_size)
        if request.skip_reading_prefix_cache:
            count, later = 0, False
        if count is None:
            return
        name = request.request_id
        assert later == (count > 0)
        assert len(hit) * self.block_size + count <= len(request.prompt_token_ids)
        own = -(-len(request.prompt_token_ids) // self.block_size) - len(hit)
        self.blocks[name] = hit + list(range(self.next_block, self.next_block + own))
        self.next_block += own
        self.loaded[name] = len(hit) * self.block_size + count
        self.waiting.remove(request)
        self.scheduler.allocate(request, self.blocks[name], count)
        self.requests[name] = request
        if not count:
            self._end(name, set())

    def _end(self, name: str, failed: set[str]) -> None:
        request = self.requests[name]
        if name in failed:
            self.failed.add(name)
        else:
            self._share(request)
            self.running.add(name)
            self.scheduler.allocate(request, self.blocks[name], 0)
        self.scheduler.finish(name)

    def _share(self, request: Any) -> None:
        if not self.scheduler.shares_blocks:
            return
        for at in range(len(request.prompt_token_ids) // self.block_size):
            key = self._key(request, (at + 1) * self.block_size)
            self.shared.setdefault(key, self.blocks[request.request_id][at])


class Pages:
    """The blocks of some layers, as plain tensors ``[slots, heads, head_dim]``."""

    def __init__(self, layers: Sequence[int], slots: int, heads: int, head_dim: int) -> None:
        self.of = {index: torch.full((2, slots, heads, head_dim), torch.nan) for index in layers}
        self.written = 0

    def writers(self) -> dict[int, Any]:
        return {index: lambda *given, at=index: self._write(at, *given) for index in self.of}

    def _write(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        self.of[index][0][slots] = keys
        self.of[index][1][slots] = values
        self.written += len(slots)

    def read(self, index: int, block_ids: Sequence[int], length: int, block_size: int) -> Tensor:
        """Keys and values of a request's first tokens, token by token: ``[2, length, ...]``."""
        slots = [block_ids[at // block_size] * block_size + at % block_size for at in range(length)]
        return self.of[index][:, slots]
