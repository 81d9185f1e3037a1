"""Define the facts that the library must know of a decoder layer of any model."""

from __future__ import annotations

import abc
from typing import ClassVar

import attrs


@attrs.frozen
class LayerKind(abc.ABC):
    """A kind of decoder layer: what the layer holds for each token, and which tokens it sees.

    A model is taken apart into layers of known kinds; no other code asks for the family of a model.
    A new kind is a new file beside this one, and an entry in `KINDS`.

    Attributes:
        name: A few words, as shown in tables.
        attends: Whether the layer has keys, values and queries of its own, by which a policy can
            choose.
        picks: Whether an indexer picks among its keys.
        crosses: Whether the layer attends to images instead of tokens.
        blocks: Whether its indexer picks blocks of slots, counted in the slots that are held.
        borrows: Whether it has no indexer, and attends to the slots picked by an earlier layer's.
        window: Number of tokens that a token sees, itself included; None if it sees all.
        states: Number of states of either kind that the layer carries from token to token; 0 if it
            has none.
        producer: The earlier layer whose keys and values this one attends to; None if it has its
            own.
    """

    name: ClassVar[str]
    attends: ClassVar[bool] = True
    picks: ClassVar[bool] = False
    crosses: ClassVar[bool] = False
    blocks: bool = attrs.field(default=False, kw_only=True)
    borrows: bool = attrs.field(default=False, kw_only=True)
    window: int | None = attrs.field(default=None, kw_only=True)
    states: int = attrs.field(default=0, kw_only=True)
    producer: int | None = attrs.field(default=None, kw_only=True)

    @classmethod
    @abc.abstractmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """Return this kind, with the layer's settings, if it describes the layer; else None."""

    def refusal(self, index: int) -> str | None:
        """Return why a model with such a layer is refused; None if policies can be applied to it.

        ``index`` is the index of the layer.
        """
        return None


@attrs.frozen
class LayerFacts:
    """A record of how the model's configuration and Transformers' cache describe one layer.

    Args:
        index: Index of the layer.
        kind: Transformers' word for it, such as ``"sliding_attention"``.
        cached_as: The name of its class in Transformers' own cache; None if it has none there.
        window: The sliding window in tokens, of that class or else of the configuration.
        latent: Whether attention computes keys and values from a latent that all heads share.
        states: Number of states of either kind that the layer holds, if it holds any.
        indexer: ``"full"`` or ``"shared"`` in models in which only some layers have an indexer of
            their own.
        indexes_blocks: Whether an indexer picks blocks of slots, and gives its index keys to the
            cache's layer.
        crosses: Whether the layer attends to images instead of tokens.
        untold: Whether its indexer rotates index keys by positions that the cache of this
            Transformers version does not hold.
        producer: The layer whose keys and values this one attends to; None if it makes its own.
    """

    index: int
    kind: str
    cached_as: str | None
    window: int | None
    latent: bool = False
    states: int = 1
    indexer: str | None = None
    indexes_blocks: bool = False
    crosses: bool = False
    untold: bool = False
    producer: int | None = None
