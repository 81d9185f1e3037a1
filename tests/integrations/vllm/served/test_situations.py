"""Chunks, preemption, no shared blocks, workers: a real vLLM answers as kvpolicy's `generate`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.served.support import (
    NEEDS_VLLM,
    QUESTIONS,
    Written,
    ask,
    check_answers,
    engine,
)

pytestmark = NEEDS_VLLM
NAMES = ("snapkv", "whole_blocks", "few")
ASKED = [(name, question) for name in NAMES for question in QUESTIONS]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    return Written(tmp_path_factory.mktemp("situations"), names=NAMES)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16, "enable_chunked_prefill": True},
        {"enable_prefix_caching": False},
        {"async_scheduling": False},
        {"block_size": 64},
    ],
    ids=["chunks of 16", "no shared blocks", "no async scheduling", "blocks of 64"],
)
def test_settings(settings: dict[str, Any], written: Written) -> None:
    with engine(written, **settings) as llm:
        check_answers(written, ASKED, ask(llm, written, ASKED))
        check_answers(written, ASKED, ask(llm, written, ASKED))


@pytest.mark.parametrize("shares", [True, False], ids=["shared blocks", "no shared blocks"])
def test_preempted_requests(shares: bool, written: Written) -> None:
    """With few blocks requests are preempted while they answer, and loaded again."""
    with engine(
        written, num_gpu_blocks_override=14, enable_prefix_caching=shares, max_model_len=320
    ) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempted = []
        before = scheduler._preempt_request
        scheduler._preempt_request = lambda *given, **named: (
            preempted.append(given),
            before(*given, **named),
        )[1]
        check_answers(written, ASKED * 2, ask(llm, written, ASKED * 2))
        assert preempted


def test_no_memory_for_residents(written: Written) -> None:
    settings = written.transfer_config(resident_gib=0)
    with engine(written, kv_transfer_config=settings) as llm:
        check_answers(written, ASKED, ask(llm, written, ASKED))


def test_two_workers(written: Written) -> None:
    """Tensor parallel; vLLM's CPU backend has no pipeline parallelism, for plain texts neither."""
    with engine(written, processes=True, tensor_parallel_size=2) as llm:
        check_answers(written, ASKED, ask(llm, written, ASKED))
        check_answers(written, ASKED, ask(llm, written, ASKED))


def test_settings_that_are_refused(written: Written, tmp_path: Path) -> None:
    config = written.transfer_config()
    wrong = [
        ({"kv_load_failure_policy": "recompute"}, "kv_load_failure_policy must be 'fail'"),
        ({"kv_connector_extra_config": {}}, "must have documents, the folder"),
        (
            {"kv_connector_extra_config": {"documents": str(tmp_path / "none")}},
            "documents must be a folder that exists",
        ),
    ]
    for change, reason in wrong:
        with (
            pytest.raises(ValueError, match=reason),
            engine(written, kv_transfer_config={**config, **change}),
        ):
            pass
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    with (
        pytest.raises(ValueError, match="speculative_config must be None"),
        engine(written, speculative_config=drafts),
    ):
        pass
