"""Find of which kind each decoder layer is: what it holds for a token, and which tokens it sees.

A model is taken apart into layers of known kinds; no other code asks for the family of a model. A
new kind is a class here, and a case in `_kind`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
from transformers import DynamicCache

from kvpolicy.integrations.transformers.model.masks import Chunk


@attrs.frozen(kw_only=True)
class LayerKind:
    """A kind of decoder layer.

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
        refusal: Why a model with such a layer is refused; None if policies can be applied to it.
    """

    name: ClassVar[str]
    attends: ClassVar[bool] = True
    picks: ClassVar[bool] = False
    crosses: ClassVar[bool] = False
    blocks: bool = False
    borrows: bool = False
    window: int | None = None
    states: int = 0
    producer: int | None = None
    refusal: str | None = None


class SharedKeys(LayerKind):
    """A layer that makes no keys of its own, and attends to the kept keys of an earlier layer.

    Its positions are those of the earlier layer, the producer. Only the producer's queries decide
    what is kept, so that tokens cannot be dropped after this layer. If tokens were dropped between
    the two layers, this one has queries for the remaining ones only. The producer always runs for
    all tokens that reach it, since others need all keys. Nothing is compiled.
    """

    name = "shared keys"
    attends = False


class CrossAttention(LayerKind):
    """A layer that attends to images, whose keys and values no policy evicts.

    Their number does not depend on the number of tokens. Each token attends to them independently,
    and without images the layer is skipped. Tokens cannot be dropped after it, since its queries
    look at no token.
    """

    name = "cross attention"
    attends = False
    crosses = True


class LatentAttention(LayerKind):
    """A layer that holds a latent and a rotary key of each token for all heads together (MLA).

    Attention computes keys and values from them. A policy's scorer sees these keys and values, head
    by head. All heads keep the same tokens, chosen by the mean of their saliency: the selector gets
    a context of one head, with what the layer holds as its keys (`LayerContext._for_selector`).
    This does not depend on this class: it follows from the inputs of the attention function, for
    any layer whose module makes more heads from the tensors that the cache returns.
    """

    name = "latent attention"


class FullAttention(LayerKind):
    """A layer that attends to all tokens before; a policy evicts its tokens per KV head."""

    name = "full attention"


class Indexed(LayerKind):
    """A layer whose indexer picks keys by an extra index key of each token (DeepSeek Sparse).

    A latent may take the place of keys and values. The indexer scores the index keys for each
    query, which then attends to the best few. The keys, values and index key of a token are kept or
    evicted together, so that all heads keep the same tokens. Afterwards the indexer picks among the
    tokens that the layer holds, and blocks of tokens are formed anew from these. Policies see all
    keys, not only the picked ones.

    No tokens are dropped between a layer and a later one that borrows the slots picked by its
    indexer, and keeps the same tokens. Such layers run for all tokens that reach them.
    """

    name = "with an indexer"
    picks = True


class SlidingWindow(LayerKind):
    """A layer that holds only the tokens in its sliding window, so that it needs no policy.

    In a context longer than the window the policy chooses nothing in this layer. Tokens cannot be
    dropped after it, since it has not seen all of them. Windows are measured in original positions,
    even after tokens were dropped in earlier layers.
    """

    name = "sliding window"


class ChunkedAttention(LayerKind):
    """A layer that attends only within chunks of the context, so that it needs no policy.

    Chunks begin at multiples of their length, counted in original positions even after tokens were
    dropped in earlier layers. In a context longer than a chunk the policy chooses nothing in this
    layer. Tokens cannot be dropped after it, since it has not seen all of them.
    """

    name = "chunked attention"


class Tokenwise(LayerKind):
    """A layer that is only an MLP or experts, and holds nothing in the cache."""

    name = "without attention"
    attends = False


class Recurrent(LayerKind):
    """A layer that holds a state of fixed size, of which a policy can evict nothing.

    Tokens cannot be dropped after it, since it has no queries. After a restart, or after an earlier
    layer has dropped tokens, it reads the remaining ones in their order, as if there were no
    others. Its mask tells tokens from padding, and is made for the tokens that reach it.

    No mask makes a state skip padding between tokens, and no token can be removed from a state. So
    draft tokens, `crop` and turns with padding behind tokens are refused. So is a model that keeps
    states in its own modules, where calls with another cache change them.
    """

    name = "recurrent"
    attends = False


class SideBySide(LayerKind):
    """A layer with attention and a recurrence: keys and values of each token, and a state.

    The policy chooses among keys and values; the state is held whole. Tokens may be dropped after
    this layer, since its queries are seen: both parts have then read all tokens that reached the
    layer, and the state is not changed back. After an earlier layer has dropped tokens, both parts
    read the remaining ones. The layer always runs for all tokens that reach it, also those that it
    drops, since the state needs them. Whatever else it returns for each token is cut together with
    its hidden states. It is given two masks, one for each part; see `MaskArguments`. If several
    layers share a module's weights, a call is assigned to the layer in which it happens.
    """

    name = "attention and recurrent"


_COMPRESSED = "holds compressed tokens, several to an entry, and a window of uncompressed ones"
# By what Transformers calls a refused kind: words for it, why no policy can choose there, and, if
# these are others than usual, what every layer must do and what it means for the user.
_REASONS = {
    "compressed_sparse_attention": ("compressed attention", _COMPRESSED),
    "heavily_compressed_attention": ("compressed attention", _COMPRESSED),
    "reference_sliding_attention": (
        "reference window",
        "sees the whole of a first prompt, but only a window of later tokens",
        "see the tokens of an answer as it sees those of a prompt",
        "use Transformers' own cache with this model",
    ),
    "DummyLayer": ("without a cache", "holds nothing, and is of no known kind"),
}


def _refused(
    index: int,
    called: str,
    reason: str,
    needed: str = "hold keys and values of its own, one for each token",
    remedy: str = "a policy has nothing to choose there",
) -> LayerKind:
    said = f"every layer must {needed}, but layer {index} ({called}) {reason}; {remedy}"
    return LayerKind(refusal=said)


# The fields of configurations that tell kinds apart, besides the layers' names.
_FIELDS = (
    "cross_attention_layers",
    "indexer_compress_ratio",
    "indexer_types",
    "kv_lora_rank",
    "window_size",
)


def kinds_of(config: Any, num_layers: int) -> list[LayerKind]:
    """Return the kind of each decoder layer, found from the model's configuration."""
    own = DynamicCache(config=config).layers
    called = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    called = called or ["full_attention"] * num_layers
    if len(own) == 1 < num_layers:  # Transformers adds more layers of this class later
        own = own * num_layers
    producers = _producers(config, called)
    fields = {name: getattr(config, name, None) for name in _FIELDS}
    kinds = []
    for index in range(num_layers):
        producer = producers.get(index)
        place = index if producer is None else producer
        cached = own[place] if place < len(own) else None
        name = called[index] if index < len(called) else "full_attention"
        kinds.append(_kind(fields, index, name, cached, producer))
    return kinds


def _producers(config: Any, called: Sequence[str]) -> dict[int, int]:
    """Map each layer that shares keys to the earlier layer of its type that makes them."""
    first = len(called) - (getattr(config, "num_kv_shared_layers", None) or 0)
    makers = {kind: index for index, kind in enumerate(called[:first])}
    return {i: makers[called[i]] for i in range(first, len(called)) if called[i] in makers}


def _kind(
    fields: Mapping[str, Any], index: int, called: str, cached: Any, producer: int | None
) -> LayerKind:
    """Return the kind of one layer.

    ``called`` is Transformers' word for it; ``cached`` is what stands for it in Transformers' own
    cache, or for its producer; None without any.
    """
    cached_as = None if cached is None else type(cached).__name__
    window = getattr(cached, "sliding_window", None) or fields["window_size"]
    states = getattr(cached, "number_of_states", 1)
    if producer is not None:
        return SharedKeys(window=window, producer=producer)
    if index in (fields["cross_attention_layers"] or ()):
        return CrossAttention()
    # A layer may be called sliding but have no window.
    known = called in ("full_attention", "attention", "sliding_attention", "global")
    if known and cached_as in (None, "DynamicLayer"):
        latent = fields["kv_lora_rank"] is not None and called in ("full_attention", "attention")
        return LatentAttention() if latent else FullAttention()
    if hasattr(cached, "update_index"):
        return Indexed(blocks=True)
    # Pooled index keys are turned by positions that only newer caches of Transformers hold.
    placed = fields["indexer_compress_ratio"] is None or hasattr(cached, "indexer_position_ids")
    if cached_as == "DynamicIndexedLayer" and placed:
        indexers = fields["indexer_types"] or ()
        return Indexed(borrows=index < len(indexers) and indexers[index] == "shared")
    # Transformers' own cache holds all tokens of a local layer.
    slides = cached_as == "DynamicSlidingWindowLayer" and known and called != "global"
    if slides or (called == "local" and window is not None):
        return SlidingWindow(window=window)
    if called == "chunked_attention" and window is not None:
        return ChunkedAttention(window=Chunk(window))
    # The class in the cache cannot tell: layers with borrowed keys have the same one, and recurrent
    # layers had it too.
    if called in ("mlp", "moe"):
        return Tokenwise()
    if cached_as == "LinearAttentionLayer":
        return Recurrent(states=states)
    if cached_as in (
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    ):
        return SideBySide(window=window, states=states)
    told = _REASONS.get(called) or _REASONS.get(cached_as or "")
    return _refused(index, *(told or (called, f"is cached as {cached_as}")))
