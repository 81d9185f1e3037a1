"""Check on the model itself that policies give right results, for models that no test covers.

Two prompts of some dozen tokens, one of them padded, are read under a policy that evicts and under
a policy that drops tokens, and a few tokens are decoded. The model's logits are compared with those
of its own dense attention, without a cache, under the mask of the tokens that each layer held.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers.model import unseen
from kvpolicy.integrations.transformers.model.dense import Visible, dense_outputs, plain_outputs
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.model.quirks import ModelQuirks
from kvpolicy.integrations.transformers.model.tested import TESTED
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import FastKV, FullContext, SnapKV
from kvpolicy.policy import CachePolicy

LENS = [40, 27]
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

    ``tested`` says if the library's tests cover its family; ``dropping`` is of policies that evict
    and also drop tokens.
    """

    tested: bool
    evicting: Finding = Finding()
    dropping: Finding = Finding()
    quirks: ModelQuirks = ModelQuirks()  # noqa: RUF009

    @property
    def reasons(self) -> int:
        """The number of policy kinds, out of evicting and dropping, that the self-check refuses."""
        return sum(each.reason is not None for each in (self.evicting, self.dropping))

    def check(self, policy: CachePolicy, num_layers: int) -> None:
        """Raise an error if the self-check has found that the model does not work with a policy."""
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
    """Run the self-check on a model of no tested family; equal models share the result."""
    quirks = _checking.get()
    if quirks is not None:
        return Verdict(False, quirks=quirks)
    # The type of the whole model: a model with images around a tested decoder is not itself tested.
    named = getattr(getattr(model, "config", None), "model_type", None) in TESTED
    # A model whose attention differs from its family's is not tested either.
    tested = named and parts.shows_queries
    if tested and not fresh:
        return Verdict(True)
    # Layers whose attention cannot be observed may be of any class.
    unseen_layers = [parts.layers[i] for i in parts.attending if parts.attentions[i] is None]
    kinds = {type(each) for layer in unseen_layers for each in layer.modules()}
    names = sorted(f"{each.__module__}.{each.__qualname__}" for each in kinds)
    own = f"{type(model).__module__}.{type(model).__qualname__}"
    key = (own, parts.config.to_json_string(), parts.implementation, *names)
    with _lock:
        known = _verdicts.get(key)
    if known is not None and not fresh:
        return known
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            verdict = _SelfCheck(model, parts, make_cache).verdict(tested=tested)
    finally:
        model.train(training)
    with _lock:
        _verdicts[key] = verdict
    return verdict


class _SelfCheck:
    """The check of one model, which is in evaluation mode; see `verdict_of`."""

    def __init__(self, model: Any, parts: ModelParts, make_cache: MakeCache) -> None:
        self.model, self.parts, self.make_cache = model, parts, make_cache
        self.rows = self._drawn()  # the prompts, [len] int64 each
        weights = (each.dtype for each in parts.decoder.parameters() if each.is_floating_point())
        self.dtype = next(weights)  # by which rounding is estimated

    def _drawn(self) -> list[Tensor]:
        """Draw rows of random token ids, without special tokens."""
        size = min(self.parts.config.vocab_size, 4096)
        whole: Any = self.parts.model
        special = {
            value
            for config in (self.parts.config, whole.config)
            for name, value in config.to_dict().items()
            if name.endswith(("token_id", "token_index")) and isinstance(value, int)
        }
        plain = torch.tensor([each for each in range(size) if each not in special])
        generator, device = torch.Generator().manual_seed(0), self.parts.device_of(0)
        drawn = [torch.randint(len(plain), (count,), generator=generator) for count in LENS]
        return [plain[each].to(device) for each in drawn]

    def verdict(self, *, tested: bool) -> Verdict:
        """Try sets of shortcuts until nothing is refused; return the one with least refused."""
        seen = self.parts.shows_queries
        evicts, drops = (EVICTING, DROPPING) if seen else (unseen.EVICTING, unseen.DROPPING)
        positions, best = self._positions(), None
        for care in CARES:
            quirks = attrs.evolve(care, **positions)
            evicting = self._found(evicts, quirks)
            dropping = evicting if evicting.reason else self._found(drops, quirks)
            verdict = Verdict(tested, evicting, dropping, quirks)
            if best is None or verdict.reasons < best.reasons:
                best = verdict
            if not best.reasons:
                break
        assert best is not None
        if self.parts.holds_states and not best.evicting.reason:
            goes_on = self._continues(best.quirks)
            best = attrs.evolve(best, quirks=attrs.evolve(best.quirks, continues=goes_on))
        return best

    def _rounding(self, want: Tensor) -> float:
        """Return how far apart equal logits may be because of rounding."""
        return ROUNDING.get(self.dtype, OTHER_ROUNDING) * max(float(want.abs().max()), 1e-3)

    def _positions(self) -> dict[str, bool]:
        """Find out whether a model counts positions from 0 itself, or must be given them."""
        row = self.rows[0][None]
        try:
            own = plain_outputs(self.model, row).float()
            given = plain_outputs(self.model, row, placed=True).float()
        except Exception:  # takes no positions, or needs more than text
            return {"counts": True, "placed": False}
        if _apart(given, own) <= self._rounding(own):
            return {"counts": True, "placed": False}
        try:
            logits = self._generated(row, None, 1).logits[0].float()
        except Exception:  # has no `generate`, or needs images: read in a loop
            return {"counts": False, "placed": True}
        nearer = (logits[0] - given[-1]).abs().max() < (logits[0] - own[-1]).abs().max()
        return {"counts": False, "placed": bool(nearer)}

    def _continues(self, quirks: ModelQuirks) -> bool:
        """True if a recurrent model gives the same output for a row in two chunks as in one."""
        decoder: Any = self.parts.decoder
        whole = torch.cat(self.rows)
        # Given as by `generate`, since some decoders count the positions of every call from 0.
        places = torch.arange(len(whole), device=whole.device)
        cache, checking = self.make_cache(EVERYTHING), _checking.set(quirks)
        try:
            with cache.attached(self.model):
                for part, own in zip(self.rows, torch.split(places, LENS), strict=True):
                    cache.start_turn()
                    given = {"input_ids": part[None], "position_ids": own[None], CACHE: cache}
                    found = decoder(**given).last_hidden_state[0].float()
            visible = Visible.everything(self.parts.windows, len(whole))
            want = dense_outputs(decoder, self.parts, whole[None], visible)[-LENS[1] :].float()
        except Exception:  # an unknown model may raise anything
            return False
        finally:
            _checking.reset(checking)
        return _apart(found, want) <= self._rounding(want)

    def _found(self, policy: CachePolicy, quirks: ModelQuirks) -> Finding:
        checking, cache = _checking.set(quirks), self.make_cache(policy)
        decoder = self.parts.decoder
        try:
            try:
                return self._compared(self.model, cache, quirks)
            except (UnsupportedModelError, UnsupportedGenerationError):
                raise
            except Exception:
                # Some models generate from images only; their decoder reads text.
                if self.model is decoder or self._reads_text():
                    raise
                return self._compared(decoder, cache, quirks)
        except UnsupportedModelError as error:
            return Finding(reason=str(error))
        except Exception as error:  # an unknown model may raise anything
            said = " ".join(str(error).split())[:300]
            return Finding(reason=f"its self-check ended in {type(error).__name__}: {said}")
        finally:
            _checking.reset(checking)

    def _reads_text(self) -> bool:
        try:
            self.model.generate(self.rows[0][None], max_new_tokens=1, do_sample=False)
        except Exception:  # whatever it may be
            return False
        return True

    def _compared(self, model: nn.Module, cache: Any, quirks: ModelQuirks) -> Finding:
        """Compare a policy's logits with dense attention's; return the first wrong or worst row."""
        findings = []
        for rows in ([self.rows] if quirks.pads else []) + [self.rows[:1]]:
            cache.reset()
            found, said = self._read(model, cache, rows, quirks)
            for row, ids in enumerate(rows):
                whole = torch.cat([ids, said[row, :-1]])
                finding = self._of_row(model, cache, row, found[row].float(), whole, quirks)
                if finding.reason is not None:
                    return finding
                findings.append(finding)
        return max(findings, key=lambda each: each.error)

    def _of_row(
        self,
        model: nn.Module,
        cache: Any,
        row: int,
        found: Tensor,
        ids: Tensor,
        quirks: ModelQuirks,
    ) -> Finding:
        """Compare a row's last logits ``[count, vocab]`` with masked dense attention."""
        end, prompt = len(ids), len(ids) - len(found) + 1
        how, windows = {"placed": quirks.placed}, self.parts.windows
        left = Visible.after(cache, windows, row, prompt, end)
        want, full = (
            dense_outputs(model, self.parts, ids[None], visible, **how)[prompt - 1 :].float()
            for visible in (left, Visible.everything(windows, end))
        )
        plain = plain_outputs(model, ids[None], **how)[prompt - 1 :].float()
        error, effect, own = _apart(found, want), _apart(full, want), _apart(plain, full)
        share = LARGEST_SHARE if self.dtype in ROUNDING else OTHER_LARGEST_SHARE
        bound = max(share * effect, self._rounding(want))
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
                f"from the model's own dense attention in a row of {prompt} tokens{padded}, where "
                f"the hidden tokens change the logits by {effect:.2g}"
            )
        return Finding(error, effect, reason)

    def _read(
        self, model: Any, cache: Any, rows: list[Tensor], quirks: ModelQuirks
    ) -> tuple[Tensor, Tensor]:
        """Read rows with the cache and decode; return the logits (of a decoder, states) and ids."""
        longest = max(map(len, rows))
        ids, mask = (
            torch.stack([torch.cat([row.new_zeros(longest - len(row)), row]) for row in each])
            for each in (rows, [torch.ones_like(row) for row in rows])
        )
        if getattr(model, "generate", None) is not None:
            output = self._generated(ids, mask, 1 + DECODED, **{CACHE: cache})
            return torch.stack(output.logits, dim=1), output.sequences[:, longest:]
        found, said, new = [], [], ids
        with cache.attached(model):
            for step in range(1 + DECODED):
                places = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -new.shape[1] :]
                given: Any = {"position_ids": places} if quirks.placed else {}
                given |= {"attention_mask": mask, CACHE: cache}
                output = model(input_ids=new, use_cache=True, **given)
                found.append(output.last_hidden_state[:, -1])
                new = ids[:, step + 1 : step + 2].clamp(min=1)
                said.append(new)
                mask = torch.cat([mask, torch.ones_like(new)], dim=1)
        return torch.stack(found, dim=1), torch.cat(said, dim=1)

    def _generated(self, ids: Tensor, mask: Tensor | None, count: int, **cache: Any) -> Any:
        config = GenerationConfig(
            max_new_tokens=count,
            use_cache=True,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
            eos_token_id=None,
        )
        given = {} if mask is None else {"attention_mask": mask}
        return self.model.generate(ids, generation_config=config, **given, **cache)


def _apart(found: Tensor, want: Tensor) -> float:
    """Return each token's largest difference between two outputs, as the median over tokens."""
    return float(statistics.median((found - want).abs().amax(dim=-1).tolist()))
