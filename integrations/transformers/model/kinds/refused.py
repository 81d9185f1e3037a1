"""Define layers to which no policy can be applied, with the reason."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind

_COMPRESSED = "holds compressed tokens, several to an entry, and a window of uncompressed ones"
_REASONS = {
    "compressed_sparse_attention": ("compressed attention", _COMPRESSED),
    "heavily_compressed_attention": ("compressed attention", _COMPRESSED),
    "reference_sliding_attention": (
        "reference window",
        "sees the whole of a first prompt, but only a window of later tokens",
        "see the tokens of an answer as it sees those of a prompt",
        "use Transformers' own cache with this model",
    ),
}
_CACHED_AS = {
    "DummyLayer": ("without a cache", "holds nothing, and is of no known kind"),
}


@attrs.frozen
class Refused(LayerKind):
    """A layer of a kind to which no policy can be applied.

    Args:
        called: A few words for the kind.
        reason: Why no policy can choose there.
        needed: What every layer must do.
        remedy: What the reason means for the user.
    """

    name: ClassVar[str] = "unknown"
    called: str = ""
    reason: str = ""
    needed: str = "hold keys and values of its own, one for each token"
    remedy: str = "a policy has nothing to choose there"

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """Return this kind for any layer, so that it must be tried last."""
        found = _REASONS.get(layer.kind) or _CACHED_AS.get(layer.cached_as or "")
        return cls(*(found or (layer.kind, f"is cached as {layer.cached_as}")))

    def refusal(self, index: int) -> str | None:
        """See `LayerKind.refusal`."""
        found = f"layer {index} ({self.called}) {self.reason}"
        return f"every layer must {self.needed}, but {found}; {self.remedy}"
