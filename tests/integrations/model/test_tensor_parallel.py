"""A model whose heads lie in two processes, against the same model in one."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from transformers import PreTrainedModel

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.heads import Heads
from kvpolicy.integrations.transformers.model.parallel import HeadSharding, ProcessHeads
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.model.tensor_parallel import (
    CASES,
    KINDS,
    POLICIES,
    SEEDS,
    build,
    seen,
    seen_of_kind,
)
from tests.reference import Family

ROOT = Path(__file__).parents[3]
PROCESSES = 2
TIMEOUT = 300  # seconds; some 40 are needed

Seen = dict[tuple[str, str], dict[str, Any]]  # what one process saw, by family and policy

with_processes = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="needs torch.distributed with the gloo backend",
)


def run_processes(folder: Path) -> list[Seen]:
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--standalone", "--nproc-per-node", str(PROCESSES)]
    command += ["-m", "tests.integrations.model.tensor_parallel", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the machine's name resolves to
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as started:
        try:
            output, _ = started.communicate(timeout=TIMEOUT)
        except BaseException:
            os.killpg(started.pid, signal.SIGKILL)  # with the processes it has started
            raise
    assert started.returncode == 0, output[-6000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return run_processes(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def models() -> dict[Family, PreTrainedModel]:
    return {family: build(family) for family in SEEDS}


@with_processes
@pytest.mark.parametrize(("family", "name"), CASES)
def test_two_processes_give_what_one_gives(
    ranks: list[Seen], models: dict[Family, PreTrainedModel], family: Family, name: str
) -> None:
    whole = seen(models[family], POLICIES[name])
    parts = [rank[family, name] for rank in ranks]
    for turn, expected in enumerate(whole["turns"]):
        for part in parts:
            found = part["turns"][turn]
            assert found["tokens"].tolist() == expected["tokens"].tolist()
            assert found["propagated"] == expected["propagated"]
            torch.testing.assert_close(found["logits"], expected["logits"], atol=1e-3, rtol=0)
        if name == "bounded_ada_kv":  # slots of decoded tokens are not told apart there
            continue
        for row, layers in enumerate(expected["kept"]):
            for layer, heads in enumerate(layers):
                kept = [part["turns"][turn]["kept"][row][layer] for part in parts]
                assert [head for of_process in kept for head in of_process] == heads


@with_processes
@pytest.mark.parametrize(("name", "policy"), KINDS)
def test_two_processes_agree_on_layers_of_other_kinds(
    ranks: list[Seen], name: str, policy: str
) -> None:
    """Latents, of which every process holds all, and states."""
    whole = seen_of_kind(builds()[name].model(), POLICIES[policy])
    for rank in ranks:
        found: Any = rank[name, policy]
        assert torch.equal(found["tokens"], whole["tokens"])
        torch.testing.assert_close(found["logits"], whole["logits"], atol=1e-3, rtol=0)
        assert found["propagated"].keys() == whole["propagated"].keys()
        for layer, positions in whole["propagated"].items():
            assert torch.equal(found["propagated"][layer], positions)
    for layer, positions in enumerate(whole["kept"]):
        held: list[Any] = [rank[name, policy]["kept"][layer] for rank in ranks]
        if positions is None:
            assert held == [None, None]
        elif name == "deepseek_v2":
            assert all(torch.equal(each, positions) for each in held)
        else:
            assert torch.equal(torch.cat(held, dim=1), positions)


@with_processes
def test_a_process_reports_the_bytes_of_its_heads(
    ranks: list[Seen], models: dict[Family, PreTrainedModel]
) -> None:
    whole = seen(models["llama"], POLICIES["fastkv"])["held_bytes"]
    held = [rank["llama", "fastkv"]["held_bytes"] for rank in ranks]
    assert held == [whole // PROCESSES] * PROCESSES


@with_processes
@pytest.mark.parametrize("family", SEEDS)
def test_without_the_other_heads_the_processes_would_disagree(
    ranks: list[Seen], family: Family
) -> None:
    """So that they agree is no accident of models whose heads all want the same."""
    passed = [rank[family, "local"]["turns"][0]["propagated"] for rank in ranks]
    assert passed[0] != passed[1]


def test_all_heads_of_a_layer_may_be_in_every_process() -> None:
    spread = HeadSharding(1, 2, object(), query_heads=8)
    assert type(spread.heads(8)) is Heads
    half = spread.heads(4)
    assert isinstance(half, ProcessHeads)
    assert (half.share, half.shares) == (1, 2)


@pytest.mark.parametrize(("group", "query_heads"), [(object(), 3), (None, 4)])
def test_an_unknown_share_of_the_heads_is_refused(group: object, query_heads: int) -> None:
    with pytest.raises(UnsupportedModelError, match=f"all 8 query heads.*got {query_heads}"):
        HeadSharding(1, 2, group, query_heads=8).heads(query_heads)


def test_a_model_of_one_process_has_all_heads_here(models: dict[Family, PreTrainedModel]) -> None:
    model = models["llama"]
    spread = HeadSharding.of(model.model.layers[0].self_attn, model.config)
    assert type(spread.heads(8)) is Heads
    assert type(spread.heads(3)) is Heads
