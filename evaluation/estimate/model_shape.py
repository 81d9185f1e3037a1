"""Define the sizes of a model that decide what it holds."""

import attrs

from kvpolicy.checks import check_count


@attrs.frozen
class LayerShape:
    """What one decoder layer holds of a prompt.

    Args:
        kind: A few words for headlines, such as ``"full attention"``.
        token_bytes: Bytes that the layer holds for each token: a key and a value for every KV head,
            or a latent; 0 if it holds nothing for a token, or uses another layer's keys.
        state_bytes: Bytes of the state that it holds, however many tokens there are.
        state_elements: Numbers of this state.
        window: Tokens that one of its tokens sees, itself included; None if it sees all.
        chunked: Whether the window is a chunk of the context, which begins at a multiple of it.

    Raises:
        TypeError: A size is not an int.
        ValueError: A size is below its least.

    Example:
        >>> LayerShape("full attention", token_bytes=2 * 8 * 128 * 2).held(100)
        100
    """

    kind: str
    token_bytes: int = 0
    state_bytes: int = 0
    state_elements: int = 0
    window: int | None = None
    chunked: bool = False

    def __attrs_post_init__(self) -> None:
        for size in ("token_bytes", "state_bytes", "state_elements"):
            check_count(size, getattr(self, size), minimum=0)
        if self.window is not None:
            check_count("window", self.window, minimum=1)

    @property
    def chooses(self) -> bool:
        """True if a policy chooses tokens at this layer: it holds keys and has no window."""
        return bool(self.token_bytes) and self.window is None

    def held(self, context_len: float) -> float:
        """Return how many tokens the layer holds without eviction: at most its window."""
        if self.window is None or context_len <= self.window:
            return context_len
        return context_len % self.window if self.chunked else self.window - 1


@attrs.frozen
class ModelShape:
    """The sizes of a decoder from which its weights and its cache are computed.

    Args:
        name: What to call it.
        layers: What each layer holds, in their order, at least one.
        weight_bytes: Bytes of all weights; those that two modules share count once.
        max_positions: Tokens that the model is made for; None if that is not known.

    Raises:
        TypeError: A size is not an int, or ``layers`` no tuple of `LayerShape`.
        ValueError: A size is below its least.
    """

    name: str
    layers: tuple[LayerShape, ...]
    weight_bytes: int
    max_positions: int | None = None

    def __attrs_post_init__(self) -> None:
        check_count("weight_bytes", self.weight_bytes, minimum=0)
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
