"""Measure questions on one long document in vLLM: plain with prefix caching, and exported.

    python -m benchmarks.vllm [--device cuda] [--context 8192] [--rounds 5] [--out FILE]

All questions come at once, each with an answer of the same length. Plain vLLM reads the document in
front of every question; what its prefix cache holds is read once (cold) or not at all (warm).
Exported documents were read before by Transformers, under SnapKV. The model has random weights;
nothing is downloaded. It runs in the environment of `make vllm-tests`, or with a vLLM for GPUs.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import torch

from benchmarks.common import ModelSpec, write_json
from kvpolicy.evaluation.results import environment
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.vllm import ServedDocument, export
from kvpolicy.policies import SnapKV

SIZES = {
    "cpu": ModelSpec(512, 6, 8, 2, intermediate_size=1024, vocab_size=2048),
    "cuda": ModelSpec(4096, 32, 32, 8, intermediate_size=14336, vocab_size=32000),
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
RATES = (0.1, 0.2)
QUESTION = 32
BLOCK = 32


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=SIZES)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("results/vllm.json"))
    return parser.parse_args()


@torch.no_grad()
def prepare(folder: Path, asked: argparse.Namespace) -> tuple[list[int], list[dict[str, Any]]]:
    """Write a model and its documents; return the document's ids and what reading took."""
    spec = attrs.evolve(SIZES[asked.device], max_positions=2 * asked.context)
    model = spec.build(asked.device, DTYPES[asked.device])
    model.save_pretrained(folder / "model")
    (folder / "documents").mkdir()
    ids = torch.randint(0, spec.vocab_size, (1, asked.context), device=asked.device)
    found = []
    for rate in RATES:
        begin, cache = time.perf_counter(), PolicyCache(SnapKV(retention_rate=rate))
        with cache.attached(model):
            model(ids, cache=cache, logits_to_keep=1)
        read = time.perf_counter() - begin
        document = export(cache, model, folder / "documents" / f"kept_{rate * 100:.0f}.safetensors")
        begin = time.perf_counter()
        document.entries(range(spec.num_layers))
        found.append(
            {
                "document": document.name,
                "tokens_held": document.length,
                "bytes": document.nbytes,
                "read_under_policy_seconds": read,
                "file_read_and_checked_seconds": time.perf_counter() - begin,
            }
        )
    return ids[0].tolist(), found


def start(folder: Path, asked: argparse.Namespace) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM

    return LLM(
        str(folder / "model"),
        dtype=str(DTYPES[asked.device]).removeprefix("torch."),
        skip_tokenizer_init=True,
        max_model_len=asked.context + QUESTION + asked.answer + 32,
        max_num_seqs=asked.questions,
        block_size=BLOCK,
        enforce_eager=asked.device == "cpu",
        kv_transfer_config={
            "kv_connector": "PolicyConnector",
            "kv_role": "kv_consumer",
            "kv_connector_module_path": "kvpolicy.integrations.vllm.connector",
            "kv_connector_extra_config": {"documents": str(folder / "documents")},
        },
    )


def run(llm: Any, requests: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Send requests at once; return seconds to first tokens, throughput and blocks held."""
    engine = llm.llm_engine
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    before = pool.get_num_free_blocks()
    begin, firsts, most = time.perf_counter(), {}, 0
    for index, (prompt, sampling) in enumerate(requests):
        engine.add_request(f"{begin}-{index}", prompt, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.outputs[0].finish_reason != "error"
            if output.outputs[0].token_ids:
                firsts.setdefault(output.request_id, time.perf_counter() - begin)
        most = max(most, before - pool.get_num_free_blocks())
    seconds = time.perf_counter() - begin
    assert len(firsts) == len(requests)
    return {
        "requests_a_second": len(requests) / seconds,
        "first_token_mean_seconds": statistics.mean(firsts.values()),
        "first_token_last_seconds": max(firsts.values()),
        "blocks_held_by_all": most,
    }


def measure(llm: Any, folder: Path, ids: list[int], asked: argparse.Namespace) -> list[Any]:
    """Medians over the rounds, of plain prompts and of each document, cold and warm."""
    paths = sorted((folder / "documents").iterdir())
    documents: list[ServedDocument | None] = [None, *map(ServedDocument.load, paths)]
    measured: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(asked.rounds):
        for document in documents:
            assert llm.llm_engine.reset_prefix_cache()
            for state in ("cold", "warm"):
                found = run(llm, requests_of(document, ids, asked))
                name = "plain" if document is None else document.name
                print(name, state, json.dumps(found), flush=True)
                measured.setdefault((name, state), []).append(found)
    rows = []
    for (name, state), rounds in measured.items():
        medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        rows.append({"served": name, "state": state, **medians})
    return rows


def requests_of(
    document: ServedDocument | None, ids: list[int], asked: argparse.Namespace
) -> list[tuple[Any, Any]]:
    from vllm import SamplingParams

    named = {}
    if document is not None:
        named = {"kv_transfer_params": {"kvpolicy_document": document.name}}
    sampling = SamplingParams(
        temperature=0, max_tokens=asked.answer, ignore_eos=True, detokenize=False, extra_args=named
    )
    found = []
    for index in range(asked.questions):
        question = [(index * 37 + at * 11) % 2048 for at in range(QUESTION)]
        plain: Any = {"prompt_token_ids": [*ids, *question]}
        found.append((plain if document is None else document.prompt(question), sampling))
    return found


def main() -> None:
    asked = parse()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        ids, documents = prepare(folder, asked)
        print(json.dumps(documents), flush=True)
        begin, llm = time.perf_counter(), start(folder, asked)
        print(f"started in {time.perf_counter() - begin:.0f} s", flush=True)
        rows = measure(llm, folder, ids, asked)
    settings = {key: value for key, value in vars(asked).items() if key != "out"}
    sizes = attrs.asdict(SIZES[asked.device])
    whole = {
        "environment": environment(torch.device(asked.device)),
        "settings": {**settings, "question": QUESTION, "block": BLOCK, "model": sizes},
        "documents": documents,
        "rows": rows,
    }
    write_json(asked.out.parent, asked.out.name, whole)
    print(f"written to {asked.out}")


if __name__ == "__main__":
    main()
