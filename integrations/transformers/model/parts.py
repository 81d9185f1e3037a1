"""Take a model apart into its layers, their attention modules and their windows."""

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.model import unseen
from kvpolicy.integrations.transformers.model.finding import (
    check_holds_states,
    check_uncompiled,
    find_attention,
    find_decoder,
    layers_within,
    placeholders_of,
)
from kvpolicy.integrations.transformers.model.kinds import FullAttention, LatentAttention, kinds_of
from kvpolicy.integrations.transformers.model.masks import DENSE, FLASH, IMPLEMENTATIONS
from kvpolicy.integrations.transformers.model.modules import path_to, signature
from kvpolicy.integrations.transformers.model.quirks import ModelQuirks, Temperature
from kvpolicy.integrations.transformers.model.rotary import stretch
from kvpolicy.integrations.transformers.surface import ATTN_IMPLEMENTATION
from kvpolicy.interfaces import nearest_layer
from kvpolicy.policy import CachePolicy


class ModelParts:
    """A model taken apart into decoder, layers and attention modules, for a cache to attach to.

    Args:
        model: A decoder-only language model of Transformers, with or without its head.

    Attributes:
        decoder: The model without its head.
        between: The modules between the model and its decoder, on the path of a call.
        attentions: The attention module of each layer; None if a layer does not attend, or attends
            with a function of its own.
        own_caches_only: Whether the decoder refuses caches of other classes than its own. It does
            not check the class if ``use_cache`` is False, and its layers use the one they are
            given.
        windows: For each layer, how many tokens its sliding window sees, the token itself included;
            None if it sees all.
        temperatures: For each layer, how it scales queries by positions that it counts itself; None
            if it does not.

    Raises:
        TypeError: ``model`` is not a torch module.
        UnsupportedModelError: A policy cannot be applied to the model; the message says why.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.model = model
        self.decoder = find_decoder(model)
        self.between = [*path_to(model, self.decoder).values()][1:-1]
        for module in (self.decoder, *model.children(), *self.between):
            # A model may return the decoder inside a compiled module as its decoder.
            if getattr(module, "_orig_mod", module) is self.decoder or module in self.between:
                check_uncompiled(module)
        self.config: Any = self.decoder.config
        self._placeholders = placeholders_of(self.model)
        self.layers = layers_within(self.decoder)
        for layer in self.layers:
            check_uncompiled(layer)
        self.kinds = kinds_of(self.config, len(self.layers))
        for kind in self.kinds:
            if kind.refusal is not None:
                raise UnsupportedModelError(kind.refusal)
        if not any(kind.attends for kind in self.kinds):
            raise UnsupportedModelError(
                "some layer must hold keys and values, but all of them hold a recurrent state or "
                "nothing; a policy has nothing to choose there"
            )
        self.windows = [kind.window for kind in self.kinds]
        self.attentions = [
            find_attention(layer, index) if kind.attends or kind.producer is not None else None
            for index, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True))
        ]
        self.temperatures = [Temperature.of(each) for each in self.attentions]
        for attention in filter(None, self.attentions):
            check_uncompiled(attention)
        for layer in (self.layers[i] for i in self.attending if self.attentions[i] is None):
            unseen.check_layer(layer, self.decoder)
        for index, kind in enumerate(self.kinds):
            beside = kind.producer is not None or (kind.attends and kind.states)
            if beside and self.attentions[index] is None:
                raise UnsupportedModelError(
                    "a layer that carries a state beside its attention, or attends to another's "
                    "keys, must call Transformers' AttentionInterface, but "
                    f"{type(self.layers[index]).__name__} at {index} does not"
                )
            if kind.states:
                check_holds_states(self.layers[index], index, self.attentions[index])
        self.own_caches_only = unseen.takes_own_caches_only(self.decoder)
        _ = self.implementation

    @property
    def implementation(self) -> str:
        """The name of the model's attention implementation, which may change between forwards."""
        name = str(getattr(self.config, ATTN_IMPLEMENTATION))
        known = IMPLEMENTATIONS if self.shows_queries else DENSE
        if name not in known:
            raise UnsupportedModelError(
                f"attn_implementation of the model must be one of {', '.join(known)}, "
                f"got {name!r}; load it with attn_implementation='sdpa'"
            )
        return name

    @property
    def plain_scores(self) -> bool:
        """True if all layers' attention is a plain softmax, without a softcap or sinks."""
        capped = getattr(self.config, "attn_logit_softcapping", None) is not None
        own = filter(None, self.attentions)
        return not capped and not any(hasattr(each, "sinks") for each in own)

    @property
    def num_layers(self) -> int:
        """The number of decoder layers in the model."""
        return len(self.layers)

    @property
    def max_positions(self) -> int | None:
        """The largest number of positions that the model supports; None if it does not say."""
        stated = getattr(self.config, "max_position_embeddings", None)
        return None if not isinstance(stated, int) else int(stated * stretch(self.config))

    def kinds_of(self, arguments: Mapping[str, Any]) -> Tensor | None:
        """Return the `TokenKind` of each token of a call; None if it has no ids or only text."""
        ids = arguments.get("input_ids")
        if not self._placeholders or not isinstance(ids, Tensor) or ids.ndim != 2:
            return None
        kinds = torch.zeros(ids.shape, dtype=torch.int8, device=ids.device)
        for token, kind in self._placeholders.items():
            kinds.masked_fill_(ids == token, int(kind))
        return kinds

    @property
    def eligible(self) -> list[int]:
        """The indices of the layers after which a policy may drop tokens in any context.

        They see the whole context, and no later layer uses slots that their indexer picked; if
        there are none, all layers that see the whole context, or else all that attend.
        """
        attending = self.attending
        whole = [index for index in attending if self.windows[index] is None]
        free = [index for index in whole if not self._lends(index)]
        return free or whole or attending

    def _lends(self, index: int) -> bool:
        """True if a later layer uses the slots that an indexer up to this layer has picked."""
        return next((kind.borrows for kind in self.kinds[index + 1 :] if kind.picks), False)

    @functools.cached_property
    def shows_queries(self) -> bool:
        """True if the queries of every attending layer can be observed."""
        return all(self.attentions[index] is not None for index in self.attending)

    @functools.cached_property
    def passes_on(self) -> bool:
        """True if layers are not attention modules, to whose output the model adds something."""
        pairs = zip(self.layers, self.attentions, strict=True)
        return all(layer is not attention for layer, attention in pairs)

    @property
    def attending(self) -> list[int]:
        """The indices of the layers that have queries, keys and values of their own."""
        return [index for index, kind in enumerate(self.kinds) if kind.attends]

    @functools.cached_property
    def holds_states(self) -> bool:
        """True if some layer carries a recurrent state from token to token."""
        return any(kind.states for kind in self.kinds)

    def device_of(self, index: int) -> torch.device:
        """Return the device on which a layer computes; the CPU if none is known.

        Offloaded weights have no device before the layer runs. Then it is that of a buffer of the
        decoder, such as that of its rotary embedding, or of another parameter.
        """
        found = itertools.chain(
            self.layers[index].parameters(), self.decoder.buffers(), self.decoder.parameters()
        )
        return next((each.device for each in found if not each.is_meta), torch.device("cpu"))

    @property
    def causal(self) -> bool:
        """True if a token in a layer without a mask sees no later token; False in PaliGemma."""
        own = filter(None, self.attentions)
        return all(getattr(each, "is_causal", True) for each in own)

    def check_padding(self, quirks: ModelQuirks) -> None:
        """Check that padding does not change how the model reads a row."""
        if not quirks.pads or any(kind.blocks for kind in self.kinds):
            raise UnsupportedModelError(
                f"rows must not be padded with {type(self.model).__name__}, which reads padded "
                "rows differently, with any cache; give rows of one length, or one row at a time"
            )

    def check_queries(self, policy: CachePolicy) -> None:
        """Check that a policy can work without queries if some layer's cannot be observed."""
        if not self.shows_queries:
            unseen.check_policy(self.model, policy)

    def check_policy(self, policy: CachePolicy, context_len: int) -> None:
        """Check that a policy can act on a context of this length in this model."""
        if policy.gapless:
            self._check_gapless(policy)
        acting = policy.propagation.acting_layers(self.num_layers)
        self._check_acting(policy, acting)
        short = [
            i for i, window in enumerate(self.windows) if (window or context_len) < context_len
        ]
        if short and policy.propagation.restarts:
            raise UnsupportedModelError(
                f"context must fit the sliding window of every layer if {policy} restarts the "
                f"prefill at new positions, {self.windows[short[0]]} tokens, got {context_len}"
            )
        blind = sorted(acting & set(short))
        if blind:
            others = [i for i in range(self.num_layers) if i not in short]
            nearest = f"; the nearest is {nearest_layer(blind[0], others)}" if others else ""
            raise UnsupportedModelError(
                f"layers after which {policy.propagation} drops tokens must see the whole context, "
                f"but the sliding window of layers {blind} sees {self.windows[blind[0]]} of "
                f"{context_len} tokens; layers that see all: {others or 'none'}{nearest}"
            )
        if self.implementation in FLASH:
            self._check_flash(policy, acts=bool(acting))

    def _check_flash(self, policy: CachePolicy, *, acts: bool) -> None:
        """Check that no layer will need a mask under flash attention, now or later in an answer.

        Its kernels see a row's keys in their order, and count windows in keys.
        """
        selectors = [policy.selector]
        if policy.decoding is not None:
            selectors.append(policy.decoding.selector)
        latent = all(isinstance(self.kinds[index], LatentAttention) for index in self.attending)
        one_choice = latent or getattr(self.config, "num_key_value_heads", None) == 1
        if acts and any(self.windows):
            why = (
                "drops tokens or restarts in a model with sliding windows, which flash attention "
                "counts in keys: without the dropped tokens, they would reach too far back"
            )
        elif any(each.unequal_heads for each in selectors) and not one_choice:
            why = (
                "may keep different numbers of tokens in the heads of a layer, for which flash "
                "attention has no mask"
            )
        else:
            return
        raise UnsupportedModelError(
            f"attn_implementation of the model must not be {self.implementation!r} if {policy} "
            f"{why}; load the model with attn_implementation='sdpa' or 'eager'"
        )

    def _check_gapless(self, policy: CachePolicy) -> None:
        """Check that the keys of every layer can be rotated to other positions."""
        for index, kind in enumerate(self.kinds):
            if not isinstance(kind, FullAttention) or self.temperatures[index] is not None:
                scaled = (
                    " with queries scaled by position" if isinstance(kind, FullAttention) else ""
                )
                raise UnsupportedModelError(
                    f"every layer must have full attention if {policy} rotates keys to positions "
                    f"without gaps, but layer {index} is of the kind {kind.name}{scaled}; use "
                    "gapless=False"
                )

    def check_logits(self, policy: CachePolicy, keep_last: int | None) -> None:
        """Check that the decoder itself cuts no hidden states while a policy drops tokens."""
        cuts = "logits_to_keep" in signature(type(self.decoder).forward).parameters
        if cuts and keep_last not in (None, 1):
            raise UnsupportedModelError(
                f"logits_to_keep must be 0 or 1 if {policy} drops tokens of a prompt, since "
                f"{type(self.decoder).__name__} cuts hidden states itself, got {keep_last}"
            )

    def check_rows(self, policy: CachePolicy, rows: int, context_len: int) -> None:
        """Check that rows pass on the same tokens where attention scales a query by its column."""
        floor = getattr(self.config, "log_scaling_n_floor", None)
        if rows > 1 and floor is not None and context_len > floor:
            raise UnsupportedModelError(
                f"a batch must have one row if {policy} drops tokens of a context longer than the "
                f"model's log_scaling_n_floor, {floor} tokens, got {rows} rows of {context_len}; "
                "give one row at a time"
            )

    def _check_acting(self, policy: CachePolicy, acting: frozenset[int]) -> None:
        """Check that layers after which tokens are dropped attend, and pick for no later one."""
        if acting and not self.passes_on:
            raise UnsupportedModelError(
                f"{policy.propagation} cannot be applied to {type(self.model).__name__}, whose "
                "layers attend several times each: no token can be dropped in between; use a "
                "policy that drops no tokens"
            )
        attending = self.attending
        lending = sorted(index for index in acting if self._lends(index))
        if lending and not policy.propagation.restarts:
            others = [index for index in attending if not self._lends(index)]
            raise UnsupportedModelError(
                f"layers after which {policy.propagation} drops tokens must not pick slots by an "
                f"indexer for a later layer, which layers {lending} do; the others: {others}; the "
                f"nearest is {nearest_layer(lending[0], others)}"
            )
        others = sorted(acting - set(attending))
        if others:
            raise UnsupportedModelError(
                f"layers after which {policy.propagation} drops tokens must attend, but layers "
                f"{others} hold a recurrent state, or no keys of their own; layers that attend: "
                f"{attending}; the nearest is {nearest_layer(others[0], attending)}"
            )
