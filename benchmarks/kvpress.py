"""Compare kvpolicy with NVIDIA's kvpress on a real model: texts, kept positions, CPU time.

SmolLM2-135M-Instruct is asked for a number of seven digits that is hidden in some 2,000 tokens.
Both libraries read the same token ids with the same weights, each in an environment of its own,
since kvpress needs another Transformers. Methods that look at the last queries read document and
question together; all others read the document first, and the question after they have chosen. A
press has kvpress's settings, but windows of 8 and kernels of 7; kvpolicy's policy is composed so
that it follows the press's rule (`kvpress_rules`).

Both processes run at the same time with one thread each. They cannot take turns, so CPU times say
only roughly which library is faster. Answers are kept in ``results/kvpress``: a second start goes
on after the last one. Writes ``kvpress.json`` and prints a table. ``make bench-kvpress`` builds the
other environment, and runs this:

    python benchmarks/kvpress.py --kvpress-python .venv-kvpress/bin/python [--prompts 4]
        [--tokens 2000] [--rates 0.1 0.2] [--methods snapkv kvzip] [--out benchmarks/results]
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).resolve().parents[1]
# Not the folder of this file, which has the name of the library.
sys.path[:] = [
    str(ROOT),
    *(each for each in sys.path if Path(each or ".") != Path(__file__).parent),
]

LIBRARIES = ("kvpolicy", "kvpress")
FULL = "full"
# For each method the press, how kvpolicy follows it, and whether the question is asked later.
METHODS = {
    FULL: ("-", "Transformers' own cache", True),
    "snapkv": ("SnapKVPress", "averages over the window, then over 7 keys", False),
    "pyramidkv": ("PyramidKVPress", "as SnapKV; the window is part of the budget", False),
    "adakv": ("AdaKVPress", "as SnapKV; the window is part of a head's floor", False),
    "criticalkv": ("CriticalKVPress", "as SnapKV; epsilon 8e-4", False),
    "chunkkv": ("ChunkKVPress", "as SnapKV; whole chunks of 20", False),
    "h2o": ("ObservedAttentionPress", "mean attention, nothing protected", False),
    "tova": ("TOVAPress", "one choice for all heads", False),
    "streamingllm": ("StreamingLLMPress", "4 sinks", True),
    "keydiff": ("KeyDiffPress", "nothing protected", True),
    "key_norm": ("KnormPress", "nothing protected", True),
    "curdkv": ("CURPress", "nothing protected", True),
    "expected_attention": ("ExpectedAttentionPress", "nothing protected", True),
    "lagkv": ("LagKVPress", "equal scores as the press has them", True),
    "compactor": ("CompactorPress", "kvpolicy's own rule; other random numbers", True),
    "kvzip": ("KVzipPress", "the total rounded once", True),
}
WINDOW, KERNEL, SINKS = 8, 7, 4
# kvpress needs a Transformers in which this argument has its earlier name.
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"

Row = dict[str, Any]


def policy_of(method: str, rate: float, repetition: Mapping[str, Any]) -> Any:
    """Return the policy that follows a press's rule; ``repetition`` is `Repetition`'s arguments."""
    from benchmarks import kvpress_rules as rules
    from kvpolicy import CachePolicy, Repetition, policies

    named = {
        "keydiff": policies.KeyDiff,
        "key_norm": policies.KeyNorm,
        "curdkv": policies.CurDKV,
        "expected_attention": policies.ExpectedAttention,
    }
    if method in named:
        return named[method](rate, window_size=0)
    if method == "streamingllm":
        return policies.StreamingLLM(rate, num_sinks=SINKS)
    if method == "compactor":
        return policies.Compactor(rate)
    window = policies.WindowMeanPoolScorer(WINDOW, kernel_size=KERNEL)
    how = {"retention_rate": rate, "window_size": WINDOW}
    group, each = policies.GQAGroupSelector(**how), {**how, "window_size": 0}
    total = rules.PressThresholdSelector(**each, protect=SINKS)
    parts = {
        "snapkv": (window, group),
        "pyramidkv": (window, rules.PressPyramidSelector(**how)),
        "adakv": (window, rules.PressAdaptiveSelector(**how)),
        # kvpress takes the mean over the window, kvpolicy the sum.
        "criticalkv": (window, policies.CriticalSelector(group, epsilon=WINDOW * 1e-4)),
        "chunkkv": (window, rules.PressChunkSelector(**how)),
        "h2o": (rules.MeanAttentionScorer(), policies.GQAGroupSelector(**each)),
        "tova": (rules.AllHeadsLastQueryScorer(), policies.GQAGroupSelector(rate, window_size=1)),
        "lagkv": (rules.TiedLagScorer(), rules.TopKSelector(**each)),
        "kvzip": (policies.PeakAttentionScorer(), total),
    }
    again = Repetition(**repetition) if method == "kvzip" else None
    return CachePolicy(*parts[method], policies.PassAllPropagation(), rereading=again)


def press_of(method: str, rate: float) -> Any:
    import kvpress

    press, ratio = getattr(kvpress, METHODS[method][0]), 1 - rate
    window = {"window_size": WINDOW, "kernel_size": KERNEL}
    if method in ("snapkv", "pyramidkv"):
        return press(ratio, **window)
    if method in ("adakv", "criticalkv", "chunkkv"):
        return press(kvpress.SnapKVPress(ratio, **window))
    return press(ratio, n_sink=SINKS) if method == "streamingllm" else press(ratio)


@contextmanager
def pressed(model: PreTrainedModel, press: Any, cache: Any, whole: list[Tensor]) -> Iterator[None]:
    """Attach a press while a prompt is read, and note all keys of every layer before it acts."""

    def note(module: Any, *_: Any) -> None:
        if module.layer_idx == len(whole):  # not in KVzipPress's second reading
            whole.append(cache.layers[module.layer_idx].keys)

    layers: Any = model.get_decoder().layers
    handles = [each.self_attn.register_forward_hook(note) for each in layers]
    try:
        with press(model):
            yield
    finally:
        for handle in handles:
            handle.remove()


def kept_by_press(model: PreTrainedModel, cache: Any, whole: Sequence[Tensor]) -> list[list[int]]:
    """Return the kept positions of every layer and head as `bits`, by looking up the held keys.

    A press for unequal heads holds all keys, and hides some of them from later queries.
    """
    layers: Any = model.get_decoder().layers
    found = []
    for layer, held, before in zip(layers, cache.layers, whole, strict=True):
        masked = getattr(layer.self_attn, "masked_key_indices", None) or ()
        hidden = set(zip(*(each.tolist() for each in masked), strict=True))
        slots = [enumerate(places_of(*both)) for both in zip(held.keys[0], before[0], strict=True)]
        found.append(
            [
                bits(place for slot, place in places if (0, head, slot) not in hidden)
                for head, places in enumerate(slots)
            ]
        )
    return found


def bits(positions: Iterable[int]) -> int:
    """Return a number whose bit ``p`` is set for every position ``p``; -1 is no position.

    Example:
        >>> bin(bits([-1, 0, 3]))
        '0b1001'
    """
    return sum(1 << place for place in positions if place >= 0)


def places_of(held: Tensor, whole: Tensor) -> list[int]:
    """Return where the rows of a tensor occur in another, ``[length, head_dim]``, exactly."""
    places: dict[bytes, list[int]] = {}
    for place, row in enumerate(whole.numpy()):
        places.setdefault(row.tobytes(), []).append(place)
    found = []
    for row in held.numpy():
        left = places.get(row.tobytes())
        if not left:
            raise ValueError("held must have rows of whole, each once, got one that is not left")
        found.append(left.pop(0))
    return found


@torch.inference_mode()
def answered(model: PreTrainedModel, method: str, by: Any, prompt: Mapping[str, Any]) -> Row:
    """Read a prompt under a policy or a press, None for full context, and answer it greedily.

    ``kept`` are positions by layer and head as `bits`, and ``seconds`` the CPU's of reading.
    """
    parts = [prompt["document"], prompt["question"]]
    if not METHODS[method][2]:
        parts = [[*parts[0], *parts[1]]]
    ends, end, whole = model.generation_config.eos_token_id, 0, list[Tensor]()
    ends = ends if isinstance(ends, list) else [ends]
    with ExitStack() as stack:
        if ours := hasattr(by, "scorer"):
            from kvpolicy.integrations.transformers import PolicyCache

            cache: Any = stack.enter_context(PolicyCache(by).attached(model))
        else:
            cache = DynamicCache(config=model.config)

        def forward(ids: Sequence[int]) -> int:
            nonlocal end
            how = {CACHE: cache, "use_cache": True, "logits_to_keep": 1}
            if not ours:  # such a cache counts what it holds, not what was read
                how["position_ids"] = torch.arange(end, end + len(ids))[None]
            end += len(ids)
            return int(model(input_ids=torch.tensor([ids]), **how).logits[0, -1].argmax())

        start = time.process_time()
        with nullcontext() if ours or by is None else pressed(model, by, cache, whole):
            token = forward(parts[0])
        seconds, kept = time.process_time() - start, list[list[int]]()
        if ours:
            kept = [[bits(head) for head in each.positions[0].tolist()] for each in cache.layers]
        elif by is not None:
            kept = kept_by_press(model, cache, whole)
        for part in parts[1:]:
            token = forward(part)
        tokens: list[int] = []
        while token not in ends and len(tokens) < prompt["new_tokens"]:
            tokens.append(token)
            token = forward([token])
    heads = [[f"{head:x}" for head in layer] for layer in kept]
    return {"tokens": tokens, "kept": heads, "seconds": seconds}


def work(library: str, folder: Path) -> None:
    """Answer what ``asked.json`` of a folder asks, and add each answer to ``LIBRARY.jsonl``.

    Answers that are there already are not asked for again.
    """
    torch.set_num_threads(1)
    disable_progress_bar()
    asked = json.loads((folder / "asked.json").read_text())
    models: dict[str, PreTrainedModel] = {}
    done = answers_in(folder, library)
    for method, rate, index in keys_of(asked):
        if (method, rate, index) in done:
            continue
        # ObservedAttentionPress reads the attention weights, which only this attention returns.
        attention = "eager" if (library, method) == ("kvpress", "h2o") else "sdpa"
        if attention not in models:
            models[attention] = AutoModelForCausalLM.from_pretrained(
                asked["model"], dtype=torch.float32, attn_implementation=attention
            ).eval()
        torch.manual_seed(0)  # of CompactorPress
        by = None
        if method != FULL and library == "kvpolicy":
            by = policy_of(method, rate, asked["repetition"])
        elif method != FULL:
            by = press_of(method, rate)
        row = {"method": method, "rate": rate, "prompt": index}
        row |= answered(models[attention], method, by, asked["prompts"][index])
        with (folder / f"{library}.jsonl").open("a") as file:
            file.write("\n" + json.dumps(row))  # the line before it may be cut
        print(f"{library}: {method} {rate} prompt {index}", file=sys.stderr, flush=True)
    found = {name: version(name) for name in ("torch", "transformers", library)}
    (folder / f"{library}.versions.json").write_text(json.dumps(found))


def keys_of(asked: Mapping[str, Any]) -> list[tuple[str, float, int]]:
    """Return method, rate and prompt of every answer; full context has the rate 1."""
    return [
        (method, rate, index)
        for method in asked["methods"]
        for rate in ([1.0] if method == FULL else asked["rates"])
        for index in range(len(asked["prompts"]))
    ]


def answers_in(folder: Path, library: str) -> dict[tuple[str, float, int], Row]:
    """Return a library's answers; of a process that was stopped, the last line may be cut."""
    path, found = folder / f"{library}.jsonl", {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[row["method"], row["rate"], row["prompt"]] = row
    return found


def ask(options: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from kvpolicy import Repetition
    from kvpolicy.evaluation.default_model import default_model
    from kvpolicy.evaluation.tasks.needles import Needles

    model = default_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    questions = Needles(("number",)).questions(tokenizer, options.tokens, options.prompts)
    # As KVzipPress does it: the template's beginning is not repeated, its end precedes the answer.
    chat = [{"role": "user", "content": "DOCUMENT"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    around = (tokenizer.encode(part, add_special_tokens=False) for part in text.split("DOCUMENT"))
    before, after = around
    repetition = Repetition.asking(tokenizer, answer_ids=after, unrepeated=len(before))
    names = ("instruction_ids", "later_ids", "answer_ids", "unrepeated")
    return {
        "model": str(model),
        "repetition": {name: getattr(repetition, name) for name in names},
        "rates": options.rates,
        "methods": options.methods,
        "prompts": [
            {
                "document": each.document_ids,
                "question": each.question_ids,
                "new_tokens": each.question.new_tokens,
                "answers": each.question.answers,
            }
            for each in questions
        ],
    }


def compared(both: Sequence[Sequence[Row]]) -> Row:
    """Compare the answers of one method at one rate: kvpolicy's and kvpress's, prompt by prompt.

    ``heads_nested`` counts heads of which one side keeps all that the other keeps, or more;
    ``shared`` is the share of kept positions that both keep; ``seconds`` are medians.
    """
    pairs = [
        (int(mine, 16), int(other, 16))
        for one, two in zip(*both, strict=True)
        for own, its in zip(one["kept"], two["kept"], strict=True)
        for mine, other in zip(own, its, strict=True)
    ]
    shared = sum((mine & other).bit_count() for mine, other in pairs)
    kept = sum(mine.bit_count() + other.bit_count() for mine, other in pairs)
    named = list(zip(LIBRARIES, both, strict=True))
    return {
        "prompts": len(both[0]),
        "texts_equal": sum(a["tokens"] == b["tokens"] for a, b in zip(*both, strict=True)),
        "heads": len(pairs),
        "heads_equal": sum(mine == other for mine, other in pairs),
        "heads_nested": sum(mine & other in (mine, other) for mine, other in pairs),
        "shared": 2 * shared / kept if pairs else None,
        "right": {library: sum(row["right"] for row in rows) for library, rows in named},
        "seconds": {library: median(row["seconds"] for row in rows) for library, rows in named},
    }


def rows_of(asked: Mapping[str, Any], folder: Path, decode: Any) -> list[Row]:
    from kvpolicy.evaluation.tasks.question import any_answer

    answers = [answers_in(folder, library) for library in LIBRARIES]
    rows = []
    for method, rate in dict.fromkeys((method, rate) for method, rate, _ in keys_of(asked)):
        found = [
            [of[method, rate, index] for index in range(len(asked["prompts"]))] for of in answers
        ]
        for row in (*found[0], *found[1]):
            text = decode(row["tokens"]).partition("\n")[0]
            row["right"] = any_answer(text, asked["prompts"][row["prompt"]]["answers"]) == 1
        press, setting, later = METHODS[method]
        head = {"method": method, "press": press, "setting": setting, "rate": rate}
        rows.append({**head, "asked_later": later, **compared(found)})
    return rows


def table(record: Mapping[str, Any]) -> str:
    lines = ["method              kept asked texts    heads nested  shared right     CPU s"]
    for row in record["rows"]:
        shared = "-" if row["shared"] is None else f"{row['shared']:.4f}"
        right, seconds = row["right"].values(), row["seconds"].values()
        texts = f"{row['texts_equal']}/{row['prompts']}"
        heads = f"{row['heads_equal']}/{row['heads']}"
        lines.append(
            f"{row['method']:<19}{row['rate']:5.0%} {'later' if row['asked_later'] else 'known'}"
            f"{texts:>6}{heads:>9}{row['heads_nested']:>7}{shared:>8}"
            f"{'/'.join(map(str, right)):>6}{'/'.join(f'{each:.1f}' for each in seconds):>10}"
        )
    return "\n".join(
        [*lines, "texts, heads: equal/all; right, CPU s of reading and choosing: kvpolicy/kvpress"]
    )


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kvpress-python", type=Path, default=Path())
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.2])
    parser.add_argument("--methods", choices=METHODS, nargs="+", default=list(METHODS))
    parser.add_argument("--folder", type=Path, default=ROOT / "results/kvpress", help="of answers")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only print a result")
    parser.add_argument("--work", choices=LIBRARIES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not (options.show or options.work or options.kvpress_python.is_file()):
        parser.error(
            "--kvpress-python must be the interpreter of an environment with kvpress, got "
            f"{options.kvpress_python}; `make bench-kvpress` builds one"
        )
    return options


def check_same(asked: Mapping[str, Any], folder: Path) -> None:
    """Refuse a folder with answers to other prompts; other methods, rates, and numbers are fine."""
    path = folder / "asked.json"
    before = json.loads(path.read_text()) if path.exists() else asked
    prompts = zip(before["prompts"], asked["prompts"], strict=False)
    same = all(before[name] == asked[name] for name in ("model", "repetition"))
    if not (same and all(one == other for one, other in prompts)):
        raise ValueError(f"--folder must have answers to the same prompts, got {folder}: delete it")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from kvpolicy.evaluation.results import environment

    asked, folder = json.loads(json.dumps(ask(options))), options.folder
    check_same(asked, folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "asked.json").write_text(json.dumps(asked))
    pythons = dict(zip(LIBRARIES, (sys.executable, str(options.kvpress_python)), strict=True))
    running = [
        subprocess.Popen([python, __file__, "--work", library, "--folder", str(folder)])
        for library, python in pythons.items()
    ]
    codes = [process.wait() for process in running]
    if any(codes):
        raise RuntimeError("a process has failed, see above; a second start goes on after it")
    lengths = [len(each["document"]) + len(each["question"]) for each in asked["prompts"]]
    versions = [(folder / f"{each}.versions.json").read_text() for each in LIBRARIES]
    settings = {name: asked[name] for name in ("rates", "repetition")}
    settings |= {"model": Path(asked["model"]).name, "tokens": lengths, "threads": 1}
    settings |= {"window_size": WINDOW, "kernel_size": KERNEL, "num_sinks": SINKS}
    return {
        "benchmark": "kvpress",
        "settings": settings,
        "versions": dict(zip(LIBRARIES, map(json.loads, versions), strict=True)),
        "machine": environment(torch.device("cpu"))["machine"],
        "rows": rows_of(asked, folder, AutoTokenizer.from_pretrained(asked["model"]).decode),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    if options.work:
        work(options.work, options.folder)
    elif options.show:
        print(table(json.loads(options.show.read_text())))
    else:
        from kvpolicy.evaluation.results import write_all

        record = measure(options)
        write_all(options.out, {"kvpress.json": json.dumps(record, indent=1).encode()})
        print(table(record))


if __name__ == "__main__":
    main()
