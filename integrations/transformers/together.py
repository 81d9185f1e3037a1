"""Read a prompt once for many policies, each of which fills a cache of its own."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.context import LayerContext
from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.forward.arriving import ReadState
from kvpolicy.integrations.transformers.forward.dispatcher import ForwardDispatcher
from kvpolicy.integrations.transformers.forward.facts import Call, ModelFacts
from kvpolicy.integrations.transformers.forward.layer_probe import LayerProbe
from kvpolicy.integrations.transformers.forward.pass_run import Passes, PassRun
from kvpolicy.integrations.transformers.forward.passes import AtQueries, Pass, PassState, Stored
from kvpolicy.integrations.transformers.forward.plan import Arrival
from kvpolicy.integrations.transformers.forward.selecting import Select, choose
from kvpolicy.integrations.transformers.forward.stage import NO_LAYERS, StagePiece
from kvpolicy.integrations.transformers.model.attachment import AroundLayer
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layers import why_whole
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.integrations.transformers.surface import CACHE, CACHE_NAMES
from kvpolicy.interfaces import Scorer
from kvpolicy.policies import FullContext
from kvpolicy.policy import CachePolicy
from kvpolicy.precision import without_autocast

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

    All policies share one forward of the model. At each layer, every policy chooses among the same
    keys and values, which are held once and freed before the next layer. Behind its first drop, a
    policy that drops tokens runs each layer for its own tokens. A policy that restarts, or reads
    its prompt twice or in blocks, reads it alone. So does one that drops tokens on a model whose
    layers use what other layers have left, such as shared keys.

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

    def read(cache: PolicyCache, *, whole: bool) -> Tensor | None:
        ids, inputs = input_ids, given
        if not whole:  # the last token alone
            ids = None if input_ids is None else input_ids[:, -1:]
            embeds = model_inputs.get("inputs_embeds")
            inputs = {"logits_to_keep": 1} if "logits_to_keep" in given else {}
            inputs |= {} if embeds is None else {"inputs_embeds": embeds[:, -1:]}
        logits = getattr(model(ids, **inputs, **{CACHE: cache}), "logits", None)
        return logits[:, -1] if isinstance(logits, Tensor) else None

    with torch.no_grad(), ExitStack() as attached:
        for name, cache in caches.items():
            with _of_policy(name):
                attached.enter_context(cache.attached(model))
        logits = _shared({name: each for name, each in caches.items() if _may_share(each)}, read)
        for name, cache in caches.items():
            if name not in logits:
                with _of_policy(name):
                    logits[name] = read(cache, whole=True)
    found.update(caches)
    found.logits = {name: each for name in caches if (each := logits[name]) is not None}
    return found


def _by_name(policies: Mapping[str, CachePolicy] | Sequence[CachePolicy]) -> dict[str, CachePolicy]:
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
    facts, layers = cache._reader.facts, cache._reader.layers
    assert facts is not None
    alone = facts.policy.rereading is not None or facts.policy.prefill_block is not None
    if facts.restarts or alone:
        return False
    # Behind a drop, layers may need what earlier ones have left in the forward.
    return not facts.acting or all(why_whole(each) is None for each in layers)


def _shared(
    caches: Mapping[str, PolicyCache], read: Callable[..., Tensor | None]
) -> dict[str, Tensor | None]:
    """Read a prompt into several attached caches, with one forward of another cache.

    ``read`` reads the prompt into a cache, only its last token if ``whole`` is False, and returns
    its last logits. These are returned by name, but for caches that must read alone.
    """
    followers = [_Follower(name, each) for name, each in caches.items()]
    if len(followers) < 2:
        return {}
    leader, logits = PolicyCache(FullContext()), dict[str, Tensor | None]()
    leader._reader.plan = _Leading(leader, followers).passes
    with leader.attached(followers[0].facts.parts.model):
        whole = read(leader, whole=True)
        for each in followers:
            with _of_policy(each.name):
                each.end(leader._reader)
        for each in followers:
            logits[each.name] = whole
            if each.output is not None:
                leader.reset()
                leader._reader.plan = functools.partial(_ended, hidden=each.last_hidden())
                logits[each.name] = read(leader, whole=False)
    return logits


class _Sharing(Select):
    """A policy's choice in which a scorer is asked once for all policies that have an equal one.

    Attributes:
        known: What scorers of other policies have said of the layer under way; None where a policy
            has tokens of its own.
    """

    known: dict[Scorer, Tensor] | None = None

    def saliency(self, at: PassState, context: LayerContext) -> Tensor | None:
        policy, scorer = at.policy, at.policy.scorer
        alike = policy.decoding is None and not policy.gapless and policy._selects_by_saliency
        if self.known is None or scorer is None or not alike or not policy._is_tested(scorer):
            return None
        if scorer.history_layers:
            return None
        if scorer not in self.known:
            with without_autocast(context.keys.device):
                self.known[scorer] = policy._saliency(context, self.checks)
        return self.known[scorer]


@attrs.define(eq=False)
class _Follower:
    """A cache that chooses among the keys and values which another cache's forward shows it.

    Behind its first drop it runs the layers for its own tokens.

    Attributes:
        run: Its pass, as if it were reading alone.
        output: The last layer's output for its own tokens; None if all tokens have reached it.
    """

    name: str
    cache: PolicyCache
    select: _Sharing = attrs.field(factory=_Sharing, init=False)
    run: PassRun = attrs.field(init=False)
    output: Any = attrs.field(default=None, init=False)

    @property
    def facts(self) -> ModelFacts:
        """What is known of the model and of the policy placed on it."""
        facts = self.cache._reader.facts
        assert facts is not None
        return facts

    @property
    def drop(self) -> int | None:
        """Index of the first layer after which the policy drops tokens; None if it drops none."""
        return min(self.facts.acting, default=None)

    def follows(self, index: int) -> bool:
        """True if all tokens of the prompt reach the layer with this index."""
        return self.drop is None or index <= self.drop

    def begin(self, call: Call, arrival: Arrival) -> None:
        """Begin a forward of the leader's, which is at no layer yet."""
        facts = self.facts
        facts.form = call.model.form
        probe = LayerProbe.of(facts.parts, facts.policy)
        call = attrs.evolve(call, model=facts, probe=probe)
        made = Pass(
            arrival.incoming, self.select, main=True, narrows=True, features=arrival.features
        )
        self.cache._reader.run = self.run = PassRun(call, self.cache.layers, made)

    def observe(
        self,
        index: int,
        inputs: AttentionInputs,
        stored: Stored,
        leading: PolicyLayer,
        known: dict[Scorer, Tensor],
    ) -> None:
        """Let the policy choose what a layer keeps; ``leading`` is the leader's layer."""
        layer = self.cache.layers[index]
        if layer.indexed is not None and leading.indexed is not None:
            layer.indexed.show_as(leading.indexed)
        self.run.at.masks.enter(layer)
        self.select.known = known
        self.select.observe(self.run.at, index, inputs, stored)
        self.select.known = None

    def layer(self, around: AroundLayer, kwargs: dict[str, Any], leading: Any) -> None:
        """Run a layer for the policy's own tokens, if it has dropped some."""
        if around.index == self.drop:
            self.output = self.run.cut_output(around.index, leading)
        elif not self.follows(around.index):
            hidden = self.output[0] if isinstance(self.output, tuple) else self.output
            own = {
                name: self.cache if isinstance(each, PolicyCache) else each
                for name, each in kwargs.items()
            }
            self.output = self.run.layer(around, hidden, own)

    def last_hidden(self) -> Tensor:
        """Return the last layer's output for the prompt's last token."""
        hidden: Tensor = self.output[0] if isinstance(self.output, tuple) else self.output
        axis = self.run.at.reach.token_axis(hidden)
        return hidden.narrow(axis, hidden.shape[axis] - 1, 1)

    def end(self, leader: ForwardDispatcher) -> None:
        """End the leader's forward."""
        reader, layers = self.cache._reader, self.cache.layers
        for index, (layer, leading) in enumerate(zip(layers, leader.layers, strict=True)):
            if not self.follows(index):
                break
            self.run.updated.add(index)
            if layer.holds_more and layer.indexed is None:  # states, or images
                layer.restore(layer.contents, leading.beside(), self.run.tokens)
        tokens = self.run.finish()
        if self.select.waiting:
            choose(self.facts.policy, layers, self.select.waiting)
        reader.now, reader.filled_by = ReadState(tokens, self.run.propagated), leader.filled_by
        reader.run = None


class _Leading(Select):
    """A pass's choice to hold nothing itself, and to show each layer to the caches that follow."""

    def __init__(self, cache: PolicyCache, followers: Sequence[_Follower]) -> None:
        super().__init__()
        self._cache, self._followers = cache, followers
        drops = [each.drop for each in followers]
        self._drops = [each for each in drops if each is not None]
        # The last layer that all tokens must reach; None for the model's last one.
        self._last = None if None in drops else max(self._drops)

    def passes(self, arrival: Arrival) -> Passes:
        """Yield the pass of the leader's forward; see `Arrival.passes`."""
        reader, self._arrival = self._cache._reader, arrival
        for each in self._followers:
            arriving = attrs.evolve(reader._arriving(ends=True), model=each.facts)
            with _of_policy(each.name):
                arriving.check(reader._given, arrival.incoming)
        yield Pass(arrival.incoming, self, main=True, features=arrival.features, around=self.layer)

    def begin(self, at: PassState) -> None:
        super().begin(at)
        for each in self._followers:
            with _of_policy(each.name):
                each.begin(at.call, self._arrival)

    def left_alone(self, at: PassState) -> frozenset[int]:
        if any(each.run.call.probe is not None for each in self._followers):
            return frozenset()
        first = min(self._drops, default=len(at.layers))
        return frozenset(index for index in super().left_alone(at) if index < first)

    def observe(self, at: PassState, index: int, inputs: AttentionInputs, stored: Stored) -> None:
        known: dict[Scorer, Tensor] = {}
        for each in self._followers:
            if each.follows(index):
                with _of_policy(each.name):
                    each.observe(index, inputs, stored, at.layers[index], known)

    def layer(
        self, run: PassRun, around: AroundLayer, hidden: Tensor, kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer for all tokens, and for the tokens of each follower that has dropped some."""
        index = around.index
        for each in self._followers:
            if index == 0:
                each.run.at.reach.check(around.module, hidden)
            if each.follows(index):
                with _of_policy(each.name):
                    each.run.try_layer(around, hidden, kwargs)
        if self._last is None or index <= self._last:
            output = run.run_layer(around, hidden, kwargs)
        else:
            run.updated.add(index)
            output = run.call.model.form.of(hidden)
        for each in self._followers:
            with _of_policy(each.name):
                each.layer(around, kwargs, output)
        return output

    def finish(self, at: PassState) -> SeenTokens:
        for each in self._followers:
            if each.output is None:
                each.run.at.last_hidden = at.last_hidden
        return at.tokens


def _ended(arrival: Arrival, hidden: Tensor) -> Passes:
    """Yield a pass in which no layer runs, and the last one returns the given hidden states."""
    yield Pass(
        arrival.incoming,
        AtQueries(),
        stage=StagePiece(NO_LAYERS, is_output=True),
        main=True,
        around=lambda run, *_: run.call.model.form.of(hidden),
    )
