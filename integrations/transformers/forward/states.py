"""Refuse forwards that would make a recurrent layer skip tokens or padding."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.inputs import Incoming


def check_states_go_on(incoming: Incoming, *, several: bool) -> None:
    """Check that recurrent layers can continue from their states with a forward's tokens.

    Args:
        incoming: The forward's tokens and those seen before.
        several: Whether the model's layers can continue from a state with more than one token.

    Raises:
        UnsupportedModelError: A row has padding behind its tokens, tokens read before have become
            padding, or several tokens come where the model can only take one.
    """
    if incoming.moved is not None:
        raise UnsupportedModelError(
            "attention_mask must not turn tokens already read into padding if layers are "
            "recurrent, since they cannot be removed from a state; give every row its answer up "
            "to the last token, or read rows one at a time"
        )
    valid, started = incoming.new_valid, incoming.tokens.lengths > 0
    if incoming.padded:
        between = (valid[:, :-1] & ~valid[:, 1:]).any(dim=1) | (started & ~valid.all(dim=1))
    if incoming.padded and bool(between.any()):
        row = int(between.nonzero()[0])
        raise UnsupportedModelError(
            "padding must come before all tokens of a row if layers are recurrent, since a state "
            f"cannot skip it, but row {row} has tokens before its padding; give rows turns of one "
            "length, or read them one at a time"
        )
    if not several and valid.shape[1] > 1 and bool(started.any()):
        raise UnsupportedModelError(
            f"one token at a time must follow what the cache has read, got {valid.shape[1]}: if "
            "the model's recurrent layers read several, they start from an empty state, with any "
            "cache; give the whole conversation to a new PolicyCache, in one forward"
        )


def check_states_skip_nothing(valid: Tensor, started: Tensor) -> None:
    """Check that no recurrent layer would read padding after a row's tokens.

    A row that passes on fewer tokens than another, or restarts with fewer, is padded before these
    tokens.

    Args:
        valid: bool ``[batch, reaching_len]``, the tokens that reach the layer, False on padding.
        started: bool ``[batch]``, rows in which tokens were read before this forward.

    Raises:
        UnsupportedModelError: They would.
    """
    between = started.to(valid.device) & ~valid.all(dim=1)
    if bool(between.any()):
        row = int(between.nonzero()[0])
        counts = valid.sum(dim=1).tolist()
        raise UnsupportedModelError(
            "all rows of a later turn must pass on equally many tokens if later layers are "
            f"recurrent, since a state cannot skip padding, but row {row} passes on {counts[row]} "
            f"of up to {max(counts)}; give budgets in tokens, rows of equal length in all, or "
            "read rows one at a time"
        )
