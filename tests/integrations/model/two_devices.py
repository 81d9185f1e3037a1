"""A second device without a second device: tensors that say they are elsewhere, and insist on it.

`Far` tensors compute on the CPU, but an operation that mixes them with others is an error, as it is
between two GPUs (single numbers are exempt, there and here). They say they are on `FAR`, which
inside `far_reachable` can be given to ``.to(...)`` and as ``device=``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

FAR = torch.device("cpu", 1)  # there is no such device, and nothing has to be set up for it


class Far(torch.Tensor):
    """A tensor on the far device; ``near`` is what it computes with."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> "Far":
        far: Far = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=FAR,
        )
        far.near = near
        return far

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        leaves: list[Any] = []
        tree_map(leaves.append, (args, kwargs))
        for each in leaves:
            if isinstance(each, Tensor) and not isinstance(each, Far) and each.ndim:
                raise RuntimeError(f"tensors on two devices: {func} with one at {each.device}")
        here = func is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device(
            "cpu"
        )
        if kwargs.get("device") == FAR:
            del kwargs["device"]
        near_args, near_kwargs = tree_map(_near, (args, kwargs))
        result = func(*near_args, **near_kwargs)
        if func._schema.is_mutable:
            return args[0]
        return result if here else tree_map(_far, result)


def _near(value: Any) -> Any:
    return value.near if isinstance(value, Far) else value


def _far(value: Any) -> Any:
    return Far(value) if isinstance(value, Tensor) and not isinstance(value, Far) else value


class _Reachable(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.tolist:
            return _near(args[0]).tolist()
        to_far = any(isinstance(each, torch.device) and each == FAR for each in args)
        if kwargs.get("device") != FAR and not to_far:
            return func(*args, **kwargs)
        kwargs.pop("device", None)
        args = tuple(each for each in args if each is not FAR and each != FAR)
        if func is torch.Tensor.to:
            tensor, rest = args[0], args[1:]
            tensor = tensor.to(*rest, **kwargs) if rest or kwargs else tensor
            return _far(tensor)
        return _far(func(*args, **kwargs))


@contextmanager
def far_reachable() -> Iterator[None]:
    """Let ``.to(FAR)`` and ``device=FAR`` give far tensors."""
    with _Reachable():
        yield


def split_over_two_devices(model: PreTrainedModel, first: int) -> PreTrainedModel:
    """Bring the layers from ``first`` on and what follows to the far device, as accelerate does.

    Every one of these modules moves its arguments there, and the model moves its logits back; the
    cache is moved nowhere.
    """
    decoder: Any = model.model
    for module in (*decoder.layers[first:], decoder.norm, model.lm_head):
        _bring(module)
    forward = model.forward

    def with_logits_here(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits.to("cpu")
        return output

    model.forward = with_logits_here  # type: ignore[method-assign]
    return model


def _bring(module: nn.Module) -> None:
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(Far(parameter.detach()), requires_grad=False))
    forward = module.forward

    def with_arguments_there(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_far, (args, kwargs))
        return forward(*args, **kwargs)

    module.forward = with_arguments_there
