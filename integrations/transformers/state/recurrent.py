"""What a `PolicyCache` stores for a layer that carries a state, or holds nothing at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import LinearAttentionLayer

from kvpolicy.integrations.transformers.model.kinds import (
    CrossAttention,
    Indexed,
    LayerKind,
)
from kvpolicy.integrations.transformers.state.cross import CrossLayer
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.state.layer import PolicyLayer, State
from kvpolicy.integrations.transformers.state.storage import Storage
from kvpolicy.integrations.transformers.state.tokens import SeenTokens

States = dict[int, Tensor]

# Transformers 5.17 has none, and does not ask for it.
_Dummy: Any = getattr(cache_utils, "DummyLayer", object)


class RecurrentLayer(PolicyLayer, LinearAttentionLayer):  # type: ignore[misc]
    """The state of a recurrent layer or of a convolution, as Transformers' own cache holds it.

    Models write into the tensors of a state. `own_states` gives them others to write to, before
    every forward, so that one that fails can be taken back, and copies go their own way.

    Args:
        storage: Of keys and values; the state is held as it is.
        room: As of a `PolicyLayer`.
        number_of_states: States of either kind, one for each module of the layer that has one.
    """

    attends = False
    is_croppable = False  # a state cannot be taken back by some tokens

    def __init__(
        self, storage: Storage | None = None, room: int = 0, number_of_states: int = 1
    ) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        PolicyLayer.__init__(self, storage, room)

    def fresh(self) -> PolicyLayer:
        """See `PolicyLayer.fresh`."""
        return type(self)(self.storage, self.room, self.number_of_states)

    @property
    def states(self) -> tuple[States, States]:
        """Those of convolutions and the recurrent ones, ``[batch, ...]`` each, by number."""
        return _held(self.conv_states), _held(self.recurrent_states)

    def own_states(self) -> None:
        """Go on with copies of the states, which nothing else holds."""
        self.hold_states(
            *({index: each.clone() for index, each in part.items()} for part in self.states)
        )

    def hold_states(self, conv: States, recurrent: States) -> None:
        """Hold these, and no others."""
        for index in range(self.number_of_states):
            self.conv_states[index] = conv.get(index)
            self.recurrent_states[index] = recurrent.get(index)
            self.is_conv_states_initialized[index] = index in conv
            self.is_recurrent_states_initialized[index] = index in recurrent
            # As Transformers', which learns of a state from that of its convolution.
            self.has_previous_state[index] = index in conv
            self.conv_kernel_size[index] = conv[index].shape[-1] if index in conv else None
        device: Any = next((each.device for each in (*conv.values(), *recurrent.values())), None)
        if self.held is None:
            self.device = device

    def move_to(self, device: torch.device, tokens: SeenTokens) -> None:
        """See `PolicyLayer.move_to`."""
        super().move_to(device, tokens)
        self.hold_states(
            *({index: each.to(device) for index, each in part.items()} for part in self.states)
        )

    def state_nbytes(self) -> int:
        """See `PolicyLayer.state_nbytes`."""
        return sum(each.nbytes for part in self.states for each in part.values())

    def take_rows(self, rows: Tensor, tokens: SeenTokens) -> None:
        """See `PolicyLayer.take_rows`."""
        super().take_rows(rows, tokens)
        self.hold_states(
            *(
                {index: each.index_select(0, rows.to(each.device)) for index, each in part.items()}
                for part in self.states
            )
        )

    def state(self) -> State:
        """See `PolicyLayer.state`."""
        return (*super().state(), self.states)

    def restore(self, state: State) -> None:
        """See `PolicyLayer.restore`."""
        *own, states = state
        super().restore(tuple(own))
        self.hold_states(*states)

    def reset(self) -> None:
        """Forget everything."""
        PolicyLayer.reset(self)

    def _nothing(self) -> State:
        return (*super()._nothing(), ({}, {}))

    # What Transformers asks of a layer.

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make room for a state; keys and values need none."""
        if not args:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


class SideBySideLayer(RecurrentLayer):
    """Keys and values, of which a policy chooses, and a state beside them, which is held whole."""

    attends = True


class EmptyLayer(PolicyLayer, _Dummy):  # type: ignore[misc]
    """A layer that reads its tokens one by one, such as experts alone, and holds nothing."""

    attends = False

    def __init__(self, storage: Storage | None = None, room: int = 0) -> None:
        PolicyLayer.__init__(self, storage, room)


class SharedLayer(EmptyLayer):
    """A layer that attends to the keys and values of another one, and holds nothing itself.

    Args:
        storage: As of a `PolicyLayer`.
        room: As of a `PolicyLayer`.
        producer: The layer that holds them, which is known after `link`.
    """

    def __init__(
        self, storage: Storage | None = None, room: int = 0, producer: int | None = None
    ) -> None:
        super().__init__(storage, room)
        self.producer = producer
        self._lender: PolicyLayer | None = None

    def fresh(self) -> PolicyLayer:
        """See `PolicyLayer.fresh`."""
        return type(self)(self.storage, self.room, self.producer)

    @property
    def positions(self) -> Tensor | None:
        """Those of the layer that holds its keys and values."""
        return None if self._lender is None else self._lender.positions

    def borrow(self, lender: PolicyLayer) -> None:
        """Learn which layer holds its keys and values."""
        self._lender = lender


def link(layers: Sequence[PolicyLayer]) -> None:
    """Tell every layer of a cache that shares another's keys which one that is."""
    for layer in layers:
        if isinstance(layer, SharedLayer):
            assert layer.producer is not None
            layer.borrow(layers[layer.producer])


def layer_for(kind: LayerKind, storage: Storage, room: int) -> PolicyLayer:
    """What a cache holds for a layer of a kind, nothing yet.

    Args:
        kind: The layer's.
        storage: How keys and values are held.
        room: Slots to have memory for in advance.
    """
    if kind.producer is not None:
        return SharedLayer(storage, room, kind.producer)
    if isinstance(kind, CrossAttention):
        return CrossLayer(storage, room)
    if isinstance(kind, Indexed):
        return IndexedLayer(storage, room, blocks=kind.blocks)
    if kind.states:
        held = SideBySideLayer if kind.attends else RecurrentLayer
        return held(storage, room, kind.states)
    return PolicyLayer(storage, room) if kind.attends else EmptyLayer(storage, room)


def _held(states: dict[int, Tensor | None]) -> States:
    return {index: each for index, each in states.items() if each is not None}
