"""Measure eviction while decoding: the mean cost of a step, and each rule's accuracy.

Costs: `generate` decodes into fixed buffers of the same number of slots, with a bound and without
one, in turns. Costs are CPU times; ratios are of the same round. Accuracy: needle prompts of the
bundled model are fed token by token after a short prompt, as if the model had generated them. The
question comes last, so that no rule has seen it when it chose. Writes ``decoding.json``.

    python benchmarks/decoding.py [--rounds 9] [--budget 1024] [--count 40] [--threads 1]
    python benchmarks/decoding.py --quick
    python benchmarks/decoding.py --show FILE
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.clocks import TokenTimes
from benchmarks.common import SMALL, TINY, random_prompt, spread
from benchmarks.harness import (
    Benchmark,
    Column,
    Option,
    Row,
    Run,
    Table,
    at_least,
    extent,
    in_turns,
    ratios,
)
from kvpolicy.evaluation.tasks.needle import NeedleTask, exact_match, load_model
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    H2O,
    RKV,
    TOVA,
    FullContext,
    KeyDiff,
    Random,
    SnapKV,
    StreamingLLM,
)
from kvpolicy.policies.methods.method import Method

RULES: tuple[type[Method], ...] = (StreamingLLM, H2O, TOVA, SnapKV, KeyDiff, RKV, Random)
# Tokens of a needle prompt that are read at once; the rest is fed as an answer.
FIRST = 16
OPTIONS = (
    Option("rounds", 9, quick=1, help="of costs"),
    Option("count", 40, quick=2, help="prompts of each kind"),
    Option("context", 256, at_least(128)),
    Option("budget", 1024, at_least(16), help="of costs"),
    Option("rules", "", help="of costs, comma-separated; all where none is named"),
    Option("no-costs", False, help="accuracy alone"),
    Option("no-accuracy", False, help="costs alone"),
)
COSTS = Table(
    "costs",
    Column("rule", -15, "rule"),
    Column("budget", 7, "budget"),
    Column("every", 6, "every"),
    Column("token ms", 10, lambda row: fmean(row["token_ms"]), ".2f"),
    Column("of unbounded (range)", 24, extent("of_none", 3)),
)
ACCURACY = Table(
    "accuracy",
    Column("rule", -15, "rule"),
    Column("budget", 7, "budget"),
    Column("one-hop", 9, "hops_1", ".1%"),
    Column("two-hop", 9, "hops_2", ".1%"),
    Column("most held", 11, "most_held"),
)


def bounded(method: type[Method], tokens: int, every: int) -> Method:
    """Return a policy that bounds only the answer, by a method's rule; TOVA chooses every step."""
    return FullContext(decoding=method().decoding_rule(tokens, min(every, method.every)))


def token_ms(
    model: PreTrainedModel, prompt: Tensor, count: int, cache: Callable[[], PolicyCache]
) -> float:
    """Return the mean CPU milliseconds of ``count`` decoded tokens after the first."""
    clock = TokenTimes(time.process_time)
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        cache=cache(),
        max_new_tokens=count + 2,
        do_sample=False,
        streamer=clock,
        disable_compile=True,
    )
    return fmean(clock.steps_ms(2))


def costs(
    model: PreTrainedModel, rules: Sequence[type[Method]], budget: int, every: int, rounds: int
) -> list[Row]:
    """Time every rule, and decoding without a rule, on buffers of ``budget + every`` slots.

    Without a bound, an answer of ``every`` tokens follows a prompt of ``budget`` tokens. With a
    bound, the answer is so long that tokens are evicted twice.
    """
    prompt = random_prompt(model.config.vocab_size, budget)
    free = partial(PolicyCache, FullContext(), max_new_tokens=every)
    turns = {"none": partial(token_ms, model, prompt, every - 2, free)}
    for rule in rules:
        cache = partial(PolicyCache, bounded(rule, budget, every), max_new_tokens=every * 3)
        turns[rule.__name__] = partial(token_ms, model, prompt, every * 2, cache)
    taken = in_turns(
        turns, rounds, done=lambda turn: print(f"round {turn} of {rounds}", file=sys.stderr)
    )
    return [
        {
            "rule": name,
            "budget": budget,
            "every": min(every, TOVA.every) if name == "TOVA" else every,
            "token_ms": own,
            "of_none": spread(ratios(own, taken["none"])),
        }
        for name, own in taken.items()
    ]


@torch.no_grad()
def answered(model: Any, policy: Method, prompts: Tensor, answers: int) -> tuple[Tensor, int]:
    """Feed prompts ``[batch, len]`` token by token; return answers and the largest cache size."""
    cache, most = PolicyCache(policy), 0
    with cache.attached(model):
        output = model(prompts[:, :FIRST], cache=cache)
        for column in prompts[:, FIRST:].T:
            output = model(column[:, None], cache=cache)
            most = max(most, *(layer.kept_len for layer in cache.layers))
        said = [output.logits[:, -1].argmax(dim=-1)]
        for _ in range(answers - 1):
            output = model(said[-1][:, None], cache=cache)
            said.append(output.logits[:, -1].argmax(dim=-1))
    return torch.stack(said, dim=1), most


def accuracies(run: Run, context: int, budgets: Sequence[int], every: int) -> None:
    """Measure the fraction of questions answered exactly, for each rule and budget."""
    model: Any = load_model()
    count = run.options.count
    drawn = [each for hops in (1, 2) for each in NeedleTask(context, hops).prompts(count, seed=11)]
    ids = torch.tensor([each.input_ids for each in drawn])
    cases: list[tuple[str, int | None, Method]] = [("none", None, FullContext())]
    cases += [
        (each.__name__, budget, bounded(each, budget, every))
        for each in RULES
        for budget in budgets
    ]
    for name, budget, policy in cases:
        said, most = answered(model, policy, ids, len(drawn[0].answer))
        right = list(map(exact_match, said.tolist(), (each.answer for each in drawn)))
        row: Row = {"rule": name, "budget": budget, "every": every, "most_held": most}
        row |= {"hops_1": sum(right[:count]) / count, "hops_2": sum(right[count:]) / count}
        run.add("accuracy", row)


def measure(run: Run) -> None:
    """Measure the costs, then the accuracy."""
    options, quick = run.options, run.options.quick
    spec = TINY if quick else SMALL
    budget, every = (32, 16) if quick else (options.budget, 128)
    settings = {name: getattr(options, name) for name in ("rounds", "count", "context")}
    run.begin({"model": attrs.asdict(spec), **settings, "first": FIRST}, "costs", "accuracy")
    if not options.no_costs:
        rules = [each for each in RULES if each.__name__ in options.rules] or RULES
        run.add("costs", *costs(spec.build(), rules, budget, every, options.rounds))
    if not options.no_accuracy:
        if quick:
            accuracies(run, 160, [64], 16)
        else:
            accuracies(run, options.context, [32, 64, 128], 32)


BENCHMARK = Benchmark("decoding", __doc__, measure, OPTIONS, (COSTS, ACCURACY))
main = BENCHMARK.main

if __name__ == "__main__":
    main()
