"""`GenerationMixin.generate`, wrapped so that a call is made again with each policy's cache."""

import functools
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import attrs
from generate_twice.arguments import Arguments, Before
from generate_twice.outputs import differences
from generate_twice.record import Comparison, Record
from torch import Tensor
from transformers import DynamicCache, GenerationMixin

import kvpolicy
from kvpolicy.errors import KVPolicyError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import FullContext, SnapKV

# Each makes a cache for an answer of so many tokens. All of them keep everything.
MakeCache = Callable[[int], PolicyCache]
POLICIES: dict[str, MakeCache] = {
    "full_context": lambda _: PolicyCache(FullContext()),
    "fixed_decoding": lambda length: PolicyCache(FullContext(), max_new_tokens=length),
    "snapkv_keeps_all": lambda _: PolicyCache(SnapKV(retention_rate=1.0)),
}
LONGEST_REASON = 140


@attrs.define(eq=False)
class Watched:
    """A call under way, and the cache that `generate` makes for it.

    Attributes:
        model: Whose `generate` was called; an assistant's own call inside of it is not the call.
        why_not: Why no other cache can be put in the place of its own; None where one can.
    """

    model: Any
    why_not: str | None = "generate never came to its cache"
    is_known: bool = False

    def note(self, given: Any, config: Any, made: Any) -> None:
        """Note the cache that the call was given, or else the one that was made for it."""
        self.is_known = True
        if given is not None:
            self.why_not = f"a cache is given: {type(given).__name__}"
        elif self.model.config.is_encoder_decoder:
            self.why_not = "encoder and decoder"
        elif config.cache_implementation is not None:
            self.why_not = f"cache_implementation={config.cache_implementation}"
        elif type(made) is not DynamicCache:
            self.why_not = "no cache" if made is None else f"its cache is a {type(made).__name__}"
        else:
            self.why_not = None


_watched: ContextVar[Watched | None] = ContextVar("generate_twice_watched", default=None)


@contextmanager
def generating_twice(
    record: Record, policies: Mapping[str, MakeCache] = POLICIES
) -> Iterator[None]:
    """Make every outermost call of `generate` again with each policy, inside of the block.

    The caller gets what its own call gave; the generators of chance and the models' settings are
    left as that call left them.
    """
    generate, prepare = GenerationMixin.generate, GenerationMixin._prepare_cache_for_generation

    @functools.wraps(prepare)
    def prepare_and_note(
        self: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        given = model_kwargs.get(CACHE)
        result = prepare(self, generation_config, model_kwargs, *args, **kwargs)
        watched = _watched.get()
        if watched is not None and watched.model is self and not watched.is_known:
            watched.note(given, generation_config, model_kwargs.get(CACHE))
        return result

    @functools.wraps(generate)
    def generate_twice(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _watched.get() is not None:
            return generate(self, *args, **kwargs)
        return _Call(generate, self, Arguments(args, kwargs), record).twice(policies)

    GenerationMixin.generate = generate_twice
    GenerationMixin._prepare_cache_for_generation = prepare_and_note
    try:
        yield
    finally:
        GenerationMixin.generate = generate
        GenerationMixin._prepare_cache_for_generation = prepare


@attrs.frozen(eq=False)
class _Call:
    """One call of `generate` by a test."""

    generate: Callable[..., Any]
    model: Any
    arguments: Arguments
    record: Record

    def twice(self, policies: Mapping[str, MakeCache]) -> Any:
        """Make the call, and again with each policy; return what the call itself gave."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test").rsplit(" (", 1)[0]
        models = self.arguments.models(self.model)
        try:
            # Before the call, which may change what it is given.
            arguments, before = self.arguments.copied(), Before.of(models)
        except Exception as error:  # whatever copying raises is a reason to leave the call out
            self.record.left_out.append((test, f"arguments cannot be copied: {_brief(error)}"))
            return self.generate(self.model, *self.arguments.positional, **self.arguments.named)
        watched = Watched(self.model)
        token = _watched.set(watched)
        try:
            output = self._own(test)
            if watched.why_not is None:
                self._compare(test, output, arguments, before, policies)
            else:
                self.record.left_out.append((test, watched.why_not))
        finally:
            _watched.reset(token)
        return output

    def _own(self, test: str) -> Any:
        try:
            return self._made(self.arguments)
        except Exception as error:  # often what the test wants to see
            self.record.left_out.append((test, f"the call itself raises {_brief(error)}"))
            raise

    def _made(self, arguments: Arguments, cache: Any = None) -> Any:
        given = {} if cache is None else {CACHE: cache}
        return self.generate(self.model, *arguments.positional, **{**arguments.named, **given})

    def _compare(
        self,
        test: str,
        output: Any,
        arguments: Arguments,
        before: Before,
        policies: Mapping[str, MakeCache],
    ) -> None:
        moved = arguments.is_padded_right
        if moved:
            arguments = arguments.padded_left()
            with before.again():
                output = self._made(arguments.copied())
        length = _answer_len(output, arguments)
        for name, make_cache in policies.items():
            comparison = Comparison(test, name, moved)
            try:
                found = self._against(output, arguments, before, make_cache(length))
            except Exception as error:  # all that a test's call can raise is a finding
                if _is_refusal(error):
                    comparison = attrs.evolve(comparison, refused=_brief(error))
                else:
                    comparison = attrs.evolve(comparison, differs={"raises": _brief(error)})
            else:
                given = bool(found) and self._differs_with_any(found, output, arguments, before)
                comparison = attrs.evolve(comparison, differs=found, given=given)
            self.record.comparisons.append(comparison)

    def _against(
        self, output: Any, arguments: Arguments, before: Before, cache: Any
    ) -> dict[str, str]:
        with before.again(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tests count those of their own calls
            again = self._made(arguments.copied(), cache)
        return differences(output, again, arguments.mask)

    def _differs_with_any(
        self, found: dict[str, str], output: Any, arguments: Arguments, before: Before
    ) -> bool:
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        try:
            return found.keys() <= self._against(output, arguments, before, cache).keys()
        except Exception:  # a cache that is given is refused by `generate` itself
            return True


def _answer_len(output: Any, arguments: Arguments) -> int:
    sequences = output if isinstance(output, Tensor) else output.sequences
    prompt = arguments.positional[0] if arguments.positional else None
    for name in ("inputs", "input_ids"):
        prompt = arguments.named.get(name, prompt)
    read = prompt.shape[1] if isinstance(prompt, Tensor) and prompt.ndim == 2 else 0
    return max(1, int(sequences.shape[1]) - read)


def _is_refusal(error: Exception) -> bool:
    """Whether an error is the library's word, and not what went wrong inside."""
    if isinstance(error, KVPolicyError):
        return True
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    package = [Path(folder).resolve() for folder in _folders()]
    own = any(folder in Path(raised_in).resolve().parents for folder in package)
    return own and isinstance(error, (ValueError, TypeError))


def _folders() -> list[str]:
    """Of the package, which stand apart where it is installed for editing."""
    return [
        *kvpolicy.__path__,
        *kvpolicy.policies.__path__,
        *kvpolicy.integrations.transformers.__path__,
    ]


def _brief(error: Exception) -> str:
    """Its kind and first words, the same for calls that differ in numbers only."""
    words = re.sub(r"\d+", "N", " ".join(str(error).split()))
    return f"{type(error).__name__}: {words[:LONGEST_REASON]}"
