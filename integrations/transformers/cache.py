"""Define `PolicyCache`, which applies any policy inside a stock `model.generate`."""

from __future__ import annotations

import copy
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from kvpolicy.checks import check_count
from kvpolicy.description import describe
from kvpolicy.errors import CacheInUseError, UnsupportedModelError
from kvpolicy.integrations.transformers.adapters import check_adapters
from kvpolicy.integrations.transformers.forward.decoding.static_rolling import RollingDecoding
from kvpolicy.integrations.transformers.forward.dispatcher import ForwardDispatcher
from kvpolicy.integrations.transformers.forward.second_reading import check_layers
from kvpolicy.integrations.transformers.forward.static_decoding import StaticDecoding
from kvpolicy.integrations.transformers.model.attachment import Attachment
from kvpolicy.integrations.transformers.model.check import verdict_of
from kvpolicy.integrations.transformers.model.parallel import HeadSharding
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.state.cross import CrossLayer
from kvpolicy.integrations.transformers.state.fingerprint import ModelFingerprint
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.recurrent import (
    RecurrentLayer,
    layer_for,
    link,
)
from kvpolicy.integrations.transformers.state.report import CacheReport
from kvpolicy.integrations.transformers.state.saving import SavedCache
from kvpolicy.integrations.transformers.state.storage import PlainStorage, Storage
from kvpolicy.policy import CachePolicy


class PolicyCache(Cache):  # type: ignore[misc]
    """A Transformers cache that applies a policy while the model reads a prompt.

    Give it to ``model.generate(..., past_key_values=cache)``; in a hand-written loop, call the
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
        >>> tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=4)
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
        super().__init__(layers=[])
        self.layers: list[PolicyLayer]
        self._reader = ForwardDispatcher(policy, storage, max_new_tokens, self.layers)
        self._thread = threading.current_thread()  # the thread that attached the cache
        self._loaded_for: ModelFingerprint | None = None  # the model that filled a saved cache

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[PolicyCache]:
        """Attach the cache to a model, so that the policy acts on its forwards inside the block.

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
        self.check_thread()
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
        self._check_room(parts, self.max_new_tokens)
        verdict = verdict_of(model, parts, PolicyCache)
        verdict.check(self.policy, parts.num_layers)
        self._check_filled_by(parts)
        self._find_heads(parts)
        self._check_bounded()
        if placed.decides_later:
            check_layers(placed, self.layers, reference=any(parts.answer_windows))
        self._reader.placed, self._reader.quirks = placed, verdict.quirks
        self._reader.attachment = Attachment(self, self._reader, parts)
        self._thread = threading.current_thread()
        try:
            self._reader.attachment.attach()
            yield self
        finally:
            self._reader.attachment.detach()
            self._reader.attachment = None
            self._reader.abandon_forward()

    def check_thread(self) -> None:
        """Check that no other thread has attached the cache.

        Raises:
            CacheInUseError: Another thread has attached the cache.
        """
        if self.is_attached and self._thread is not threading.current_thread():
            raise CacheInUseError.by(self._thread)

    @property
    def is_attached(self) -> bool:
        """True while the cache is attached to a model."""
        return self._reader.attachment is not None

    def _check_filled_by(self, parts: ModelParts) -> None:
        if self._reader.tokens is None:
            room = self._reader.room
            self.layers[:] = [layer_for(kind, self.storage, room) for kind in parts.kinds]
            link(self.layers)
        elif len(self.layers) != parts.num_layers:
            raise ValueError(
                f"model must have the {len(self.layers)} layers of the model that filled the "
                f"cache, got one with {parts.num_layers}; use a new PolicyCache"
            )
        elif self._reader.filled_by is not None and self._reader.filled_by() is not parts.decoder:
            raise ValueError(
                "model must be the one that filled the cache, got another one; use a new "
                "PolicyCache or reset() this one"
            )
        elif self._reader.filled_by is None and self._loaded_for is not None:
            self._check_loaded_for(self._loaded_for, ModelFingerprint.of(parts.decoder))
            self._check_kinds(parts)
            self._move_to(parts)

    def _check_room(self, parts: ModelParts, longest: int | None) -> None:
        """Check that the reserved memory is at most as many tokens as the model has positions.

        Raises:
            ValueError: It reserves memory for more.
        """
        most, room = parts.max_positions, self._reader.room_for(longest)
        if most is None or room <= most:
            return
        name, remedy = "max_new_tokens", "the longest answer you expect, or None to let it grow"
        if longest is None:
            name, remedy = "every of the policy's decoding", "how many tokens a layer may grow by"
        raise ValueError(
            f"{name} must be at most {most}, the positions of {type(parts.model).__name__}, since "
            f"memory for as many tokens is taken when a prompt is read, got {longest or room}; "
            f"pass {remedy}"
        )

    def _check_bounded(self) -> None:
        """Check that every layer can evict while an answer is decoded.

        Raises:
            UnsupportedModelError: The policy's decoding rule needs queries, and a layer's attention
                shows none.
        """
        if self.policy.decoding is None:
            return
        blind = [i for i, layer in enumerate(self.layers) if not layer.shows_queries]
        if blind and self.policy.decoding.num_queries != 0:
            raise UnsupportedModelError(
                f"decoding of {self.policy} must look at no queries with a model whose attention "
                f"shows none, as that of layers {blind}; use the rule of StreamingLLM, KeyNorm, "
                "KeyDiff, LagKV, CurDKV or Random"
            )

    @staticmethod
    def _check_loaded_for(saved: ModelFingerprint, model: ModelFingerprint) -> None:
        difference = saved.difference(model)
        if difference is not None:
            raise ValueError(
                f"model must be the one that filled the saved cache, got another one: {difference}"
            )
        if not saved.is_comparable(model):
            warnings.warn(
                "whether model is the one that filled the saved cache cannot be told, since no "
                "parameter's values are known both of it and of that one (they are quantised, or "
                "not in memory); make sure of it, or load it with its embeddings in memory",
                stacklevel=4,
            )

    def _check_kinds(self, parts: ModelParts) -> None:
        for index, (layer, kind) in enumerate(zip(self.layers, parts.kinds, strict=True)):
            wanted = layer_for(kind, self.storage, 0)
            if isinstance(layer, IndexedLayer) and isinstance(wanted, IndexedLayer):
                layer.blocks = wanted.blocks  # a file does not hold this setting
            if type(layer) is not type(wanted) or layer.producer != wanted.producer:
                raise ValueError(
                    f"saved cache must hold what layer {index} of the model holds, which is "
                    f"{kind.name}, got something else; the file was changed"
                )

    def _find_heads(self, parts: ModelParts) -> None:
        tp_size = getattr(parts.model, "tp_size", None) or 1
        for layer, attention in zip(self.layers, parts.attentions, strict=True):
            layer.shows_queries = attention is not None or not layer.attends
            if attention is not None:
                layer.spread = HeadSharding.of(attention, parts.config, tp_size)
            elif layer.attends:  # no queries are seen there to count
                layer.query_heads = getattr(parts.config, "num_attention_heads", 0)

    def _move_to(self, parts: ModelParts) -> None:
        assert self._reader.tokens is not None
        self._reader.tokens = self._reader.tokens.to(parts.device_of(0))
        # The dtype of the embeddings, since weights of layers may be quantised.
        dtype = next(each.dtype for each in parts.decoder.parameters() if each.is_floating_point())
        for index, layer in enumerate(self.layers):
            if layer.held is not None:
                keys, values = layer.held.read()
                if keys.dtype != dtype:
                    self._check_precision(keys.dtype, dtype)
                    # The same model, loaded in another precision. `move_to` puts it into the
                    # cache's storage.
                    layer.held = PlainStorage().hold(keys.to(dtype), values.to(dtype))
                    layer.observed = layer.observed.in_precision(dtype)
            layer.move_to(parts.device_of(index), self._reader.tokens.to(parts.device_of(index)))

    def _check_precision(self, saved: torch.dtype, own: torch.dtype) -> None:
        if any(layer.state_nbytes() for layer in self.layers):
            raise ValueError(
                f"model must be in the precision in which the saved cache was filled, {saved}, "
                f"where it has recurrent layers or has read images, got {own}; what is held of "
                "these is in one precision"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the contents of the cache to a file, to continue from it later or elsewhere.

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
        reader = copy.copy(self._reader)  # the copy undoes a forward that is under way
        if reader.tokens is None or reader.chunks is not None:
            raise ValueError("cache must have read a prompt to be saved, got one that has not")
        SavedCache(
            policy=describe(self.policy),
            model=self._model_print(),
            tokens=reader.tokens,
            layers=reader.layers,
            propagated=reader.propagated,
            starts_turn=reader.starts_turn,
        ).write(path)

    def _model_print(self) -> ModelFingerprint:
        if self._loaded_for is not None:
            return self._loaded_for
        decoder = None if self._reader.filled_by is None else self._reader.filled_by()
        if decoder is None:
            raise ValueError(
                "cache must be saved while the model that filled it exists, since the file says "
                "which it was; a copy of a cache knows none"
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
        for layer in saved.layers:
            layer.storage, layer.room = cache.storage, cache._reader.room
        cache.layers[:] = saved.layers
        cache._reader.propagated = saved.propagated
        cache._reader.tokens, cache._reader.starts_turn = saved.tokens, saved.starts_turn
        cache._loaded_for = saved.model
        return cache

    def report(self) -> CacheReport:
        """Report the tokens and bytes held, and the bytes of a full cache; prints as a table."""
        self._reader.fixed.read_queries()
        return CacheReport.of(self.layers, sum(self.seen_lengths), self.get_seq_length())

    @property
    def policy(self) -> CachePolicy:
        """The policy that the cache applies."""
        return self._reader.policy

    @property
    def storage(self) -> Storage:
        """The setting that says how keys and values are held."""
        return self._reader.storage

    @property
    def max_new_tokens(self) -> int | None:
        """The number of answer tokens with reserved memory; None if memory grows."""
        return self._reader.max_new_tokens

    @max_new_tokens.setter
    def max_new_tokens(self, count: int | None) -> None:
        if count is not None:
            check_count("max_new_tokens", count, minimum=1)
        if self._reader.attachment is not None:
            self._check_room(self._reader.attachment.parts, count)
        self._reader.max_new_tokens = count

    @property
    def propagated(self) -> dict[int, Tensor]:
        """The positions that each dropping layer passed on in the last prompt; see the class."""
        return self._reader.propagated

    def start_turn(self, prompt_len: int | None = None) -> None:
        """Begin a new turn in a hand-written loop: the policy acts on the next forward.

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
        """Let `generate` append the prompts it is given; the policy does not act on them.

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
    def reader(self) -> ForwardDispatcher:
        """The object that handles the model's forwards; for `generate`, not for users."""
        return self._reader

    @property
    def seen_lengths(self) -> tuple[int, ...]:
        """The number of tokens seen in each row, without padding."""
        return () if self._reader.tokens is None else tuple(self._reader.tokens.lengths.tolist())

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: everything except the attachment to a model."""
        state = {**self.__dict__, "_reader": copy.copy(self._reader)}
        for own in ("layers", "_thread"):  # `__setstate__` sets both
            del state[own]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which belongs to the thread that makes it."""
        self.__dict__.update(state)
        self.layers = self._reader.layers
        self._thread = threading.current_thread()

    # The interface of a Transformers cache.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values; return all keys and values its attention must see.

        Raises:
            NotAttachedError: The cache is not attached to the model that calls.
        """
        static = self._reader.fixed.buffers
        if static is not None:
            return static.layers[layer_idx].write(key_states, value_states)
        return self._reader.update(layer_idx, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Add a layer's new index keys; return all index keys that its indexer must see.

        Args:
            indexer_key_states: ``[batch, new_len, index_dim]``.
            layer_idx: Index of the layer.

        Raises:
            NotAttachedError: The cache is not attached to the model that calls.
        """
        return self._reader.update_index(layer_idx, indexer_key_states)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """True if a recurrent layer has read any token.

        None for ``layer_idx`` asks about the last layer with a state.

        Raises:
            NotAttachedError: ``layer_idx`` is given, and the cache is not attached to its model.
        """
        if layer_idx is not None and self._reader.tokens is not None:
            # With Transformers 5.17 a model then takes the state from the layer and writes to it.
            self._reader.note_state(layer_idx)
        return bool(super().has_previous_state(layer_idx, state_idx))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state of a layer's convolution, or None before any token is read.

        The model may write into it.

        Raises:
            NotAttachedError: The cache is not attached to the model that calls.
        """
        self._reader.note_state(layer_idx)
        state: Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the recurrent state of a layer, or None before any token is read.

        The model may write into it.

        Raises:
            NotAttachedError: The cache is not attached to the model that calls.
        """
        self._reader.note_state(layer_idx)
        state: Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        return state

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Add the new inputs of a layer's convolution; return them behind the earlier ones.

        Raises:
            NotAttachedError: The cache is not attached to the model that calls.
        """
        self._reader.note_state(layer_idx)
        state: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return state

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Store a layer's recurrent state after the current tokens.

        Raises:
            NotAttachedError: The cache is not attached to the model that calls.
        """
        self._reader.note_state(layer_idx)
        state: Tensor = super().update_recurrent_state(
            recurrent_states, layer_idx, state_idx, **kwargs
        )
        return state

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the recurrent state of a layer, or None before any token is read.

        Some models define caches of their own with this method and `set_linear_cache`, and replace
        the state whole.

        Raises:
            NotAttachedError: The cache is not attached to the model that calls.
        """
        self._reader.note_state(layer_idx)
        layer = self.layers[layer_idx]
        assert isinstance(layer, RecurrentLayer)
        state: Tensor | None = layer.recurrent_states[0]
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Store a layer's recurrent state after the current tokens.

        Raises:
            NotAttachedError: The cache is not attached to the model that calls.
        """
        self.update_recurrent_state(linear_cache, layer_idx)

    @property
    def static(self) -> StaticDecoding | RollingDecoding | None:
        """The decoding into fixed buffers that is under way, or None; compiled hooks use it."""
        return self._reader.fixed.buffers

    @property
    def is_compileable(self) -> bool:
        """True if `generate` may compile the decoding of an answer."""
        return self._reader.fixed.is_compileable

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns seen, padding included.

        The number of slots stored is ``layers[i].kept_len``. For a layer that attends to images it
        is 0 until there is an image: Transformers 5.17 then leaves the layer out.
        """
        layer = self.layers[layer_idx] if 0 <= layer_idx < len(self.layers) else None
        without_image = isinstance(layer, CrossLayer) and layer.images is None
        return 0 if without_image else self._reader.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the key length and the key offset of the next mask.

        The offset is the number of columns seen but not stored. An attention module that computes
        distances between queries and keys gets all columns seen instead.
        """
        columns = self._reader.columns(layer_idx)
        if columns is not None:
            return columns.keys, 0
        if self._reader.makes_masks:  # a mask of all slots would not be used
            return query_length, self.get_seq_length(layer_idx)
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def get_query_offset(self, layer_idx: int = 0) -> int | Tensor:
        """Return the number of columns seen, which is the column of the next query.

        An attention module that computes distances gets the offset of its own queries instead.
        """
        columns = self._reader.columns(layer_idx)
        return self.get_seq_length(layer_idx) if columns is None else columns.query_offset

    @property
    def batch_size(self) -> int:
        """The number of rows; -1 before the first forward."""
        return -1 if self._reader.tokens is None else self._reader.tokens.batch

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: a policy cache has no maximum length."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens appended since the policy last acted.

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
            self._reader.fixed.end()
        if tokens_to_remove and self._reader.chunks is not None:
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
                f"tokens_to_remove must be 0 where layers are recurrent, got {tokens_to_remove}: "
                "tokens cannot be taken back from a state; use a copy made before they were read"
            )
        if count and self._reader.tokens is not None:
            self._reader.tokens = self._reader.tokens.without_last(count)
            for layer in self.layers:
                layer.drop_last(count)
                layer.follow(self._reader.tokens)

    def reset(self) -> None:
        """Forget everything; the next forward reads a first prompt."""
        self._reader.abandon_forward()
        self._reader.fixed.end()
        for layer in self.layers:
            layer.reset()
        self._reader.propagated = {}
        self._loaded_for = None
        self._reader.tokens, self._reader.chunks, self._reader.prompt_end = None, None, None
        self._reader.starts_turn = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue with the rows ``beam_idx`` ``[batch]``, as beam search chooses them."""
        self._take_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Continue with the rows ``indices`` ``[count]`` of the batch."""
        self._take_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, copies of a row next to each other."""
        check_count("repeats", repeats, minimum=1)
        if self._reader.tokens is not None:
            rows = torch.arange(
                self._reader.tokens.batch, device=self._reader.tokens.lengths.device
            )
            self._take_rows(rows.repeat_interleave(repeats))

    def _take_rows(self, rows: Tensor) -> None:
        if not isinstance(rows, Tensor) or rows.ndim != 1 or rows.is_floating_point():
            raise TypeError(f"rows must be a tensor of indices [count], got {rows!r}")
        if rows.dtype not in (torch.bool, torch.int32, torch.int64):
            raise TypeError(f"rows must be int64 or int32, got {rows.dtype}; use rows.long()")
        if rows.dtype == torch.bool or not rows.numel():
            raise ValueError(f"rows must be indices of at least one row, got {rows}")
        self._reader.abandon_forward()
        if self._reader.tokens is None:
            return
        if self._reader.chunks is not None:
            raise ValueError("rows must not change while a prompt is read in chunks")
        if bool(((rows < 0) | (rows >= self._reader.tokens.batch)).any()):
            raise ValueError(
                f"rows must be indices of the cache's {self._reader.tokens.batch} rows, in "
                f"[0, {self._reader.tokens.batch - 1}], got {rows.tolist()}"
            )
        self._reader.fixed.end()
        self._reader.tokens = self._reader.tokens.take_rows(rows)
        for layer in self.layers:
            layer.take_rows(rows, self._reader.tokens)
        self._reader.propagated = {
            index: positions.index_select(0, rows.to(positions.device))
            for index, positions in self.propagated.items()
        }
