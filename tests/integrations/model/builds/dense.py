"""Dense attention of any decoder under a mask of each layer's own, by the model's own code.

Nothing here looks at how a model makes its masks or calls its attention: while the model runs once
over a whole row without a cache, every softmax over scores of the row's tokens is taken under what
its layer is to see in addition to what the model itself masks.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

_SOFTMAX = (torch.softmax, torch.Tensor.softmax, nn.functional.softmax)
# Of which some take the share of a sink apart from the softmax.
_SUM = (torch.logsumexp, torch.Tensor.logsumexp)
_SDPA = (nn.functional.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)
_BESIDE = re.compile(r"vision|visual|image|audio|speech|vq|qformer|perceiver|depth_decoder|encoder")

_STATEFUL = re.compile(r"(MambaMixer|H1Mixer|CCAProjection|ShortConvolution)$")

# Without position ids, which `generate` gives them, these count positions from their padding id on.
COUNTED = (
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)


class UnjudgedError(Exception):
    """The reference cannot be had; says why."""


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers, wherever the model has them, in order.

    Raises:
        UnjudgedError: There is no list of as many modules as the configuration has layers.
    """
    config = model.config.get_text_config(decoder=True)
    count = next(
        (
            value
            for name in ("num_hidden_layers", "num_layers", "n_layers", "decoder_layers")
            if isinstance(value := getattr(config, name, None), int)
        ),
        None,
    )
    lists = [
        (name, each)
        for name, each in model.named_modules()
        if isinstance(each, nn.ModuleList) and len(each) == count
    ]
    inside = [each for each in lists if not _BESIDE.search(each[0])] or lists
    named = [each for each in inside if re.search(r"(layers?|h|blocks?)$", each[0])] or inside
    if not named:
        # Of layers that attend several times, what attends.
        numbered = [
            each
            for each in model.modules()
            if hasattr(each, "layer_idx") and re.search("Attention|MLA", type(each).__name__)
        ]
        if [each.layer_idx for each in numbered] == list(range(count or 0)):
            return numbered
        raise UnjudgedError(f"no list of {count} layers")
    return list(named[0][1])


class _Masked(TorchFunctionMode):
    """Takes every softmax of a row's scores under the mask of the layer that is running."""

    def __init__(
        self, visible: Sequence[Tensor | None], length: int, prompt_len: int, *, tiled: bool
    ) -> None:
        super().__init__()
        self.visible = visible
        self.length = length
        # Also where a prompt's tokens see each other in both directions, they see no later ones.
        place = torch.arange(length)
        self.known = place[None] < (place + 1).clamp(min=prompt_len)[:, None]
        self.tiled = tiled
        self.layer: int | None = None
        self.reached: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SOFTMAX or func in _SUM:
            scores = args[0] if args else kwargs["input"]
            rest = {name: value for name, value in kwargs.items() if name != "input"}
            return func(self._cut(scores), *args[1:], **rest)
        if func in _SDPA:
            return self._attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            group = query.shape[-3] // key.shape[-3]
            key, value = (each.repeat_interleave(group, dim=-3) for each in (key, value))
        scores = query @ key.transpose(-2, -1)
        scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        lowest = torch.finfo(scores.dtype).min
        if is_causal:
            causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~causal, lowest)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, lowest)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._cut(scores).softmax(dim=-1) @ value

    def _cut(self, scores: Tensor) -> Tensor:
        """Scores `[..., len, len]`, and a sink's behind them, with what is not seen lowest."""
        more = scores.shape[-1] - self.length if scores.ndim > 2 else -1
        if more not in (0, 1) or scores.shape[-2] != self.length:
            return scores
        heads = math.prod(scores.shape[:-2])  # of one row
        seen = self._seen(heads) & self.known
        seen = nn.functional.pad(seen, (0, more), value=True)
        lowest = torch.finfo(scores.dtype).min
        return scores.masked_fill(~seen.view(scores.shape[:-2] + seen.shape[-2:]), lowest)

    def _seen(self, heads: int) -> Tensor:
        """`[heads, len, len]`, what the layer that is running sees."""
        if self.layer is not None:
            self.reached.add(self.layer)
        seen = None if self.layer is None else self.visible[self.layer]
        if seen is None:
            return torch.ones(heads, self.length, self.length, dtype=torch.bool)
        if heads % seen.shape[0]:
            raise UnjudgedError(f"{heads} heads of scores, {seen.shape[0]} of keys")
        group = heads // seen.shape[0]
        return seen.repeat(group, 1, 1) if self.tiled else seen.repeat_interleave(group, dim=0)


@dataclass(frozen=True)
class Seen:
    """What one layer sees of a row."""

    # Bool `[kv_heads, len, len]`, whether the query of a row sees the key of a column; None where
    # it sees all that the model lets it.
    keys: Tensor | None
    # Bool `[len]`, those that reach the layer. Only a layer's states, or its indexer, take these
    # from here; elsewhere the keys of others are not seen.
    tokens: Tensor


def seen_of(
    kept: Mapping[int, Sequence[Sequence[Sequence[int]]]],
    length: int,
    passed: Sequence[tuple[slice, Mapping[int, Sequence[int]]]] = (),
    producers: Sequence[int | None] = (),
) -> list[Seen]:
    """By layer what a row's tokens see: what was kept at the last choice, and all that is newer.

    Args:
        kept: By number of tokens read before a choice, the positions of every layer and head.
        length: Of the row.
        passed: By prompt its places, and by layer those that went on.
        producers: By layer, the one whose keys it borrows.
    """
    reaching, layers = torch.ones(length, dtype=torch.bool), list[Seen]()
    for index, heads in enumerate(kept[min(kept)]):
        keys = None
        if producers and producers[index] is not None:  # sees what reached that layer
            keys = layers[producers[index]].keys  # type: ignore[index]
        elif heads:
            keys = torch.ones(len(heads), length, length, dtype=torch.bool)
            for own, _ in passed:
                keys[:, own, own] &= reaching[own]
            for end, chosen in sorted(kept.items()):
                keys[:, end:, :end] = False
                for head, positions in enumerate(chosen[index]):
                    keys[head, end:, positions] = True
            keys |= torch.eye(length, dtype=torch.bool)
        layers.append(Seen(keys, reaching))
        reaching = reaching.clone()
        for own, by_layer in passed:
            if index in by_layer:
                reaching[own] = False
                reaching[by_layer[index]] = True
    return layers


@torch.no_grad()
def dense_logits(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    prompt_len: int,
    seen: Sequence[Seen] = (),
    *,
    tiled: bool = False,
    beside: dict[str, Tensor] | None = None,
) -> Tensor:
    """One forward over a whole row without a cache, each layer's attention narrowed.

    Args:
        model: any decoder of Transformers; its own masks hold besides.
        token_ids: the row, prompt and decoded tokens.
        prompt_len: tokens of the prompt, which was read without those that follow.
        seen: by layer; empty where all layers see all.
        tiled: whether query head `i` has the key head `i % kv_heads`, instead of neighbours
            sharing one.
        beside: what the model is given of images, by name.

    Returns:
        Logits `[len, vocab]`.

    Raises:
        UnjudgedError: A layer that is to see less than all took no softmax.
    """
    masked = _Masked([each.keys for each in seen], len(token_ids), prompt_len, tiled=tiled)
    handles: list[Any] = []
    layers = decoder_layers(model) if seen else []
    if len(layers) != len(seen):
        raise UnjudgedError(f"{len(layers)} layers, but {len(seen)} in the cache")
    parts = _InParts()
    for index, (layer, each) in enumerate(zip(layers, seen, strict=True)):
        handles += _hooks(masked, index, layer)
        if each.keys is not None and _has_indexer(layer):
            handles.append(parts.hook(layer, each))
        elif not bool(each.tokens.all()):
            for part in _stateful(layer) if each.keys is not None else [layer]:
                handles += _gathering(part, each.tokens)
    try:
        with masked:
            logits: Tensor = model(
                **_inputs(model, token_ids), **(beside or {}), use_cache=False
            ).logits
    finally:
        for handle in handles:
            handle.remove()
    missed = [
        index
        for index, each in enumerate(seen)
        if each.keys is not None and index not in masked.reached
    ]
    if missed:
        raise UnjudgedError(f"layers {missed} take no softmax over the tokens")
    return logits[0]


def _hooks(masked: _Masked, index: int, layer: nn.Module) -> list[Any]:
    """Say which layer is running."""

    def enters(*_: Any) -> None:
        masked.layer = index

    def leaves(*_: Any) -> None:
        masked.layer = None

    return [
        layer.register_forward_pre_hook(enters),
        layer.register_forward_hook(leaves, always_call=True),
    ]


def _has_indexer(layer: nn.Module) -> bool:
    """Whether a layer has an indexer, or goes by that of one before it."""
    inside = list(layer.modules())
    named = any("Indexer" in type(each).__name__ for each in inside)
    return named or any(getattr(each, "skip_topk", False) for each in inside)


class _InParts:
    """Runs layers whose indexer picks among the tokens there are for these tokens alone.

    Such a layer is not what it is under a mask: of what is hidden, nothing may be picked. So its
    own code is run anew, once for each stretch of tokens that see the same ones and each other,
    on what the stretch sees, and each token's output taken from its own run.
    """

    def __init__(self) -> None:
        # What the layer before gave besides its hidden states: of the whole row, then by run.
        self.beside: list[tuple[Any, list[Any]]] = []

    def hook(self, layer: nn.Module, seen: Seen) -> Any:
        assert seen.keys is not None
        if not bool((seen.keys == seen.keys[:1]).all()):
            raise UnjudgedError("heads keep tokens of their own where an indexer picks for all")
        runs = _stretches(seen.keys[0], seen.tokens)

        def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            outputs = [
                self._run(module, args, kwargs, there, i) for i, (there, _) in enumerate(runs)
            ]
            several = isinstance(output, tuple)
            hidden = torch.zeros_like(output[0] if several else output)
            for (there, own), found in zip(runs, outputs, strict=True):
                hidden[:, own] = (found[0] if several else found)[:, torch.isin(there, own)]
            if not several:
                return hidden
            pairs = zip(output[1:], zip(*(each[1:] for each in outputs), strict=True), strict=True)
            self.beside = [(whole, list(each)) for whole, each in pairs if whole is not None]
            return (hidden, *output[1:])

        return layer.register_forward_hook(after, with_kwargs=True)

    def _run(self, module: Any, args: Any, kwargs: dict[str, Any], there: Tensor, run: int) -> Any:
        length = (args[0] if args else kwargs["hidden_states"]).shape[1]

        def cut(value: Any, every: bool = False) -> Any:
            for whole, by_run in self.beside:
                if value is whole:
                    return by_run[run]
            if isinstance(value, tuple):
                return tuple(cut(each) for each in value)
            if isinstance(value, Tensor):
                axes = [i for i in range(1, value.ndim) if value.shape[i] == length]
                for axis in axes if every else axes[:1]:
                    value = value.index_select(axis, there)
            return value

        named = {name: cut(each, name.endswith("mask")) for name, each in kwargs.items()}
        if any(hasattr(each, "build_block_mask") for each in module.modules()):
            # Blocks of keys are counted among those there are; rotary embeddings stay as they are.
            named["position_ids"] = torch.arange(len(there))[None]
        return type(module).forward(module, *map(cut, args), **named)


def _stretches(keys: Tensor, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Stretches of tokens that see the same ones before them, and all of their own up to itself.

    Args:
        keys: bool `[len, len]`, whether the query of a row sees the key of a column.
        tokens: bool `[len]`, those that reach the layer.

    Returns:
        By stretch, the places that its last token sees, and its own places.
    """
    stretches: list[list[int]] = []
    sets = [set(keys[i, : i + 1].nonzero()[:, 0].tolist()) for i in range(len(tokens))]
    for i in tokens.nonzero()[:, 0].tolist():
        if stretches and sets[i] == sets[stretches[-1][-1]] | {i}:
            stretches[-1].append(i)
        else:
            stretches.append([i])
    return [(torch.tensor(sorted(sets[own[-1]])), torch.tensor(own)) for own in stretches]


def _stateful(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer that hold a state beside its attention, by what they are called."""
    return [each for each in layer.modules() if _STATEFUL.search(type(each).__name__)]


def _gathering(layer: nn.Module, tokens: Tensor) -> list[Any]:
    """Run a module that holds a state on the tokens that reach it alone."""
    places = tokens.nonzero()[:, 0]

    def cut(value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.shape[1:2] == tokens.shape
        return value[:, places] if whole else value

    def enters(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return tuple(map(cut, args)), {name: cut(each) for name, each in kwargs.items()}

    def spread(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 3 or value.shape[1] != len(places):
            return value
        whole = value.new_zeros(value.shape[0], len(tokens), *value.shape[2:])
        whole[:, places] = value
        return whole

    def leaves(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(map(spread, output))
        return spread(output)

    return [
        layer.register_forward_pre_hook(enters, with_kwargs=True),
        layer.register_forward_hook(leaves),
    ]


def _inputs(model: PreTrainedModel, token_ids: Sequence[int]) -> dict[str, Tensor]:
    """What `generate` gives a model of a row without padding."""
    ids = torch.tensor([list(token_ids)])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.model_type in COUNTED:
        inputs["position_ids"] = torch.arange(len(token_ids))[None]
    return inputs
