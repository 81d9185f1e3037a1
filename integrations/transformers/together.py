"""Read a prompt once for many policies, each of which fills a cache of its own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.forward.deferred_layers import choose
from kvpolicy.integrations.transformers.forward.dispatcher import ForwardDispatcher
from kvpolicy.integrations.transformers.forward.facts import Call, ModelFacts
from kvpolicy.integrations.transformers.forward.later_stages import Passes
from kvpolicy.integrations.transformers.forward.layer_probe import LayerProbe
from kvpolicy.integrations.transformers.forward.passes import KeyUse, Pass, PassState
from kvpolicy.integrations.transformers.forward.plan import Arrival
from kvpolicy.integrations.transformers.forward.read_state import ReadState
from kvpolicy.integrations.transformers.forward.selecting import Select
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layers import follow
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.integrations.transformers.surface import CACHE, CACHE_NAMES
from kvpolicy.policies import FullContext
from kvpolicy.policy import CachePolicy

# Arguments of a model that `read_together` gives itself, or that ask for an output of all tokens.
OWN_ARGUMENTS = frozenset({"labels", "logits_to_keep", "use_cache", *CACHE_NAMES})


class ReadTogether(dict[str, PolicyCache]):
    """The caches that `read_together` has filled, by name.

    Attributes:
        logits: By name, ``[batch, vocab_size]``, the logits of the prompt's last token, from which
            the first token of the answer is chosen. Empty if the model gives no logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logits: dict[str, Tensor] = {}


def read_together(
    model: Any,
    input_ids: Tensor | None,
    policies: Mapping[str, CachePolicy] | Sequence[CachePolicy],
    attention_mask: Tensor | None = None,
    **model_inputs: Any,
) -> ReadTogether:
    """Read a prompt into a cache for each of several policies, with as few readings as possible.

    Each cache is as if it had read alone, in ``with cache.attached(model): model(input_ids,
    cache=cache)``: it holds the same tokens, and an answer, a second turn or `generate` continues
    on it. Logits may differ by rounding. The logits of the prompt's last token are in the result's
    attribute ``logits``.

    Policies that only evict share one forward of the model: at each layer, every policy chooses
    among the same keys and values, which are held once and freed before the next layer. A policy
    that drops tokens, restarts or reads its prompt twice reads it alone.

    No gradients are recorded.

    Args:
        model: A decoder-only model of Transformers.
        input_ids: ``[batch, len]`` int64, the prompt, padded on the left; None if ``model_inputs``
            has ``inputs_embeds``.
        policies: The policies by name, or a sequence of policies, whose names are their `str`.
        attention_mask: ``[batch, len]``, 0 on padding; None without padding.
        model_inputs: Further arguments of the model's forward, such as ``pixel_values``.

    Returns:
        A dict from name to cache, in the order of ``policies``, with the attribute ``logits``.

    Raises:
        TypeError: ``policies`` is neither a mapping nor a sequence, or has something that is not a
            `CachePolicy`.
        ValueError: ``policies`` is empty or two of a sequence have the same name, ``model_inputs``
            has an argument that is not the caller's, or ``attention_mask`` has padding on the
            right. Also all errors of a cache that reads alone, such as `UnsupportedModelError`;
            their messages begin with the name of the policy. The model then is as it was.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from kvpolicy.policies import H2O, SnapKV
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        ...     eos_token_id=None)
        >>> model = LlamaForCausalLM(config).eval()
        >>> prompt = torch.arange(40)[None]
        >>> caches = read_together(model, prompt, {"snap": SnapKV(0.5), "heavy": H2O(0.25)})
        >>> [(name, cache.layers[0].kept_len) for name, cache in caches.items()]
        [('snap', 20), ('heavy', 10)]
        >>> first = caches.logits["snap"].argmax(dim=-1, keepdim=True)
        >>> read = torch.cat([prompt, first], dim=1)
        >>> answer = model.generate(read, cache=caches["snap"], max_new_tokens=3)
    """
    named = _by_name(policies)
    if own := sorted(OWN_ARGUMENTS & model_inputs.keys()):
        raise ValueError(f"model_inputs must not have {', '.join(own)}, which are not the caller's")
    if attention_mask is not None and not bool(attention_mask[:, -1].all()):
        raise ValueError(
            "attention_mask must have padding on the left only, got a row that ends in 0"
        )
    given = {"attention_mask": attention_mask, **model_inputs}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        given["logits_to_keep"] = 1
    caches, found = {}, ReadTogether()
    for name, policy in named.items():
        with _of_policy(name):
            caches[name] = PolicyCache(policy)
    with torch.no_grad(), ExitStack() as attached:
        for name, cache in caches.items():
            with _of_policy(name):
                attached.enter_context(cache.attached(model))
        followers = [
            _Follower(name, each) for name, each in caches.items() if _only_evicts(each._reader)
        ]
        if len(followers) > 1:
            leader = PolicyCache(FullContext())
            attached.enter_context(leader.attached(model))
            leading = _Leading(leader._reader, followers)
            leader._reader.plan = leading.passes
            logits = _logits(model(input_ids, **given, **{CACHE: leader}))
            for each in followers:
                with _of_policy(each.name):
                    each.end(leader._reader)
                found.logits |= {each.name: logits} if logits is not None else {}
        for name, cache in caches.items():
            if not cache.get_seq_length():
                with _of_policy(name):
                    logits = _logits(model(input_ids, **given, **{CACHE: cache}))
                found.logits |= {name: logits} if logits is not None else {}
    found.update(caches)
    return found


def _by_name(
    policies: Mapping[str, CachePolicy] | Sequence[CachePolicy],
) -> dict[str, CachePolicy]:
    """Return policies by name; see `read_together`."""
    if isinstance(policies, Mapping):
        named = dict(policies)
    elif isinstance(policies, Sequence) and not isinstance(policies, str):
        named = {str(each): each for each in policies}
        if len(named) < len(policies):
            names = [str(each) for each in policies]
            twice = next(each for each in names if names.count(each) > 1)
            raise ValueError(
                f"policies must have different names, but {twice} is there twice; give a mapping "
                "of names to policies"
            )
    else:
        raise TypeError(
            f"policies must be a mapping of names to policies or a sequence, got {policies!r}"
        )
    if not named:
        raise ValueError(f"policies must have at least one policy, got {policies!r}")
    return named


@contextmanager
def _of_policy(name: str) -> Iterator[None]:
    """Put the name of a policy before the message of an error in a `with` block."""
    try:
        yield
    except Exception as error:
        error.args = (f"policy {name!r}: {error}", *error.args[1:])
        raise


def _only_evicts(reader: ForwardDispatcher) -> bool:
    """True if an attached cache's policy reads its prompt once, with all tokens in all layers."""
    assert reader.facts is not None
    return not reader.facts.acting and reader.facts.policy.rereading is None


def _logits(output: Any) -> Tensor | None:
    """Return the logits ``[batch, vocab_size]`` of the last token; None if there are none."""
    logits = getattr(output, "logits", None)
    return logits[:, -1] if isinstance(logits, Tensor) else None


@attrs.define(eq=False)
class _Follower:
    """A cache that chooses among the keys and values which another cache's forward shows it.

    Args:
        name: The name of its policy.
        cache: The cache, attached to the model.

    Attributes:
        select: What its policy does at each layer.
        at: The pass, as if it were the cache's own.
    """

    name: str
    cache: PolicyCache
    select: Select = attrs.field(factory=Select, init=False)
    at: PassState = attrs.field(init=False)

    @property
    def facts(self) -> ModelFacts:
        facts = self.cache._reader.facts
        assert facts is not None
        return facts

    def begin(self, at: PassState) -> None:
        """Begin a pass of the leader's, which is at no layer yet."""
        self.at = copy.copy(at)
        self.at.policy, self.at.layers = self.facts.policy, self.cache.layers
        probe = LayerProbe.of(self.facts.parts, self.facts.policy)
        self.at.call = attrs.evolve(at.call, model=self.facts, probe=probe)
        self.select.begin(self.at)

    def observe(
        self,
        index: int,
        inputs: AttentionInputs,
        stored: tuple[Tensor, Tensor],
        leading: PolicyLayer,
    ) -> None:
        """Let the policy choose what a layer keeps; ``leading`` is the leader's layer."""
        layer = self.cache.layers[index]
        if isinstance(layer, IndexedLayer) and isinstance(leading, IndexedLayer):
            layer.show_as(leading)
        self.select.observe(self.at, index, inputs, stored)

    def end(self, leader: ForwardDispatcher) -> None:
        """Take over what the leader has read, once its forward has ended."""
        reader, layers = self.cache._reader, self.cache.layers
        tokens = self.select.finish(self.at)
        for layer, leading in zip(layers, leader.layers, strict=True):
            if layer.holds_more and not isinstance(layer, IndexedLayer):  # states, or images
                layer.restore(layer.contents, leading.beside(), tokens)
        follow(layers, tokens)
        if self.select.waiting:
            choose(self.facts.policy, layers, self.select.waiting)
        reader.now, reader.filled_by = ReadState(tokens), leader.filled_by


class _Leading(Select):
    """A pass's choice to hold nothing itself, and to show each layer to the caches that follow.

    Args:
        reader: The dispatcher of the leading cache.
        followers: The caches.
    """

    def __init__(self, reader: ForwardDispatcher, followers: Sequence[_Follower]) -> None:
        super().__init__()
        self._reader, self._followers = reader, followers

    def passes(self, arrival: Arrival) -> Passes:
        """Yield the pass of the leader's forward; see `Arrival.passes`."""
        arriving = self._reader._arriving(ends=True)
        for each in self._followers:
            with _of_policy(each.name):
                attrs.evolve(arriving, model=each.facts).check(
                    self._reader._given, arrival.incoming
                )
        yield Pass(arrival.incoming, KeyUse.SELECT, self, main=True, features=arrival.features)

    def begin(self, at: PassState) -> None:
        """See `AtQueries.begin`."""
        super().begin(at)
        for each in self._followers:
            with _of_policy(each.name):
                each.begin(at)

    def probe(self, call: Call) -> LayerProbe | None:
        """See `AtQueries.probe`."""
        asking = [each for each in self._followers if each.at.call.probe is not None]
        if not asking:
            return None
        facts = asking[0].facts
        return _Probes(facts.parts, facts.policy, False, False, followers=asking)

    def observe(
        self, at: PassState, index: int, inputs: AttentionInputs, stored: tuple[Tensor, Tensor]
    ) -> None:
        """See `AtQueries.observe`."""
        for each in self._followers:
            with _of_policy(each.name):
                each.observe(index, inputs, stored, at.layers[index])

    def finish(self, at: PassState) -> SeenTokens:
        """See `AtQueries.finish`."""
        for each in self._followers:
            each.at.last_hidden = at.last_hidden
        return at.tokens


@attrs.frozen(eq=False)
class _Probes(LayerProbe):
    """The finders of several caches, each of which looks at the same layers of the model."""

    followers: Sequence[_Follower] = ()

    def check_places(self, tokens: SeenTokens) -> None:
        """See `LayerProbe.check_places`; a first prompt has no earlier places."""

    def enter(self, index: int, module: Any, layer: PolicyLayer, *args: Any, **kwargs: Any) -> None:
        """See `LayerProbe.enter`; ``layer`` is the leader's."""
        for each in self.followers:
            assert each.at.call.probe is not None
            with _of_policy(each.name):
                each.at.call.probe.enter(index, module, each.cache.layers[index], *args, **kwargs)
