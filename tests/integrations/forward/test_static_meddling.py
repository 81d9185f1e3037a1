"""Decoding into buffers of a fixed size while a user's code, or a failure, comes between."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.errors import UnsupportedGenerationError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import cache_of
from tests.integrations.forward.test_static import (
    ROOM,
    SNAPKV,
    Counting,
    assert_same,
    backend,
    everywhere,
    generate,
)
from tests.integrations.support.reading import Interrupted, marks_on
from tests.integrations.test_generation import assert_same_state
from tests.integrations.test_robustness import batch_of, continued, failing

__all__ = ["backend"]  # a fixture

Act = Callable[[PolicyCache, PreTrainedModel], Any]
# What a user's code may do with a cache between two tokens, and the error that comes of it.
BETWEEN: dict[str, tuple[Act, str]] = {
    "crop": (lambda cache, model: cache.crop(-1), r"= \[2, 64 \+ 1\], got \[2, 66\]"),
    "repeat": (
        lambda cache, model: cache.batch_repeat_interleave(2),
        r"= \[4, 65 \+ 1\], got \[2, 66\]",
    ),
    "reset": (lambda cache, model: cache.reset(), r"= \[2, 0 \+ 1\], got \[2, 66\]"),
    "read": (
        lambda cache, model: model(torch.ones(2, 1, dtype=torch.int64), cache=cache),
        "must not be read by other calls of the model while generate decodes",
    ),
}


class Meddling:
    """A streamer that does something after some tokens."""

    def __init__(self, act: Callable[[], Any], after: int = 4) -> None:
        self.act = act
        self.left = after + 1  # the prompt comes first

    def put(self, value: Tensor) -> None:
        if self.left == 0:
            self.act()
        self.left -= 1

    def end(self) -> None:
        pass


def meddled(
    model: PreTrainedModel,
    cache: PolicyCache,
    monkeypatch: pytest.MonkeyPatch,
    act: Act,
    *lengths: int,
) -> Any:
    """An answer of a batch of two, which Transformers itself would not stream."""
    streamer = Meddling(lambda: act(cache, model))
    original = type(model)._update_model_kwargs_for_generation

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        streamer.put(torch.zeros(2))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "_update_model_kwargs_for_generation", update)
    try:
        return generate(model, cache, batch_of(*(lengths or (60, 35))))
    finally:
        monkeypatch.undo()


@pytest.mark.parametrize("name", BETWEEN)
def test_meddling_between_two_tokens_is_refused(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    act, message = BETWEEN[name]
    before = marks_on(model)
    cache = PolicyCache(SNAPKV, max_new_tokens=ROOM)
    with pytest.raises((ValueError, UnsupportedGenerationError), match=message):
        meddled(model, cache, monkeypatch, act)
    assert marks_on(model) == before
    cache.reset()
    given = batch_of(60, 35)
    assert_same(generate(model, PolicyCache(SNAPKV), given), generate(model, cache, given))


def test_rows_may_change_places_between_two_tokens(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a search that is written outside; where their paddings are unlike, it is refused."""
    for rows in ([0, 1], [1, 0]):
        for lengths in ((60, 60), (60, 35)):
            answers = []
            caches = PolicyCache(SNAPKV), PolicyCache(SNAPKV, max_new_tokens=ROOM)
            for cache in caches:
                act = lambda cache, _: cache.reorder_cache(torch.tensor(rows))  # noqa: B023, E731
                try:
                    answer = meddled(model, cache, monkeypatch, act, *lengths)
                    answers.append(answer.sequences.tolist())
                except ValueError as error:
                    answers.append(str(error))
            assert answers[0] == answers[1]
            assert isinstance(answers[0], str) == (rows == [1, 0] and lengths == (60, 35))
            if rows == [0, 1] or lengths == (60, 60):
                assert_same_state(*caches)


@pytest.mark.parametrize("error", [RuntimeError, Interrupted])
def test_a_step_that_fails_behind_the_layers_is_taken_back(
    model: PreTrainedModel, error: Any
) -> None:
    cache, twin = PolicyCache(SNAPKV, max_new_tokens=ROOM), PolicyCache(SNAPKV)
    given = batch_of(60, 35)
    for each in (cache, twin):
        with failing(model, "lm_head", 4, error), pytest.raises(error):
            generate(model, each, given)
    want = generate(model, PolicyCache(SNAPKV), given, max_new_tokens=3)
    assert cache.get_seq_length() == 62
    told = continued(want.sequences, given["attention_mask"], 20, 9)
    assert_same_state(cache, cache_of(want))
    assert_same(generate(model, cache_of(want), told), generate(model, cache, told))


def test_beside_another_attached_cache(model: PreTrainedModel, backend: Counting) -> None:
    """Whose hooks would be compiled as well: nothing is."""
    other, cache = PolicyCache(SNAPKV), PolicyCache(SNAPKV, max_new_tokens=ROOM)
    given = batch_of(50)
    want = generate(model, PolicyCache(SNAPKV), given)
    with other.attached(model):
        assert_same(want, generate(model, cache, given, compile_config=everywhere(backend)))
    assert backend.calls == 0
    cache.reset()
    with cache.attached(model):
        assert_same(want, generate(model, cache, given, compile_config=everywhere(backend)))
    assert backend.calls == 7


def test_attaching_from_within(model: PreTrainedModel) -> None:
    """To the decoder, around a step; and a copy of the model that is made there."""
    cache, copies = PolicyCache(SNAPKV, max_new_tokens=ROOM), []
    before, given = marks_on(model), batch_of(50)

    def attach() -> None:
        with cache.attached(model.model):
            copies.append(copy.deepcopy(model))

    got = generate(model, cache, given, streamer=Meddling(attach))
    want = generate(model, PolicyCache(SNAPKV), given)
    assert_same(want, got)
    assert marks_on(model) == before
    fresh = PolicyCache(SNAPKV, max_new_tokens=ROOM)
    assert_same(want, generate(copies[0], fresh, given))
