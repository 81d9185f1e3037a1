"""Find a layer's rotary embedding and output projection by running the layer on a few tokens.

When a layer is first entered under a policy whose parts need them, its last tokens are run through
it as far as necessary. Running them at other positions shows which channels are rotated. Replacing
the outputs of its heads shows which module takes these outputs.

The channels and the module are found once. The frequencies are found at every forward: the rotary
embedding that a layer is given is compared with the frequencies that the decoder holds, at the
tokens' own positions. A layer whose results are not as expected is refused; the error names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import attrs
import torch
from torch import Tensor
from transformers import Cache

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.inputs import take_columns
from kvpolicy.integrations.transformers.forward.reaching import ReachingTokens, cut_arguments
from kvpolicy.integrations.transformers.model.attachment import AroundLayer
from kvpolicy.integrations.transformers.model.layer_trial import FAILURES, LayerTrial, near
from kvpolicy.integrations.transformers.model.masks import causal_mask
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.model.rotary import (
    Form,
    Gapless,
    GivenPlaces,
    RotaryChannels,
    changes_with_length,
    channels_of,
    frequencies_of,
    has_axes,
)
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policy import CachePolicy

# Positions of the tokens with which a layer is tried.
TRIED = (3, 11)

Found = TypeVar("Found")


@attrs.frozen(eq=False)
class LayerProbe:
    """A finder of the layers' rotary embeddings and output projections, for one forward.

    Args:
        rotary: Whether a part rotates keys or queries, or the cache rotates kept keys.
        output_weight: Whether a part reads the weights of output projections.
        known: Rotary embeddings that layers were given, with the frequencies found for each.
        compared: Frequencies of an earlier forward and of this one, with the result of comparing
            them.
    """

    parts: ModelParts
    policy: CachePolicy
    rotary: bool
    output_weight: bool
    known: list[tuple[Any, Any]] = attrs.field(factory=list)
    compared: list[tuple[Tensor, Tensor, bool]] = attrs.field(factory=list)

    @staticmethod
    def of(parts: ModelParts, policy: CachePolicy) -> LayerProbe | None:
        """Make the finder if the policy reads rotary embeddings or projections; else None."""
        later = policy.decoding
        rotary = policy.needs_rotary or (later is not None and later.needs_rotary)
        rotary = rotary or policy.gapless
        weight = policy.needs_output_weight or (later is not None and later.needs_output_weight)
        if not (rotary or weight):
            return None
        asked = LayerProbe(parts, policy, rotary, weight)
        if not parts.shows_queries:
            asked._refuse("some layers call attention functions of their own")
        if rotary and not asked.reads_places and has_axes(parts.config):
            asked._refuse("its rotary positions have several axes, as for the tokens of an image")
        if policy.gapless and changes_with_length(parts.config):
            asked._refuse("its rotary frequencies change with the length of what is read")
        if later is not None and later.needs_rotary and policy.propagation.restarts:
            asked._refuse("after a restart, the keys in the cache are rotated to other positions")
        return asked

    @property
    def reads_places(self) -> bool:
        """True if tokens are read where the model or the caller says, and parts must know where."""
        moves = self.policy.gapless or self.policy.propagation.restarts
        return self.rotary and not moves

    def check_places(self, tokens: SeenTokens) -> None:
        """Check that the rotary positions of the tokens read earlier are known."""
        skipped = tokens.skipped
        if not self.rotary or skipped is None or not bool(skipped.any()):
            return
        if not self.policy.gapless:
            self._refuse("a restart in an earlier turn has read tokens at other positions")
        if self.policy.needs_rotary:  # parts see original positions only
            self._refuse("the keys in the cache are rotated to positions without gaps")

    def enter(
        self,
        around: AroundLayer,
        layer: PolicyLayer,
        hidden: Tensor,
        kwargs: dict[str, Any],
        *,
        reach: ReachingTokens,
        before: SeenTokens,
        read_at: Gapless | GivenPlaces | None,
        implementation: str,
    ) -> None:
        """Try a layer that is about to run, and note what the policy needs to know of it."""
        axis = reach.token_axis(hidden)
        length = hidden.shape[axis]
        last = torch.arange(max(length - 2, 0), length, device=reach.valid.device)
        slots = last.expand(reach.valid.shape[0], -1)
        here = {
            name: None if "mask" in name or isinstance(value, Cache) else value
            for name, value in reach.arguments(kwargs).items()
        }
        if layer.indexed is not None:  # its indexer reads the mask
            how = implementation, hidden.dtype, hidden.device
            mask = causal_mask(len(last), len(last), *how)
            assert isinstance(mask, Tensor)
            here["attention_mask"] = mask.expand(hidden.shape[0], -1, -1, -1)
        attention = self.parts.attentions[around.index]
        assert attention is not None
        entering = LayerTrial(
            around.index,
            around.module,
            attention,
            take_columns(hidden, slots, axis - 1, axis),
            axis,
            cut_arguments(here, slots, length),
            kwargs.get("position_embeddings"),
        )
        places = everything = reach.every_position
        if read_at is not None:
            places = read_at.places(everything[:, None])[:, 0]
        elif before.skipped is not None:
            places = (everything - before.skipped[:, None]).clamp(min=0)
        if self.rotary:
            layer.facts.turns = self._turns(layer, entering, places, everything >= 0)
        if self.output_weight and layer.facts.projection is None:
            layer.facts.projection = self._tried(entering, entering.projection)
            if layer.facts.projection is None:
                entering.check_finite()
                self._refuse(f"no projection of layer {entering.index} takes its heads' outputs")

    def _turns(
        self, layer: PolicyLayer, entering: LayerTrial, places: Tensor, valid: Tensor
    ) -> RotaryChannels:
        given = entering.embeddings
        if given is None:
            self._refuse(
                f"layer {entering.index} gets no rotary embedding: its keys contain absolute "
                "positions, or none"
            )
        found = next((of_given for each, of_given in self.known if each is given), None)
        if found is None:
            found = frequencies_of(self.parts.decoder, given, places, valid)
            if found is None:
                self._refuse(
                    f"the rotary embedding that layer {entering.index} gets does not fit its "
                    "tokens' positions by any frequencies of the decoder"
                )
            self.known.append((given, found))
        frequencies, scale, form, axes = found
        before = layer.facts.turns
        if before is not None and self._are_those(before, frequencies, scale):
            return before if axes is None else attrs.evolve(before, axes=axes)
        if before is not None and layer.held is not None:
            self._refuse(
                "its rotary frequencies have changed with the length of the context, and the "
                "keys in the cache were rotated by others"
            )

        channels = self._tried(entering, lambda: _channels(entering, frequencies, scale, form))
        if channels is None:
            entering.check_finite()
            self._refuse(
                f"layer {entering.index} does something else to its keys than rotating them"
            )
        return RotaryChannels(frequencies, scale, channels.to(frequencies.device), axes)

    def _are_those(self, turns: RotaryChannels, frequencies: Tensor, scale: float) -> bool:
        """True if a layer rotated by these frequencies in an earlier forward too.

        Layers that share a tensor of frequencies are compared once.
        """
        for own, others, same in self.compared:
            if own is turns.frequencies and others is frequencies:
                return same and turns.scale == scale
        same = torch.equal(turns.frequencies.to(frequencies.device), frequencies)
        self.compared.append((turns.frequencies, frequencies, same))
        return same and turns.scale == scale

    def _tried(self, entering: LayerTrial, find: Callable[[], Found]) -> Found:
        try:
            return find()
        except FAILURES as error:
            self._refuse(f"layer {entering.index} cannot be run without a cache ({error})")

    def _refuse(self, reason: str) -> NoReturn:
        wanted = {"a rotary embedding": self.rotary, "an output projection": self.output_weight}
        remedy = "use a policy that does not need it, such as KVzip"
        remedy += ", and gapless=False" if self.policy.gapless else ""
        raise UnsupportedModelError(
            f"model must have {' and '.join(name for name, asked in wanted.items() if asked)} "
            f"that a policy can read, since parts of {self.policy} need it, but "
            f"{type(self.parts.model).__name__} has none: {reason}; {remedy}"
        )


def _channels(entering: LayerTrial, frequencies: Tensor, scale: float, form: Form) -> Tensor | None:
    """Find which channels of the heads a layer rotates; none if the layer does not rotate."""
    count = entering.hidden.shape[entering.token_axis]
    places = torch.tensor(TRIED[:count], device=frequencies.device)[None]
    angles = places[..., None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    before = entering.states(
        lambda like: form.given(torch.ones_like(cos), torch.zeros_like(sin), like)
    )
    after = entering.states(lambda like: form.given(cos * scale, sin * scale, like))
    if all(torch.equal(*pair) for pair in zip(before, after, strict=True)):
        return torch.empty(2, 0, dtype=torch.int64)

    def fits(channels: Tensor) -> bool:
        turns = RotaryChannels(frequencies, scale, channels)
        pairs = zip(before, after, strict=True)
        return all(near(turns.turned(one, places[:, None]), other) for one, other in pairs)

    return channels_of(len(frequencies), before[0].shape[-1], fits)
