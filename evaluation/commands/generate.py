"""Run `kvpolicy generate`: one completion, or answers about a document, under a policy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from kvpolicy.evaluation.commands import shared
from kvpolicy.evaluation.commands.shared import option, with_policies
from kvpolicy.evaluation.policy_options import PolicyOptions

if TYPE_CHECKING:
    import torch
    from transformers import TextStreamer

    from kvpolicy.evaluation.models import Loaded
    from kvpolicy.integrations.transformers import PolicyCache
    from kvpolicy.policy import CachePolicy

# More groups of layers than this are described by the first and the last.
MAX_GROUPS = 3
DEFAULT = "replaykv"  # the one that keeps long answers, whether it knows the question or not


@with_policies
def generate(
    *,
    prompt_file: shared.PromptFile = None,
    prompt: Annotated[
        str | None, option("TEXT", "The prompt itself, instead of --prompt-file.")
    ] = None,
    ask: Annotated[
        list[str] | None,
        option(
            "TEXT",
            "A question about the prompt, which is then a document that is read once, before "
            "any question is known. Repeatable: each question is answered without the others.",
        ),
    ] = None,
    model: shared.ModelName = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "cpu",
    beyond_positions: shared.BeyondPositions = False,
    answer_tokens: Annotated[
        int, option("N", "Largest number of tokens to generate.", min=1)
    ] = 128,
    sample: Annotated[
        bool, option(None, "Sample the answer; default: greedy.", "--sample")
    ] = False,
    temperature: Annotated[float, option("T", "Temperature of --sample, above 0.")] = 1.0,
    seed: Annotated[int, option("N", "Of --sample.")] = 0,
    chat: shared.Chat = None,
    policies: PolicyOptions,
) -> None:
    """Stream a completion to stdout, then print to stderr what the cache held.

    Without --policy, ReplayKV is used, which keeps 20%. With --ask, the answers are on stdout, in
    the order of the questions, and the cache is the document's.
    """
    questions = tuple(ask or ())
    if (prompt_file is None) == (prompt is None):
        got = "neither" if prompt is None else "both"
        raise ValueError(f"exactly one of --prompt-file and --prompt must be given, got {got}")
    if prompt is not None and not prompt.strip():
        raise ValueError("--prompt must be a text, got an empty one")
    if not all(each.strip() for each in questions):
        raise ValueError("--ask must be a text, got an empty one")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, got {temperature}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be in [0, 2**63), got {seed}")

    from kvpolicy.evaluation.chosen import chosen_variant
    from kvpolicy.evaluation.commands.terminal import load_shown, plain_console
    from kvpolicy.evaluation.readable import (
        check_known,
        check_positions,
        encode_prompt,
        positions_notes,
    )
    from kvpolicy.evaluation.texts import read_prompt

    variant = chosen_variant(policies, DEFAULT)
    chosen = variant.policy
    text = prompt if prompt_file is None else read_prompt(prompt_file)
    assert text is not None  # exactly one of the two is given
    loaded = load_shown(model, dtype=dtype, device=device)
    variant.check_model(loaded.model.config.num_hidden_layers)
    for question in questions:
        check_known(loaded.tokenizer, loaded.tokenizer(question)["input_ids"], "question")
    ends = [f"\n\n{question}" for question in questions]
    prompts = [encode_prompt(loaded, f"{text}{end}", chat=chat) for end in ends or [""]]
    longest = max(each.shape[1] for each in prompts)
    check_positions(
        loaded,
        longest,
        answer_tokens,
        beyond=beyond_positions,
        remedy="a shorter prompt, fewer --answer-tokens",
    )
    arguments = {"max_new_tokens": answer_tokens} | _sampling(loaded, temperature, seed, sample)
    begin = time.perf_counter()
    if questions:
        cache = _answer(loaded, text, questions, chosen, chat, arguments)
        read = cache.get_seq_length()
        what = f"document of {read:,} tokens"
        notes = ["The document was read once. The table is of its cache, without the questions."]
    else:
        cache = _complete(loaded, prompts[0], chosen, arguments)
        read, what, notes = longest, f"prompt of {longest:,} tokens", []
    seconds = time.perf_counter() - begin
    errors = plain_console(stderr=True)
    errors.rule(f"{chosen}, {what}, {seconds:.1f} s")
    errors.print(str(cache.report()))
    for note in [*reading_lines(cache, read), *notes, *positions_notes(loaded.model, longest)]:
        errors.print(note)


def _complete(
    loaded: Loaded, input_ids: torch.Tensor, policy: CachePolicy, arguments: dict[str, Any]
) -> PolicyCache:
    """Stream the completion of a prompt; return the cache as it is after the last token."""
    import torch
    from rich.console import Console

    from kvpolicy.integrations.transformers import PolicyCache

    cache = PolicyCache(policy)
    with Console(stderr=True).status(f"reading {input_ids.shape[1]:,} tokens") as reading:
        loaded.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            cache=cache,
            streamer=_streamer(loaded, reading.stop),
            **arguments,
        )
    return cache


def _answer(
    loaded: Loaded,
    document: str,
    questions: Sequence[str],
    policy: CachePolicy,
    chat: bool | None,
    arguments: dict[str, Any],
) -> PolicyCache:
    """Read a document once and stream the answer to each question; return the document's cache."""
    from rich.console import Console

    from kvpolicy.evaluation.commands.terminal import plain_console
    from kvpolicy.evaluation.readable import reads_chat
    from kvpolicy.integrations.transformers import ReadDocument

    with Console(stderr=True).status("reading the document"):
        read = ReadDocument(
            loaded.model, loaded.tokenizer, document, policy, chat=reads_chat(loaded, chat)
        )
    for question in questions:
        plain_console(stderr=True).print(f"question: {question}", style="dim")
        with Console(stderr=True).status("reading the question") as reading:
            read.answer([f"\n\n{question}"], streamer=_streamer(loaded, reading.stop), **arguments)
    return read.cache


def _streamer(loaded: Loaded, on_text: Callable[[], None]) -> TextStreamer:
    """Return a streamer of one answer to stdout, which calls a function before each piece."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            on_text()
            super().on_finalized_text(text, stream_end)

    return Streamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)


def _sampling(loaded: Loaded, temperature: float, seed: int, sample: bool) -> dict[str, Any]:
    """Return the arguments of `generate` for sampling or greedy decoding; sets torch's seed."""
    import torch

    end, pad = (getattr(loaded.model.generation_config, f"{it}_token_id") for it in ("eos", "pad"))
    if pad is None:  # not used for one row, but required by generate
        pad = end[0] if isinstance(end, list) else end
    if not sample:
        return {"do_sample": False, "pad_token_id": pad}
    torch.manual_seed(seed)
    return {"do_sample": True, "temperature": temperature, "pad_token_id": pad}


def reading_lines(cache: PolicyCache, prompt_len: int) -> list[str]:
    """Describe one prompt's prefill by layer, and the tokens held of prompt and answer."""
    lines = [_read(cache, prompt_len)]
    held = [each.positions[0] for each in cache.layers if each.positions is not None]
    answer_len = cache.get_seq_length() - prompt_len
    if held and answer_len:
        answer = fmean(int((each >= prompt_len).sum()) / len(each) for each in held)
        prompt = fmean(int((each >= 0).sum()) / len(each) for each in held) - answer
        lines.append(
            f"held, mean over layers: {prompt:,.1f} tokens of the prompt, {answer:,.1f} of the "
            f"{answer_len:,} answer tokens read"
        )
    return lines


def _read(cache: PolicyCache, prompt_len: int) -> str:
    """Describe how many of the prompt's tokens reached each layer."""
    last, passed = len(cache.layers) - 1, sorted(cache.propagated.items())
    counts = [(layer, int((positions >= 0).sum())) for layer, positions in passed]
    if cache.policy.propagation.restarts and counts:
        ((layer, count),) = counts
        return (
            f"read: {prompt_len:,} tokens by layers 0 to {layer}, then the {count:,} that layer "
            f"{layer} chose by all layers"
        )
    starts = [0, *(layer + 1 for layer, _ in counts)]
    groups = [
        (first, following - 1, count)
        for first, following, count in zip(
            starts,
            [*starts[1:], last + 1],
            [prompt_len, *(count for _, count in counts)],
            strict=True,
        )
        if first < following
    ]
    if len(groups) == 1:
        return f"read: {prompt_len:,} tokens by every layer"
    if len(groups) > MAX_GROUPS:
        return (
            f"read: {prompt_len:,} tokens by layer 0, fewer by later ones, {groups[-1][2]:,} by "
            f"layer {last}"
        )
    said = ", ".join(
        f"{count:,} tokens by {f'layer {first}' if first == end else f'layers {first} to {end}'}"
        for first, end, count in groups
    )
    return f"read: {said}"
