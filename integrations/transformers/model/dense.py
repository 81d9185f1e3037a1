"""Run a model with its own dense attention, without a cache, under given masks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.integrations.transformers.model import routing
from kvpolicy.integrations.transformers.model.finding import stateful_parts
from kvpolicy.integrations.transformers.model.kinds import Indexed
from kvpolicy.integrations.transformers.model.masks import first_seen
from kvpolicy.integrations.transformers.model.parts import ModelParts

# By layer, which tokens its attention may see in this thread: [kv_heads or 1, len, len] bool.
_visible: ContextVar[Sequence[Tensor] | None] = ContextVar("kvpolicy_visible", default=None)
# By layer, the tokens that reach it in this thread: [len] bool.
_reaching: ContextVar[Sequence[Tensor] | None] = ContextVar("kvpolicy_reaching", default=None)


@torch.no_grad()
def dense_outputs(
    model: nn.Module,
    parts: ModelParts,
    ids: Tensor,
    see: list[Tensor],
    reaching: list[Tensor],
    *,
    placed: bool = False,
) -> Tensor:
    """Return a model's dense outputs for one row, with each layer's attention under a given mask.

    Args:
        model: The model, or its decoder.
        parts: Its modules.
        ids: ``[1, len]`` int64.
        see: By layer, ``[kv_heads or 1, len, len]`` bool: True if a token (second axis) sees
            another token (third axis).
        reaching: By layer, ``[len]`` bool: the tokens that its states read, if it has any.
        placed: See `plain_outputs`.

    Returns:
        Logits, or the last hidden states, ``[len, size]``.
    """
    tokens = _visible.set(see), _reaching.set(reaching)
    try:
        with _dense(parts):
            return plain_outputs(model, ids, placed=placed)
    finally:
        _visible.reset(tokens[0])
        _reaching.reset(tokens[1])


@torch.no_grad()
def plain_outputs(model: nn.Module, ids: Tensor, *, placed: bool = False) -> Tensor:
    """Run a model on one prompt without any cache; return its logits or last hidden states.

    Args:
        model: The model, or its decoder.
        ids: ``[1, len]`` int64.
        placed: Whether the model gets positions, as from ``generate``, instead of counting them
            itself.
    """
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    given = {"position_ids": places} if placed else {}
    output: Any = model(input_ids=ids, use_cache=False, return_dict=True, **given)
    found = output.logits if "logits" in output else output.last_hidden_state
    rows: Tensor = found[0]
    return rows


@contextmanager
def _dense(parts: ModelParts) -> Iterator[None]:
    with ExitStack() as stack:
        picked = _Picked()
        for index, attention in enumerate(parts.attentions):
            if isinstance(parts.kinds[index], Indexed):
                stack.enter_context(picked.among_what_is_seen(parts, index))
            elif attention is not None:
                stack.enter_context(routing.replaced(attention, _Dense(index)))
                if parts.kinds[index].states:
                    for each in stateful_parts(parts.layers[index], attention):
                        stack.enter_context(_reading_some(each, index))
            elif parts.kinds[index].attends:
                how = parts.implementation
                stack.enter_context(_given_mask(parts.layers[index], index, how))
            else:
                stack.enter_context(_reading_some(parts.layers[index], index))
        yield


@contextmanager
def _given_mask(layer: nn.Module, index: int, implementation: str) -> Iterator[None]:
    """Give a layer with its own attention a mask of the tokens it may see, in a `with` block.

    These tokens are never later than the query, so that the model's own causal mask adds nothing.
    """

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        see = _visible.get()
        if see is None:
            return None
        names = list(inspect.signature(type(module).forward).parameters)[1:]  # after self
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        hidden, visible = given.pop(names[0]), see[index]
        assert bool((visible == visible[:1]).all())  # some layers take one mask for all heads
        mask = visible[:1].to(hidden.device)[None]
        if implementation != "sdpa":
            lowest = torch.finfo(hidden.dtype).min
            mask = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill_(~mask, lowest)
        return (hidden,), {**given, "attention_mask": mask}

    handle = layer.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _reading_some(layer: nn.Module, index: int) -> Iterator[None]:
    """In a `with` block, make a non-attention module compute only tokens not dropped before it.

    Its output is 0 for the other tokens, which nothing reads. Calls of other threads pass through.
    """

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        there = _there(index)
        if there is None:
            return args, kwargs
        cut = {name: _cut(each, there) for name, each in kwargs.items()}
        if "attention_mask" in cut:
            cut["attention_mask"] = None
        return tuple(_cut(each, there) for each in args), cut

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        there = _there(index)
        if there is None:
            return output
        if isinstance(output, tuple):
            return tuple(_spread(each, there) for each in output)
        return _spread(output, there)

    handles = [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _there(index: int) -> Tensor | None:
    """Return which tokens reach a layer, ``[len]`` bool; None outside of a self-check."""
    reaching = _reaching.get()
    return None if reaching is None else reaching[index]


def _spread(value: Any, there: Tensor) -> Any:
    """Put outputs of the reaching tokens back into the row, 0 elsewhere.

    They have an axis of tokens: ``[1, count, ...]``, or behind that of heads.
    """
    count = int(there.sum())
    if not isinstance(value, Tensor) or value.ndim < 3 or count not in value.shape[1:]:
        return value
    axis = 1 + value.shape[1:].index(count)
    whole = value.new_zeros(*value.shape[:axis], len(there), *value.shape[axis + 1 :])
    return whole.index_copy(axis, there.nonzero()[:, 0].to(value.device), value)


def _cut(value: Any, there: Tensor) -> Any:
    """Cut an argument of a layer to the tokens of the row that reach it."""
    if isinstance(value, tuple):
        return tuple(_cut(part, there) for part in value)
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    axes = [axis for axis in range(1, value.ndim) if value.shape[axis] == len(there)]
    if not axes:
        return value
    return value.index_select(axes[0], there.nonzero()[:, 0].to(value.device))


class _Picked:
    """A runner of layers with an indexer, which runs them on only the visible tokens.

    A mask would not be enough, since the indexer could pick hidden tokens. So the output of each
    token comes from a run of the layer over exactly the tokens that this token sees.
    """

    def __init__(self) -> None:
        # What the last layer of this kind returned besides hidden states: for the whole row, then
        # by run.
        self._beside: list[tuple[Tensor, dict[tuple[bool, ...], Any]]] = []

    @contextmanager
    def among_what_is_seen(self, parts: ModelParts, index: int) -> Iterator[None]:
        """Compute each token's output by a layer run on what it sees, in a `with` block.

        Calls of other threads pass through.
        """
        kind = parts.kinds[index]
        by_slot = isinstance(kind, Indexed) and kind.blocks

        def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            see = _visible.get()
            if see is None:
                return output
            hidden, *others = output if isinstance(output, tuple) else (output,)
            hidden, runs = torch.zeros_like(hidden), {}
            for there, own in _runs(see[index][0].to(hidden.device)):
                given = kwargs
                if by_slot:  # blocks are counted in the visible tokens
                    slots = there.cumsum(dim=0)[None] - 1
                    given = {**kwargs, "position_ids": slots}
                found = self._run(module, args, given, there)
                runs[tuple(there.tolist())] = found
                hidden[:, own] = (found[0] if isinstance(output, tuple) else found)[:, own[there]]
            self._beside = [
                (whole, {run: found[place] for run, found in runs.items()})
                for place, whole in enumerate(others, start=1)
                if isinstance(whole, Tensor)
            ]
            return (hidden, *others) if isinstance(output, tuple) else hidden

        layer: Any = parts.layers[index]
        handle = layer.register_forward_hook(after, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _run(self, module: Any, args: Any, kwargs: dict[str, Any], there: Tensor) -> Any:
        def cut(name: str, value: Any) -> Any:
            lent = next((by_run for whole, by_run in self._beside if whole is value), None)
            if lent is not None:
                return lent.get(tuple(there.tolist()))  # None for a layer that picks its own slots
            cut_once = _cut(value, there)
            pairs = name == "attention_mask" and isinstance(value, Tensor) and value.ndim == 4
            return _cut(cut_once.transpose(2, 3), there).transpose(2, 3) if pairs else cut_once

        named = {name: cut(name, value) for name, value in kwargs.items()}
        return module.forward(*(cut("", value) for value in args), **named)


def _runs(see: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the runs of a layer: the tokens that each reads, and those whose output it gives.

    Args:
        see: ``[len, len]`` bool: True if a token (first axis) sees another (second axis).
    """
    left = see.sum(dim=0) > 1  # a token that only itself sees is not read, except the last one
    left[-1] = True
    causal = torch.ones_like(see).tril()
    while bool(left.any()):
        there = see[int(left.nonzero()[-1])]
        own = left & there & (see == (there & causal)).all(dim=1)
        left = left & ~own
        yield there, own


class _Dense:
    """An attention function: the module's eager one, under the mask that the check sets.

    Args:
        index: Index of the layer.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend under both the model's own ``mask`` and the layer's mask in the check."""
        eager, see = routing.eager_function(module), _visible.get()
        assert see is not None
        visible = see[self.index].to(query.device)
        visible = visible.repeat_interleave(query.shape[1] // visible.shape[0], dim=0)[None]
        extra = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
        extra.masked_fill_(~visible, torch.finfo(query.dtype).min)
        if isinstance(mask, Tensor) and mask.ndim == 4:
            own = mask[..., : key.shape[2]]
            if own.dtype == torch.bool:
                own = torch.zeros_like(own, dtype=query.dtype).masked_fill_(
                    ~own, torch.finfo(query.dtype).min
                )
            extra = torch.clamp(own.to(query.dtype) + extra, min=torch.finfo(query.dtype).min)
        return eager(module, query, key, value, extra, **kwargs)


def visible_to(
    layers: Sequence[tuple[Tensor, list[int]]], windows: Sequence[int | None], prompt: int, end: int
) -> list[Tensor]:
    """Return which tokens each token of a row sees in every layer, after a policy has acted.

    Args:
        layers: For each layer the positions kept of the prompt, ``[kv_heads, kept]``, -1 on empty
            slots, and the positions of the prompt that reached it.
        windows: Each layer's sliding window; None if it sees all tokens.
        prompt: Tokens of the prompt.
        end: Tokens of the whole row.

    Returns:
        By layer, ``[kv_heads, end, end]`` bool.
    """
    places = torch.arange(end)
    causal = places[None, :] <= places[:, None]
    found = []
    for (kept, reached), window in zip(layers, windows, strict=True):
        there = torch.zeros(end, dtype=torch.bool)
        there[reached] = True
        # A padded slot writes to a spare column.
        columns = torch.where(kept < 0, end, kept).cpu()
        held = torch.zeros(kept.shape[0], end + 1, dtype=torch.bool).scatter_(1, columns, True)
        decoded = places >= prompt
        later = held[:, :end] | decoded
        see = torch.where(decoded[:, None], later[:, None, :], there[None, None, :]) & causal
        if window is not None:
            see = see & (places[None, :] >= first_seen(places, window)[:, None])
        # A token that did not reach a layer sees itself there, so that its output stays finite; it
        # is not read.
        found.append(see | torch.eye(end, dtype=torch.bool))
    return found


def reaching_by_layer(
    layers: Sequence[tuple[Tensor, list[int]]], prompt: int, end: int
) -> list[Tensor]:
    """Return which tokens of a row reach each layer, after a policy has dropped some.

    Args:
        layers: See `visible_to`.
        prompt: Tokens of the prompt.
        end: Tokens of the whole row.

    Returns:
        By layer, ``[end]`` bool.
    """
    found = []
    for _, reached in layers:
        there = torch.arange(end) >= prompt
        there[reached] = True
        found.append(there)
    return found


def left_by(cache: Any, row: int, prompt: int) -> list[tuple[Tensor, list[int]]]:
    """Return, by layer, which prompt positions of a row were kept, and which reached it."""
    reached = list(range(prompt))
    found: list[tuple[Tensor, list[int]]] = []
    for index, layer in enumerate(cache.layers):
        # For a layer without attention only the tokens that reached it matter.
        kept = torch.tensor([reached]) if layer.positions is None else layer.positions[row]
        own = kept.masked_fill(kept >= prompt, -1), reached
        found.append(own if layer.producer is None else found[layer.producer])
        if index in cache.propagated:
            reached = [each for each in cache.propagated[index][row].tolist() if each >= 0]
    return found
