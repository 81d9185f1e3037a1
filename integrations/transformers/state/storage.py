"""Hold a layer's keys and values: unchanged, quantised, or on another device."""

from __future__ import annotations

import abc
import copy
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_count

# If a token is appended to a full buffer, the buffer grows by this share, or at least by the number
# of slots below. So decoding copies its buffers only once in many steps.
GROWTH_SHARE = 1 / 16
SMALLEST_GROWTH = 16
# Keys of at most so many bytes are copied with each token: to write into a buffer takes longer.
COPIED_BYTES = 1 << 17


class StoredKV(abc.ABC):
    """The stored keys and values of one cache layer, in whatever form a `Storage` holds them.

    It is immutable: every operation returns a new object.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> torch.Size:
        """The shape ``[batch, kv_heads, kept_len, head_dim]`` of the keys."""

    @property
    @abc.abstractmethod
    def widths(self) -> tuple[int, int]:
        """The head dimension of the keys, and that of the values."""

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype in which attention gets the keys and values."""

    @property
    def capacity(self) -> int:
        """The number of cache slots for each row and head that fit into the reserved memory."""
        return self.shape[2]

    @property
    def slots(self) -> int:
        """The number of cache slots in use, over all rows and heads."""
        return self.shape[:3].numel()

    @abc.abstractmethod
    def read(self) -> tuple[Tensor, Tensor]:
        """Return keys and values as full tensors on the device where attention needs them."""

    @abc.abstractmethod
    def appended(self, keys: Tensor, values: Tensor) -> StoredKV:
        """Return a copy with the keys and values of new tokens appended."""

    @abc.abstractmethod
    def first(self, count: int) -> StoredKV:
        """Return a copy with only the first ``count`` slots of each row and head."""

    @abc.abstractmethod
    def rows(self, rows: Tensor) -> StoredKV:
        """Return a copy with only the given rows ``[count]`` of the batch."""

    @abc.abstractmethod
    def nbytes(self) -> int:
        """Return the bytes of all memory behind the tensors, reserved memory included."""

    def taken_nbytes(self) -> int:
        """Return the bytes of slots that hold tokens, without reserved memory."""
        return self.nbytes() * self.shape[2] // max(self.capacity, 1)

    def with_room(self, count: int) -> StoredKV:
        """Return a copy with memory for ``count`` more slots, if this form can reserve memory."""
        return self


class Storage(abc.ABC):
    """A way to hold a layer's keys and values: unchanged, offloaded or quantised."""

    @abc.abstractmethod
    def hold(self, keys: Tensor, values: Tensor) -> StoredKV:
        """Store the keys and values that a layer keeps, in this storage's form.

        Both are ``[batch, kv_heads, kept_len, head_dim]``; the head dimensions may differ.
        """

    def beside(self) -> Storage:
        """Return the storage for a layer's other tensors, such as index keys, which stay exact."""
        return self


@attrs.frozen
class PlainStorage(Storage):
    """A storage that holds keys and values unchanged, on their device.

    Example:
        >>> PlainStorage().hold(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4)).nbytes()
        192
    """

    def hold(self, keys: Tensor, values: Tensor) -> StoredKV:
        """See `Storage.hold`."""
        return Plain.of(keys, values, keys.device)


@attrs.frozen
class OffloadedStorage(Storage):
    """A storage that holds keys and values in CPU memory, and copies them back for attention.

    Example:
        >>> OffloadedStorage().hold(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4)).shape
        torch.Size([1, 2, 3, 4])
    """

    def hold(self, keys: Tensor, values: Tensor) -> StoredKV:
        """See `Storage.hold`."""
        away = torch.device("cpu")
        return Plain.of(keys.to(away), values.to(away), keys.device)


@attrs.frozen
class QuantizedStorage(Storage):
    """A storage that quantises keys and values to a few bits, as Transformers' cache does.

    The tokens that a policy keeps are quantised at once. Appended tokens stay unquantised until
    there are ``residual_length`` of them; then all tokens are quantised again.

    Args:
        backend: ``"quanto"`` (optimum-quanto) or ``"hqq"``; it must be installed.
        nbits: Bits of a number: 2 or 4 with quanto, 1, 2, 3, 4 or 8 with hqq.
        q_group_size: Numbers that share a scale; must divide the head dimension.
        residual_length: Number of appended tokens at which all are quantised, at least 1.

    Raises:
        TypeError: A number is not an int.
        ValueError: The backend is unknown, or a number is below 1.
        ImportError: The backend is not installed.

    Source: KIVI (arXiv 2402.02750), as in Transformers' ``QuantizedCache``.
    """

    backend: str = "quanto"
    nbits: int = 4
    q_group_size: int = 64
    residual_length: int = 128

    def __attrs_post_init__(self) -> None:
        for name in ("nbits", "q_group_size", "residual_length"):
            check_count(name, getattr(self, name), minimum=1)
        self._layer()

    def _layer(self) -> Any:
        """Make an empty quantised cache layer of Transformers."""
        from kvpolicy.integrations.transformers.surface import QUANTIZED  # slow to import

        if self.backend not in QUANTIZED:
            raise ValueError(f"backend must be one of {', '.join(QUANTIZED)}, got {self.backend!r}")
        kind, axis = QUANTIZED[self.backend]
        return kind(
            nbits=self.nbits,
            axis_key=axis,
            axis_value=axis,
            q_group_size=self.q_group_size,
            residual_length=self.residual_length,
        )

    def beside(self) -> Storage:
        """See `Storage.beside`."""
        return PlainStorage()

    def hold(self, keys: Tensor, values: Tensor) -> StoredKV:
        """See `Storage.hold`.

        Raises:
            ValueError: ``q_group_size`` does not divide the head dimension.
        """
        for name, tensor in (("keys", keys), ("values", values)):
            if tensor.shape[3] % self.q_group_size:
                raise ValueError(
                    f"q_group_size must divide the head dimension of {name}, {tensor.shape[3]}, "
                    f"got {self.q_group_size}"
                )
        empty = keys[:, :, :0].clone(), values[:, :, :0].clone()
        if not keys.shape[2]:
            return _Quantized(self, None, *empty)
        layer = self._layer()
        layer.update(keys, values)
        return _Quantized(self, layer, *empty, quantized_len=keys.shape[2])


@attrs.define(eq=False)
class _Used:
    """A counter of the slots in use in two buffers that several objects share."""

    slots: int


@attrs.frozen(eq=False)
class Plain(StoredKV):
    """The keys and values in the first ``length`` slots of two buffers, which others may share.

    Appended tokens are written behind these slots if nothing is there yet; otherwise all slots are
    copied to new buffers. So the slots that another object sees never change.
    """

    keys: Tensor
    values: Tensor
    device: torch.device  # where attention needs them
    length: int
    used: _Used

    @staticmethod
    def of(keys: Tensor, values: Tensor, device: torch.device) -> Plain:
        """Store whole keys and values, copied if they are views into larger tensors."""
        length = keys.shape[2]
        return Plain(own_storage(keys), own_storage(values), device, length, _Used(length))

    @property
    def shape(self) -> torch.Size:
        batch, heads, _, dim = self.keys.shape
        return torch.Size((batch, heads, self.length, dim))

    @property
    def widths(self) -> tuple[int, int]:
        return self.keys.shape[3], self.values.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def read(self) -> tuple[Tensor, Tensor]:
        keys, values = self._taken()
        return keys.to(self.device), values.to(self.device)

    def _taken(self) -> tuple[Tensor, Tensor]:
        """Return the taken slots of both buffers, on the buffers' device."""
        if self.length == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def appended(self, keys: Tensor, values: Tensor) -> Plain:
        home, after = self.keys.device, self.length + keys.shape[2]
        keys, values = keys.to(home), values.to(home)
        full = self.length == self.keys.shape[2]
        few = full and self.is_at_hand and self.keys.nbytes <= COPIED_BYTES
        if few or not self._may_write(keys, values):
            held_keys, held_values = self._taken()
            joined = torch.cat([held_keys, keys], dim=2), torch.cat([held_values, values], dim=2)
            return Plain(*joined, self.device, after, _Used(after))
        growth = max(int(after * GROWTH_SHARE), SMALLEST_GROWTH)
        held = self if self._has_room(after) else self.moved(after + growth)
        held.keys[:, :, self.length : after] = keys
        held.values[:, :, self.length : after] = values
        held.used.slots = after
        return Plain(held.keys, held.values, held.device, after, held.used)

    @property
    def is_at_hand(self) -> bool:
        """True if the buffers are already on the device where attention needs them."""
        return self.keys.device == self.device

    def _may_write(self, keys: Tensor, values: Tensor) -> bool:
        """True if autograd lets the buffers be written in place: nothing requires a gradient."""
        return not any(each.requires_grad for each in (keys, values, self.keys, self.values))

    def _has_room(self, after: int) -> bool:
        # A tensor that was made in inference mode cannot be written to outside of that mode.
        frozen = self.keys.is_inference() and not torch.is_inference_mode_enabled()
        return self.used.slots == self.length and after <= self.keys.shape[2] and not frozen

    def with_room(self, count: int) -> Plain:
        after = self.length + count
        return self if self._has_room(after) else self.moved(after)

    def has_room_for(self, keys: Tensor, values: Tensor) -> bool:
        """True if new tokens fit behind the slots in use without copying the buffers."""
        return self._may_write(keys, values) and self._has_room(self.length + keys.shape[2])

    def claim(self) -> tuple[Tensor, Tensor]:
        """Return the whole buffers; until `release` only the caller may write to free slots."""
        self.used.slots = self.capacity
        return self.keys, self.values

    def written(self, count: int) -> Plain:
        """Return a copy that counts ``count`` more slots, written by the caller of `claim`."""
        return Plain(self.keys, self.values, self.device, self.length + count, self.used)

    def release(self) -> None:
        """End `claim`, so that tokens can be appended to this object again."""
        self.used.slots = self.length

    def moved(self, capacity: int) -> Plain:
        """Return a copy in new buffers with ``capacity`` slots, 0 on free slots."""

        def larger(tensor: Tensor) -> Tensor:
            batch, heads, _, dim = tensor.shape
            buffer = tensor.new_empty(batch, heads, capacity, dim)
            buffer[:, :, : self.length] = tensor[:, :, : self.length]
            buffer[:, :, self.length :] = 0  # finite, since it may be read under a mask
            return buffer

        used = _Used(self.length)
        return Plain(larger(self.keys), larger(self.values), self.device, self.length, used)

    def first(self, count: int) -> StoredKV:
        return Plain.of(self.keys[:, :, :count], self.values[:, :, :count], self.device)

    def rows(self, rows: Tensor) -> StoredKV:
        rows = rows.to(self.keys.device)
        keys, values = (each.index_select(0, rows) for each in self._taken())
        return Plain.of(keys, values, self.device)

    def nbytes(self) -> int:
        return _nbytes(self.keys) + _nbytes(self.values)


@attrs.frozen(eq=False)
class _Quantized(StoredKV):
    """The keys and values of one layer, quantised except for the newest tokens."""

    storage: QuantizedStorage
    layer: Any  # of Transformers; only copies of it are updated; None if it is empty
    keys: Tensor  # of the tokens appended since
    values: Tensor
    quantized_len: int = 0

    @property
    def shape(self) -> torch.Size:
        batch, heads, count, dim = self.keys.shape
        return torch.Size((batch, heads, self.quantized_len + count, dim))

    @property
    def widths(self) -> tuple[int, int]:
        return self.keys.shape[3], self.values.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    def read(self) -> tuple[Tensor, Tensor]:
        if self.layer is None:
            return self.keys, self.values
        empty = self.keys[:, :, :0], self.values[:, :, :0]
        keys, values = copy.copy(self.layer).update(*empty)
        return torch.cat([keys, self.keys], dim=2), torch.cat([values, self.values], dim=2)

    def appended(self, keys: Tensor, values: Tensor) -> StoredKV:
        after = attrs.evolve(
            self,
            keys=torch.cat([self.keys, keys], dim=2),
            values=torch.cat([self.values, values], dim=2),
        )
        if after.keys.shape[2] < self.storage.residual_length:
            return after
        return self.storage.hold(*after.read())

    def first(self, count: int) -> StoredKV:
        recent = count - self.quantized_len
        if recent >= 0:
            keys, values = self.keys[:, :, :recent].clone(), self.values[:, :, :recent].clone()
            return attrs.evolve(self, keys=keys, values=values)
        keys, values = self.read()
        return self.storage.hold(keys[:, :, :count], values[:, :, :count])

    def rows(self, rows: Tensor) -> StoredKV:
        keys, values = self.read()
        rows, prefix = rows.to(keys.device), self.quantized_len
        held = self.storage.hold(keys[rows, :, :prefix], values[rows, :, :prefix])
        assert isinstance(held, _Quantized)
        return attrs.evolve(held, keys=keys[rows, :, prefix:], values=values[rows, :, prefix:])

    def nbytes(self) -> int:
        held = _nbytes(self.keys) + _nbytes(self.values)
        for name in ("_quantized_keys", "_quantized_values") if self.layer is not None else ():
            held += sum(_nbytes(tensor) for tensor in _tensors_in(getattr(self.layer, name)))
        return held


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the plain tensors of which a quantised tensor consists, to count their bytes."""
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return [each for name in names for each in _tensors_in(getattr(value, name))]
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [each for part in value for each in _tensors_in(part)]


def _nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor that shares no memory with a larger one, copied if it must be."""
    whole = tensor.contiguous()
    if whole is tensor and _nbytes(tensor) != tensor.numel() * tensor.element_size():
        return tensor.clone()
    return whole
