"""Store the state of a recurrent layer, and define layers that store nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from kvpolicy.integrations.transformers.model.kinds import LayerKind
from kvpolicy.integrations.transformers.state.cross import CrossLayer
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layer_contents import LayerContents
from kvpolicy.integrations.transformers.state.storage import Storage
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.integrations.transformers.surface import EMPTY_LAYER, LinearAttentionLayer

States = dict[int, Tensor]
# Names of convolution states and recurrent states, before their numbers.
PARTS = ("conv", "recurrent")


class RecurrentLayer(PolicyLayer, LinearAttentionLayer):  # type: ignore[misc]
    """A cache layer for a recurrent layer, whose states it holds as Transformers' cache does.

    Models write into the tensors of a state. Before every forward `own_states` replaces them by
    copies, so that a failed forward can be undone and copies of a cache are independent.

    Args:
        storage: How keys and values are held; the state is held unchanged.
        number_of_states: Number of states of either kind, one for each module of the layer that has
            a state.
    """

    attends = False
    holds_more = True
    plain = False
    is_croppable = False  # tokens cannot be removed from a state

    def __init__(
        self, storage: Storage | None = None, room: int = 0, number_of_states: int = 1
    ) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        PolicyLayer.__init__(self, storage, room)

    @property
    def recurrent(self) -> RecurrentLayer:  # an attribute there, which costs no call
        """See `PolicyLayer`."""
        return self

    def settings(self) -> dict[str, Any]:
        """See `PolicyLayer.settings`."""
        return {"number_of_states": self.number_of_states}

    @property
    def states(self) -> tuple[States, States]:
        """The layer's convolution states and recurrent states, ``[batch, ...]`` each, by number."""
        return _held(self.conv_states), _held(self.recurrent_states)

    def own_states(self) -> None:
        """Replace the layer's states by copies, since models write into a state in place."""
        self._change_states(Tensor.clone)

    def _change_states(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every state by what a function makes of it."""
        self.hold_states(*({at: change(it) for at, it in part.items()} for part in self.states))

    def hold_states(self, conv: States, recurrent: States) -> None:
        """Replace all convolution and recurrent states of the layer."""
        for index in range(self.number_of_states):
            self.conv_states[index] = conv.get(index)
            self.recurrent_states[index] = recurrent.get(index)
            self.is_conv_states_initialized[index] = index in conv
            self.is_recurrent_states_initialized[index] = index in recurrent
            # As in Transformers, which sets this flag when the convolution state is set.
            self.has_previous_state[index] = index in conv
            self.conv_kernel_size[index] = conv[index].shape[-1] if index in conv else None
        device: Any = next((each.device for each in (*conv.values(), *recurrent.values())), None)
        if self.held is None:
            self.device = device

    def tensors(self) -> dict[str, Tensor]:
        """See `PolicyLayer.tensors`."""
        states = {
            f"{part}.{index}": each
            for part, held in zip(PARTS, self.states, strict=True)
            for index, each in held.items()
        }
        return super().tensors() | states

    def hold_tensors(self, tensors: Mapping[str, Tensor], tokens: SeenTokens) -> None:
        """See `PolicyLayer.hold_tensors`."""
        super().hold_tensors(tensors, tokens)
        states: dict[str, States] = {part: {} for part in PARTS}
        for name, each in tensors.items():
            part, _, index = name.partition(".")
            if index:
                states[part][int(index)] = each
        self.hold_states(*states.values())

    def state_nbytes(self) -> int:
        """See `PolicyLayer.state_nbytes`."""
        return sum(each.nbytes for part in self.states for each in part.values())

    def take_rows(self, rows: Tensor, tokens: SeenTokens) -> None:
        """See `PolicyLayer.take_rows`."""
        super().take_rows(rows, tokens)
        self._change_states(lambda state: state.index_select(0, rows.to(state.device)))

    def beside(self) -> Any:
        """Return the layer's states; see `PolicyLayer.beside`."""
        return self.states

    def restore(self, contents: LayerContents, beside: Any, tokens: SeenTokens | None) -> None:
        """See `PolicyLayer.restore`."""
        super().restore(contents, beside, tokens)
        self.hold_states(*(beside or ({}, {})))

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
        """See `PolicyLayer.settings`."""
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


def _held(states: dict[int, Tensor | None]) -> States:
    return {index: each for index, each in states.items() if each is not None}
