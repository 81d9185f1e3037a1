"""Make RULER's prompts for a tokenizer with the harness's own code, without a network."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvpolicy.evaluation.tasks.harness_tasks.essays import has_punkt, read_essays, sentences_of
from kvpolicy.evaluation.text_files import read_text

SEED = 42
# The functions that make a task's samples, by name; each takes the number of samples.
MAKERS = ("generate_samples", "sys_word_pair_random", "sys_kwext", "sys_vartrack_w_noise_random")
Rows = list[dict[str, Any]]


def is_ruler(config: Mapping[str, Any]) -> bool:
    """True if a harness task's configuration belongs to RULER."""
    return getattr(config.get("custom_dataset"), "__module__", "").startswith("lm_eval.tasks.ruler")


@attrs.frozen
class RulerSource:
    """Makes RULER's prompts with the harness's code from a tokenizer and local data.

    Args:
        tokenizer: That of the model, by which they are as long as they are to be.
        data: A folder with ``essays/*.txt`` and ``ruler/<task>.jsonl``; None for the harness's own
            ways.
        limit: Samples of each length; None for the harness's 500.
    """

    tokenizer: Any
    data: Path | None = None
    limit: int | None = None

    def rows(self, task: str, make: Callable[..., Any], length: int) -> tuple[Rows, dict[str, str]]:
        """Return a RULER task's documents at one prompt length.

        Where the data holds prompts of the task that are no longer than this and longer than half,
        they are taken, else prompts are made. A number of samples begins with the smaller one.

        Args:
            task: Its name.
            make: The harness's function that makes its documents.
            length: Tokens of prompt and answer, at most.

        Returns:
            The documents, and what is to be said of them in results.

        Raises:
            ValueError: The length is too small for the task's smallest prompt, or the data lacks
                what it needs.
        """
        file = None if self.data is None else self.data / "ruler" / f"{task}.jsonl"
        if file is not None and file.is_file():
            found = [each for each in local_rows(file) if length / 2 < each["length"] <= length]
            if found:
                rows = [{**each, "max_length": length} for each in found[: self.limit]]
                return rows, {"prompts": f"ruler/{file.name}, of the lengths it says"}
        return self._made(task, make, length)

    def _made(
        self, task: str, make: Callable[..., Any], length: int
    ) -> tuple[Rows, dict[str, str]]:
        names, said = make.__globals__, {"prompts": "made by lm_eval"}
        with seeded(), contextlib.redirect_stdout(io.StringIO()):
            self._check_fits(task, names, length)
            changed: dict[str, Any] = {"get_tokenizer": lambda *_, **__: self.tokenizer}
            changed |= {each: self._limited(names[each]) for each in MAKERS if each in names}
            if "RNG" in names:  # whose state would depend on earlier samples
                changed["RNG"] = random.Random(SEED)
            inner: dict[str, Any] = {}
            if "get_haystack" in names:
                changed["get_haystack"] = functools.partial(
                    self._haystack, names["get_haystack"], said, task, length
                )
                inner = names["generate_samples"].__globals__
            splitter = {"cached_sent_tokenize": functools.lru_cache(sentences_of)}
            own = bool(inner) and not has_punkt()
            with replaced(names, changed), replaced(inner, splitter if own else {}):
                rows = make(max_seq_lengths=[length])["test"].to_list()
        if own and "essays" in said:
            said["sentences"] = "split by kvpolicy: nltk has no punkt_tab here"
        return rows, said

    def _limited(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def limited(*args: Any, num_samples: int = 500, **kwargs: Any) -> Any:
            return make(*args, num_samples=min(num_samples, self.limit or num_samples), **kwargs)

        return limited

    def _haystack(
        self,
        own: Callable[..., Any],
        said: dict[str, str],
        task: str,
        length: int,
        *,
        type_haystack: str,
    ) -> Any:
        if type_haystack != "essay":
            return own(type_haystack=type_haystack)
        said["essays"] = "fetched by lm_eval"
        if self.data is None:
            return own(type_haystack=type_haystack)
        said["essays"] = "essays/*.txt"
        words = re.sub(r"\s+", " ", read_essays(self.data)).split(" ")
        longest = self._count(" ".join(words[:length]))
        if len(words) < length and longest < length:
            raise ValueError(
                f"data must hold essays of at least {length} tokens for the task {task} at that "
                f"length, got {longest}; put more texts into {self.data / 'essays'}"
            )
        return words

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text)["input_ids"])

    def _check_fits(self, task: str, names: Mapping[str, Any], length: int) -> None:
        """Check that a task's shortest prompt fits a length; the harness would try forever."""
        smallest = 0
        if "sys_word_pair_random" in names:
            example, text, answer = names["generate_input_output"](10, length)
            smallest = self._count(f"{example}\n{text} {answer}") + 120
        elif "sys_vartrack_w_noise_random" in names:
            example_len = self._count(names["generate_input_output"](5, 1, 4, is_icl=True)[0]) + 30
            # RULER makes the example in the prompt as long as possible, up to 500 tokens.
            smallest = self._count(names["generate_input_output"](10, 1, 4)[0]) + 30 + 500
            if example_len > 0.95 * 500:
                raise ValueError(
                    f"tokenizer must spell the example of {task} in 475 tokens, got {example_len}: "
                    "it makes too many tokens of a text for this task"
                )
        elif "sys_kwext" in names:
            smallest = max(self._count(names["TEMPLATE"]) + 50, 256)
        if smallest > 0.95 * length:
            raise ValueError(
                f"lengths must be at least {int(smallest / 0.95) + 1} tokens for the task {task}, "
                f"got {length}"
            )


def local_rows(file: Path) -> Rows:
    """Read a RULER task's prompts from JSON lines, with the harness's column names.

    An ``input`` may end with the beginning of the answer, behind the line that asks.

    Raises:
        ValueError: A line is none of RULER's.
    """
    rows = []
    for number, line in enumerate(read_text(file, "RULER file").split("\n"), start=1):
        if not line.strip():
            continue
        entry = json.loads(line)
        missing = [name for name in ("input", "outputs", "length") if name not in entry]
        if missing:
            raise ValueError(f"line {number} of {file.name} must have {', '.join(missing)}")
        text, begun = entry["input"], entry.get("gen_prefix", "")
        if not begun:
            text, begun = _without_beginning(text)
        rows.append(
            {
                "index": entry.get("index", number - 1),
                "input": text,
                "outputs": entry["outputs"],
                "length": entry["length"],
                "gen_prefix": begun.strip(),
            }
        )
    return rows


def _without_beginning(text: str) -> tuple[str, str]:
    r"""Split a RULER prompt into the prompt proper and the beginning of the answer at its end.

    Example:
        >>> _without_beginning("1. a 2. b\nQuestion: Which? Answer: They are:")
        ('1. a 2. b\nQuestion: Which?', 'Answer: They are:')
        >>> _without_beginning("a text\nWhat is it? It is")
        ('a text\nWhat is it?', 'It is')
    """
    start = text.rstrip().rfind("\n") + 1
    end = text.rfind(" Answer:", start)
    if end < 0:
        end = text.rfind("?", start) + 1 or len(text)
    return text[:end], text[end:].strip()


@contextlib.contextmanager
def replaced(names: dict[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Replace a module's attributes for the time of a ``with`` block."""
    before = {name: names[name] for name in values}
    names.update(values)
    try:
        yield
    finally:
        names.update(before)


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Seed Python's and numpy's random generators in a ``with`` block; restore them afterwards."""
    states = random.getstate(), np.random.get_state()
    random.seed(SEED)
    np.random.seed(SEED)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
