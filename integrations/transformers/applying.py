"""Apply a policy to every `generate` call of a model, even if no cache can be passed."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

from torch import nn
from transformers import GenerationMixin

from kvpolicy.checks import check_count
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.state.report import CacheReport
from kvpolicy.integrations.transformers.state.storage import Storage
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policy import CachePolicy

_lock = threading.Lock()

# Models are found by what they are, not by a mark on them: a copy of a model has no policy, and a
# model that is no longer used is not kept alive.
_applied: weakref.WeakKeyDictionary[nn.Module, AppliedPolicy] = weakref.WeakKeyDictionary()


class AppliedPolicy:
    """A policy applied to a model until `remove` is called; see `apply_policy`.

    Used as a context manager, it is removed at the end of the `with` block.

    Args:
        model: The model whose `generate` runs.
        policy: Which tokens to keep.
        storage: How keys and values are held; see `PolicyCache`.
        max_new_tokens: Answer tokens for which memory is reserved; see `PolicyCache`.
        reports: How many reports are remembered.

    Attributes:
        policy: The policy.
        storage: The storage; None holds keys and values unchanged.
        max_new_tokens: The number of answer tokens with reserved memory; None if there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: CachePolicy,
        storage: Storage | None,
        max_new_tokens: int | None,
        reports: int,
    ) -> None:
        self.policy, self.storage, self.max_new_tokens = policy, storage, max_new_tokens
        self._model = weakref.ref(model)
        self._reports: deque[CacheReport] = deque(maxlen=reports)

    @property
    def reports(self) -> tuple[CacheReport, ...]:
        """The reports of the last finished calls that used a cache made here, oldest first."""
        with _lock:
            return tuple(self._reports)

    @property
    def is_applied(self) -> bool:
        """False once `remove` was called, or once the model no longer exists; True before."""
        model = self._model()
        return model is not None and _applied.get(model) is self

    def remove(self) -> None:
        """Remove the policy from the model; doing so again changes nothing.

        A call that is running in another thread keeps its cache until it ends.
        """
        with _lock:
            model = self._model()
            if model is not None and _applied.get(model) is self:
                del _applied[model]

    def __enter__(self) -> AppliedPolicy:
        if not self.is_applied:
            raise ValueError(
                f"{self!r} must be applied to be used in a with block, got one that was removed; "
                "call apply_policy again"
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.policy}{'' if self.is_applied else ', removed'}>"

    def _new_cache(self) -> PolicyCache:
        """Make the cache of one `generate` call."""
        return PolicyCache(self.policy, self.storage, max_new_tokens=self.max_new_tokens)

    def _note(self, cache: PolicyCache) -> None:
        """Store the report of a call's cache, if reports are wanted."""
        if self._reports.maxlen:
            report = cache.report()
            with _lock:
                self._reports.append(report)


def apply_policy(
    model: nn.Module,
    policy: CachePolicy,
    *,
    storage: Storage | None = None,
    max_new_tokens: int | None = None,
    reports: int = 16,
) -> AppliedPolicy:
    """Apply a policy to every `generate` call of a model that is given no cache.

    Each of these calls gets a new `PolicyCache`, as if ``cache=PolicyCache(policy)`` were
    passed. It is for libraries that call `generate` themselves and have no place for a cache:
    pipelines, agents, trainers, evaluations. Calls that are given a cache are not
    affected. Neither are calls that draft tokens for another call (``assistant_model``), since
    drafts are removed again, and the next call is no new turn.

    Args:
        model: A decoder-only model of Transformers, or a PEFT model around one, which count as the
            same model. A copy of the model has no policy applied.
        policy: Which tokens to keep.
        storage: How keys and values are held; see `PolicyCache`.
        max_new_tokens: Answer tokens for which memory is reserved; see `PolicyCache`.
        reports: How many of the last calls' reports are remembered; 0 makes none. A report waits
            for the GPU once for every layer.

    Returns:
        A handle that removes the policy: by its ``remove()``, or at the end of a `with` block.

    Raises:
        TypeError: ``model`` is not a torch module, or another argument has the wrong type.
        UnsupportedModelError: The policy cannot be applied to the model, or the model's `generate`
            is not the one of Transformers.
        ValueError: The model has a policy applied, ``reports`` is below 0, a layer of the policy
            lies outside the model, or ``max_new_tokens`` is below 1 or above the model's positions.

    A second policy for the same model is refused until the first is removed, so that the order in
    which handles are removed does not matter.

    Threads share the model's policy, and every call has its own cache. What `generate` refuses with
    a `PolicyCache` is refused with the same errors. A forward of the model without `generate` is
    not affected.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from kvpolicy.policies import SnapKV
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        ...     eos_token_id=None)
        >>> model = LlamaForCausalLM(config).eval()
        >>> with apply_policy(model, SnapKV(retention_tokens=12)) as applied:
        ...     for length in (40, 30):
        ...         tokens = model.generate(torch.arange(length)[None], max_new_tokens=4)
        >>> [(report.total.seen, report.total.kept) for report in applied.reports]
        [(43, 15.0), (33, 15.0)]
        >>> applied.is_applied
        False
    """
    check_count("reports", reports, minimum=0)
    owner = _generating(model)
    handle = AppliedPolicy(owner, policy, storage, max_new_tokens, reports)
    with handle._new_cache().attached(model):  # raises an error if the policy cannot act on it
        pass
    with _lock:
        before = _applied.get(owner)
        if before is not None:
            raise ValueError(
                f"model must have no policy applied, got one with {before.policy}; call remove() "
                "on the object that apply_policy returned, or leave its with block"
            )
        _applied[owner] = handle
    return handle


def applied_to(model: nn.Module) -> AppliedPolicy | None:
    """Return the policy applied to the model whose `generate` runs; None if there is none."""
    return _applied.get(model) if _applied else None


def _generating(model: Any) -> nn.Module:
    """Return the model whose `generate` runs, given this model or one that wraps it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    base = getattr(model, "get_base_model", None)  # of PEFT, whose generate calls the base model's
    owner = base() if callable(base) else model
    method: Any = getattr(owner, "generate", None)
    if getattr(method, "__func__", None) is not GenerationMixin.generate:
        kind = "another one" if callable(method) else "none"
        raise UnsupportedModelError(
            f"model must have the generate of Transformers, but {type(owner).__name__} has "
            f"{kind}; apply the policy to the inner model that generates, or pass "
            f"{CACHE}=PolicyCache(policy)"
        )
    found: nn.Module = method.__self__
    return found
