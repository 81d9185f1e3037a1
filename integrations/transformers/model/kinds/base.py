"""What the library has to know of a decoder layer, whatever model it comes from."""

from __future__ import annotations

import abc
from typing import ClassVar

import attrs


@attrs.frozen
class LayerKind(abc.ABC):
    """A kind of decoder layer: what it holds for a token, and what it can see.

    A model is taken apart into layers of known kinds; nothing else of the library asks which family
    a model is of. A new kind is a file of its own beside this one, and an entry in `KINDS`.

    Attributes:
        name: In a few words, as tables show it.
        attends: Whether it has keys, values and queries, which a policy may choose by.
        window: Tokens a layer sees, its own among them; None where it sees all.
        states: States of either kind that it carries from token to token; 0 without any.
        producer: The earlier layer whose keys and values it attends to; None without such.
    """

    name: ClassVar[str]
    attends: ClassVar[bool] = True
    window: int | None = attrs.field(default=None, kw_only=True)
    states: int = attrs.field(default=0, kw_only=True)
    producer: int | None = attrs.field(default=None, kw_only=True)

    @classmethod
    @abc.abstractmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """The kind of a layer, if it is this one."""

    @property
    def refusal(self) -> str | None:
        """Why no policy can be applied to a model with such a layer; None where one can."""
        return None


@attrs.frozen
class LayerFacts:
    """What a model says of one of its layers.

    Args:
        index: The layer's.
        kind: Transformers' word for it, such as ``"sliding_attention"``.
        cached_as: The name of the class that Transformers' own cache has for it; None where it
            has none.
        window: The sliding window of that, or else of the configuration, in tokens.
        latent: Whether attention makes keys and values of a latent that all heads share.
        states: The states of either kind that it holds, if it holds any.
        indexer: ``"full"`` or ``"shared"`` where layers differ in whether they have an indexer.
        indexes_blocks: Whether an indexer picks blocks of slots, and hands its index keys to what
            the layer holds.
        crosses: Whether it attends to images instead of the tokens.
        untold: Whether its indexer turns index keys by positions that this Transformers' cache does
            not hold beside them.
        producer: The layer whose keys and values it attends to; None where it makes its own.
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
