"""Say in words what layers read of a prompt, and what they hold of it and of its answer."""

from __future__ import annotations

from statistics import fmean

from kvpolicy.integrations.transformers import PolicyCache

# More groups of layers than this are described by the first and the last.
MAX_GROUPS = 3


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
