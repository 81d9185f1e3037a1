"""Find out which policies a model can be used with, before it reads anything."""

from collections import Counter

import attrs
from torch import nn

from kvpolicy.checks import check_count, check_kind
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.model.check import Finding, Verdict, verdict_of
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.policy import CachePolicy


@attrs.frozen(eq=False)
class ModelCheck:
    """A report of which policies a model can be used with, and of the layers it has.

    Args:
        name: The model's class.
        model_type: Its decoder's family, as Transformers calls it.
        kinds: The kind of every layer, in a few words.
        refusal: Why no policy can be applied at all; None if some policies can.
        verdict: What the self-check found; None if it was not run.
        parts: The model's modules; None if it could not be taken apart.
    """

    name: str
    model_type: str
    kinds: tuple[str, ...]
    refusal: str | None
    verdict: Verdict | None
    parts: ModelParts | None

    @property
    def kind_counts(self) -> dict[str, int]:
        """The number of layers of each kind in the model."""
        return dict(Counter(self.kinds))

    @property
    def findings(self) -> dict[str, Finding]:
        """The self-check's findings for policies that evict and for policies that drop tokens."""
        if self.verdict is None or self.verdict.evicting == Finding():
            return {}
        return {"evicting": self.verdict.evicting, "dropping": self.verdict.dropping}

    @property
    def pads(self) -> bool:
        """True if the model reads rows padded on the left like rows without padding."""
        return self.verdict is None or self.verdict.quirks.pads

    @property
    def shows_queries(self) -> bool:
        """True if the model lets a policy see the queries of all its layers."""
        return self.parts is None or self.parts.shows_queries

    def refusal_of(self, policy: CachePolicy, context_len: int) -> str | None:
        """Return why a policy cannot be used with the model; None if it can.

        Args:
            policy: The policy.
            context_len: Tokens of the context.

        Raises:
            TypeError: ``policy`` is not a `CachePolicy`, or ``context_len`` is not an int.
            ValueError: A layer of the policy lies outside the model, or ``context_len`` is below 1.
        """
        check_kind("policy", policy, CachePolicy)
        check_count("context_len", context_len, minimum=1)
        if self.parts is None or self.verdict is None:
            return self.refusal
        placed = policy.placed(self.parts.num_layers, self.parts.eligible)
        placed.check_model(self.parts.num_layers)
        try:
            self.parts.check_queries(placed)
            # A check of this policy tells more than a self-check with another policy.
            self.parts.check_policy(placed, context_len)
            self.verdict.check(policy, self.parts.num_layers)
        except UnsupportedModelError as error:
            return str(error)
        return None


def check_model(model: nn.Module, *, always: bool = True) -> ModelCheck:
    """Check which policies a model can be used with, by running the self-check on it.

    Without this call, a policy is checked when it is first used with a model; see `PolicyCache`.

    Args:
        model: A model of Transformers.
        always: Whether the self-check runs for every model; if not, only where the library's tests
            do not cover its family.

    Raises:
        TypeError: ``model`` is not a torch module.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        ...     num_hidden_layers=6, initializer_range=0.2,
        ... )
        >>> found = check_model(LlamaForCausalLM(config), always=True)
        >>> found.kind_counts, found.refusal
        ({'full attention': 6}, None)
        >>> found.findings["dropping"].error < 1e-3 < found.findings["dropping"].effect
        True
    """
    config = getattr(model, "config", None)
    try:
        parts = ModelParts(model)
    except UnsupportedModelError as error:
        model_type = str(getattr(config, "model_type", "unknown"))
        return ModelCheck(type(model).__name__, model_type, (), str(error), None, None)
    verdict = verdict_of(model, parts, PolicyCache, fresh=always)
    return ModelCheck(
        type(model).__name__,
        str(parts.config.model_type),
        tuple(kind.name for kind in parts.kinds),
        verdict.evicting.reason,
        verdict,
        parts,
    )
