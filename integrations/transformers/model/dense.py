"""Run a model with its own dense attention, without a cache, under given masks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.integrations.transformers.model import routing
from kvpolicy.integrations.transformers.model.finding import stateful_parts
from kvpolicy.integrations.transformers.model.masks import first_seen
from kvpolicy.integrations.transformers.model.parts import ModelParts


@attrs.frozen(eq=False)
class Visible:
    """What the layers of a model see of one row.

    Args:
        see: By layer, ``[kv_heads or 1, len, len]`` bool: True if a token (second axis) sees
            another token (third axis). A token that did not reach a layer sees itself there, so
            that its output stays finite; it is not read.
        reaching: By layer, ``[len]`` bool: the tokens that reach it.
    """

    see: list[Tensor]
    reaching: list[Tensor]

    @staticmethod
    def everything(windows: Sequence[int | None], length: int) -> Visible:
        """Return what is seen without a policy, in layers with these sliding windows."""
        every = torch.ones(1, 1, length, dtype=torch.bool)
        return Visible([_causal(every, each) for each in windows], [every[0, 0]] * len(windows))

    @staticmethod
    def after(
        cache: Any, windows: Sequence[int | None], row: int, prompt: int, end: int
    ) -> Visible:
        """Return what is seen after a cache's policy has acted on a prompt."""
        later = torch.arange(end) >= prompt
        reached = torch.ones(end, dtype=torch.bool)
        found: list[tuple[Tensor, Tensor]] = []
        for index, layer in enumerate(cache.layers):
            held = reached[None]  # of a layer without attention, where only `reached` matters
            if layer.positions is not None:
                kept = layer.positions[row].cpu()
                held = torch.zeros(len(kept), end + 1, dtype=torch.bool)
                held = held.scatter_(1, kept.masked_fill(kept < 0, end), True)[:, :end]
            sees = torch.where(later[:, None], (held | later)[:, None], reached)
            found.append((sees, reached) if layer.producer is None else found[layer.producer])
            if index in cache.propagated:
                passed = cache.propagated[index][row].cpu()
                reached = later.clone()
                reached[passed[passed >= 0]] = True
        see = [_causal(sees, window) for (sees, _), window in zip(found, windows, strict=True)]
        return Visible(see, [reached for _, reached in found])


def _causal(sees: Tensor, window: int | None) -> Tensor:
    """Return which tokens are seen, none of them later or outside of a window, but itself."""
    places = torch.arange(sees.shape[-1])
    within = places <= places[:, None]
    if window is not None:
        within = within & (places >= first_seen(places, window)[:, None])
    return (sees & within) | (places == places[:, None])


@torch.no_grad()
def dense_outputs(
    model: nn.Module, parts: ModelParts, ids: Tensor, visible: Visible, *, placed: bool = False
) -> Tensor:
    """Return a model's logits or hidden states for one row, under the mask ``visible``."""
    picked: _Beside = []
    with ExitStack() as stack:

        def in_runs(
            module: nn.Module, runs: list[_Run], beside: _Beside, *, by_slot: bool = False
        ) -> None:
            hook = _in_runs(runs, beside, by_slot=by_slot)
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)

        for index, (kind, attention) in enumerate(zip(parts.kinds, parts.attentions, strict=True)):
            see, reaching = visible.see[index], visible.reaching[index]
            layer: Any = parts.layers[index]
            # A mask would not be enough for an indexer, which could pick hidden tokens, and layers
            # that call no attention function of Transformers take masks in many forms.
            if kind.picks or (kind.attends and attention is None):
                in_runs(layer, list(_runs(see)), picked, by_slot=kind.blocks)
                continue
            if attention is not None:
                stack.enter_context(routing.replaced(attention, _under(see)))
            states = [layer] if attention is None else stateful_parts(layer, attention)
            for module in states if attention is None or kind.states else ():
                in_runs(module, [(reaching, reaching)], [])
        return plain_outputs(model, ids, placed=placed)


@torch.no_grad()
def plain_outputs(model: nn.Module, ids: Tensor, *, placed: bool = False) -> Tensor:
    """Run a model on one prompt without any cache; return its logits or last hidden states.

    ``placed`` gives it positions, as `generate` does, instead of letting it count them itself.
    """
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    given = {"position_ids": places} if placed else {}
    output: Any = model(input_ids=ids, use_cache=False, return_dict=True, **given)
    found = output.logits if "logits" in output else output.last_hidden_state
    rows: Tensor = found[0]
    return rows


def _under(see: Tensor) -> routing.Attend:
    """Return an attention function: a module's eager one, under its own mask and ``see``."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        lowest = torch.finfo(query.dtype).min
        visible = see.to(query.device).repeat_interleave(query.shape[1] // see.shape[0], dim=0)
        added = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
        added = added.masked_fill_(~visible, lowest)[None]
        if isinstance(mask, Tensor) and mask.ndim == 4:
            own = mask[..., : key.shape[2]]
            if own.dtype == torch.bool:
                own = torch.zeros_like(own, dtype=query.dtype).masked_fill_(~own, lowest)
            added = torch.clamp(own.to(query.dtype) + added, min=lowest)
        return routing.eager_function(module)(module, query, key, value, added, **kwargs)

    return attend


# One run of a module on some tokens of a row: those that it reads, and those whose output it gives.
_Run = tuple[Tensor, Tensor]
# What the last module returned besides its first output: for the whole row, then by run.
_Beside = list[tuple[Tensor, dict[tuple[bool, ...], Any]]]


def _in_runs(runs: list[_Run], beside: _Beside, *, by_slot: bool) -> Callable[..., Any]:
    """Return a hook after a module that takes its output from runs on some tokens only.

    The output is 0 for tokens of no run, which nothing reads. Calls of other threads pass through.
    With ``by_slot``, positions are counted in the tokens of a run, as blocks are.
    """
    thread = threading.get_ident()

    def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if threading.get_ident() != thread:
            return output
        found: dict[tuple[bool, ...], tuple[Any, ...]] = {}
        for there, _ in runs:
            run = tuple(there.tolist())

            def cut(value: Any, there: Tensor = there, run: tuple[bool, ...] = run) -> Any:
                lent = [of_runs for each, of_runs in beside if each is value]
                return lent[0].get(run) if lent else _cut(value, there)

            given = {name: cut(value) for name, value in kwargs.items()}
            if by_slot:
                given["position_ids"] = torch.arange(sum(run), device=args[0].device)[None]
            found[run] = _as_tuple(module.forward(*map(cut, args), **given))
        joined = tuple(
            _joined(
                whole,
                [(*run, of_run[place]) for run, of_run in zip(runs, found.values(), strict=True)],
            )
            for place, whole in enumerate(_as_tuple(output))
        )
        beside[:] = [
            (each, {run: of_run[place] for run, of_run in found.items()})
            for place, each in enumerate(joined)
            if place and isinstance(each, Tensor)
        ]
        return joined if isinstance(output, tuple) else joined[0]

    return after


def _as_tuple(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


def _joined(whole: Any, parts: list[tuple[Tensor, Tensor, Any]]) -> Any:
    """Return an output like ``whole``, whose tokens come from the runs that give them."""
    axis = _token_axis(whole, len(parts[0][0])) if isinstance(whole, Tensor) else 0
    if not axis:
        return whole
    joined = torch.zeros_like(whole)
    for there, own, part in parts:
        taken = part.index_select(axis, own[there].nonzero()[:, 0].to(part.device))
        slots = own.nonzero()[:, 0].to(whole.device)
        if taken.shape != joined.index_select(axis, slots).shape:
            return whole  # such as weights of attention, or slots that an indexer picks
        joined.index_copy_(axis, slots, taken)
    return joined


def _token_axis(value: Tensor, length: int) -> int:
    """Return the first axis behind the batch that has ``length`` entries; 0 if there is none."""
    return next((axis for axis in range(1, value.ndim) if value.shape[axis] == length), 0)


def _cut(value: Any, there: Tensor) -> Any:
    """Cut an argument of a module to some tokens of the row."""
    if isinstance(value, tuple):
        return tuple(_cut(part, there) for part in value)
    if not isinstance(value, Tensor) or not (axis := _token_axis(value, len(there))):
        return value
    slots = there.nonzero()[:, 0].to(value.device)
    pairs = value.ndim == 4 and value.shape[2:] == (len(there),) * 2  # a mask
    value = value.index_select(axis, slots)
    return value.index_select(3, slots) if pairs else value


def _runs(see: Tensor) -> Iterator[_Run]:
    """Yield runs of a layer by which each token reads what it sees, in all heads the same."""
    assert bool((see == see[:1]).all())
    see = see[0]
    left = see.sum(dim=0) > 1  # a token that only itself sees is not read, except the last one
    left[-1] = True
    causal = torch.ones_like(see).tril()
    places = torch.arange(len(see))
    while bool(left.any()):
        last = int(left.nonzero()[-1])
        there = see[last]
        # Not of the first half, so that a layer is found out which lets tokens see later ones.
        own = left & there & (see == (there & causal)).all(dim=1) & (places >= last // 2)
        left = left & ~own
        yield there, own
