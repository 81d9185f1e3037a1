"""Check on the model itself that policies give right results, for models that no test covers.

Two prompts of some dozen tokens, one of them padded, are read under a policy that evicts and under
a policy that drops tokens, and a few tokens are decoded. The model's logits are compared with those
of its own dense attention, without a cache, under the mask of the tokens that each layer held.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers.model import unseen
from kvpolicy.integrations.transformers.model.dense import (
    dense_outputs,
    left_by,
    plain_outputs,
    reaching_by_layer,
    visible_to,
)
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.model.quirks import ModelQuirks
from kvpolicy.integrations.transformers.model.tested import TESTED
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import FastKV, FullContext, SnapKV
from kvpolicy.policy import CachePolicy

LENS = (40, 27)
DECODED = 3
EVICTING = SnapKV(retention_rate=0.5, window_size=4, kernel_size=3)
DROPPING = FastKV(tsp_rate=0.7, retention_rate=0.4, window_size=4, kernel_size=3)
EVERYTHING = FullContext()
# A wrong result differs by about as much as eviction changes the logits; a right one by rounding.
LARGEST_SHARE = 0.1
# In half precision, rounding alone may route a token to other experts.
OTHER_LARGEST_SHARE = 0.3
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}
OTHER_ROUNDING = 3e-2

MakeCache = Callable[[CachePolicy], Any]

# The shortcuts under which a model is being checked now; None outside of a check.
_checking: ContextVar[ModelQuirks | None] = ContextVar("kvpolicy_checking", default=None)
_lock = threading.Lock()
_verdicts: dict[tuple[str, ...], Verdict] = {}  # earlier results, by class and configuration


@attrs.frozen
class Finding:
    """The self-check's result for one kind of policy: its error, or why it cannot be used.

    Args:
        error: The largest difference of logits of a token, the median over the tokens of a row, the
            largest over the rows.
        effect: The same measure between dense attention with and without the evicted or dropped
            tokens.
        reason: Why the policy cannot be applied; None if it can.
    """

    error: float = 0.0
    effect: float = 0.0
    reason: str | None = None


# The sets of shortcuts that are tried, in this order.
CARES = (
    ModelQuirks(),
    ModelQuirks(refills=True),
    ModelQuirks(narrows=False),
    ModelQuirks(narrows=False, spares_masks=False),
    ModelQuirks(pads=False),
    ModelQuirks(narrows=False, pads=False),
)


@attrs.frozen
class Verdict:
    """The result of a model's self-check: which kinds of policies can be used with the model.

    Args:
        tested: Whether the library's tests cover its family.
        evicting: The finding for policies that evict keys and values.
        dropping: The finding for policies that also drop tokens.
        quirks: The shortcuts that its forwards may take.
    """

    tested: bool
    evicting: Finding
    dropping: Finding
    quirks: ModelQuirks = ModelQuirks()  # noqa: RUF009 -- frozen

    @property
    def reasons(self) -> int:
        """The number of policy kinds, out of evicting and dropping, that the self-check refuses."""
        return sum(each.reason is not None for each in (self.evicting, self.dropping))

    def check(self, policy: CachePolicy, num_layers: int) -> None:
        """Raise an error if the self-check has found that the model does not work with a policy.

        Raises:
            UnsupportedModelError: The policy is refused; the message says why.
        """
        if policy.propagation.restarts and not self.quirks.pads:
            raise UnsupportedModelError(
                f"{policy} cannot be applied to this model: it restarts the prefill at positions "
                "without gaps, but the model counts columns, and therefore reads padded rows "
                "differently too; use a policy that does not restart"
            )
        drops = bool(policy.propagation.acting_layers(num_layers))
        for finding in (self.evicting, *([self.dropping] if drops else [])):
            if finding.reason is not None:
                raise UnsupportedModelError(
                    f"{policy} cannot be applied to this model: {finding.reason}"
                )


def verdict_of(
    model: nn.Module, parts: ModelParts, make_cache: MakeCache, *, fresh: bool = False
) -> Verdict:
    """Run the self-check on a model, or return an earlier result for an equal model.

    Families that the library's tests cover are not checked.

    Args:
        model: The model.
        parts: Its modules.
        make_cache: A function that makes a cache with a policy.
        fresh: Whether to run the check even if the result is known.
    """
    untold, quirks = Finding(), _checking.get()
    if quirks is not None:
        return Verdict(False, untold, untold, quirks)
    # The type of the whole model: a model with images around a tested decoder is not itself tested.
    named = getattr(getattr(model, "config", None), "model_type", None) in TESTED
    # A model whose attention differs from its family's is not tested either.
    tested = named and parts.shows_queries
    if tested and not fresh:
        return Verdict(True, untold, untold)
    key = (
        f"{type(model).__module__}.{type(model).__qualname__}",
        parts.config.to_json_string(),
        parts.implementation,
        *_own_modules(parts),
    )
    with _lock:
        known = _verdicts.get(key)
    if known is not None and not fresh:
        return known
    with _as_check(model, ModelQuirks()):
        positions = _positions(model, _rows(parts)[0][None], _dtype(parts))
    all_quirks = [attrs.evolve(each, **positions) for each in CARES]
    verdict = _tried(model, parts, make_cache, all_quirks[0], tested=tested)
    for quirks in all_quirks[1:]:
        if not verdict.reasons:
            break
        more = _tried(model, parts, make_cache, quirks, tested=tested)
        verdict = more if more.reasons < verdict.reasons else verdict
    if parts.holds_states and not verdict.evicting.reason:
        verdict = attrs.evolve(verdict, quirks=_with_continuing(model, parts, make_cache, verdict))
    with _lock:
        _verdicts[key] = verdict
    return verdict


def _tried(
    model: nn.Module, parts: ModelParts, make_cache: MakeCache, quirks: ModelQuirks, *, tested: bool
) -> Verdict:
    own = None if parts.shows_queries else unseen
    with _as_check(model, quirks):
        evicting = _found(model, parts, make_cache(own.EVICTING if own else EVICTING))
        dropping = evicting
        if evicting.reason is None:
            dropping = _found(model, parts, make_cache(own.DROPPING if own else DROPPING))
    return Verdict(tested, evicting, dropping, quirks)


def _own_modules(parts: ModelParts) -> list[str]:
    """Return the names of all module classes in layers whose attention cannot be observed."""
    layers = [parts.layers[i] for i in parts.attending if parts.attentions[i] is None]
    kinds = {type(each) for layer in layers for each in layer.modules()}
    return sorted(f"{each.__module__}.{each.__qualname__}" for each in kinds)


def _positions(model: Any, row: Tensor, dtype: torch.dtype) -> dict[str, bool]:
    """Find out whether a model counts positions from 0 itself, or must be given them.

    Args:
        model: The model.
        row: ``[1, len]`` int64.
        dtype: Dtype of its weights.
    """
    try:
        own = plain_outputs(model, row).float()
        given = plain_outputs(model, row, placed=True).float()
    except Exception:  # takes no positions, or needs more than text
        return {"counts": True, "placed": False}
    if _apart(given, own) <= _rounding(dtype, own):
        return {"counts": True, "placed": False}
    config = GenerationConfig(
        max_new_tokens=1, return_dict_in_generate=True, output_logits=True, pad_token_id=0
    )
    try:
        logits = model.generate(row, generation_config=config).logits[0].float()
    except Exception:  # has no `generate`, or needs images: read in a loop
        return {"counts": False, "placed": True}
    nearer = (logits[0] - given[-1]).abs().max() < (logits[0] - own[-1]).abs().max()
    return {"counts": False, "placed": bool(nearer)}


def _with_continuing(
    model: nn.Module, parts: ModelParts, make_cache: MakeCache, verdict: Verdict
) -> ModelQuirks:
    """Return the model's quirks, with ``continues`` set by a test on a recurrent state.

    The test reads several tokens at once behind a recurrent state.
    """
    with _as_check(model, verdict.quirks):
        try:
            right = _continues(model, parts, make_cache(EVERYTHING))
        except Exception:  # an unknown model may raise anything
            right = False
    return attrs.evolve(verdict.quirks, continues=right)


def _continues(model: Any, parts: ModelParts, cache: Any) -> bool:
    """True if a recurrent model gives the same output for a row in two chunks as in one."""
    decoder: Any = parts.decoder
    first, second = _rows(parts)
    whole = torch.cat([first, second])
    # Given as by `generate`, since some decoders count the positions of every call from 0.
    places = torch.arange(len(whole), device=whole.device)[None]
    with cache.attached(model):
        for part, own in ((first, places[:, : len(first)]), (second, places[:, len(first) :])):
            cache.start_turn()
            output = decoder(input_ids=part[None], position_ids=own, **{CACHE: cache})
    found = output.last_hidden_state[0]
    everything = torch.ones(1, len(whole), len(whole), dtype=torch.bool).tril()
    see, reaching = [everything] * parts.num_layers, [everything[0, -1]] * parts.num_layers
    want = dense_outputs(decoder, parts, whole[None], see, reaching)
    want = want[-len(second) :].float()
    return _apart(found.float(), want) <= _rounding(_dtype(parts), want)


@contextmanager
def _as_check(model: nn.Module, quirks: ModelQuirks) -> Iterator[None]:
    checking, training = _checking.set(quirks), model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        _checking.reset(checking)
        model.train(training)


def _found(model: nn.Module, parts: ModelParts, cache: Any) -> Finding:
    try:
        return _compared(model, parts, cache)
    except UnsupportedModelError as error:
        return Finding(reason=str(error))
    except Exception as error:  # an unknown model may raise anything
        said = " ".join(str(error).split())[:300]
        return Finding(reason=f"its self-check ended in {type(error).__name__}: {said}")


def _compared(model: nn.Module, parts: ModelParts, cache: Any) -> Finding:
    """Compare a policy's logits with dense attention's, in a padded batch and in a single row."""
    quirks = _checking.get()
    rows = _rows(parts)
    batches = [rows, rows[:1]] if quirks is None or quirks.pads else [rows[:1]]
    findings = []
    for batch in batches:
        cache.reset()
        try:
            findings.append(_of_batch(model, parts, cache, batch))
        except (UnsupportedModelError, UnsupportedGenerationError):
            raise
        except Exception:
            # Some models generate from images only; their decoder reads text.
            if model is parts.decoder or _reads_text(model, rows[0]):
                raise
            return _compared(parts.decoder, parts, cache)
        if findings[-1].reason is not None:
            return findings[-1]
    return max(findings, key=lambda finding: finding.error)


def _of_batch(model: nn.Module, parts: ModelParts, cache: Any, rows: list[Tensor]) -> Finding:
    found, said = _read(model, cache, rows)
    worst = Finding()
    for row, ids in enumerate(rows):
        finding = _of_row(model, parts, cache, row, found[row], torch.cat([ids, said[row, :-1]]))
        if finding.reason is not None:
            return finding
        worst = max(worst, finding, key=lambda each: each.error)
    return worst


def _of_row(
    model: nn.Module, parts: ModelParts, cache: Any, row: int, found: Tensor, ids: Tensor
) -> Finding:
    """Compare one row's logits under a policy with those of masked dense attention.

    Args:
        model: The model.
        parts: Its modules.
        cache: The cache that has read the row.
        row: Index of the row in the batch.
        found: ``[count, vocab]``, logits of the row's last tokens.
        ids: ``[len]``, ids of the row's tokens.
    """
    end, prompt = len(ids), len(ids) - len(found) + 1
    left = left_by(cache, row, prompt)
    whole = [(kept[:, :0], list(range(end))) for kept, _ in left]
    placed = _places_given()

    def dense(layers: list[tuple[Tensor, list[int]]], read: int) -> Tensor:
        see = visible_to(layers, parts.windows, read, end)
        reaching = reaching_by_layer(layers, read, end)
        found = dense_outputs(model, parts, ids[None], see, reaching, placed=placed)
        return found[prompt - 1 :].float()

    want, full = dense(left, prompt), dense(whole, end)
    plain = plain_outputs(model, ids[None], placed=placed)[prompt - 1 :].float()
    effect = _apart(full, want)
    dtype = _dtype(parts)
    rounding = _rounding(dtype, want)
    share = LARGEST_SHARE if dtype in ROUNDING else OTHER_LARGEST_SHARE
    bound = max(share * effect, rounding)
    own, error = _apart(plain, full), _apart(found.float(), want)
    reason = None
    if not own <= bound:  # NaN is never small enough
        reason = (
            "its self-check found that the model's attention differs from what its layers and "
            f"windows declare: off by {own:.2g} although all tokens are visible"
        )
    elif not error <= bound:
        what = "drops tokens" if cache.propagated else "evicts keys and values"
        padding = cache.get_seq_length() - end
        padded = f", {padding} of padding before them" if padding else ""
        reason = (
            f"its self-check found wrong logits under a policy that {what}: off by {error:.2g} "
            f"from the model's own dense attention in a row of {prompt} tokens{padded}, where the "
            f"hidden tokens change the logits by {effect:.2g}"
        )
    return Finding(error, effect, reason)


def _rows(parts: ModelParts) -> list[Tensor]:
    """Draw rows of random token ids for the self-check, without special tokens."""
    config, size = parts.config, parts.config.vocab_size
    whole: Any = parts.model
    special = {
        value
        for each in (config, whole.config)
        for name, value in each.to_dict().items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    plain = torch.tensor([each for each in range(min(size, 4096)) if each not in special])
    generator = torch.Generator().manual_seed(0)
    device = parts.device_of(0)
    drawn = [torch.randint(len(plain), (count,), generator=generator) for count in LENS]
    return [plain[each].to(device) for each in drawn]


def _places_given() -> bool:
    """True if the self-check passes position ids to the model."""
    quirks = _checking.get()
    return quirks is not None and quirks.placed


def _reads_text(model: Any, row: Tensor) -> bool:
    try:
        model.generate(row[None], max_new_tokens=1, do_sample=False)
    except Exception:  # whatever it may be
        return False
    return True


def _read(model: nn.Module, cache: Any, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Read rows with the cache and decode; return the logits and the decoded ids.

    They are ``[batch, 1 + DECODED, vocab]`` and ``[batch, 1 + DECODED]``.
    """
    longest = max(map(len, rows))
    ids = torch.stack([torch.cat([row.new_zeros(longest - len(row)), row]) for row in rows])
    mask = torch.stack([_valid(row, longest) for row in rows])
    generate: Any = getattr(model, "generate", None)
    if generate is None:
        return _read_by_hand(model, cache, ids, mask)
    config = GenerationConfig(
        max_new_tokens=1 + DECODED,
        use_cache=True,
        do_sample=False,
        num_beams=1,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    output = generate(ids, attention_mask=mask, generation_config=config, **{CACHE: cache})
    return torch.stack(output.logits, dim=1), output.sequences[:, longest:]


def _valid(row: Tensor, longest: int) -> Tensor:
    return torch.cat([row.new_zeros(longest - len(row)), torch.ones_like(row)])


def _read_by_hand(model: Any, cache: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Read rows and decode as `_read` does, but without the model's `generate`.

    It returns hidden states in place of logits.
    """
    found, said, new = [], [], ids
    with cache.attached(model):
        for step in range(1 + DECODED):
            places = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -new.shape[1] :]
            given: Any = {"position_ids": places} if _places_given() else {}
            given |= {"attention_mask": mask, CACHE: cache}
            output = model(input_ids=new, use_cache=True, **given)
            found.append(output.last_hidden_state[:, -1])
            new = ids[:, step + 1 : step + 2].clamp(min=1)
            said.append(new)
            mask = torch.cat([mask, torch.ones_like(new)], dim=1)
    return torch.stack(found, dim=1), torch.cat(said, dim=1)


def _dtype(parts: ModelParts) -> torch.dtype:
    """Return the dtype of the model's weights, from which rounding errors are estimated."""
    return next(each.dtype for each in parts.decoder.parameters() if each.is_floating_point())


def _rounding(dtype: torch.dtype, want: Tensor) -> float:
    """Return how far apart equal logits may be because of rounding."""
    return ROUNDING.get(dtype, OTHER_ROUNDING) * max(float(want.abs().max()), 1e-3)


def _apart(found: Tensor, want: Tensor) -> float:
    """Return each token's largest difference between two outputs, as the median over tokens."""
    return float(statistics.median((found - want).abs().amax(dim=-1).tolist()))
