"""Restart a prefill: a first pass chooses tokens at a layer, a second one reads them.

The first pass comes before the decoder's own call, ends inside the filter layer and stores nothing.
The decoder is then given the chosen tokens, at rotary positions without gaps. Their original
positions do not change. `SeenTokens.skipped` counts the tokens of a row that its restarts left out:
later tokens are read at rotary positions that are smaller than their original ones by this number.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.forward.facts import ModelFacts
from kvpolicy.integrations.transformers.forward.inputs import OF_TOKENS, Incoming, take_columns
from kvpolicy.integrations.transformers.forward.passes import Pass, PassState
from kvpolicy.integrations.transformers.forward.selecting import ChooseTokens
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import gather_positions


def choosing_pass(model: ModelFacts, incoming: Incoming, features: AddedFeatures | None) -> Pass:
    """Make the first pass of a restart, which ends once the filter layer's queries are known."""
    check_positions(model.policy, incoming)
    (layer,) = model.acting
    propagation = model.policy.propagation
    return Pass(
        incoming,
        ChooseTokens(layer),
        ends_inside=layer,
        features=features,
        no_later=(
            f"no token may see a later one if {propagation} restarts the prefill, but the model's "
            "mask lets the tokens of an image see each other; use a policy that does not restart"
        ),
        no_columns=(
            f"attention must use position_ids if {propagation} restarts the prefill at new "
            "positions, but that of layer {index} counts columns; use a policy that does not "
            "restart"
        ),
    )


def chosen_tokens(incoming: Incoming, chosen: Tensor | None, at: PassState) -> Incoming:
    """Return the chosen tokens as the second pass's input, at rotary positions without gaps.

    ``chosen`` are slots ``[batch, count]`` of the first pass, which is ``at``; None for all tokens.
    """
    slots = at.reach.everything() if chosen is None else chosen
    valid = slots >= 0
    return attrs.evolve(
        incoming,
        arguments=_arguments(incoming, slots),
        new_valid=valid,
        positions=gather_positions(at.reach.positions, slots),
        skipped=at.reach.valid.sum(dim=1) - valid.sum(dim=1),
        order=None,
    )


def _arguments(incoming: Incoming, chosen: Tensor) -> dict[str, Any]:
    arguments, tokens = dict(incoming.arguments), incoming.tokens
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
    """Check that given position ids count each row's own tokens from 0, as the policy needs."""
    given = incoming.arguments.get("position_ids")
    if given is None:
        return
    why = f"{policy.propagation} restarts the prefill"
    if policy.gapless:
        why = f"{policy} rotates keys to positions without gaps"
    own = incoming.tokens.rotary_positions_of(incoming.new_valid)
    given = given.to(own.device)
    given = given.expand(*given.shape[:-2], *own.shape)  # there may be axes before the rows
    unlike = ((given != own) & incoming.new_valid).nonzero()
    if len(unlike) and given.ndim > 2:
        raise ValueError(
            f"position_ids must be the same on every axis if {why}, but an image's tokens have "
            "several; use another policy"
        )
    if len(unlike):
        row, column = unlike[0].tolist()
        skipped = incoming.tokens.skipped
        left_out = 0 if skipped is None else int(skipped[row])
        raise ValueError(
            f"position_ids must count each row's own tokens from 0 if {why}: "
            f"{int(own[row, column]) + left_out} for a token of row {row}, got "
            f"{int(given[row, column]) + left_out}; leave position_ids out"
        )
