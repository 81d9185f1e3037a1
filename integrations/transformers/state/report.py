"""Report the tokens and bytes a cache holds, and the bytes of a full cache."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvpolicy.integrations.transformers.state.layer import PolicyLayer


@attrs.frozen
class LayerReport:
    """A count of the tokens and bytes held by one layer, or by all layers together.

    Args:
        seen: Tokens seen, over all rows, padding not counted.
        kept: Tokens whose keys and values are held, over all rows; the mean over the KV heads.
        held_bytes: Bytes held in this process: keys and values, index keys if the layer has an
            indexer, and the layer's state. Memory reserved for more tokens is not counted: that for
            ``max_new_tokens`` or, while decoding, up to a sixteenth.
        full_bytes: The same bytes in a full cache, padding included.
        padding_bytes: How many of ``held_bytes`` hold no token. Heads and rows are padded to the
            length of the longest if they keep nearly equal numbers of tokens, or while `generate`
            decodes into fixed buffers. Otherwise they are held without padding.
        holds_tokens: Whether the layer has keys and values. Other layers hold a state, which is as
            large in a full cache, or nothing.
        observed_bytes: Bytes of the queries and sums by which a policy evicts while it decodes. A
            full cache has none; they are not part of ``held_bytes``.
    """

    seen: int
    kept: float
    held_bytes: int
    full_bytes: int
    padding_bytes: int = 0
    holds_tokens: bool = True
    observed_bytes: int = 0

    @property
    def share(self) -> float:
        """The bytes that a layer holds as a share of a full cache's; 0 for an empty cache."""
        return self.held_bytes / self.full_bytes if self.full_bytes else 0.0


@attrs.frozen
class CacheReport:
    """A report of the tokens and bytes that each layer of a cache holds, printed as a table.

    The table has at most 80 columns.

    Under tensor parallelism a cache holds only the keys and values of its process's heads. All
    numbers of bytes and heads then count these heads only, also those of the full cache.

    Args:
        layers: One report for each layer.

    Example:
        >>> print(CacheReport((LayerReport(1000, 100.0, 51200, 512000, 2048),)))
        layer tokens seen tokens kept          bytes      padding      full cache  share
        0           1,000       100.0         51,200        2,048         512,000  10.0%
        total       1,000       100.0         51,200        2,048         512,000  10.0%
    """

    layers: tuple[LayerReport, ...]

    @staticmethod
    def of(layers: Sequence[PolicyLayer], seen: int, columns: int) -> CacheReport:
        """Count the tokens and bytes that each layer of a cache holds.

        It has ``seen`` tokens, over all rows without padding, in ``columns`` columns.
        """
        reports = []
        for layer in layers:
            held, positions = layer.held, layer.positions
            state = layer.state_nbytes()
            if not layer.attends:
                reports.append(LayerReport(seen, 0.0, state, state, holds_tokens=False))
                continue
            if held is None or positions is None:
                reports.append(LayerReport(0, 0.0, 0, 0))
                continue
            batch, kv_heads = held.shape[:2]
            slot_bytes = sum(held.widths) * held.dtype.itemsize
            kept = int((positions >= 0).sum()) / positions.shape[1]
            taken = layer.taken_nbytes()
            full = batch * columns * (kv_heads * slot_bytes + layer.beside_nbytes())
            padding = taken * (held.slots - round(kept * kv_heads)) // max(held.slots, 1)
            observed = layer.observed.nbytes()
            of_layer = LayerReport(seen, kept, taken + state, full + state, padding)
            reports.append(attrs.evolve(of_layer, observed_bytes=observed))
        return CacheReport(tuple(reports))

    @property
    def total(self) -> LayerReport:
        """The report of all layers of the cache together.

        Bytes are sums; tokens kept are the mean over the layers that hold keys and values.
        """
        count = max(sum(layer.holds_tokens for layer in self.layers), 1)
        return LayerReport(
            seen=max((layer.seen for layer in self.layers), default=0),
            kept=sum(layer.kept for layer in self.layers) / count,
            held_bytes=sum(layer.held_bytes for layer in self.layers),
            full_bytes=sum(layer.full_bytes for layer in self.layers),
            padding_bytes=sum(layer.padding_bytes for layer in self.layers),
            observed_bytes=sum(layer.observed_bytes for layer in self.layers),
        )

    def __str__(self) -> str:
        lines = [
            f"{'layer':<5}{'tokens seen':>12}{'tokens kept':>12}{'bytes':>15}{'padding':>13}"
            f"{'full cache':>16}{'share':>7}"
        ]
        rows = [(str(index), layer) for index, layer in enumerate(self.layers)]
        for name, row in [*rows, ("total", self.total)]:
            kept = f"{row.kept:,.1f}" if row.holds_tokens else "-"
            lines.append(
                f"{name:<5}{row.seen:>12,}{kept:>12}{row.held_bytes:>15,}"
                f"{row.padding_bytes:>13,}{row.full_bytes:>16,}{row.share:>7.1%}"
            )
        if self.total.observed_bytes:
            lines.append(
                f"and {self.total.observed_bytes:,} bytes of queries and sums to choose by"
            )
        return "\n".join(lines)


def held_in_words(layers: Sequence[PolicyLayer], seen: int) -> str:
    """Say in a few words how much a cache has read and holds, without reading a tensor.

    Of a layer whose rows or heads hold different numbers of tokens, the largest is shown.
    """
    counts = [layer.kept_len for layer in layers if layer.attends]
    if not seen or not counts:
        return f"{seen:,} tokens read" if seen else "empty"
    few, most = min(counts), max(counts)
    held = f"{most:,}" if few == most else f"{few:,} to {most:,}"
    return f"{seen:,} tokens read, {held} held by each layer"
