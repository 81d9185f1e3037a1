"""Checks arguments that name layers: one or several indices, or None for a default."""

from __future__ import annotations

from kvpolicy.checks import as_tuple, check_count


def as_layers(layers: object) -> tuple[int, ...] | None:
    """Convert layer indices to an ascending tuple; None, for the default layers, stays None.

    Args:
        layers: An iterable of layer indices, from 0, or None.

    Raises:
        TypeError: ``layers`` is no iterable of ints.
        ValueError: ``layers`` is empty, an index is below 0, or an index is repeated.

    Example:
        >>> as_layers([7, 3])
        (3, 7)
    """
    if layers is None:
        return None
    given = as_tuple("tsp_layers", "layer indices", layers)
    found = sorted(check_count("tsp_layers", layer) for layer in given)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"tsp_layers must be at least one layer, each once, got {found}")
    return tuple(found)


def within(layers: tuple[int, ...], num_layers: int, *, first: int = 0) -> frozenset[int]:
    """Check that layer indices exist in a model, and return them as a set.

    Args:
        layers: The layer indices.
        num_layers: Layers of the model.
        first: The smallest index allowed, for the message.

    Raises:
        ValueError: An index lies outside the model.
    """
    if max(layers) >= num_layers:
        raise ValueError(
            f"tsp_layers must be in [{first}, {num_layers - 1}] for a model of {num_layers} "
            f"layers, got {list(layers)}"
        )
    return frozenset(layers)
