"""Define the sizes of a model that decide its cost."""

from __future__ import annotations

import attrs

from kvpolicy.checks import check_count


@attrs.frozen
class LayerShape:
    """The sizes of one decoder layer from which its compute and memory are estimated.

    Args:
        weights: Those that one token is multiplied with, at least 1: of the projections of
            attention, and of the MLP, where there are experts of those that are active.
        projection_weights: Of them, those that make queries, keys and values.
        query_heads: Heads that attend; 0 where the layer does not.
        kv_heads: Heads of keys and values, a divisor of ``query_heads``; as many where they are
            made of a latent.
        key_dim: Width of a head's queries and keys as they are multiplied.
        value_dim: Width of a head's values.
        token_elements: Numbers that the layer holds for each token: a key and a value for every
            KV head, or a latent; 0 where it holds nothing for a token, or has the keys of
            another layer.
        place_bytes: Bytes that the layer holds for each token beside these, whatever the model's
            precision: the position ids by which index keys are turned when they are scored.
        state_elements: Numbers of the state that it holds, however many tokens there are.
        float_state_elements: Of them, those that are in float32 whatever the model's precision.
        window: Tokens that one of its tokens sees, itself among them; None where it sees all.
        chunked: Whether the window is a chunk of the context, which begins at a multiple of it.

    Raises:
        TypeError: A size is not an int.
        ValueError: A size is below its least, or sizes of heads do not go together.

    Example:
        >>> layer = attention_layer(8, 4, 2, 3, mlp=gated_mlp(8, 10))
        >>> layer.projection_weights, layer.weights, layer.token_elements
        (192, 528, 12)
    """

    weights: int
    projection_weights: int = 0
    query_heads: int = 0
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    token_elements: int = 0
    place_bytes: int = 0
    state_elements: int = 0
    float_state_elements: int = 0
    window: int | None = None
    chunked: bool = False

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(LayerShape):
            size = getattr(self, field.name)
            if field.name == "chunked" or (field.name == "window" and size is None):
                continue
            check_count(field.name, size, minimum=int(field.name in ("weights", "window")))
        if self.projection_weights > self.weights:
            raise ValueError(
                f"projection_weights must be among the layer's {self.weights} weights, got "
                f"{self.projection_weights}"
            )
        if self.float_state_elements > self.state_elements:
            raise ValueError(
                f"float_state_elements must be among the {self.state_elements} state_elements, "
                f"got {self.float_state_elements}"
            )
        if self.query_heads and (not self.kv_heads or self.query_heads % self.kv_heads):
            raise ValueError(
                f"query_heads must be a multiple of kv_heads, got {self.query_heads} and "
                f"{self.kv_heads}"
            )

    @property
    def pair_width(self) -> int:
        """The multiplications that attention takes per pair of query and key, over all heads."""
        return self.query_heads * (self.key_dim + self.value_dim)

    @property
    def chooses(self) -> bool:
        """True if a policy chooses tokens at this layer: it stores keys and has no window."""
        return bool(self.query_heads and self.token_elements) and self.window is None

    def held(self, context_len: float) -> float:
        """Return how many tokens the layer stores without eviction: at most its window."""
        if self.window is None or context_len <= self.window:
            return context_len
        return context_len % self.window if self.chunked else self.window - 1

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes that a token takes in this layer's cache, given bytes per number."""
        return self.token_elements * itemsize + self.place_bytes

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of one sequence's recurrent state, given bytes per number."""
        own = self.state_elements - self.float_state_elements
        return own * itemsize + self.float_state_elements * 4


@attrs.frozen
class ModelShape:
    """The sizes of a decoder from which its compute and memory are estimated.

    Args:
        name: What to call it.
        hidden_size: Width of the residual stream.
        layers: The sizes of each layer, in their order.
        vocab_size: Rows of the output head.
        max_positions: Tokens that the model is made for; None where that is not known.

    Raises:
        TypeError: A size is not an int, or ``layers`` no tuple of `LayerShape`.
        ValueError: A size is below 1, or there are no layers.

    Example:
        >>> layer = attention_layer(8, 4, 2, 3, mlp=gated_mlp(8, 10))
        >>> ModelShape("tiny", 8, (layer,) * 5, vocab_size=9).num_layers
        5
    """

    name: str
    hidden_size: int
    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_positions: int | None = None

    def __attrs_post_init__(self) -> None:
        for size in ("hidden_size", "vocab_size"):
            check_count(size, getattr(self, size), minimum=1)
        if self.max_positions is not None:
            check_count("max_positions", self.max_positions, minimum=1)
        if not isinstance(self.layers, tuple) or not all(
            isinstance(layer, LayerShape) for layer in self.layers
        ):
            raise TypeError(f"layers must be a tuple of LayerShape, got {self.layers!r}")
        if not self.layers:
            raise ValueError("layers must have an entry for each layer, got none")

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.layers)

    @property
    def eligible(self) -> list[int]:
        """The layers after which tokens may be dropped: those without a window, or else all."""
        seeing = [index for index, layer in enumerate(self.layers) if layer.chooses]
        return seeing or list(range(self.num_layers))


def attention_layer(
    hidden_size: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    mlp: int,
    window: int | None = None,
) -> LayerShape:
    """Make the sizes of a standard transformer layer: attention with equal heads, and an MLP.

    Args:
        hidden_size: Width of the residual stream.
        query_heads: Query heads.
        kv_heads: KV heads.
        head_dim: Width of a head.
        mlp: Weights of the MLP that one token is multiplied with.
        window: Tokens that one token sees; None where it sees all.
    """
    projection = hidden_size * head_dim * (query_heads + 2 * kv_heads)
    return LayerShape(
        weights=projection + hidden_size * head_dim * query_heads + mlp,
        projection_weights=projection,
        query_heads=query_heads,
        kv_heads=kv_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        token_elements=2 * kv_heads * head_dim,
        window=window,
    )


def gated_mlp(hidden_size: int, intermediate_size: int) -> int:
    """Return the number of weights of an MLP with gate, up and down projections."""
    return 3 * hidden_size * intermediate_size
