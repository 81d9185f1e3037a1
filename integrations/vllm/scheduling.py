"""Decide in vLLM's scheduler which entries of a document are loaded for a request.

It knows vLLM's requests only by the attributes it reads, so that it is tested without vLLM.
"""

import logging
from collections.abc import Sequence
from typing import Any

import attrs

from kvpolicy.integrations.vllm.document import ServedDocument
from kvpolicy.integrations.vllm.files import DocumentError
from kvpolicy.integrations.vllm.folder import DocumentFolder
from kvpolicy.integrations.vllm.refusing import concerns_documents, document_of
from kvpolicy.integrations.vllm.served_model import ServedModel

logger = logging.getLogger(__name__)


@attrs.frozen
class Load:
    """Entries of a document that a worker must write into a request's blocks.

    Args:
        name: The document's name; None if the request is refused, which the worker reports.
        digest: The document's digest, since another file may have its name by then.
        block_ids: The request's blocks, from its first token on.
        start: The first entry to write.
        stop: The entry after the last one to write.
    """

    request_id: str
    name: str | None
    digest: str = ""
    block_ids: tuple[int, ...] = ()
    start: int = 0
    stop: int = 0


@attrs.define(eq=False)
class DocumentScheduler:
    """Plans, in vLLM's scheduler, which documents are loaded for which requests.

    A request that cannot be served is given one token to load, whose load then fails: this is how
    vLLM lets a connector end a request.

    Args:
        shares_blocks: Whether vLLM shares full blocks between requests (prefix caching).
    """

    folder: DocumentFolder
    model: ServedModel
    shares_blocks: bool = True
    # For each request that waits for blocks: its document, or why it is refused.
    _served: dict[str, ServedDocument | str] = attrs.field(factory=dict, init=False)
    _loads: list[Load] = attrs.field(factory=list, init=False)
    # The request that loads a document from its beginning, by the document's digest.
    _loading: dict[str, str] = attrs.field(factory=dict, init=False)

    def add(self, request: Any) -> None:
        """Check a new request, and remember its document.

        vLLM asks no connector where a request does not read the prefix cache, as with
        prompt_logprobs. It would compute the placeholders.
        """
        if concerns_documents(request, self.folder):
            request.skip_reading_prefix_cache = False

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the ``computed`` ones are loaded, and if asynchronously.

        The ``computed`` ones are in shared blocks. None means that vLLM shall ask again later.
        """
        if not concerns_documents(request, self.folder):
            return 0, False
        try:
            document = document_of(request, self.folder, self.model)
        except DocumentError as error:
            self._served[request.request_id] = str(error)
            return 1, True
        first = self._loading.get(document.digest)
        if first not in (None, request.request_id) and self.shares_blocks:
            return None, False  # its blocks will soon be shared
        self._served[request.request_id] = document
        missing = max(document.length - computed, 0)
        return missing, missing > 0

    def allocate(self, request: Any, block_ids: Sequence[int], count: int) -> None:
        """Plan to load the last ``count`` tokens of its document for a request that has blocks."""
        name = request.request_id
        self._loading = {digest: by for digest, by in self._loading.items() if by != name}
        served = self._served.pop(name, "nothing is known of it")
        if not count:
            return
        if isinstance(served, str):
            logger.warning("request %s is refused: %s", name, served)
            self._loads.append(Load(name, None))
            return
        start = served.length - count
        load = Load(name, served.name, served.digest, tuple(block_ids), start, served.length)
        self._loads.append(load)
        if not start:
            self._loading[served.digest] = name

    def take_loads(self) -> list[Load]:
        """Return the loads planned since the last call."""
        found, self._loads = self._loads, []
        return found

    def finish(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._served.pop(request_id, None)
        self._loading = {digest: by for digest, by in self._loading.items() if by != request_id}
