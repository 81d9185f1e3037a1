"""Score continuations by log-likelihood, from caches that have read their contexts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import attrs
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from kvpolicy.integrations.lm_eval.costs import RequestCosts, RowsHeld, now
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.document import left_padded, read
from kvpolicy.policy import CachePolicy


@attrs.frozen
class Continuation:
    """A continuation to score by log-likelihood, with the context that precedes it.

    Args:
        document: Ids that the policy acts on.
        rest: Ids that are appended: the rest of the context, then the continuation without its last
            token. The rest of the context has at least one token: its last token predicts the first
            token of the continuation.
        scored: Ids of the continuation.
    """

    document: tuple[int, ...]
    rest: tuple[int, ...]
    scored: tuple[int, ...]

    @staticmethod
    def of(
        context: Sequence[int], scored: Sequence[int], document_len: int | None, max_length: int
    ) -> Continuation:
        """Split a context into the document, on which the policy acts, and the rest.

        The last token of a context is never given to the policy: on the prompt that a policy acts
        on, logits are those of the full context. Without a ``document_len`` all of the context is
        the document. What a model of ``max_length`` does not read is cut off on the left, as `HFLM`
        does.
        """
        if len(scored) > max_length:
            raise ValueError(
                f"a continuation must have at most max_length={max_length} tokens, got "
                f"{len(scored)}"
            )
        whole = tuple([*context, *scored][-(max_length + 1) :])
        left = len(whole) - len(scored)  # tokens of the context
        end = left if document_len is None else document_len - (len(context) - left)
        if document_len is not None and end < 1:
            raise ValueError(
                f"max_length must leave room for the document before the question, which has "
                f"{len(context) - document_len} tokens, got {max_length}"
            )
        end = min(end, left - 1)
        return Continuation(whole[:end], whole[end:-1], tuple(scored))

    @property
    def asked_len(self) -> int:
        """The number of context tokens that follow the document."""
        return len(self.rest) - (len(self.scored) - 1)


@attrs.frozen
class Score:
    """The result for one continuation; ``is_greedy`` if each of its tokens is the likeliest one.

    The seconds of a batch are shared by its continuations.
    """

    log_likelihood: float
    is_greedy: bool
    costs: RequestCosts


@attrs.frozen
class CacheScorer:
    """A scorer of continuations whose contexts a model reads under a policy."""

    model: torch.nn.Module
    policy: CachePolicy
    batch_size: int
    pad: int
    softmax_dtype: torch.dtype | None = None

    def score(self, requests: Mapping[int, Continuation]) -> Iterator[dict[int, Score]]:
        """Score continuations batch by batch, by the index that the caller has given them.

        A document is read once, however many continuations it has.
        """
        documents: dict[tuple[int, ...], list[int]] = {}
        for index, request in requests.items():
            documents.setdefault(request.document, []).append(index)
        longest_first = sorted(documents, key=lambda ids: (-len(ids), ids))
        for start in range(0, len(longest_first), self.batch_size):
            batch = longest_first[start : start + self.batch_size]
            asked = [(row, i) for row, ids in enumerate(batch) for i in documents[ids]]
            yield self._score_batch(batch, asked, requests)

    @torch.no_grad()
    def _score_batch(
        self,
        documents: Sequence[tuple[int, ...]],
        asked: list[tuple[int, int]],
        requests: Mapping[int, Continuation],
    ) -> dict[int, Score]:
        """Read documents under the policy; score their continuations from copies of the cache."""
        begin = now()
        cache = PolicyCache(self.policy)
        ids, mask = left_padded(documents, self.pad, self._device)
        read(self.model, cache, ids, mask)
        prefill, held = now() - begin, RowsHeld.of(cache)
        found: dict[int, tuple[float, bool]] = {}
        for chunk in self._chunks(cache, asked, requests):
            rows = torch.tensor([row for row, _ in chunk], device=self._device)
            fork = copy.copy(cache)
            fork.batch_select_indices(rows)
            found |= self._continue(fork, mask[rows], {i: requests[i] for _, i in chunk})
        seconds = (prefill / len(asked), (now() - begin) / len(asked))
        return {
            index: Score(*found[index], _costs(held, row, requests[index], *seconds))
            for row, index in asked
        }

    def _chunks(
        self,
        cache: PolicyCache,
        asked: Sequence[tuple[int, int]],
        requests: Mapping[int, Continuation],
    ) -> Iterator[list[tuple[int, int]]]:
        """Yield the (row, index) pairs to score together in one forward, longest first."""

        def length(pair: tuple[int, int]) -> int:
            return -len(requests[pair[1]].rest)

        # A recurrent layer cannot skip padding behind a document, so that only rows of one length
        # are read together.
        padded = all(layer.is_croppable for layer in cache.layers)
        ordered = sorted(asked, key=length)
        groups = [ordered] if padded else [list(each) for _, each in groupby(ordered, length)]
        for group in groups:
            for start in range(0, len(group), self.batch_size):
                yield group[start : start + self.batch_size]

    def _continue(
        self, cache: PolicyCache, mask: Tensor, requests: Mapping[int, Continuation]
    ) -> dict[int, tuple[float, bool]]:
        """Append the rest of each request to the cache, and score its continuation.

        ``mask`` ``[rows, len]`` is the mask of the rows' documents.
        """
        each = list(requests.values())
        ids, valid = left_padded([request.rest for request in each], self.pad, self._device)
        with cache.attached(self.model):
            logits = self.model(
                ids, attention_mask=torch.cat([mask, valid], dim=1), cache=cache
            ).logits
        found = {}
        for row, (index, request) in enumerate(requests.items()):
            own = logits[row, -len(request.scored) :]  # [scored_len, vocab_size]
            likely = log_softmax(own, dim=-1, dtype=self.softmax_dtype)
            target = torch.tensor(request.scored, device=likely.device)
            total = float(likely.gather(1, target[:, None]).sum())
            found[index] = (total, bool((likely.argmax(dim=-1) == target).all()))
        return found

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def _costs(
    held: RowsHeld, row: int, request: Continuation, prefill: float, total: float
) -> RequestCosts:
    """Return the costs of a continuation, with the context tokens after its document counted.

    Those tokens are all kept; each is taken to need as many bytes as a kept token of the document.
    """
    kept = held.kept[row] + request.asked_len
    nbytes = held.nbytes[row] * kept / held.kept[row] if held.kept[row] else 0.0
    tokens = len(request.document) + request.asked_len
    return RequestCosts(tokens, kept, round(nbytes), prefill, total)
