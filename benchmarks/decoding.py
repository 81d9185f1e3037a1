"""Eviction while decoding: what a step costs on average, and which rule keeps what is asked later.

Costs: `generate` decodes into fixed buffers of as many slots with a bound and without one, in
turns, by the processor's time; ratios are of the same round. Accuracy: needle prompts of the
bundled model are fed token by token after a short prompt, as if it had said them itself; then comes
the question, which no rule has seen when it chose. Writes ``decoding.json``.

    python benchmarks/decoding.py [--rounds 9] [--budget 1024] [--count 40] [--threads 1]
    python benchmarks/decoding.py --quick
    python benchmarks/decoding.py --show FILE
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import (
    at_least,
    facts,
    out_folder,
    parser_of,
    random_prompt,
    read_json,
    spread,
    write_json,
)
from benchmarks.methods import SMALL, TINY
from kvpolicy.evaluation.tasks.needle import NeedleTask, exact_match, load_model
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    H2O,
    RKV,
    TOVA,
    FullContext,
    KeyDiff,
    Method,
    Random,
    SnapKV,
    StreamingLLM,
)

RULES: tuple[type[Method], ...] = (StreamingLLM, H2O, TOVA, SnapKV, KeyDiff, RKV, Random)
# Tokens of a needle prompt that are read at once; the rest is fed as an answer.
FIRST = 16
COST_HEADER = f"{'rule':<15}{'budget':>7}{'every':>6}{'token ms':>10}{'of unbounded (range)':>24}"
HEADER = f"{'rule':<15}{'budget':>7}{'one-hop':>9}{'two-hop':>9}{'most held':>11}"


def bounded(method: type[Method], tokens: int, every: int) -> Method:
    """A rule that bounds the answer alone; TOVA's at every step."""
    return FullContext(decoding=method().decoding_rule(tokens, min(every, method.every)))


def token_ms(model: PreTrainedModel, cache: PolicyCache, prompt: Tensor, count: int) -> float:
    """Processor milliseconds of a decoded token, the mean over ``count`` behind the first."""
    times: list[float] = []

    class Clock:
        def put(self, value: Tensor) -> None:
            times.append(time.process_time())

        def end(self) -> None:
            """Nothing more comes."""

    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=count + 2,
        do_sample=False,
        streamer=Clock(),
        disable_compile=True,
    )
    return 1e3 * (times[-1] - times[2]) / count


def costs(
    model: PreTrainedModel, rules: Sequence[type[Method]], budget: int, every: int, rounds: int
) -> list[dict[str, Any]]:
    """Every rule against none, on buffers of ``budget + every`` slots.

    Without a bound a prompt of ``budget`` tokens is given an answer of ``every``; with one, an
    answer that is evicted from twice.
    """
    prompt = random_prompt(model.config.vocab_size, budget)
    times: dict[str, list[float]] = {"none": []} | {each.__name__: [] for each in rules}
    for turn in range(rounds + 1):
        for name, taken in times.items():
            if name == "none":
                cache = PolicyCache(FullContext(), max_new_tokens=every)
                found = token_ms(model, cache, prompt, every - 2)
            else:
                method = next(each for each in rules if each.__name__ == name)
                cache = PolicyCache(bounded(method, budget, every), max_new_tokens=every * 3)
                found = token_ms(model, cache, prompt, every * 2)
            if turn:
                taken.append(found)
        print(f"round {turn} of {rounds}", file=sys.stderr, flush=True)
    return [
        {
            "rule": name,
            "budget": budget,
            "every": min(every, TOVA.every) if name == "TOVA" else every,
            "token_ms": taken,
            "of_none": spread([a / b for a, b in zip(taken, times["none"], strict=True)]),
        }
        for name, taken in times.items()
    ]


@torch.no_grad()
def answered(model: Any, policy: Method, prompts: Tensor, answers: int) -> tuple[Tensor, int]:
    """What follows prompts ``[batch, len]`` that are fed token by token, and the most held."""
    cache, most = PolicyCache(policy), 0
    with cache.attached(model):
        output = model(prompts[:, :FIRST], past_key_values=cache)
        for column in prompts[:, FIRST:].T:
            output = model(column[:, None], past_key_values=cache)
            most = max(most, *(layer.kept_len for layer in cache.layers))
        said = [output.logits[:, -1].argmax(dim=-1)]
        for _ in range(answers - 1):
            output = model(said[-1][:, None], past_key_values=cache)
            said.append(output.logits[:, -1].argmax(dim=-1))
    return torch.stack(said, dim=1), most


def accuracies(
    context: int, count: int, budgets: Sequence[int], every: int
) -> list[dict[str, Any]]:
    """The share of questions answered exactly, by rule and budget."""
    model: Any = load_model()
    asked = {hops: NeedleTask(context, hops).prompts(count, seed=11) for hops in (1, 2)}
    cases: list[tuple[str, int | None, Method]] = [("none", None, FullContext())]
    cases += [
        (each.__name__, budget, bounded(each, budget, every))
        for each in RULES
        for budget in budgets
    ]
    rows, drawn = [], [prompt for prompts in asked.values() for prompt in prompts]
    ids = torch.tensor([each.input_ids for each in drawn])
    for name, budget, policy in cases:
        said, most = answered(model, policy, ids, len(drawn[0].answer))
        right = list(map(exact_match, said.tolist(), (each.answer for each in drawn)))
        row: dict[str, Any] = {"rule": name, "budget": budget, "every": every, "most_held": most}
        row |= {"hops_1": sum(right[:count]) / count, "hops_2": sum(right[count:]) / count}
        rows.append(row)
        print(line_of(row), flush=True)
    return rows


def cost_line(row: dict[str, Any]) -> str:
    """One line of the first table."""
    middle, lowest, highest = (f"{each:.3f}" for each in row["of_none"].values())
    mean = sum(row["token_ms"]) / len(row["token_ms"])
    return (
        f"{row['rule']:<15}{row['budget']:>7}{row['every']:>6}{mean:>10.2f}"
        f"{f'{middle} ({lowest}-{highest})':>24}"
    )


def line_of(row: dict[str, Any]) -> str:
    """One line of the second table."""
    budget = "-" if row["budget"] is None else row["budget"]
    shares = "".join(f"{row[f'hops_{hops}']:>9.1%}" for hops in (1, 2))
    return f"{row['rule']:<15}{budget:>7}{shares}{row['most_held']:>11}"


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=at_least(1), help="of costs, default 9")
    parser.add_argument("--count", type=at_least(1), help="prompts of each kind, default 40")
    parser.add_argument("--context", type=at_least(128), default=256, help="default 256")
    parser.add_argument("--budget", type=at_least(16), default=1024, help="of costs, default 1024")
    parser.add_argument("--rules", default="", help="of costs, comma-separated; default all")
    parser.add_argument("--no-costs", action="store_true", help="accuracy alone")
    parser.add_argument("--no-accuracy", action="store_true", help="costs alone")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 9)
    options.count = options.count or (2 if options.quick else 40)
    return options


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure everything; the result is written after each part."""
    spec = TINY if options.quick else SMALL
    budget, every = (32, 16) if options.quick else (options.budget, 128)
    budgets = [64] if options.quick else [32, 64, 128]
    model = spec.build()
    record: dict[str, Any] = {
        "benchmark": "decoding",
        "settings": {
            "model": attrs.asdict(spec),
            "rounds": options.rounds,
            "count": options.count,
            "context": options.context,
            "first": FIRST,
        },
        **facts(model.device),
        "costs": [],
        "accuracy": [],
    }
    if not options.no_costs:
        rules = [each for each in RULES if each.__name__ in options.rules] or RULES
        record["costs"] = costs(model, rules, budget, every, options.rounds)
        print("\n".join([COST_HEADER, *map(cost_line, record["costs"])]), flush=True)
        write_json(folder, "decoding.json", record)
    if not options.no_accuracy:
        print(HEADER, flush=True)
        context = 160 if options.quick else options.context
        record["accuracy"] = accuracies(
            context, options.count, budgets, 16 if options.quick else 32
        )
    write_json(folder, "decoding.json", record)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = options_of(arguments)
    folder = out_folder(options)
    torch.set_num_threads(options.threads)
    if options.show is None:
        measure(options, folder)
        return
    record = read_json(options.show)
    print("\n".join([COST_HEADER, *map(cost_line, record["costs"])]))
    print("\n".join([HEADER, *map(line_of, record["accuracy"])]))


if __name__ == "__main__":
    main()
