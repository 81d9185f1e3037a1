"""Define the methods that Transformers calls on a cache; the cache's dispatcher does the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Cache

from kvpolicy.errors import NotAttachedError
from kvpolicy.integrations.transformers.forward.dispatcher import ForwardDispatcher
from kvpolicy.integrations.transformers.forward.pass_run import PassRun
from kvpolicy.integrations.transformers.forward.static_steps import StaticSteps
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.surface import CACHE


def _noting(name: str, place: int) -> Callable[..., Any]:
    """Make a method of a cache that reads or writes a layer's state, and notes that it was used.

    The model may write into a state that it gets. Without a model attached, the method raises a
    `NotAttachedError`.
    """

    def method(self: DispatchedCache, *args: Any, **kwargs: Any) -> Any:
        index = kwargs["layer_idx"] if "layer_idx" in kwargs else args[place]
        self._run().updated.add(index)
        return getattr(super(DispatchedCache, self), name)(*args, **kwargs)

    return method


class DispatchedCache(Cache):  # type: ignore[misc]
    """A Transformers cache whose methods hand their work to a dispatcher of forwards.

    Models and `generate` call its methods. `PolicyCache` adds what users call.

    Args:
        reader: The dispatcher of the cache's forwards.
    """

    def __init__(self, reader: ForwardDispatcher) -> None:
        super().__init__(layers=[])
        self._reader = reader
        self.layers: list[PolicyLayer] = reader.layers

    def _run(self) -> PassRun:
        """Return the run of the decoder that is in progress."""
        run = self._reader.run
        if run is None:
            raise NotAttachedError.with_cache_as(CACHE)
        return run if run.part is None else run.part

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values; return all keys and values its attention must see."""
        lent = self._reader.answer.cache
        if lent is not None:
            keys, values = lent.update(key_states, value_states, layer_idx)
            return keys, values
        run = self._run()
        return run.update(layer_idx, key_states, value_states, run.attentions[layer_idx])

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Add a layer's new index keys; return all index keys that its indexer must see.

        Args:
            indexer_key_states: ``[batch, new_len, index_dim]``.
            layer_idx: Index of the layer.
        """
        return self._run().update_index(layer_idx, indexer_key_states)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """True if a recurrent layer has read any token.

        None for ``layer_idx`` asks about the last layer with a state.
        """
        if layer_idx is not None and self._reader.tokens is not None:
            # With Transformers 5.17 a model then takes the state from the layer and writes to it.
            self._run().updated.add(layer_idx)
        return bool(super().has_previous_state(layer_idx, state_idx))

    get_conv_state = _noting("get_conv_state", 0)
    get_recurrent_state = _noting("get_recurrent_state", 0)
    update_conv_state = _noting("update_conv_state", 1)
    update_recurrent_state = _noting("update_recurrent_state", 1)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the recurrent state of a layer; None before any token is read.

        Some models define caches of their own with this method and `set_linear_cache`, and replace
        the state whole.
        """
        self._run().updated.add(layer_idx)
        layer = self.layers[layer_idx].recurrent
        assert layer is not None
        state: Tensor | None = layer.recurrent_states[0]
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Store a layer's recurrent state after the current tokens."""
        self.update_recurrent_state(linear_cache, layer_idx)

    @property
    def _static(self) -> StaticSteps | None:
        """The steps of an answer that may be compiled; None if there are none."""
        return self._reader.answer.static

    @property
    def is_compileable(self) -> bool:
        """True if `generate` may compile the decoding of an answer."""
        return self._reader.answer.is_compileable

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many input columns the cache has read, padding included.

        The number of slots stored is ``layers[i].kept_len``. For a layer that attends to images it
        is 0 until there is an image: Transformers 5.17 then leaves the layer out.
        """
        layer = self.layers[layer_idx] if 0 <= layer_idx < len(self.layers) else None
        crossing = None if layer is None else layer.crossing
        without_image = crossing is not None and crossing.images is None
        return 0 if without_image else self._reader.seen_by(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys and the column offset for the next attention mask.

        The offset is the number of columns seen but not stored. An attention module that computes
        distances between queries and keys gets all columns seen instead.
        """
        reader = self._reader
        lent = reader.answer.mask_sizes(query_length, layer_idx, reader.seen_by(layer_idx))
        if lent is not None:
            return lent
        run = reader.at_work
        columns = None if run is None else run.columns(layer_idx)
        if columns is not None:
            return columns.keys, 0
        if run is not None and run.made.in_prompt and not run.at.first:
            return query_length, self.get_seq_length(layer_idx)  # since layers get other masks
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def get_query_offset(self, layer_idx: int = 0) -> int | Tensor:
        """Return the input column of the next query: the number of columns read so far.

        An attention module that computes distances gets the offset of its own queries instead.
        """
        run = self._reader.run and self._reader.at_work
        columns = None if run is None else run.columns(layer_idx)
        return self.get_seq_length(layer_idx) if columns is None else columns.query_offset

    @property
    def batch_size(self) -> int:
        """The number of rows in the batch; -1 before the first forward."""
        return -1 if self._reader.tokens is None else self._reader.tokens.batch

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1, since a policy cache has no maximum length."""
        return -1
