"""Define `PolicyCache`, which applies any policy inside a stock `model.generate`."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.checks import check_count
from kvpolicy.description import describe
from kvpolicy.errors import CacheInUseError
from kvpolicy.integrations.transformers.dispatched import DispatchedCache
from kvpolicy.integrations.transformers.fitting import (
    check_adapters,
    check_room,
    fit,
    reserved_slots,
)
from kvpolicy.integrations.transformers.forward.arriving import ReadState
from kvpolicy.integrations.transformers.forward.dispatcher import ForwardDispatcher
from kvpolicy.integrations.transformers.forward.facts import ModelFacts
from kvpolicy.integrations.transformers.forward.second_reading import check_layers
from kvpolicy.integrations.transformers.model.attachment import Attachment
from kvpolicy.integrations.transformers.model.check import verdict_of
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.state.fingerprint import ModelFingerprint
from kvpolicy.integrations.transformers.state.report import CacheReport, held_in_words
from kvpolicy.integrations.transformers.state.saving import SavedCache
from kvpolicy.integrations.transformers.state.storage import PlainStorage, Storage
from kvpolicy.policy import CachePolicy

# The attributes of a cache that no copy takes over.
OWN = ("layers", "_thread", "update")


class PolicyCache(DispatchedCache):
    """A Transformers cache that applies a policy while the model reads a prompt.

    Give it to ``model.generate(..., cache=cache)``; in a hand-written loop, call the
    model inside ``with cache.attached(model):``. The policy acts on the first forward and on the
    first forward of every later ``generate`` with the same cache (a new turn; `start_turn` in a
    hand-written loop). Any other forward, such as one decoded token, only appends.

    Args:
        policy: Which tokens to keep.
        storage: How keys and values are held: `PlainStorage`, `QuantizedStorage` or
            `OffloadedStorage`. None holds them unchanged, as `PlainStorage` does.
        max_new_tokens: Answer tokens for which memory is reserved when the prompt is read. With it
            `generate` can compile the decoding steps, which it does by default on a GPU (greedy or
            sampling, eager or sdpa attention, plain storage, layers with keys of their own and no
            state). A longer answer gets the same number again, and is compiled again. None: memory
            grows with the answer.

    Attributes:
        policy: The policy.
        layers: What each layer holds: ``.keys`` and ``.values`` ``[batch, kv_heads, kept_len,
            head_dim]`` and ``.positions`` ``[batch, kv_heads, kept_len]``, -1 on empty slots.
        propagated: For every layer that dropped tokens in the last prompt, the positions it passed
            on: ``[batch, passed_len]`` int64, -1 on empty slots.

    Raises:
        TypeError: ``policy`` is not a `CachePolicy`, ``storage`` is not a `Storage`, or
            ``max_new_tokens`` is not an int.
        ValueError: ``max_new_tokens`` is below 1 or, once a model is known, above its number of
            positions.

    If a policy drops tokens, the model returns logits and hidden states only for the prompt tokens
    that reach the last layer. The last token is always one of them.

    Every prompt token sees all tokens before it. So a policy that evicts does not change the logits
    and the loss of the prompt itself: read the context first, then score the text after it. With
    ``output_attentions`` the columns of a layer are the columns of the input until the layer has
    evicted something. Afterwards column ``j`` of a row and KV head is the token at
    ``layers[i].positions[row, head, j]``.

    The cache remembers the ids of all tokens read: `generate` refuses a conversation that begins
    with other ids. Embeddings have no ids, so they are not checked.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from kvpolicy.policies import SnapKV
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        ...     eos_token_id=None)
        >>> model = LlamaForCausalLM(config).eval()
        >>> cache = PolicyCache(SnapKV(retention_tokens=12))
        >>> prompt = torch.arange(40)[None]
        >>> tokens = model.generate(prompt, cache=cache, max_new_tokens=4)
        >>> cache.get_seq_length(), cache.layers[0].keys.shape
        (43, torch.Size([1, 1, 15, 8]))
    """

    def __init__(
        self,
        policy: CachePolicy,
        storage: Storage | None = None,
        *,
        max_new_tokens: int | None = None,
    ) -> None:
        if not isinstance(policy, CachePolicy):
            hint = f"{policy.__name__}()" if isinstance(policy, type) else "kvpolicy.build(name)"
            raise TypeError(f"policy must be a CachePolicy, got {policy!r}; pass {hint}")
        if storage is not None and not isinstance(storage, Storage):
            raise TypeError(
                f"storage must be a Storage such as OffloadedStorage(), got {storage!r}"
            )
        if max_new_tokens is not None:
            check_count("max_new_tokens", max_new_tokens, minimum=1)
        storage = PlainStorage() if storage is None else storage
        super().__init__(ForwardDispatcher(policy, storage, max_new_tokens, []))
        self._thread = threading.current_thread()  # the thread that attached the cache
        self._loaded_for: ModelFingerprint | None = None  # the model that filled a saved cache

    def __repr__(self) -> str:
        held = held_in_words(self.layers, self._reader.seen_by(0))
        return f"{type(self).__name__}({self.policy}): {held}"

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[PolicyCache]:
        """Attach the cache to a model for a `with` block, so that the policy acts on its forwards.

        After the block the model is as it was.

        Args:
            model: A decoder-only model of Transformers. Attaching again to the same model inside
                the block does nothing.

        Raises:
            CacheInUseError: Another thread has attached the cache.
            UnsupportedModelError: The policy cannot be applied to the model; the message says why.
            ValueError: A layer of the policy lies outside the model, the cache belongs to another
                model, or the cache reserves memory for more tokens than the model has positions.
        """
        parts = ModelParts(model)
        check_adapters(model)
        self._check_thread()
        if self._reader.attachment is not None:
            if self._reader.attachment.parts.decoder is not parts.decoder:
                raise ValueError("model must be the one the cache is attached to, got another one")
            try:
                with self._reader.attachment.watching(model):
                    yield self
            finally:
                self._reader.abandon_forward()
            return
        placed = self.policy.placed(parts.num_layers, parts.eligible)
        placed.check_model(parts.num_layers)
        parts.check_queries(placed)
        check_room(self._reader, parts, self.max_new_tokens)
        verdict = verdict_of(model, parts, PolicyCache)
        verdict.check(self.policy, parts.num_layers)
        fit(self._reader, parts, self._loaded_for)
        if placed.decides_later:
            check_layers(placed, self.layers)
        self._reader.facts = ModelFacts(parts, placed, verdict.quirks)
        self._reader.attachment = Attachment(self, self._reader, parts)
        self._thread = threading.current_thread()
        try:
            self._reader.attachment.attach()
            yield self
        finally:
            self._reader.attachment.detach()
            self._reader.attachment = self._reader.facts = None
            self._reader.abandon_forward()

    def _check_thread(self) -> None:
        """Check that the cache is not attached in another thread."""
        if self.is_attached and self._thread is not threading.current_thread():
            raise CacheInUseError.by(self._thread)

    @property
    def is_attached(self) -> bool:
        """True while the cache is attached to a model."""
        return self._reader.attachment is not None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the cache to a file, from which `load` continues later or elsewhere.

        Args:
            path: The file, or a link to it, in the safetensors format. It gets the keys, values and
                positions of every layer, the tokens seen, the policy's description, and a
                fingerprint of the model.

        Raises:
            ValueError: The cache has read nothing or only a part of a prompt, the model that filled
                it no longer exists, or ``path`` does not name a file.
            OSError: The file cannot be written, or is not a regular file; an existing file stays as
                it was.
        """
        self._to_save().write(path)

    def _to_save(self) -> SavedCache:
        """Return what `save` writes; not for users."""
        reader = copy.copy(self._reader)  # the copy undoes a forward that is under way
        if reader.tokens is None or reader.now.chunks is not None:
            raise ValueError("cache must have read a prompt to be saved, got one that has not")
        return SavedCache(
            policy=describe(self.policy),
            model=self._loaded_for or self._fingerprint(),
            tokens=reader.tokens,
            layers=reader.layers,
            propagated=dict(reader.now.propagated),
            starts_turn=reader.now.starts_turn,
        )

    def _fingerprint(self) -> ModelFingerprint:
        decoder = None if self._reader.filled_by is None else self._reader.filled_by()
        if decoder is None:
            raise ValueError(
                "cache must be saved while the model that filled it exists, since the file "
                "identifies this model; a copy of a cache does not know its model"
            )
        return ModelFingerprint.of(decoder)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        policy: CachePolicy | None = None,
        storage: Storage | None = None,
        *,
        max_new_tokens: int | None = None,
    ) -> PolicyCache:
        """Load a cache from a file written by `save`.

        It continues where the saved cache was.

        Its tensors move to the model's devices and precision, and into ``storage``, when it is
        attached. The model must be the one that filled the cache; its weights may be in another
        precision, quantised, or offloaded. Where no weights can be compared, there is a warning.

        Args:
            path: The file that `save` wrote.
            policy: The policy that filled the cache; needed only where a part of it is not
                registered, since a file names no code to run.
            storage: How keys and values are held from now on; None holds them unchanged.
            max_new_tokens: See the class.

        Raises:
            TypeError: ``path`` is not a path.
            OSError: The file cannot be read, or is not a regular file.
            ValueError: The file was not written by `save` or is damaged, its policy differs from
                ``policy``, or its policy cannot be built without ``policy``.
        """
        saved = SavedCache.read(path)
        policy = saved.policy_of(path, policy)
        cache = cls(policy, storage, max_new_tokens=max_new_tokens)
        room = reserved_slots(policy, max_new_tokens)
        for layer in saved.layers:
            layer.storage, layer.room = cache.storage, room
        cache.layers[:] = saved.layers
        cache._reader.now = ReadState(saved.tokens, saved.propagated, saved.starts_turn)
        cache._loaded_for = saved.model
        return cache

    def report(self) -> CacheReport:
        """Report how many tokens and bytes the cache holds, next to those of a full cache."""
        self._reader.answer.settle()
        return CacheReport.of(self.layers, sum(self.seen_lengths), self.get_seq_length())

    @property
    def policy(self) -> CachePolicy:
        """The policy that the cache applies."""
        return self._reader.policy

    @property
    def storage(self) -> Storage:
        """The storage that says in which form keys and values are held."""
        return self._reader.storage

    @property
    def max_new_tokens(self) -> int | None:
        """The number of answer tokens with reserved memory; None if memory grows as needed."""
        return self._reader.max_new_tokens

    @max_new_tokens.setter
    def max_new_tokens(self, count: int | None) -> None:
        if count is not None:
            check_count("max_new_tokens", count, minimum=1)
        if self._reader.attachment is not None:
            check_room(self._reader, self._reader.attachment.parts, count)
        self._reader.max_new_tokens = count

    @property
    def propagated(self) -> dict[int, Tensor]:
        """The positions passed on by each layer that dropped tokens in the last prompt."""
        return dict(self._reader.now.propagated)

    def start_turn(self, prompt_len: int | None = None) -> None:
        """Begin a turn in a hand-written loop, so that the policy acts on the next forward.

        Args:
            prompt_len: Columns of the turn's prompt, if it is read in several forwards (chunked
                prefill): the policy then acts once, at the end of the prompt. None: the prompt is
                read in one forward.

        Raises:
            TypeError: ``prompt_len`` is not an int.
            ValueError: ``prompt_len`` is below 1.
        """
        self._reader.start_turn(prompt_len)

    @contextmanager
    def appending(self) -> Iterator[PolicyCache]:
        """Let `generate` append its prompts without the policy, for the length of a `with` block.

        Use it to ask a question after the policy has chosen what to keep of a document: the
        question is then held whole. The first prompt of an empty cache is still read under the
        policy. Nothing is compiled inside the block.
        """
        before, self._reader.appends = self._reader.appends, True
        try:
            yield self
        finally:
            self._reader.appends = before

    @property
    def seen_lengths(self) -> tuple[int, ...]:
        """The number of tokens that the cache has read in each row, without padding."""
        return () if self._reader.tokens is None else tuple(self._reader.tokens.lengths.tolist())

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of the cache for a copy, without the attachment to a model."""
        state = {**self.__dict__, "_reader": copy.copy(self._reader)}
        # `__setstate__` sets the first two; an answer is decoded with the third.
        return {name: each for name, each in state.items() if name not in OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copied cache, which belongs to the current thread."""
        self.__dict__.update(state)
        self.layers = self._reader.layers
        self._thread = threading.current_thread()

    # Changes that Transformers asks for between two forwards.

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last appended tokens from the cache, such as rejected draft tokens.

        If the policy evicts while it decodes, only tokens appended since the last choice in any row
        can be removed: evicted tokens cannot come back. The queries of removed tokens are
        forgotten. The next choice then has fewer queries to look at, until new ones come.

        Args:
            tokens_to_remove: Minus the number of tokens to remove, as in Transformers.

        Raises:
            TypeError: ``tokens_to_remove`` is not an int.
            ValueError: ``tokens_to_remove`` is positive, or asks for more tokens than were
                appended: tokens that the policy evicted from a prompt cannot come back. Or it is
                not 0 where a layer is recurrent or while a prompt is read in chunks.
        """
        if isinstance(tokens_to_remove, Tensor) and not tokens_to_remove.ndim:
            tokens_to_remove = tokens_to_remove.item()  # from assisted generation of 5.17
        if isinstance(tokens_to_remove, bool) or not isinstance(tokens_to_remove, int):
            raise TypeError(f"tokens_to_remove must be an int, got {tokens_to_remove!r}")
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be 0 or negative, got {tokens_to_remove}")
        self._reader.abandon_forward()
        if tokens_to_remove:
            self._reader.answer.end()
        if tokens_to_remove and self._reader.now.chunks is not None:
            raise ValueError("tokens_to_remove must be 0 while a prompt is read in chunks")
        count = -tokens_to_remove
        appended = 0 if self._reader.tokens is None else self._reader.tokens.appended.shape[1]
        if count > appended:
            raise ValueError(
                f"tokens_to_remove must be at least {-appended}: only {appended} tokens were "
                f"appended since the policy acted, got {tokens_to_remove}"
            )
        if count and not all(layer.is_croppable for layer in self.layers):
            raise ValueError(
                f"tokens_to_remove must be 0 if layers are recurrent, got {tokens_to_remove}: "
                "tokens cannot be removed from a state; use a copy made before they were read"
            )
        if count and self._reader.tokens is not None:
            for layer in self.layers:
                layer.drop_last(count)
            self._reader.take_tokens(self._reader.tokens.without_last(count))

    def reset(self) -> None:
        """Forget all that was read, so that the next forward reads a first prompt."""
        self._reader.reset()
        self._loaded_for = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the rows ``beam_idx`` ``[batch]`` the new batch, as beam search asks."""
        self._take_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Make the rows ``indices`` ``[count]`` the new batch."""
        self._take_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch ``repeats`` times, copies next to each other."""
        check_count("repeats", repeats, minimum=1)
        if (tokens := self._reader.tokens) is not None:
            rows = torch.arange(tokens.batch, device=tokens.lengths.device)
            self._take_rows(rows.repeat_interleave(repeats))

    def _take_rows(self, rows: Tensor) -> None:
        if not isinstance(rows, Tensor) or rows.ndim != 1 or rows.is_floating_point():
            raise TypeError(f"rows must be a tensor of indices [count], got {rows!r}")
        if rows.dtype not in (torch.bool, torch.int32, torch.int64):
            raise TypeError(f"rows must be int64 or int32, got {rows.dtype}; use rows.long()")
        if rows.dtype == torch.bool or not rows.numel():
            raise ValueError(f"rows must be indices of at least one row, got {rows}")
        reader = self._reader
        reader.abandon_forward()
        tokens = reader.tokens
        if tokens is None:
            return
        if reader.now.chunks is not None:
            raise ValueError("rows must not change while a prompt is read in chunks")
        if bool(((rows < 0) | (rows >= tokens.batch)).any()):
            raise ValueError(
                f"rows must be indices of the cache's {tokens.batch} rows, in "
                f"[0, {tokens.batch - 1}], got {rows.tolist()}"
            )
        reader.answer.end()
        tokens = tokens.take_rows(rows)
        for layer in self.layers:
            layer.take_rows(rows, tokens)
        passed = {
            index: positions.index_select(0, rows.to(positions.device))
            for index, positions in self.propagated.items()
        }
        reader.now = attrs.evolve(reader.now, tokens=tokens, propagated=passed)
