"""Run a prefill in two passes: the first chooses tokens at a layer, the second reads them."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.forward.inputs import OF_TOKENS, Incoming, take_columns
from kvpolicy.integrations.transformers.forward.prefill import ActingForward
from kvpolicy.integrations.transformers.forward.relative_positions import Columns
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import gather_positions


class _Chosen(Exception):  # noqa: N818 -- not an error: it ends a pass early
    """A signal that ends the first pass, once the filter layer has chosen."""


class FilterPass(ActingForward):
    """A first pass over a prompt, which only chooses the tokens of the second pass.

    It ends inside the filter layer, once the queries and keys of that layer are known. The layer's
    attention and MLP are not computed, and no later layer is.

    Args:
        policy: A policy whose propagation restarts.
        layers: The layers of the cache; they stay unchanged.
        incoming: The forward's tokens and those seen before.
        kwargs: See `Forward`.

    Raises:
        ValueError: The caller gives position_ids that do not count a row's own tokens, so that the
            second pass could not continue them.
    """

    def __init__(
        self,
        policy: CachePolicy,
        layers: list[PolicyLayer],
        incoming: Incoming,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, layers, incoming, **kwargs)
        check_positions(policy, incoming)
        (self.filter_layer,) = policy.propagation.acting_layers(len(layers))
        self._incoming = incoming
        self._chosen: Tensor | None = None

    @property
    def features(self) -> AddedFeatures | None:
        """The features that are added to hidden states, for the chosen tokens only."""
        if self._features is None or self._chosen is None:
            return self._features
        return self._features.taken(self._chosen)

    def run(self, decoder: nn.Module) -> Incoming:
        """Run the pass; return the tokens of the second pass."""
        states = [layer.state() for layer in self.layers]
        try:
            # `forward` is called directly, since this code runs inside a hook of the decoder.
            decoder.forward(**self._incoming.arguments)
        except _Chosen:
            for layer, state in zip(self.layers, states, strict=True):
                layer.restore(state)  # recurrent layers have read tokens that were not chosen
            return self._second()
        raise AssertionError("the filter layer was never reached")

    def enter_layer(
        self, index: int, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Check that no token sees a later one; then see `Forward.enter_layer`.

        Raises:
            UnsupportedModelError: Tokens see later ones, which the second pass could not reproduce.
        """
        if self._own_block(kwargs) is not None:
            raise UnsupportedModelError(
                f"no token may see a later one where {self.policy.propagation} restarts the "
                "prefill, but the model's mask lets the tokens of an image see each other; use a "
                "policy that does not restart"
            )
        return super().enter_layer(index, module, hidden, kwargs)

    def columns(self, index: int) -> Columns | None:
        """Refuse attention that measures distances in columns; see `Forward.columns`.

        Raises:
            UnsupportedModelError: The layer's attention measures distances in columns, some of
                which the second pass leaves out.
        """
        if self._inside == index:
            raise UnsupportedModelError(
                f"attention must go by position_ids where {self.policy.propagation} restarts the "
                f"prefill at new positions, but that of layer {index} counts columns; use a policy "
                "that does not restart"
            )
        return None

    def before_attention(self, index: int, inputs: AttentionInputs) -> None:
        """At the filter layer, choose the tokens and end the pass."""
        if index == self.filter_layer:
            context = self._context(index, inputs)
            self._chosen = self._here(self.policy.decide_restart(context))
            raise _Chosen

    def observe(self, index: int, inputs: AttentionInputs) -> None:
        """Score the layer if the filter layer looks at its saliency; store nothing else."""
        if index in self.history.layers:
            context = self._context(index, inputs)
            self.history = self.history.noted(self.policy.score(context), context)
        self._pending = None

    def _second(self) -> Incoming:
        """Return the chosen tokens, at rotary positions that follow the row's without a gap."""
        incoming, chosen = self._incoming, self._chosen
        if chosen is None:
            everything = torch.arange(self.new_valid.shape[1], device=self.new_valid.device)
            chosen = torch.where(self.new_valid, everything, -1)
        valid = chosen >= 0
        positions = gather_positions(self.new_positions, chosen)
        skipped = self.new_valid.sum(dim=1) - valid.sum(dim=1)
        if bool(skipped.any()):
            self.propagated[self.filter_layer] = positions
        return attrs.evolve(
            incoming,
            arguments=self._arguments(chosen),
            new_valid=valid,
            positions=positions,
            skipped=skipped,
            order=None,
        )

    def _arguments(self, chosen: Tensor) -> dict[str, Any]:
        arguments, tokens = dict(self._incoming.arguments), self._incoming.tokens
        for name in set(OF_TOKENS) & arguments.keys():
            if arguments[name] is not None:
                arguments[name] = take_columns(arguments[name], chosen)
        valid = chosen >= 0
        arguments["position_ids"] = tokens.rotary_positions_of(valid)
        arguments["attention_mask"] = None
        if tokens.padded or not bool(valid.all()):
            arguments["attention_mask"] = torch.cat([tokens.valid, valid], dim=1).long()
        return arguments


def check_positions(policy: CachePolicy, incoming: Incoming) -> None:
    """Check that position ids given by the caller count each row's own tokens from 0.

    Only such positions can be continued by a second pass, or by a policy that closes gaps.

    Raises:
        ValueError: They do not.
    """
    given = incoming.arguments.get("position_ids")
    if given is None:
        return
    why = f"{policy.propagation} restarts the prefill"
    if policy.gapless:
        why = f"{policy} turns keys to positions without gaps"
    own = incoming.tokens.rotary_positions_of(incoming.new_valid)
    given = given.to(own.device)
    given = given.expand(*given.shape[:-2], *own.shape)  # there may be axes before the rows
    unlike = ((given != own) & incoming.new_valid).nonzero()
    if len(unlike) and given.ndim > 2:
        raise ValueError(
            f"position_ids must be the same on every axis where {why}, but an image's tokens have "
            "several; use another policy"
        )
    if len(unlike):
        row, column = unlike[0].tolist()
        skipped = incoming.tokens.skipped
        left_out = 0 if skipped is None else int(skipped[row])
        raise ValueError(
            f"position_ids must count each row's own tokens from 0 where {why}: "
            f"{int(own[row, column]) + left_out} for a token of row {row}, "
            f"got {int(given[row, column]) + left_out}; leave position_ids out"
        )
