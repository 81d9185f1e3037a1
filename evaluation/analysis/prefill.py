"""Watch a prefill layer by layer, and compute the last token's state after drops at many layers.

A policy that drops nothing is the window through which every layer's queries and keys
are seen: no code of the model is copied, and attention is summed in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn
from transformers import Cache

from kvpolicy.checks import check_count, check_kind
from kvpolicy.context import LayerContext
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.interfaces import KVSelector, PropagationPolicy, Scorer
from kvpolicy.policies import PassAllPropagation, TokenSelectivePropagation
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import compress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The arguments of a layer that have axes of tokens, and these axes.
_TOKEN_AXES = {"attention_mask": (-2, -1), "position_ids": (-1,), "position_embeddings": (-2,)}


def check_prompts(
    model: PreTrainedModel, inputs: Sequence[Sequence[int] | Tensor], window_size: int
) -> list[Tensor]:
    """Check a model and token ids of prompts longer than the window; return ``[1, prompt_len]``."""
    check_kind("model", model, nn.Module)
    if model.training:
        raise ValueError("model must be in evaluation mode, got training mode; call model.eval()")
    check_count("window_size", window_size, minimum=1)
    if isinstance(inputs, str | Tensor) or not isinstance(inputs, Sequence):
        got = type(inputs).__name__
        raise TypeError(f"inputs must be a sequence of prompts' token ids, got {got}; pass a list")
    if not inputs:
        raise ValueError("inputs must hold at least one prompt, got none")
    size = int(model.get_input_embeddings().num_embeddings)
    prompts = []
    for index, ids in enumerate(inputs):
        name = f"prompt {index}"
        try:
            row = torch.as_tensor(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name} must be the token ids of one prompt: {error}") from None
        row = row[0] if row.ndim == 2 and len(row) == 1 else row
        if row.ndim != 1:
            raise ValueError(
                f"{name} must be [prompt_len] or [1, prompt_len], got shape "
                f"{list(row.shape)}; pass the rows of a batch one by one"
            )
        if len(row) <= window_size:
            raise ValueError(
                f"{name} must be longer than window_size, {window_size} tokens, got {len(row)}"
            )
        if row.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be ints, got {row.dtype}")
        for got in (int(row.min()), int(row.max())):
            if not 0 <= got < size:
                raise ValueError(f"{name} must be of token ids in [0, {size - 1}], got {got}")
        prompts.append(row.to(device=model.device, dtype=torch.int64)[None])
    return prompts


@attrs.frozen(eq=False)
class _Show(KVSelector):
    """Calls a function with each layer's saliency; keeps only the prompt's last tokens.

    Eviction comes after a layer's attention, so a prefill does not depend on what is kept.
    """

    show: Callable[[Tensor, LayerContext], None]
    protected_tail: int = 1

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        assert saliency is not None
        self.show(saliency, context)
        return compress(self.protected(context), min(self.protected_tail, context.key_len))


@torch.no_grad()
def final_state(
    model: PreTrainedModel, input_ids: Tensor, policy: CachePolicy | None = None
) -> Tensor:
    """Return the last token's hidden state after the decoder, which gives the next token's logits.

    It is ``[hidden_size]``, float64 on the CPU: a distance is a small difference of states. Without
    a policy the plain model reads ``input_ids``, ``[1, prompt_len]``, without a cache.
    """
    # The decoder alone: logits of all tokens would be larger than anything else here.
    decoder: Any = model.get_decoder()
    if policy is None:
        return _double(decoder(input_ids, use_cache=False).last_hidden_state[:, -1])
    cache = PolicyCache(policy)
    with cache.attached(model):
        return _double(decoder(input_ids, use_cache=True, cache=cache).last_hidden_state[:, -1])


def showing(
    scorer: Scorer,
    show: Callable[[Tensor, LayerContext], None] = lambda saliency, context: None,
    propagation: PropagationPolicy | None = None,
) -> CachePolicy:
    """Return a policy for prefills only, which calls ``show`` with each layer's saliency."""
    selector = _Show(show, max(scorer.unscored_tail, 1))
    return CachePolicy(scorer, selector, propagation or PassAllPropagation())


def layer_saliencies(
    model: PreTrainedModel, input_ids: Tensor, scorer: Scorer
) -> dict[int, Tensor]:
    """Return by layer that sees the whole context the saliency, averaged over the heads.

    It is float32 ``[prompt_len]`` on the CPU.
    """
    seen: dict[int, Tensor] = {}

    def show(saliency: Tensor, context: LayerContext) -> None:
        seen[context.layer_idx] = saliency[0].mean(dim=0).cpu()

    final_state(model, input_ids, showing(scorer, show))
    return seen


@torch.no_grad()
def states_after_drops(
    model: PreTrainedModel,
    input_ids: Tensor,
    scorer: Scorer,
    drop: TokenSelectivePropagation,
    layers: Sequence[int],
) -> tuple[Tensor, list[Tensor]]:
    """Return the last token's final state with full context, and for a drop after each layer.

    One full prefill notes, at every one of ``layers``, which tokens go on, and their hidden states;
    then the layers after it run on those tokens. A model whose layers cannot be run so, since they
    take tensors that are unknown here or more than a norm follows them, is run anew for each.
    The layer that ``drop`` names itself does not matter.
    """
    decoder: Any = model.get_decoder()
    modules: Any = getattr(decoder, "layers", ())
    norm: Any = getattr(decoder, "norm", None)
    passed: dict[int, Tensor | None] = {}  # tokens that go on after a layer; None for all
    states: dict[int, Tensor] = {}  # of these tokens; at -1 the last token's, after the last layer
    calls: list[dict[str, Any] | None] = []  # each layer's arguments

    def choose(saliency: Tensor, context: LayerContext) -> None:
        chosen = drop.propagate(saliency, context) if context.layer_idx in layers else None
        passed[context.layer_idx] = None if chosen is None else chosen[0]

    def note(layer: object, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tokens, left = passed.get(len(calls)), output[0] if isinstance(output, tuple) else output
        if tokens is not None:  # a copy, so that the states of dropped tokens are freed
            states[len(calls)] = left.index_select(1, tokens.to(left.device))
        states[-1] = left[:, -1:].clone()
        calls.append(_arguments(args, kwargs))

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        full = final_state(model, input_ids, showing(scorer, choose))
    shared = len(calls) == len(modules) > 0 and None not in calls and norm is not None
    if shared:
        shared = bool((_double(norm(states[-1])) - full).norm() <= 0.01 * full.norm())

    def after(layer: int) -> Tensor:
        tokens = passed[layer]
        if tokens is None:
            return full
        if not shared:
            policy = showing(scorer, propagation=attrs.evolve(drop, tsp_layer=layer))
            return final_state(model, input_ids, policy)
        left = states.pop(layer)
        for index in range(layer + 1, len(modules)):
            left = modules[index](left, **_cut(calls[index] or {}, tokens))
            left = left[0] if isinstance(left, tuple) else left
        return _double(norm(left[:, -1:]))

    return full, [after(layer) for layer in layers]


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return a layer's arguments without cache and states; None if one cannot be cut to tokens."""
    kept = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    kept = {name: None if isinstance(it, Cache) else it for name, it in kept.items()}
    unknown = [value for name, value in kept.items() if name not in _TOKEN_AXES]
    mask = kept.get("attention_mask")
    cut = len(args) < 2 and not any(isinstance(it, Tensor | tuple | list | dict) for it in unknown)
    return kept if cut and (mask is None or getattr(mask, "ndim", 0) == 4) else None


def _cut(arguments: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
    """Return a layer's arguments with only some of the tokens left."""

    def cut(value: Any, axes: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            return tuple(cut(part, axes) for part in value)
        for axis in axes if value is not None else ():
            value = value.index_select(axis, tokens.to(value.device))
        return value

    return {name: cut(value, _TOKEN_AXES.get(name, ())) for name, value in arguments.items()}


def _double(state: Tensor) -> Tensor:
    return state.flatten().float().cpu().double()
