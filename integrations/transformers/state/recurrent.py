"""Store the state of a recurrent layer, and define layers that store nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from kvpolicy.integrations.transformers.model.kinds import LayerKind
from kvpolicy.integrations.transformers.state.cross import BesideLayer, CrossLayer
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.storage import Storage
from kvpolicy.integrations.transformers.surface import EMPTY_LAYER, LinearAttentionLayer

# Names of convolution states and recurrent states, before their numbers.
PARTS = ("conv", "recurrent")


class RecurrentLayer(BesideLayer, LinearAttentionLayer):  # type: ignore[misc]
    """A cache layer for a recurrent layer, whose states it holds as Transformers' cache does.

    Models write into the tensors of a state. Before every forward `own_states` replaces them by
    copies, so that a failed forward can be undone and copies of a cache are independent.

    Args:
        storage: How keys and values are held; the state is held unchanged.
        number_of_states: Number of states of either kind, one for each module of the layer that has
            a state.
    """

    is_croppable = False  # tokens cannot be removed from a state

    def __init__(
        self, storage: Storage | None = None, room: int = 0, number_of_states: int = 1
    ) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        PolicyLayer.__init__(self, storage, room)

    @property
    def recurrent(self) -> RecurrentLayer:  # an attribute there, which costs no call
        return self

    def settings(self) -> dict[str, Any]:
        return {"number_of_states": self.number_of_states}

    def own_states(self) -> None:
        """Replace the layer's states by copies, since models write into a state in place."""
        self.hold_beside({name: each.clone() for name, each in self.beside().items()})

    def beside(self) -> dict[str, Tensor]:
        """Return the layer's states, such as ``conv.0``; see `BesideLayer.beside`."""
        held = zip(PARTS, (self.conv_states, self.recurrent_states), strict=True)
        states = {f"{part}.{at}": each for part, own in held for at, each in own.items()}
        return {name: each for name, each in states.items() if each is not None}

    def hold_beside(self, tensors: Mapping[str, Tensor]) -> None:
        device: Any = None
        for index in range(self.number_of_states):
            conv, recurrent = (tensors.get(f"{part}.{index}") for part in PARTS)
            self.conv_states[index], self.recurrent_states[index] = conv, recurrent
            self.is_conv_states_initialized[index] = conv is not None
            self.is_recurrent_states_initialized[index] = recurrent is not None
            # As in Transformers, which sets this flag when the convolution state is set.
            self.has_previous_state[index] = conv is not None
            self.conv_kernel_size[index] = None if conv is None else conv.shape[-1]
            device = next((it.device for it in (conv, recurrent) if it is not None), device)
        if self.held is None:
            self.device = device

    # The interface of a cache layer of Transformers.

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Prepare memory for a recurrent state; do nothing for keys and values."""
        if not args:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


class SideBySideLayer(RecurrentLayer):
    """A cache layer with keys and values, which a policy evicts, and a state, which it does not."""

    attends = True


class EmptyLayer(PolicyLayer, EMPTY_LAYER):  # type: ignore[misc]
    """A cache layer that holds nothing, for one that reads each token alone, as experts do."""

    attends = False
    plain = False


class SharedLayer(EmptyLayer):
    """A cache layer without keys of its own, for a model layer that attends to another's keys.

    Args:
        producer: Index of the layer that holds them; `link` connects the two.
    """

    def __init__(
        self, storage: Storage | None = None, room: int = 0, producer: int | None = None
    ) -> None:
        super().__init__(storage, room)
        self.producer = producer
        self.lender: PolicyLayer | None = None

    def settings(self) -> dict[str, Any]:
        return {"producer": self.producer}

    @property
    def positions(self) -> Tensor | None:
        """The positions of the other layer's keys that this layer uses; None before `link`."""
        return None if self.lender is None else self.lender.positions


def link(layers: Sequence[PolicyLayer]) -> None:
    """Connect every layer without keys of its own to the layer whose keys it attends to."""
    for layer in layers:
        if isinstance(layer, SharedLayer):
            assert layer.producer is not None
            layer.lender = layers[layer.producer]


def layer_for(kind: LayerKind, storage: Storage, room: int) -> PolicyLayer:
    """Make the empty cache layer that suits a kind of model layer."""
    if kind.producer is not None:
        return SharedLayer(storage, room, kind.producer)
    if kind.crosses:
        return CrossLayer(storage, room)
    if kind.picks:
        return IndexedLayer(storage, room, blocks=kind.blocks)
    if kind.states:
        held = SideBySideLayer if kind.attends else RecurrentLayer
        return held(storage, room, kind.states)
    return PolicyLayer(storage, room) if kind.attends else EmptyLayer(storage, room)


LAYERS: dict[str, Callable[..., PolicyLayer]] = {
    each.__name__: each
    for each in (
        PolicyLayer,
        IndexedLayer,
        CrossLayer,
        RecurrentLayer,
        SideBySideLayer,
        EmptyLayer,
        SharedLayer,
    )
}
