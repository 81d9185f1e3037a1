"""Counts the reads of tensors by Python code, which would make the CPU wait for a GPU."""

import traceback
from collections import Counter
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that must know a value, or a count that depends on values, before they return.
READING = (
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
)
# Methods that read CPU memory without a torch operation.
METHODS = ("tolist", "numpy", "__array__", "cpu")
MAKING = (torch.tensor, torch.as_tensor, torch.asarray)


class _Operations(TorchDispatchMode):
    def __init__(self, looks: "Looks") -> None:
        super().__init__()
        self._looks = looks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = func.overloadpacket.__name__, kwargs or {}
        if name in READING:
            self._looks.note(name)
        elif name == "repeat_interleave" and given.get("output_size") is None:
            self._looks.note(name)  # by a tensor; by a number it is no operation of its own
        elif name.startswith("index") and len(args) > 1 and isinstance(args[1], (list, tuple)):
            booleans = (torch.bool, torch.uint8)
            if any(isinstance(each, Tensor) and each.dtype in booleans for each in args[1]):
                self._looks.note(name)
        return func(*args, **given)


class _Functions(TorchFunctionMode):
    """A torch mode that counts reads of whole tensors, and numbers copied to the device."""

    def __init__(self, looks: "Looks") -> None:
        super().__init__()
        self._looks = looks
        self._made: list[Tensor] = []  # of numbers, on the processor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = kwargs or {}, getattr(func, "__name__", "")
        if name in METHODS and getattr(Tensor, name, None) is func:
            self._looks.note(name)
        made = name == "to" and any(args[0] is each for each in self._made)
        if made and not given.get("non_blocking"):
            self._looks.note("to")
        found = func(*args, **given)
        if func in MAKING and not isinstance(args[0], Tensor):
            if given.get("device") is not None:
                self._looks.note("tensor")
            self._made.append(found)
        return found


class Looks:
    """A context manager that counts operations that would wait for a GPU if tensors were on one."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        self._modes = (_Operations(self), _Functions(self))

    @property
    def count(self) -> int:
        """Returns the number of all reads."""
        return sum(self.places.values())

    def note(self, what: str) -> None:
        """Counts one read at the line of the library that caused it."""
        frames = [each for each in traceback.extract_stack() if "/torch/" not in each.filename]
        own = [
            each
            for each in frames
            if not each.filename.endswith("/looks.py") and "/tests/" not in each.filename
        ]
        where = (own or frames)[-1]
        self.places[f"{what} at {where.filename}:{where.lineno}"] += 1

    def __enter__(self) -> Self:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)
