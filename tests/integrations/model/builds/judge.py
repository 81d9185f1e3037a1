"""Whether the library is right on a model, judged by the model's own dense attention."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import FastKV, FullContext, SnapKV, StreamingLLM, TokenSelectivePropagation
from tests.integrations.model.builds.dense import Seen, UnjudgedError, dense_logits, seen_of
from tests.integrations.model.builds.sizes import FIRST_SPECIAL_ID, WINDOW
from tests.integrations.support.conversation import left_padded

LENS = (47, 31)
DECODED = 6
TOLERANCE = 1e-4
# A mask that changes the logits by less proves nothing.
EFFECT = 1e-2

POLICIES: dict[str, CachePolicy] = {
    "full_context": FullContext(),
    "streamingllm": StreamingLLM(retention_rate=0.3),
    "snapkv": SnapKV(retention_rate=0.3, window_size=4),
    "fastkv": FastKV(tsp_rate=0.5, retention_rate=0.3, window_size=4),
}
# Query head i has the key head i % kv_heads there.
TILED = ("jetmoe",)


@dataclass
class Verdict:
    """What became of one model."""

    name: str  # of the build
    # Right, refused, late (refused after something was computed), wrong, error, unjudged or
    # unbuilt.
    outcome: str = "right"
    reason: str = ""  # why, if not right
    policies: dict[str, str] = field(default_factory=dict)  # outcome and reason by policy and batch
    # How far the model's own cache is from its dense attention, by batch.
    own: dict[str, float | str] = field(default_factory=dict)
    # How far the library, keeping everything, is from the model's own cache, by batch; only where
    # that is not what dense attention gives.
    like_own: dict[str, float | str] = field(default_factory=dict)
    effect: float = 0.0  # largest change of the logits by what was not seen, relative to their size
    seconds: float = 0.0  # for all of it


def _tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(1, FIRST_SPECIAL_ID - 1, (count,), generator=generator)
    return [int(each) for each in drawn]


ROWS = [_tokens(row, length) for row, length in enumerate(LENS)]
BATCHES = {"single": ROWS[:1], "padded": ROWS}


def generate(model: PreTrainedModel, rows: list[list[int]], store: Any = None) -> Any:
    """Generates `1 + DECODED` tokens greedily behind left-padded rows."""
    ids, mask = left_padded(rows)
    given = {} if store is None else {CACHE: store}
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=1 + DECODED,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        **given,
    )


def seen_by(store: PolicyCache, row: int, prompt_len: int) -> list[Seen]:
    """Per layer, what the queries of a row see beyond what the model itself hides."""
    kept: list[list[list[int]]] = []
    for layer in store.layers:
        held = [] if layer.positions is None else layer.positions[row, :, :-DECODED].tolist()
        kept.append([[place for place in head if place >= 0] for head in held])
    passed = {
        index: [place for place in positions[row].tolist() if place >= 0]
        for index, positions in store.propagated.items()
    }
    producers = [layer.producer for layer in store.layers]
    prompt = slice(prompt_len)
    return seen_of({prompt_len: kept}, prompt_len + DECODED, [(prompt, passed)], producers)


def apart(found: Tensor, want: Tensor) -> float:
    """Largest difference of two logits, relative to the largest of the second."""
    return float((found - want).abs().max() / want.abs().max().clamp(min=1e-6))


class Judge:
    """Judges one model."""

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        self.verdict = Verdict(name)
        self.model = model
        self.tiled = name in TILED

    def __call__(self) -> Verdict:
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for batch, rows in BATCHES.items():
                own = self._own(rows)
                self.verdict.own[batch] = own
                if isinstance(own, float) and own > TOLERANCE:
                    self.verdict.like_own[batch] = self._like_own(rows)
            for name, policy in POLICIES.items():
                for batch, rows in BATCHES.items():
                    self.verdict.policies[f"{name} {batch}"] = self._outcome(policy, rows)
        self._conclude()
        self.verdict.seconds = time.perf_counter() - start
        return self.verdict

    def _own(self, rows: list[list[int]]) -> float | str:
        try:
            output = generate(self.model, rows)
            found = torch.stack(output.logits, dim=1)
            worst = 0.0
            for row, ids in enumerate(rows):
                said = output.sequences[row, max(map(len, rows)) : -1].tolist()
                want = dense_logits(self.model, ids + said, len(ids))[len(ids) - 1 :]
                worst = max(worst, apart(found[row], want))
        except Exception as error:
            return _shown(error)
        return worst

    def _like_own(self, rows: list[list[int]]) -> float | str:
        try:
            own = torch.stack(generate(self.model, rows).logits, dim=1)
            store = PolicyCache(FullContext())
            return apart(torch.stack(generate(self.model, rows, store).logits, dim=1), own)
        except Exception as error:
            return _shown(error)

    def _outcome(self, policy: CachePolicy, rows: list[list[int]]) -> str:
        outcome = ""
        for candidate in _variants(policy):
            tried = self._tried(candidate, rows)
            if tried.startswith("late"):  # unless it is known by now what a self-check has found
                tried = self._tried(candidate, rows)
            outcome = outcome or tried
            if "must see the whole context" not in tried:
                return tried
        return outcome

    def _tried(self, policy: CachePolicy, rows: list[list[int]]) -> str:
        with _counting(self.model) as calls:
            try:
                return self._held_against_dense(policy, rows)
            except UnsupportedModelError as error:
                return f"{'late' if calls else 'refused'}: {error}"
            except UnjudgedError as error:
                return f"unjudged: {error}"
            except Exception as error:
                return f"error: {_shown(error)}"

    def _held_against_dense(self, policy: CachePolicy, rows: list[list[int]]) -> str:
        store = PolicyCache(policy)
        output = generate(self.model, rows, store)
        found = torch.stack(output.logits, dim=1)
        worst, effect = 0.0, 0.0
        for row, ids in enumerate(rows):
            said = output.sequences[row, max(map(len, rows)) : -1].tolist()
            seen = seen_by(store, row, len(ids))
            whole = ids + said
            want = dense_logits(self.model, whole, len(ids), seen, tiled=self.tiled)
            want = want[len(ids) - 1 :]
            worst = max(worst, apart(found[row], want))
            if policy != FullContext():
                everything = dense_logits(self.model, whole, len(ids))[len(ids) - 1 :]
                effect = max(effect, apart(everything, want))
        self.verdict.effect = max(self.verdict.effect, effect)
        if not worst < TOLERANCE:
            return f"wrong: by {worst:.1e}"
        fault = _unspent(store, effect)
        return f"wrong: {fault}" if fault else "right"

    def _off_itself(self) -> str:
        """Where the model's own cache gives something else than its dense attention."""
        return "".join(
            f"; {batch}: its own cache is off its dense attention by "
            f"{_number(self.verdict.own[batch])}, the library off its own cache by {_number(found)}"
            for batch, found in self.verdict.like_own.items()
        )

    def _conclude(self) -> None:
        if all(_right(each) for each in self.verdict.policies.values()):
            return
        own = self.verdict.own["single"]
        if isinstance(own, str) and "error" in {
            each.split(":")[0] for each in self.verdict.policies.values()
        }:
            self.verdict.outcome = "unjudged"
            self.verdict.reason = f"the model itself, from text alone: {own}"
            return
        self.verdict.reason = self._off_itself()
        if "single" in self.verdict.like_own:
            outcomes = {each.split(":")[0] for each in self.verdict.policies.values()}
            if "wrong" in outcomes:
                self.verdict.outcome = "unjudged"
                return
        ranks = ("wrong", "error", "late", "refused", "unjudged")
        for rank in ranks:
            found = [
                (key, each)
                for key, each in self.verdict.policies.items()
                if each.startswith(rank) and not _right(each)
            ]
            if found:
                self.verdict.outcome = rank
                where = ", ".join(key for key, _ in found)
                if len(found) == len(self.verdict.policies):
                    where = "all"
                reason = found[0][1].split(": ", 1)[1]
                if rank == "wrong":
                    reason = "; ".join(dict.fromkeys(each.split(": ", 1)[1] for _, each in found))
                self.verdict.reason = f"[{where}] {reason}{self.verdict.reason}"
                return


def _number(found: float | str) -> str:
    return f"{found:.1e}" if isinstance(found, float) else f"({found})"


def _right(outcome: str) -> bool:
    """Whether it is; no layer to drop tokens after is right to be refused."""
    return outcome == "right" or "layers that see all: none" in outcome


def _unspent(store: PolicyCache, effect: float) -> str:
    """What shows that the policy did not do what it is there for."""
    if store.policy == FullContext():
        return ""
    kept = [layer.kept_len - DECODED for layer in store.layers if layer.attends]
    if max(kept, default=0) > max(int(0.3 * LENS[0]), WINDOW - 1):
        return f"layers keep {kept} tokens of {LENS[0]}"
    if store.policy.propagation.acting_layers(len(store.layers)) and not store.propagated:
        return "no token was dropped"
    windowed = all(count == WINDOW - 1 for count in kept)  # nothing was the policy's to choose
    if effect < EFFECT and not windowed:
        return f"what is not seen matters by {effect:.1e} only"
    return ""


def _variants(policy: CachePolicy) -> Iterator[CachePolicy]:
    yield policy
    if isinstance(policy.propagation, TokenSelectivePropagation):
        for layer in (0, 2, 1):
            yield FastKV(tsp_layer=layer, tsp_rate=0.5, retention_rate=0.3, window_size=4)


@contextmanager
def _counting(model: PreTrainedModel) -> Iterator[list[int]]:
    """Counts how often tokens were embedded: once for each forward that began."""
    calls: list[int] = []
    embeddings: Any = model.get_input_embeddings()
    handle = embeddings.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
