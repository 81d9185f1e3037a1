"""Load documents into vLLM's blocks in a worker, while the model runs.

A thread reads and checks a document's file. Then the entries are copied into a request's blocks,
on a GPU from pinned memory and on a stream of its own. A step of the model waits for neither.
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.vllm.files import DocumentError
from kvpolicy.integrations.vllm.folder import DocumentFolder
from kvpolicy.integrations.vllm.scheduling import Load

logger = logging.getLogger(__name__)

Entries = dict[int, tuple[Tensor, Tensor]]
# Writes keys and values ``[count, heads, head_dim]`` to slots ``[count]`` of one layer.
Writer = Callable[[Tensor, Tensor, Tensor], None]


def slots_of(load: Load, block_size: int) -> Tensor:
    """Return the block slots ``[stop - start]`` int64 for the entries of a load."""
    at = torch.arange(load.start, load.stop)
    blocks = torch.tensor(load.block_ids, dtype=torch.int64)
    return blocks[at // block_size] * block_size + at % block_size


def own_heads(rank: int, size: int, heads: int) -> slice:
    """Return the KV heads that worker ``rank`` of ``size`` holds under tensor parallelism.

    With more workers than the model's ``heads``, some have the same head.
    """
    if heads >= size:
        each = heads // size
        return slice(rank * each, (rank + 1) * each)
    at = rank * heads // size
    return slice(at, at + 1)


@attrs.define(eq=False)
class _Copy:
    """A copy into blocks that the device has not finished; keeps its source in memory."""

    request_id: str
    source: Entries
    event: Any


@attrs.define(eq=False)
class DocumentLoader:
    """Loads documents in a vLLM worker, in the background.

    Args:
        writers: For each layer of this worker, what writes into its blocks.
        heads: The KV heads of this worker.
        block_size: Tokens of a block.
        device: Where the blocks are.
        resident_bytes: How many bytes of documents stay in memory for the next requests.
    """

    folder: DocumentFolder
    writers: dict[int, Writer]
    heads: slice
    block_size: int
    device: torch.device
    resident_bytes: int
    _resident: OrderedDict[str, Future[Entries]] = attrs.field(factory=OrderedDict, init=False)
    _waiting: list[tuple[Load, Future[Entries]]] = attrs.field(factory=list, init=False)
    _copies: list[_Copy] = attrs.field(factory=list, init=False)
    _failed: set[str] = attrs.field(factory=set, init=False)
    _reader: ThreadPoolExecutor = attrs.field(init=False)
    _stream: Any = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kvpolicy-documents")
        if self.device.type != "cpu":
            self._stream = torch.Stream(self.device)

    def start(self, loads: Iterable[Load]) -> None:
        """Start the loads of a step."""
        for load in loads:
            if load.name is None:
                self._failed.add(load.request_id)
                continue
            if load.digest not in self._resident:
                self._resident[load.digest] = self._reader.submit(self._read, load)
            self._resident.move_to_end(load.digest)
            self._waiting.append((load, self._resident[load.digest]))

    def poll(self) -> tuple[set[str], set[str]]:
        """Continue the loads that were started, without waiting for anything.

        Returns the requests whose loads have ended, and those of them whose loads have failed.
        """
        waiting, self._waiting = self._waiting, []
        for load, reading in waiting:
            if not reading.done():
                self._waiting.append((load, reading))
                continue
            try:
                self._write(load, reading.result())
            except (DocumentError, OSError, MemoryError, RuntimeError) as error:
                logger.error("request %s fails: %s", load.request_id, error)
                if self._stream is not None:  # its blocks will have another owner
                    self._stream.synchronize()
                self._resident.pop(load.digest, None)
                self._failed.add(load.request_id)
        self._trim()
        ended = [each for each in self._copies if each.event is None or each.event.query()]
        self._copies = [each for each in self._copies if each not in ended]
        failed, self._failed = self._failed, set()
        return {each.request_id for each in ended} | failed, failed

    def close(self) -> None:
        """Stop all loads."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _read(self, load: Load) -> Entries:
        assert load.name is not None
        document = self.folder.get(load.name)
        if document.digest != load.digest:
            raise DocumentError(f"document {load.name!r} was replaced by another one")
        # From pinned memory, an accelerator copies by itself.
        pinned = self._stream is not None
        return document.entries(sorted(self.writers), self.heads, pinned=pinned)

    def _write(self, load: Load, entries: Entries) -> None:
        slots = slots_of(load, self.block_size)
        with self._beside():
            slots = slots.to(self.device, non_blocking=True)
            for layer, write in self.writers.items():
                keys, values = (
                    each[load.start : load.stop].to(self.device, non_blocking=True)
                    for each in entries[layer]
                )
                write(keys, values, slots)
            event = None if self._stream is None else self._stream.record_event()
        self._copies.append(_Copy(load.request_id, entries, event))

    @contextlib.contextmanager
    def _beside(self) -> Any:
        """Run a block on the loader's own stream, after the work already queued on the device.

        The blocks may have belonged to a request whose last step still runs.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            yield

    def _trim(self) -> None:
        """Drop the least recently used documents until the rest fits the memory bound."""
        done = {
            digest: sum(each.nbytes for pair in reading.result().values() for each in pair)
            for digest, reading in self._resident.items()
            if reading.done() and reading.exception() is None
        }
        total = sum(done.values())
        for digest, size in done.items():
            if total <= self.resident_bytes:
                break
            del self._resident[digest]
            total -= size
