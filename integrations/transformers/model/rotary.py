"""Apply and undo a layer's rotary embedding, whose frequencies are found from its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.rotary import RotaryEmbedding

# The largest difference of cosines and sines, which a model computes in float32 from the same
# frequencies.
ROUNDING = 1e-3


@attrs.frozen(eq=False)
class RotaryChannels:
    """A description of how a layer rotates its queries and keys: channels and frequencies.

    Args:
        frequencies: float32 ``[pairs]``, the angle per position of each pair of channels.
        scale: Factor on the rotated channels, as in YaRN.
        channels: int64 ``[2, pairs]``, the first and the second channel of each pair; no pairs if
            the layer rotates nothing.
        axes: int64 ``[pairs]``, the axis of positions by which each pair is rotated; None if
            positions have one.
    """

    frequencies: Tensor
    scale: float
    channels: Tensor
    axes: Tensor | None = None

    def turned(self, states: Tensor, places: Tensor, *, back: bool = False) -> Tensor:
        """Rotate queries or keys to positions ``places``; with ``back``, undo such a rotation.

        States are ``[batch, heads, length, head_dim]``, places ``[batch, heads or 1, length]``, or
        ``[batch, heads or 1, length, axes]``.
        """
        angles = self._of_pairs(places, states).float() * self.frequencies.to(states.device)
        size = 1 / self.scale if back else self.scale
        return self._rotated(states, angles.cos() * size, angles.sin() * (-size if back else size))

    def moved(self, states: Tensor, by: Tensor) -> Tensor:
        """Rotate what is rotated already by more positions, of the shape of places in `turned`.

        In float64: an angle of 100,000 positions has an error of 0.01 in float32.
        """
        angles = self._of_pairs(by, states).double() * self.frequencies.to(states.device)
        return self._rotated(states, angles.cos().float(), angles.sin().float())

    def _of_pairs(self, places: Tensor, states: Tensor) -> Tensor:
        """Return each pair's positions, or one for all pairs, in a last axis."""
        places = places.to(states.device)
        if places.ndim == 3:
            return places[..., None]
        return places if self.axes is None else places[..., self.axes]

    def _rotated(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        channels = self.channels.to(states.device)
        if not channels.shape[1]:
            return states.clone()
        # Every channel times a cosine, plus the other of its pair times a sine; others stay.
        width = states.shape[-1]
        cosines, sines = cos.new_ones(*cos.shape[:-1], width), sin.new_zeros(*sin.shape[:-1], width)
        cosines[..., channels] = cos[..., None, :]
        sines[..., channels] = torch.stack([-sin, sin], dim=-2)
        others = torch.arange(width, device=states.device)
        others[channels] = channels.flip(0)
        other = states.index_select(-1, others)  # several times as fast as indexing
        found = (states.float() * cosines).addcmul_(other.float(), sines)
        return found.to(states.dtype)


@attrs.frozen(eq=False)
class Gapless:
    """A map from tokens' original positions to those at which a restarted prefill reads them.

    Args:
        positions: ``[batch, count]`` int64, the original positions of the tokens read, ascending;
            -1 on the left of shorter rows.
        start: ``[batch]`` int64, the number of tokens of each row before its prompt.
    """

    positions: Tensor
    start: Tensor

    def places(self, positions: Tensor) -> Tensor:
        """Return the positions at which the tokens at these original positions are read.

        Both are ``[batch, heads or 1, length]``. A token that was left out gets the place of the
        last token before it that was read.
        """
        read, start = (each.to(positions.device) for each in (self.positions, self.start))
        read, start = read.contiguous(), start[:, None]
        padding = (read < 0).sum(dim=1)[:, None]
        flat = positions.flatten(1).contiguous()
        up_to = torch.searchsorted(read, flat, right=True) - padding  # read, it included
        behind = (flat - read[:, -1:]).clamp(min=0)
        places = torch.where(flat < start, flat, start + (up_to - 1).clamp(min=0) + behind)
        return places.view(positions.shape)


@attrs.frozen(eq=False)
class GivenPlaces:
    """A map from tokens' original positions to the position ids that the model was given.

    They may have several axes, for images, and need not begin with 0. Behind the tokens of the
    table follows text: one more than the largest position of the token before.

    Args:
        table: ``[batch, count, axes]`` int64, the positions of each row's first tokens.
    """

    table: Tensor

    def places(self, positions: Tensor) -> Tensor:
        """Return ``[batch, heads or 1, length, axes]`` of tokens ``[batch, heads or 1, length]``.

        Padding, of position -1, has any.
        """
        table = self.table.to(positions.device)
        flat = positions.flatten(1)
        behind = (flat + 1 - table.shape[1]).clamp(min=0)[..., None]
        at = flat.clamp(0, table.shape[1] - 1)[..., None].expand(-1, -1, table.shape[2])
        text = table[:, -1:].amax(dim=-1, keepdim=True) + behind
        found = torch.where(behind > 0, text, table.gather(1, at))
        return found.view(*positions.shape, -1)

    def cut(self, lengths: Tensor) -> GivenPlaces:
        """Return a copy for rows of these lengths ``[batch]``: text follows behind each."""
        last = (lengths - 1).clamp(min=0)
        count = torch.arange(max(int(lengths.max()), 1), device=last.device)
        known = self.places(count.minimum(last[:, None])[:, None])[:, 0]
        behind = (count - last[:, None]).clamp(min=0)[..., None]
        text = known.amax(dim=-1, keepdim=True) + behind
        return GivenPlaces(torch.where(behind > 0, text, known))

    def extended(self, given: Tensor, positions: Tensor, lengths: Tensor) -> GivenPlaces:
        """Return a copy with more tokens, which make rows of ``lengths`` ``[batch]``.

        They are ``given`` ids ``[axes, batch or 1, count]`` for their original positions ``[batch,
        count]``, -1 on padding.
        """
        axes, batch = max(len(given), self.axes), len(positions)
        every = torch.arange(int(lengths.max()) + 1, device=positions.device)
        table = self.places(every.expand(batch, 1, -1))[:, 0].repeat(1, 1, axes // self.axes)
        # Padding is written to a spare place.
        own = positions.where(positions >= 0, len(every) - 1)[..., None].expand(-1, -1, axes)
        table.scatter_(1, own, given.movedim(0, -1).expand(batch, -1, axes).to(table))
        return GivenPlaces(table).cut(lengths)

    @staticmethod
    def of_text(batch: int, device: torch.device) -> GivenPlaces:
        """Return the map of rows whose positions count tokens."""
        return GivenPlaces(torch.zeros(batch, 1, 1, dtype=torch.int64, device=device))

    @property
    def axes(self) -> int:
        """The number of axes."""
        return self.table.shape[2]

    @property
    def counts_tokens(self) -> bool:
        """True if positions are the original ones; reading waits for the device."""
        every = torch.arange(self.table.shape[1], device=self.table.device)
        return torch.equal(self.table, every[:, None].expand_as(self.table))


@attrs.frozen(eq=False)
class LayerRotary(RotaryEmbedding):
    """A rotary embedding of one layer, as scorers use it to rotate keys and queries.

    Tokens are read at their original positions if ``read_at`` is None.
    """

    turns: RotaryChannels
    read_at: Gapless | GivenPlaces | None = None

    def turned(self, states: Tensor, positions: Tensor) -> Tensor:
        """See `RotaryEmbedding.turned`."""
        return self.turns.turned(states, self._places(positions))

    def turned_back(self, states: Tensor, positions: Tensor) -> Tensor:
        """See `RotaryEmbedding.turned_back`."""
        return self.turns.turned(states, self._places(positions), back=True)

    def moved(self, states: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """See `RotaryEmbedding.moved`; one rotation, by the difference."""
        return self.turns.moved(states, self._places(after) - self._places(before))

    def _places(self, positions: Tensor) -> Tensor:
        return positions if self.read_at is None else self.read_at.places(positions)


@attrs.frozen
class Form:
    """A tensor layout in which a model gives its layers the cosines and sines of rotary angles.

    ``halves``: all cosines (or sines), then all again; ``pairs``: each one twice in a row;
    ``once``: each one once; ``complex``: as complex numbers.
    """

    name: str

    def given(self, cos: Tensor, sin: Tensor, like: Any) -> Any:
        """Convert cosines and sines ``[batch, length, pairs]`` to the layout of the model."""
        if self.name == "complex":
            return torch.complex(cos, sin).to(like)
        return tuple(self._spread(each).to(like[0]) for each in (cos, sin))

    def _spread(self, each: Tensor) -> Tensor:
        if self.name == "once":
            return each
        return each.repeat_interleave(2, dim=-1) if self.name == "pairs" else each.repeat(1, 1, 2)

    def of_pairs(self, each: Tensor) -> Tensor:
        """Convert cosines or sines ``[..., channels]`` from this layout to ``[..., pairs]``."""
        if self.name == "halves":
            return each[..., : each.shape[-1] // 2]
        return each[..., ::2] if self.name == "pairs" else each


FORMS = tuple(map(Form, ("halves", "pairs", "once", "complex")))


def frequencies_of(
    decoder: nn.Module, given: Any, places: Tensor, valid: Tensor
) -> tuple[Tensor, float, Form, Tensor | None] | None:
    """Find which frequencies in a model give the rotary embedding that a layer gets.

    Args:
        decoder: The layer's decoder.
        given: What the layer is given: cosines and sines, or complex numbers, for each token.
        places: ``[batch, length]`` or ``[batch, length, axes]`` int64, the tokens' positions.
        valid: ``[batch, length]`` bool, False on padding.

    Returns:
        Frequencies float32 ``[pairs]``, the factor on cosines and sines, their format, and the axis
        of each pair if positions have several; None if no frequencies of the model fit.
    """
    parts = given if isinstance(given, tuple) else (given,)
    if not all(isinstance(each, Tensor) and each.ndim == 3 for each in parts):
        return None
    complex_ = len(parts) == 1 and parts[0].is_complex()
    if not complex_ and len(parts) != 2:
        return None
    device, dtype = parts[0].device, parts[0].dtype
    places, valid = places.to(device), valid.to(device)
    tolerance = max(ROUNDING, 2 * torch.finfo(dtype).eps)
    places = places[..., None] if places.ndim == 2 else places
    shown = None
    if places.shape[2] > 1:
        shown = _turned_by_axis(decoder, parts[0], places.shape[2])
        if shown is None:
            return None
    for frequencies, scale in _candidates(decoder):
        for form in FORMS:
            fits = form.of_pairs(parts[0]).shape[-1] == len(frequencies)
            if (form.name == "complex") != complex_ or not fits:
                continue
            axes = None if shown is None else form.of_pairs(shown).to(torch.uint8).argmax(dim=0)
            own = places if axes is None else places[..., axes]
            angles = own.float() * frequencies.to(device, torch.float32)
            made = form.given(angles.cos() * scale, angles.sin() * scale, given)
            made = made if isinstance(made, tuple) else (made,)
            if all(_alike(*pair, valid, tolerance) for pair in zip(made, parts, strict=True)):
                return frequencies.detach().float().clone(), scale, form, axes
    return None


def _turned_by_axis(decoder: nn.Module, like: Tensor, axes: int) -> Tensor | None:
    """Mark the channels that a position on each axis turns, bool ``[axes, channels]``.

    None if the decoder has no rotary embedding that gives cosines and sines of such positions.
    """
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None or like.is_complex():
        return None
    places = torch.eye(axes, dtype=torch.int64, device=like.device)[:, None]
    sin: Tensor = rotary(like.new_zeros(1, axes, 1), places)[1]
    return sin[0] != 0


def _alike(made: Tensor, given: Tensor, valid: Tensor, tolerance: float) -> bool:
    if made.shape[1:] != given.shape[1:] or given.shape[0] not in (1, made.shape[0]):
        return False
    off = (made - given).abs().amax(dim=-1).masked_fill(~valid, 0.0)
    return bool(off.max() <= tolerance * max(float(given.abs().max()), 1.0))


def _candidates(decoder: nn.Module) -> Iterator[tuple[Tensor, float]]:
    """Yield the rotary frequencies that a decoder's modules hold, each with its scale."""
    for module in decoder.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and buffer.ndim == 1:
                kind = name.removesuffix("inv_freq").removesuffix("original_")
                scale = getattr(module, f"{kind}attention_scaling", 1.0)
                yield buffer, float(scale)


def channels_of(pairs: int, head_dim: int, fits: Callable[[Tensor], bool]) -> Tensor | None:
    """Find which channels of a head, int64 ``[2, pairs]``, are rotated as pairs.

    The usual layouts are tried; None if ``fits`` returns True for none of them.
    """
    every = torch.arange(2 * pairs)
    for start in dict.fromkeys((0, head_dim - 2 * pairs)):
        if start < 0:
            continue
        for channels in (every.view(2, pairs), every.view(pairs, 2).T):  # halves; neighbours
            if fits(channels + start):
                return channels + start
    return None


def _parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary settings in a configuration, of all layers or of each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None)
        if isinstance(found, dict):
            yield found
            yield from (each for each in found.values() if isinstance(each, dict))


def has_axes(config: Any) -> bool:
    """True if a model's rotary positions have several axes, as for tokens of images."""
    return any("mrope_section" in each for each in _parameters(config))


def changes_with_length(config: Any) -> bool:
    """True if a model's rotary frequencies depend on the length of the context."""
    kinds = [str(each.get("rope_type", each.get("type"))) for each in _parameters(config)]
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)


def stretch(config: Any) -> float:
    """Return the factor, at least 1, by which rotary scaling extends a model's positions."""
    factors = [each.get("factor") for each in _parameters(config)]
    return max([1.0, *(float(each) for each in factors if isinstance(each, (int, float)))])
