"""Read a prompt once for many policies, each of which fills a cache of its own."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
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
from kvpolicy.integrations.transformers.forward.staging import SharedStage
from kvpolicy.integrations.transformers.model.attachment import carries
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layers import follow
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.integrations.transformers.surface import CACHE, CACHE_NAMES
from kvpolicy.policies import FullContext
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import gather_positions

# Arguments of a model that `read_together` gives itself, or that ask for an output of all tokens.
OWN_ARGUMENTS = frozenset({"labels", "logits_to_keep", "use_cache", *CACHE_NAMES})

Read = Callable[[PolicyCache], Tensor | None]  # of a prompt; returns its last logits


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
    among the same keys and values, which are held once and freed before the next layer. Policies
    that drop tokens once share the layers up to their drop; the tokens that go on are read by each
    of them in the layers behind it. A policy that drops tokens more than once, restarts or reads
    its prompt twice reads it alone. So does one that drops tokens, on a model whose layers cannot
    be resumed (those that need `prefill_chunk_size` to be None under such a policy).

    No gradients are recorded.

    Args:
        model: A decoder-only model of Transformers.
        input_ids: ``[batch, len]`` int64, the prompt, padded on the left; None if ``model_inputs``
            has ``inputs_embeds``.
        policies: The policies by name, or a sequence of policies, whose names are their `str`.
        attention_mask: ``[batch, len]``, 0 on padding; None without padding.
        model_inputs: Further arguments of the model's forward, such as ``pixel_values``.

    Returns:
        A dict from name to cache, in the order of ``policies``. Its attribute ``logits`` has the
        logits of the prompt's last token, which no cache can give again.

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

    def read(cache: PolicyCache) -> Tensor | None:
        logits = getattr(model(input_ids, **given, **{CACHE: cache}), "logits", None)
        return logits[:, -1] if isinstance(logits, Tensor) else None

    with torch.no_grad(), ExitStack() as attached:
        for name, cache in caches.items():
            with _of_policy(name):
                attached.enter_context(cache.attached(model))
        logits = _shared({name: each for name, each in caches.items() if _may_share(each)}, read)
        for name, cache in caches.items():
            if name not in logits:
                with _of_policy(name):
                    logits[name] = read(cache)
    found.update(caches)
    found.logits = {name: each for name in caches if (each := logits[name]) is not None}
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


def _may_share(cache: PolicyCache) -> bool:
    """True if an attached cache may follow another one's forward, at least in its first layers."""
    facts = cache._reader.facts
    assert facts is not None
    if facts.restarts or facts.policy.rereading is not None:
        return False
    last = facts.parts.num_layers - 1
    drops_once = len(facts.acting) == 1 and last not in facts.acting and not facts.policy.gapless
    return drops_once or not facts.acting


def _shared(caches: Mapping[str, PolicyCache], read: Read) -> dict[str, Tensor | None]:
    """Read a prompt into several attached caches, with one forward for the layers they share.

    Returns:
        The logits of the prompt's last token, by name. A name is missing if its cache has read
        nothing, since it must read alone.
    """
    followers = [_Follower(name, each) for name, each in caches.items()]
    if len(followers) < 2:
        return {}
    leader, facts = PolicyCache(FullContext()), followers[0].facts
    leading = _Leading(leader, followers)
    leader._reader.plan = leading.passes
    logits, found = None, dict[str, Tensor | None]()
    with leader.attached(facts.parts.model), ExitStack() as hooks:
        for index in {each.drop for each in followers if each.drop is not None}:
            after = functools.partial(leading.after_drop, index)
            handle = facts.parts.layers[index].register_forward_hook(after, with_kwargs=True)
            hooks.callback(handle.remove)
        with suppress(_Enough):
            logits = read(leader)
    for each in followers:
        with _of_policy(each.name):
            if each.drop is None:
                each.end(leader._reader)
                found[each.name] = logits
            elif each.has_rest(read):
                found[each.name] = each.logits
    return found


class _Enough(Exception):  # noqa: N818 -- not an error: it ends a forward early
    """A signal, raised as an exception, that no later layer is shared."""


@attrs.define(eq=False)
class _Follower:
    """A cache that chooses among the keys and values which another cache's forward shows it.

    Args:
        name: The name of its policy.
        cache: The cache, attached to the model.

    Attributes:
        select: What its policy does at each layer.
        at: The pass, as if it were the cache's own.
        shared: What the layers up to its drop have left; None without a drop, or if the layers
            behind it cannot be run later.
        logits: ``[batch, vocab_size]``, if the cache has read the layers behind its drop.
    """

    name: str
    cache: PolicyCache
    select: Select = attrs.field(factory=Select, init=False)
    at: PassState = attrs.field(init=False)
    shared: SharedStage | None = attrs.field(default=None, init=False)
    logits: Tensor | None = attrs.field(default=None, init=False)

    @property
    def facts(self) -> ModelFacts:
        """What is known of the model and of the policy placed on it."""
        facts = self.cache._reader.facts
        assert facts is not None
        return facts

    @property
    def drop(self) -> int | None:
        """Index of the layer after which the policy drops tokens; None if it drops none."""
        return min(self.facts.acting, default=None)

    def follows(self, index: int) -> bool:
        """True if all tokens of the prompt reach the layer with this index."""
        return self.drop is None or index <= self.drop

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
        if layer.indexed is not None and leading.indexed is not None:
            layer.indexed.show_as(leading.indexed)
        self.select.observe(self.at, index, inputs, stored)

    def _take_over(self, leader: ForwardDispatcher) -> SeenTokens:
        """Take over what layers hold beside keys and values; return the record of seen tokens."""
        tokens, layers = self.select.finish(self.at), self.cache.layers
        for index, (layer, leading) in enumerate(zip(layers, leader.layers, strict=True)):
            beside = layer.holds_more and layer.indexed is None  # states, or images
            if beside and self.follows(index):
                layer.restore(layer.contents, leading.beside(), tokens)
        follow(layers, tokens)
        return tokens

    def end(self, leader: ForwardDispatcher) -> None:
        """End the leader's forward, in which all tokens have reached all layers."""
        tokens, reader = self._take_over(leader), self.cache._reader
        if self.select.waiting:
            choose(self.facts.policy, self.cache.layers, self.select.waiting)
        reader.now, reader.filled_by = ReadState(tokens), leader.filled_by

    def end_stage(self, leader: ForwardDispatcher, output: Any) -> None:
        """Take the output of the dropping layer for the tokens that go on."""
        hidden, *others = output if isinstance(output, tuple) else (output,)
        of_tokens = (each.shape[:2] for each in others if isinstance(each, Tensor))
        if hidden.ndim != 3 or hidden.shape[:2] in of_tokens:
            return
        reach, passed = self.at.reach, self.select.passed
        slots = reach.everything() if passed is None else passed
        self.shared = SharedStage(
            slots,
            gather_positions(reach.positions, slots),
            reach.taken(hidden, slots),
            drops=passed is not None,
            tokens=self._take_over(leader),
            history=self.select.history.taken(slots),
        )

    def has_rest(self, read: Read) -> bool:
        """Read the layers behind the drop; return False, with an empty cache, if that cannot be."""
        reader, shared, waiting = self.cache._reader, self.shared, self.select.waiting
        if shared is not None:
            reader.plan = lambda arrival: arrival.behind_drop(shared, waiting)
            try:
                self.logits = read(self.cache)
                return True
            except (UnsupportedModelError, UnsupportedGenerationError):
                pass  # it reads alone, and is refused there if it must be
            finally:
                reader.plan = Arrival.passes
        self.cache.reset()
        return False


class _Leading(Select):
    """A pass's choice to hold nothing itself, and to show each layer to the caches that follow.

    Args:
        cache: The leading cache.
        followers: The others.
    """

    def __init__(self, cache: PolicyCache, followers: Sequence[_Follower]) -> None:
        super().__init__()
        self._cache, self._followers = cache, followers
        drops = [each.drop for each in followers]
        # The last layer that is shared; None for the model's last one.
        self._last = None if None in drops else max(each for each in drops if each is not None)

    def passes(self, arrival: Arrival) -> Passes:
        """Yield the pass of the leader's forward; see `Arrival.passes`."""
        reader = self._cache._reader
        for each in self._followers:
            arriving = attrs.evolve(reader._arriving(ends=True), model=each.facts)
            with _of_policy(each.name):
                arriving.check(reader._given, arrival.incoming)
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
        return _Probes(call.model.parts, call.model.policy, False, False, followers=asking)

    def observe(
        self, at: PassState, index: int, inputs: AttentionInputs, stored: tuple[Tensor, Tensor]
    ) -> None:
        """See `AtQueries.observe`."""
        for each in self._followers:
            if each.follows(index):
                with _of_policy(each.name):
                    each.observe(index, inputs, stored, at.layers[index])

    def after_drop(
        self, index: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Hook after a layer at which followers drop tokens.

        Raises:
            _Enough: No policy shares a later layer.
        """
        if not carries(self._cache, args, kwargs):
            return
        for each in self._followers:
            if each.drop == index:
                with _of_policy(each.name):
                    each.end_stage(self._cache._reader, output)
        if index == self._last:
            raise _Enough

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
            probe = each.at.call.probe
            if probe is not None and each.follows(index):
                with _of_policy(each.name):
                    probe.enter(index, module, each.cache.layers[index], *args, **kwargs)
