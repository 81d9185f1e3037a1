"""Layers that no policy can be applied to, and why."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind

_COMPRESSED = "holds its tokens compressed, several to an entry, and a window of them as they are"
_REASONS = {
    "compressed_sparse_attention": ("compressed attention", _COMPRESSED),
    "heavily_compressed_attention": ("compressed attention", _COMPRESSED),
}
_CACHED_AS = {
    "DummyLayer": ("without a cache", "holds nothing, and is of no kind that is known"),
}


@attrs.frozen
class Refused(LayerKind):
    """A layer whose kind no policy knows.

    Args:
        called: The kind, in a few words.
        reason: Why nothing can be chosen there.
    """

    name: ClassVar[str] = "unknown"
    called: str = ""
    reason: str = ""

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """Any layer: to be asked last."""
        found = _REASONS.get(layer.kind) or _CACHED_AS.get(layer.cached_as or "")
        return cls(*(found or (layer.kind, f"is cached as {layer.cached_as}")))

    @property
    def refusal(self) -> str | None:
        """See `LayerKind.refusal`."""
        return f"({self.called}) {self.reason}"
