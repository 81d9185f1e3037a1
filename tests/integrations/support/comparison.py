"""Compares a `PolicyCache` with the slow reference, row by row."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from typing import ClassVar

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.state.packed import Packed
from tests.integrations.model.builds.dense import decoder_layers
from tests.reference import (
    PAD_TOKEN_ID,
    GaplessState,
    Method,
    ReferenceState,
    TogetherState,
    TurnResult,
)
from tests.reference.attention import Entry, masked_softmax
from tests.reference.decoder import finish_layer, project
from tests.reference.methods import Choice, LayerView

TOLERANCE = 1e-4
NEAR_TIE = 1e-4
# Tokens by row, rows of one length; None is padding.
Columns = Sequence[Sequence[int | None]]


class NearTieError(Exception):
    """The reference's choice is a near tie that rounding may change, so nothing can be compared."""


@attrs.frozen
class Windowed:
    """A method that, in layers with a sliding window, keeps exactly the window's tokens."""

    method: Method
    windows: Sequence[int | None]

    def choose(self, layer: LayerView) -> Choice:
        """Keeps the tokens that a full window sees; else the method's choice."""
        window = self.windows[layer.layer_idx]
        if window is None or layer.seen <= window:
            return self.method.choose(layer)
        first = layer.seen - window + 1
        return Choice(
            [
                [index for index, entry in enumerate(held) if entry.position >= first]
                for held in layer.entries
            ]
        )


class Row(ReferenceState):
    """A row read by the reference, forward by forward; forwards can be undone, the row copied.

    Attributes:
        appended: for each column since the last act, whether it is a token and not padding.
        result: what the last act gave.
        windows: sliding windows of the layers; None where a layer sees all.
    """

    keys_wait = False  # whether what is held is not yet what is attended to

    def __init__(
        self, model: PreTrainedModel, method: Method, windows: Sequence[int | None]
    ) -> None:
        super().__init__(model, Windowed(method, windows) if any(windows) else method)
        self.appended: list[bool] = []
        self.result: TurnResult | None = None
        self.windows = windows

    def act(self, tokens: Sequence[int]) -> Tensor:
        """Reads a prompt and returns the logits `[vocab]` after its last token."""
        self.result = self.turn(tokens, 0)
        self.appended = []
        if self.result.margin < NEAR_TIE:
            raise NearTieError
        return self.result.prefill_logits

    @torch.no_grad()
    def feed(self, token: int | None) -> Tensor | None:
        """Appends one column and returns its logits `[vocab]`, or None for padding."""
        self.appended.append(token is not None)
        return None if token is None else self._decode(token)

    def feed_all(self, tokens: Sequence[int | None]) -> list[Tensor | None]:
        """Appends the columns of one forward and returns what `feed` does of each."""
        return [self.feed(token) for token in tokens]

    def take_back(self, columns: int) -> None:
        """Removes the last `columns` appended columns."""
        for _ in range(columns):
            if self.appended.pop():
                self.seen -= 1
                self.rotary -= 1
                for held in (held for layer in self.cache for held in layer):
                    held.pop()

    def settle(self) -> bool:
        """Lets layers evict if it is time, and returns True if they did; this class never does."""
        return False

    def _layer(
        self, layer_idx: int, hidden: Tensor, positions: Sequence[int], rotary: Sequence[int]
    ) -> tuple[Tensor, list[Tensor], list[list[Entry]]]:
        """Runs one layer as in `ReferenceState`, but with the layer's sliding window."""
        window = self.windows[layer_idx]
        if window is None:
            return super()._layer(layer_idx, hidden, positions, rotary)
        queries, new = project(self.model, layer_idx, hidden, positions, rotary)
        grown = [old + added for old, added in zip(self.cache[layer_idx], new, strict=True)]
        scaling = queries[0].shape[1] ** -0.5
        outputs = []
        for head, head_queries in enumerate(queries):
            held = grown[head // (len(queries) // len(grown))]
            visible = torch.tensor(
                [[at - window < entry.position <= at for entry in held] for at in positions]
            )
            scores = head_queries @ torch.stack([entry.key for entry in held]).T * scaling
            values = torch.stack([entry.value for entry in held])
            outputs.append(masked_softmax(scores, visible) @ values)
        return finish_layer(self.model, layer_idx, hidden, outputs), queries, grown

    def fork(self) -> "Row":
        """Returns a copy that can be fed independently of this row."""
        other = copy.copy(self)
        other.appended = list(self.appended)
        other.cache = [[list(held) for held in layer] for layer in self.cache]
        return other


class GaplessRow(Row, GaplessState):
    """A row whose kept tokens close up: its keys are turned when they are next attended to."""

    keys_wait = True


class TogetherRow(Row, TogetherState):
    """A row whose layers choose together."""

    def take_back(self, columns: int) -> None:
        count = sum(self.appended[len(self.appended) - columns :]) if columns else 0
        super().take_back(columns)
        del self.ids[len(self.ids) - count :]

    def fork(self) -> "TogetherRow":
        other = super().fork()
        assert isinstance(other, TogetherRow)
        other.ids = list(self.ids)
        return other


@attrs.define
class Comparison:
    """A cache and its model, with a reference state per row for comparison."""

    tolerance: ClassVar[float] = TOLERANCE

    model: PreTrainedModel  # the model that the cache is attached to
    weights: PreTrainedModel  # the same model without sliding windows, for the reference
    windows: Sequence[int | None]  # of each layer; None where it sees all
    policy: CachePolicy
    method: Method
    cache: PolicyCache
    rows: list[Row] = attrs.field(factory=list)
    # What the cache has read, by row; None is padding.
    columns: list[list[int | None]] = attrs.field(factory=list)
    appended: int = 0  # number of columns that were read since the policy last acted
    starts: bool = False  # whether `start_turn` has been called for the next forward
    named: bool = False  # whether the cache comes from a file, which says what model filled it
    filled: bool = False  # whether the cache has read something itself
    # Per layer, slots held when the policy last acted.
    widths: list[int] = attrs.field(factory=list)
    block: ExitStack | None = None  # the `attached` block around several actions, if one is open

    @property
    def batch(self) -> int:
        return len(self.rows)

    @property
    def num_layers(self) -> int:
        return len(decoder_layers(self.model))

    @property
    def drops(self) -> bool:
        return bool(self.policy.propagation.acting_layers(self.num_layers))

    def assert_close(self, got: Tensor, expected: Tensor) -> None:
        """Asserts that logits, keys or values are those of the reference."""
        assert_close(got, expected)

    def check(self) -> None:
        """Asserts that everything the cache reports and stores equals the reference."""
        assert self.cache.get_seq_length() == (len(self.columns[0]) if self.columns else 0)
        assert self.cache.batch_size == (self.batch or -1)
        assert self.cache.seen_lengths == tuple(row.seen for row in self.rows)
        if self.block is None:
            self._check_model()
        if not self.rows:
            assert self.cache.report().total.held_bytes == 0
            assert self.cache.propagated == {}
            return
        for index, row in enumerate(self.rows):
            self._check_row(index, row)
        self._check_report()

    def _check_model(self) -> None:
        """Asserts that the model has no hooks and no configuration of kvpolicy left."""
        for module in self.model.modules():
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                owner = getattr(hook, "__self__", hook)
                assert not type(owner).__module__.startswith("kvpolicy"), hook
            config = getattr(module, "config", None)
            assert not type(config).__module__.startswith("kvpolicy"), config

    def _check_row(self, index: int, row: Row) -> None:
        for layer, held in zip(self.cache.layers, row.cache, strict=True):
            for head, entries in enumerate(held):
                positions = layer.positions[index, head]
                real = positions >= 0
                assert positions[real].tolist() == [entry.position for entry in entries]
                for tensor, name in ((layer.keys, "key"), (layer.values, "value")):
                    if entries and not (row.keys_wait and name == "key"):
                        expected = torch.stack([getattr(entry, name) for entry in entries])
                        self.assert_close(tensor[index, head][real], expected)
        result = row.result
        assert result is not None
        assert set(result.propagated) <= set(self.cache.propagated)
        for number, positions in self.cache.propagated.items():
            # A layer that drops tokens only in another row passes on all of this row's tokens.
            expected = result.propagated.get(number, result.reached[number])
            assert [p for p in positions[index].tolist() if p >= 0] == expected

    def _check_report(self) -> None:
        report = self.cache.report()
        kv_heads = len(self.rows[0].cache[0])
        for layer, line, held, width in zip(
            range(self.num_layers), report.layers, self.cache.layers, self.widths, strict=True
        ):
            slot_bytes = 2 * 4 * held.keys.shape[3]
            tokens = sum(len(head) for row in self.rows for head in row.cache[layer])
            slots = self.batch * kv_heads * (width + self.appended)
            if isinstance(held.held, Packed):  # what was chosen has no padding
                slots -= int((held.positions[:, :, :width] < 0).sum())
            assert held.kept_len == width + self.appended
            assert line.seen == sum(row.seen for row in self.rows)
            assert line.kept == tokens / kv_heads
            assert line.held_bytes == slots * slot_bytes
            assert line.padding_bytes == (slots - tokens) * slot_bytes
            assert line.full_bytes == self.batch * kv_heads * len(self.columns[0]) * slot_bytes
        assert report.total.held_bytes == sum(line.held_bytes for line in report.layers)


def tensors(columns: Columns) -> tuple[Tensor, Tensor]:
    """Returns token ids and mask, both int64 `[batch, len]`."""
    ids = [[PAD_TOKEN_ID if token is None else token for token in row] for row in columns]
    mask = [[int(token is not None) for token in row] for row in columns]
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.int64)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Asserts that two tensors have equal shapes, no NaN and no difference above the tolerance."""
    assert got.shape == expected.shape
    difference = float((got - expected).abs().max())
    assert difference <= TOLERANCE, f"differs by {difference}"
