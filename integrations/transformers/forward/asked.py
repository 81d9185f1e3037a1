"""What a policy's parts ask for of a layer beside its keys: found, and proved, on the layer itself.

When a layer is first entered under such a policy, its last tokens are run through it as far as
needed: at other positions, to see which channels these turn; with other outputs of its heads, to
see which module takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.model.rotary import (
    Form,
    Turns,
    changes_with_length,
    channels_of,
    frequencies_of,
    has_axes,
)
from kvpolicy.integrations.transformers.model.trying import FAILURES, Entering, near
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policy import CachePolicy

# Positions at which a layer is tried, of as many tokens.
TRIED = (3, 11)

Found = TypeVar("Found")


@attrs.frozen(eq=False)
class Asked:
    """Finds what parts ask for, in one forward.

    Args:
        parts: The model.
        policy: The policy.
        rotary: Whether a part turns keys or queries, or the cache those that are kept.
        output_weight: Whether a part reads the weights of output projections.
        known: Rotary embeddings that layers were given, and the frequencies found of each.
        compared: Frequencies of an earlier forward and of this one, and whether they are the same.
    """

    parts: ModelParts
    policy: CachePolicy
    rotary: bool
    output_weight: bool
    known: list[tuple[Any, Any]] = attrs.field(factory=list)
    compared: list[tuple[Tensor, Tensor, bool]] = attrs.field(factory=list)

    @staticmethod
    def of(parts: ModelParts, policy: CachePolicy) -> Asked | None:
        """None where nothing is asked for.

        Raises:
            UnsupportedModelError: What is asked for cannot be had of the model, whatever the layer.
        """
        later = policy.decoding
        rotary = policy.needs_rotary or (later is not None and later.needs_rotary)
        rotary = rotary or policy.gapless
        weight = policy.needs_output_weight or (later is not None and later.needs_output_weight)
        if not (rotary or weight):
            return None
        asked = Asked(parts, policy, rotary, weight)
        if not parts.shows_queries:
            asked._refuse("some layers call attention functions of their own")
        if rotary and has_axes(parts.config):
            asked._refuse("its rotary positions have several axes, as those of an image's tokens")
        if policy.gapless and changes_with_length(parts.config):
            asked._refuse("its rotary frequencies change with the length of what is read")
        if later is not None and later.needs_rotary and policy.propagation.restarts:
            asked._refuse("behind a restart, keys that are held were turned at other positions")
        return asked

    def check_places(self, tokens: SeenTokens) -> None:
        """Check that it is known at which positions tokens seen before were read.

        Raises:
            UnsupportedModelError: It is not.
        """
        skipped = tokens.skipped
        if not self.rotary or skipped is None or not bool(skipped.any()):
            return
        if not self.policy.gapless:
            self._refuse("a restart in an earlier turn has read tokens at other positions")
        if self.policy.needs_rotary:  # whom positions are shown, which are original ones
            self._refuse("keys that are held were turned to positions without gaps")

    def find(self, layer: PolicyLayer, entering: Entering, places: Tensor, valid: Tensor) -> None:
        """Let a layer know what is asked for of it.

        Args:
            layer: What it holds.
            entering: The layer, about to run.
            places: ``[batch, new_len]`` int64, the positions at which the forward's tokens are
                read.
            valid: ``[batch, new_len]`` bool, False on padding.

        Raises:
            UnsupportedModelError: It cannot be had of the layer.
            ValueError: The layer's queries or keys are no finite numbers.
        """
        if self.rotary:
            layer.turns = self._turns(layer, entering, places, valid)
        if self.output_weight and layer.projection is None:
            layer.projection = self._tried(entering, entering.projection)
            if layer.projection is None:
                entering.check_finite()
                self._refuse(f"no projection of layer {entering.index} takes its heads' outputs")

    def _turns(
        self, layer: PolicyLayer, entering: Entering, places: Tensor, valid: Tensor
    ) -> Turns:
        given = entering.embeddings
        if given is None:
            self._refuse(
                f"layer {entering.index} is given no rotary embedding: what its keys know of their "
                "positions is added before, or nothing"
            )
        found = next((of_given for each, of_given in self.known if each is given), None)
        if found is None:
            found = frequencies_of(self.parts.decoder, given, places, valid)
            if found is None:
                self._refuse(
                    f"the rotary embedding that layer {entering.index} is given is not that of its "
                    "tokens' own positions by frequencies that the decoder holds"
                )
            self.known.append((given, found))
        frequencies, scale, form = found
        before = layer.turns
        if before is not None and self._are_those(before, frequencies, scale):
            return before
        if before is not None and layer.held is not None:
            self._refuse(
                "its rotary frequencies have changed with the length of the context, and keys that "
                "are held were turned by others"
            )

        channels = self._tried(entering, lambda: _channels(entering, frequencies, scale, form))
        if channels is None:
            entering.check_finite()
            self._refuse(f"layer {entering.index} does something else with its keys than to turn")
        return Turns(frequencies, scale, channels.to(frequencies.device))

    def _are_those(self, turns: Turns, frequencies: Tensor, scale: float) -> bool:
        """Whether a layer turned by these before: looked at once for layers of the same tensor."""
        for own, others, same in self.compared:
            if own is turns.frequencies and others is frequencies:
                return same and turns.scale == scale
        same = torch.equal(turns.frequencies.to(frequencies.device), frequencies)
        self.compared.append((turns.frequencies, frequencies, same))
        return same and turns.scale == scale

    def _tried(self, entering: Entering, find: Callable[[], Found]) -> Found:
        try:
            return find()
        except FAILURES as error:
            self._refuse(f"layer {entering.index} cannot be run without a cache ({error})")

    def _refuse(self, reason: str) -> NoReturn:
        wanted = {"a rotary embedding": self.rotary, "an output projection": self.output_weight}
        remedy = "use parts that do not ask for it"
        remedy += ", and gapless=False" if self.policy.gapless else ""
        raise UnsupportedModelError(
            f"model must have {' and '.join(name for name, asked in wanted.items() if asked)} of "
            f"which a policy can know, since parts of {self.policy} ask for it, but not so "
            f"{type(self.parts.model).__name__}: {reason}; {remedy}"
        )


def _channels(entering: Entering, frequencies: Tensor, scale: float, form: Form) -> Tensor | None:
    """Which channels a layer turns by frequencies; none of them, if it turns none."""
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
        turns = Turns(frequencies, scale, channels)
        pairs = zip(before, after, strict=True)
        return all(near(turns.turned(one, places[:, None]), other) for one, other in pairs)

    return channels_of(len(frequencies), before[0].shape[-1], fits)
