"""Do the work of `kvpolicy generate`."""

from __future__ import annotations

import math
import time
from typing import Any

import attrs
import torch
from rich.console import Console

from kvpolicy.evaluation.commands.generate import GenerateOptions
from kvpolicy.evaluation.commands.work.reading import reading_lines
from kvpolicy.evaluation.commands.work.stream import stream, streaming
from kvpolicy.evaluation.commands.work.terminal import load_shown, plain_console
from kvpolicy.evaluation.comparison.chosen import chosen_variant
from kvpolicy.evaluation.comparison.variant import Variant
from kvpolicy.evaluation.defaults import default_tsp_layer
from kvpolicy.evaluation.models import Loaded
from kvpolicy.evaluation.prompt_tokens import encode_prompt, reads_chat
from kvpolicy.evaluation.readable import check_known, check_positions, positions_notes
from kvpolicy.evaluation.tasks.prompts import read_prompt
from kvpolicy.integrations.transformers import PolicyCache, ReadDocument
from kvpolicy.policy import CachePolicy

DEFAULT = "fastkv"
DEFAULT_OF_DOCUMENTS = "replaykv"  # chooses before the questions are known


def run_generate(options: GenerateOptions) -> None:
    """Do what `kvpolicy generate` does."""
    variant = _variant(options)
    chosen = variant.policy
    if not 0 < options.temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, got {options.temperature}")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"seed must be in [0, 2**63), got {options.seed}")
    text = options.prompt if options.prompt_file is None else read_prompt(options.prompt_file)
    assert text is not None  # exactly one of the two is given
    loaded = load_shown(options)
    variant.check_model(loaded.model.config.num_hidden_layers)
    ends = _ends(loaded, options)
    prompts = [encode_prompt(loaded, f"{text}{end}", chat=options.chat) for end in ends or [""]]
    longest = max(each.shape[1] for each in prompts)
    check_positions(
        loaded,
        longest,
        options.max_new_tokens,
        beyond=options.beyond_positions,
        remedy="a shorter prompt, fewer --answer-tokens",
    )
    begin = time.perf_counter()
    if options.questions:
        cache = _answer(options, loaded, text, ends, chosen)
        read = cache.get_seq_length()
        what = f"document of {read:,} tokens"
        notes = ["The document was read once. The table is of its cache, without the questions."]
    else:
        cache = _complete(options, loaded, prompts[0], chosen)
        read, what, notes = longest, f"prompt of {longest:,} tokens", []
    seconds = time.perf_counter() - begin
    errors = plain_console(stderr=True)
    errors.rule(f"{chosen}, {what}, {seconds:.1f} s")
    errors.print(str(cache.report()))
    for note in [*reading_lines(cache, read), *notes, *positions_notes(loaded.model, longest)]:
        errors.print(note)


def _complete(
    options: GenerateOptions, loaded: Loaded, input_ids: torch.Tensor, policy: CachePolicy
) -> PolicyCache:
    """Stream the completion of a prompt; return the cache as it is after the last token."""
    with Console(stderr=True).status(f"reading {input_ids.shape[1]:,} tokens") as reading:
        return stream(
            loaded,
            input_ids,
            policy,
            max_new_tokens=options.max_new_tokens,
            on_text=reading.stop,
            **_sampling(options),
        )


def _answer(
    options: GenerateOptions, loaded: Loaded, document: str, ends: list[str], policy: CachePolicy
) -> PolicyCache:
    """Read a document once and stream the answer to each question; return the document's cache."""
    chat = reads_chat(loaded, options.chat)
    with Console(stderr=True).status("reading the document"):
        read = ReadDocument(loaded.model, loaded.tokenizer, document, policy, chat=chat)
    for question, end in zip(options.questions, ends, strict=True):
        plain_console(stderr=True).print(f"question: {question}", style="dim")
        with Console(stderr=True).status("reading the question") as reading:
            arguments = streaming(loaded, on_text=reading.stop, **_sampling(options))
            read.answer([end], max_new_tokens=options.max_new_tokens, **arguments)
    return read.cache


def _ends(loaded: Loaded, options: GenerateOptions) -> list[str]:
    """Return what follows the document, one text for each question, in words that are known."""
    for question in options.questions:
        check_known(loaded.tokenizer, loaded.tokenizer(question)["input_ids"], "question")
    return [f"\n\n{question}" for question in options.questions]


def _sampling(options: GenerateOptions) -> dict[str, Any]:
    temperature = options.temperature if options.sample else None
    return {"temperature": temperature, "seed": options.seed}


def _variant(options: GenerateOptions) -> Variant:
    """Build the policy that the options ask for."""
    own = {"tsp_rate": options.tsp_rate, "tsp_layer": options.tsp_layer}
    given = {name: value for name, value in own.items() if value is not None}
    policies = attrs.evolve(options.policies, assignments=options.policies.assignments | given)
    default = DEFAULT_OF_DOCUMENTS if options.questions else DEFAULT
    return chosen_variant(policies, default, tsp_layer=default_tsp_layer(options.model))
