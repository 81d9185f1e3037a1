"""Count the memory of live tensors while a model runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A torch mode that counts the live bytes of tensors made in a ``with`` block.

    What a kernel takes for itself and gives back before it returns is not seen. Tensors on the
    `meta` device count as what they would take.

    Args:
        known: Tensors made before, which do not count, nor do their views.

    Attributes:
        live: Bytes at the moment.
        peak: The most bytes since the block began, or since `restart`.

    Example:
        >>> import torch
        >>> with LiveBytes() as bytes_of:
        ...     doubled = torch.ones(10) * 2
        >>> bytes_of.live, bytes_of.peak
        (40, 80)
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: int = 0
        self.peak: int = 0
        # Storages are kept alive until the block's end, since addresses could be reused otherwise.
        self._known = {each.untyped_storage()._cdata: each.untyped_storage() for each in known}
        self._sizes: dict[int, int] = {}
        self._counts = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch operation and count the bytes of the tensors that it makes."""
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                self._follow(each)
        return made

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context manager in which new tensors, and views of them, are not counted."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def restart(self) -> int:
        """Return the peak bytes so far, and set the peak to the bytes that are live now."""
        peak, self.peak = self.peak, self.live
        return peak

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        if not self._counts:
            self._known[key] = storage
            return
        size = storage.nbytes()
        before = self._sizes.get(key)
        if before is None:
            weakref.finalize(storage, self._forget, key)
        self._sizes[key] = size  # storages may grow
        self.live += size - (before or 0)
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)
