"""Try a layer on a few tokens, to find its rotary embedding and its output projection."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.integrations.transformers.model.routing import Attend, replaced
from kvpolicy.integrations.transformers.surface import Conv1D

# Errors of a layer that cannot be run in this way.
FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class Enough(Exception):  # noqa: N818 -- not an error: it ends a run early
    """A signal, raised as an exception, that ends a trial run once it has shown what is needed."""


def near(found: Tensor, wanted: Tensor) -> bool:
    """True if two tensors are equal up to rounding errors."""
    tolerance = max(1e-3, 4 * torch.finfo(wanted.dtype).eps) * float(wanted.abs().max())
    return bool((found.float() - wanted.float()).abs().max() <= tolerance)


@attrs.frozen(eq=False)
class OutputProjection:
    """The output projection of an attention layer, whose weights a scorer may read.

    ``module`` is applied to the concatenated outputs, of ``value_dim`` channels each, of the
    ``query_heads`` heads in this process.
    """

    module: nn.Module
    query_heads: int
    value_dim: int

    def weight(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the projection's weights, by query head: ``[query_heads, value_dim, hidden]``.

        If they are quantised, adapted or not in memory, the module is applied to each channel
        alone.
        """
        matrix = self._plain()
        if matrix is None:
            count = self.query_heads * self.value_dim
            channels = torch.eye(count, dtype=dtype, device=device)
            with torch.no_grad():
                matrix = self.module(channels) - self.module(channels.new_zeros(1, count))
        return matrix.reshape(self.query_heads, self.value_dim, -1)

    def _plain(self) -> Tensor | None:
        """Return the weights ``[channels, hidden]``; None if they are quantised or offloaded."""
        weight: Any = getattr(self.module, "weight", None)
        if type(self.module) not in (nn.Linear, Conv1D) or weight.is_meta:
            return None
        weight = weight.detach()
        if hasattr(weight, "to_local"):  # spread over processes: the part of this process's heads
            weight = weight.to_local()
        if type(weight) is not Tensor:  # of a class with a storage format of its own
            return None
        matrix: Tensor = weight.T if type(self.module) is nn.Linear else weight
        return matrix


@attrs.frozen(eq=False)
class LayerTrial:
    """A trial run of a decoder layer on a few tokens, just before its real run.

    Args:
        hidden: Hidden states of a few tokens of every row.
        token_axis: The axis of tokens in ``hidden``.
        arguments: The layer's other arguments for these tokens, by name, without mask and cache.
        embeddings: The rotary embedding of all tokens of the forward; None if the layer gets none.
    """

    index: int
    module: nn.Module
    attention: nn.Module
    hidden: Tensor
    token_axis: int
    arguments: dict[str, Any]
    embeddings: Any

    def states(self, embeddings: Callable[[Any], Any]) -> tuple[Tensor, Tensor]:
        """Return the layer's queries and keys when it is given another rotary embedding.

        ``embeddings`` is a function that makes it from the layer's own.
        """
        made = embeddings(self.arguments["position_embeddings"])
        return self._states({**self.arguments, "position_embeddings": made})

    def _states(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []

        def attend(module: nn.Module, query: Tensor, key: Tensor, *_: Any, **__: Any) -> NoReturn:
            found.extend((query, key))
            raise Enough

        self._run(attend, arguments)
        return found[0], found[1]

    def check_finite(self) -> None:
        """Check that the layer computes queries and keys without NaN or infinity."""
        if all(bool(each.isfinite().all()) for each in self._states(self.arguments)):
            return
        raise ValueError(
            f"model must compute finite numbers, but queries or keys of layer {self.index} are NaN "
            "or infinite; look for these in the parameters of that layer and those before it "
            "(is the checkpoint whole, the precision wide enough?), and in inputs_embeds"
        )

    def projection(self) -> OutputProjection | None:
        """Find the output projection of the heads, even after a gate; None if there is none."""
        drawn: list[Tensor] = []
        taken: list[tuple[nn.Module, Tensor]] = []
        generator = torch.Generator().manual_seed(0)

        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
        ) -> tuple[Tensor, None]:
            shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
            output = torch.rand(shape, generator=generator) + 0.5  # none is 0
            drawn.append(output.to(query.device, query.dtype))
            return drawn[-1], None

        def look(module: nn.Module, args: tuple[Any, ...]) -> None:
            if len(drawn) > len(taken) and args[0].numel() == drawn[-1].numel():
                taken.append((module, args[0]))
                raise Enough

        with ExitStack() as hooks:
            for module in self.module.modules():
                # Linear modules, whatever the storage format of their weights.
                if hasattr(module, "in_features") or isinstance(module, Conv1D):
                    # Before hooks that spread the module's input over processes.
                    hook = module.register_forward_pre_hook(look, prepend=True)
                    hooks.callback(hook.remove)
            for _ in range(2):
                self._run(attend, self.arguments)
        if len(taken) < 2 or taken[0][0] is not taken[1][0]:
            return None
        one, other = (
            each.reshape(of_module.shape) for each, (_, of_module) in zip(drawn, taken, strict=True)
        )
        # A gate multiplies each channel by the same factor in both runs.
        if not near(taken[0][1] * other, taken[1][1] * one):
            return None
        return OutputProjection(taken[0][0], *drawn[0].shape[2:])

    @torch.no_grad()
    def _run(self, attend: Attend, arguments: dict[str, Any]) -> None:
        with replaced(self.attention, attend):
            try:
                # `forward` is called directly, since this code runs inside a hook of the layer.
                self.module.forward(self.hidden, **arguments)
            except Enough:
                return
