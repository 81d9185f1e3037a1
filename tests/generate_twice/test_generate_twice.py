"""The comparing wrapper: it finds what is put in, leaves the caller's call alone, gives reasons."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from generate_twice import run
from generate_twice.arguments import Arguments
from generate_twice.outputs import differences
from generate_twice.record import Comparison, Record
from generate_twice.wrapping import POLICIES, generating_twice
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import StreamingLLM
from tests.reference import random_tokens, tiny_model

NEW = 5
ALL = {"output_scores": True, "output_logits": True, "output_hidden_states": True,
       "output_attentions": True, "return_dict_in_generate": True}  # fmt: skip
IDS = torch.tensor([random_tokens(0, 11), random_tokens(1, 11)])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    tiny = tiny_model("llama", seed=1)
    tiny.set_attn_implementation("eager")
    return tiny


@pytest.fixture
def record() -> Iterator[Record]:
    found = Record()
    with generating_twice(found):
        yield found


def generate(model: PreTrainedModel, ids: Tensor = IDS, **kwargs: Any) -> Any:
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **kwargs})


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        ALL,
        {"do_sample": True},
        {"num_beams": 3, "num_return_sequences": 2, **ALL},
        {"do_sample": True, "num_return_sequences": 3, **ALL},
    ],
    ids=["greedy", "all_outputs", "sampled", "beams", "several_answers"],
)
def test_policies_that_keep_everything_agree(
    model: PreTrainedModel, record: Record, kwargs: dict[str, Any]
) -> None:
    generate(model, **kwargs)
    assert [(each.policy, each.outcome) for each in record.comparisons] == [
        (name, "same") for name in POLICIES
    ]
    assert not record.left_out
    assert record.exit_status == 0


def test_policy_that_evicts_differs(model: PreTrainedModel) -> None:
    record = Record()
    policies = {"evicts": lambda _: PolicyCache(StreamingLLM(0.4))}
    with generating_twice(record, policies):
        output = generate(model, **ALL)
    [comparison] = record.comparisons
    assert comparison.outcome == "differs"
    assert comparison.differs is not None
    assert "logits" in comparison.differs
    assert record.exit_status == 1
    assert torch.equal(output.sequences, generate(model))


def _changed(value: Any) -> Any:
    """The same but for one number of the last tensor."""
    if isinstance(value, tuple):
        return (*value[:-1], _changed(value[-1]))
    value = value.clone(memory_format=torch.contiguous_format)
    value.view(-1)[-1] += 1
    return value


@pytest.mark.parametrize("field", ["sequences", "scores", "logits", "hidden_states", "attentions"])
def test_one_number_that_is_changed_is_found(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """In the last tensor of the field, wherever it is nested, and only with a policy's cache."""
    plain = GenerationMixin.generate

    def meddling(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        if isinstance(kwargs.get(CACHE), PolicyCache):
            output[field] = _changed(output[field])
        return output

    monkeypatch.setattr(GenerationMixin, "generate", meddling)
    record = Record()
    with generating_twice(record):
        generate(model, **ALL)
    assert [list(each.differs or {}) for each in record.comparisons] == [[field]] * len(POLICIES)
    assert record.exit_status == 1


def test_difference_that_any_given_cache_makes_is_not_the_policys(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = GenerationMixin.generate

    def meddling(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        return output if kwargs.get(CACHE) is None else output + 1

    monkeypatch.setattr(GenerationMixin, "generate", meddling)
    record = Record()
    with generating_twice(record):
        generate(model)
    assert {each.outcome for each in record.comparisons} == {"given"}
    assert record.exit_status == 0


def test_refused_call_is_counted_by_its_reason(model: PreTrainedModel, record: Record) -> None:
    output = generate(model, assistant_model=model, max_new_tokens=3, **ALL, ids=IDS[:1])
    assert output.sequences.shape == (1, 11 + 3)
    assert {each.outcome for each in record.comparisons} == {"refused"}
    assert record.comparisons[0].refused is not None
    assert "output_attentions" in record.comparisons[0].refused
    assert record.exit_status == 2  # nothing was compared
    assert "refused by the library: 3" in record.lines()


def test_error_inside_is_no_refusal(model: PreTrainedModel) -> None:
    class Broken(PolicyCache):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            raise IndexError("broken")

    record = Record()
    with generating_twice(record, {"broken": lambda _: Broken(StreamingLLM(0.4))}):
        generate(model)
    assert [each.differs for each in record.comparisons] == [{"raises": "IndexError: broken"}]
    assert record.exit_status == 1


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({CACHE: DynamicCache()}, "a cache is given: DynamicCache"),
        ({"cache_implementation": "static"}, "cache_implementation=static"),
        ({"use_cache": False}, "no cache"),
    ],
)
def test_calls_without_a_dynamic_cache_of_their_own_are_left_out(
    model: PreTrainedModel, record: Record, kwargs: dict[str, Any], reason: str
) -> None:
    generate(model, **kwargs)
    assert not record.comparisons
    assert [why for _, why in record.left_out] == [reason]


def test_call_that_raises_still_raises(model: PreTrainedModel, record: Record) -> None:
    with pytest.raises(ValueError, match="num_return_sequences"):
        generate(model, num_return_sequences=2)
    assert not record.comparisons
    assert record.left_out[0][1].startswith("the call itself raises ValueError")


def test_padding_on_the_right_is_moved(model: PreTrainedModel, record: Record) -> None:
    mask = torch.ones_like(IDS)
    mask[1, 7:] = 0
    generate(model, attention_mask=mask, **ALL)
    assert [(each.outcome, each.moved) for each in record.comparisons] == [("same", True)] * 3


def test_moved_rows_by_hand() -> None:
    """A column of padding alone is left out."""
    ids = torch.tensor([[1, 2, 3, 9], [4, 5, 6, 9], [7, 8, 9, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 1, 0]])
    moved = Arguments((ids,), {"attention_mask": mask, "num_beams": 2}).padded_left()
    assert moved.positional[0].tolist() == [[1, 2, 3], [6, 9, 4], [9, 7, 9]]
    assert moved.named["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert moved.named["num_beams"] == 2


def test_chance_goes_on_as_without_the_comparison(model: PreTrainedModel) -> None:
    def drawn() -> tuple[Any, ...]:
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        answer = generate(model, do_sample=True).tolist()
        return answer, float(torch.rand(())), float(np.random.rand()), random.random()

    plain = drawn()
    with generating_twice(Record()):
        assert drawn() == plain


def test_settings_of_an_assistant_are_as_its_own_call_left_them(
    model: PreTrainedModel, record: Record
) -> None:
    assistant = tiny_model("llama", seed=2)
    settings = assistant.generation_config
    settings.num_assistant_tokens_schedule = "heuristic"
    generate(model, assistant_model=assistant, ids=IDS[:1])
    assert assistant.generation_config is settings
    assert {each.outcome for each in record.comparisons} == {"same"}


def test_generate_is_itself_again_afterwards() -> None:
    before = GenerationMixin.generate, GenerationMixin._prepare_cache_for_generation
    with generating_twice(Record()):
        assert GenerationMixin.generate is not before[0]
    assert (GenerationMixin.generate, GenerationMixin._prepare_cache_for_generation) == before


LOW = torch.tensor([[-torch.inf, 1.0]])
NARROW = torch.tensor([[[[0.4, 0.6]]]])
HIDDEN = torch.zeros(1, 3, 2)


def hidden_with(token: int) -> Tensor:
    """One at a token, of which the first is padding."""
    return torch.eye(3)[:, token].view(1, 3, 1).expand(1, 3, 2)


@pytest.mark.parametrize(
    ("field", "own", "other", "how"),
    [
        ("hidden_states", ((HIDDEN,),), ((hidden_with(0),),), None),
        ("hidden_states", ((HIDDEN,),), ((hidden_with(1),),), "off by 1.0e+00[0][0]"),
        ("hidden_states", ((HIDDEN,),), (), "1 and 0 of them"),
        ("logits", None, (hidden_with(1),), "NoneType and tuple"),
        # Under a window attentions may have fewer columns.
        ("attentions", ((NARROW,),), ((torch.tensor([[[[0.0, 0.4, 0.6]]]]),),), None),
        (
            "attentions",
            ((NARROW,),),
            ((torch.tensor([[[[0.1, 0.3, 0.6]]]]),),),
            "off by 1.0e-01[0][0]",
        ),
        ("scores", (LOW,), (LOW.clone(),), None),
        ("scores", (LOW,), (LOW.flip(1),), "off by inf[0]"),
    ],
)
def test_differences_by_hand(field: str, own: Any, other: Any, how: str | None) -> None:
    mask = torch.tensor([[0, 1, 1]]) if field == "hidden_states" else None
    expected = {} if how is None else {field: how}
    assert differences({field: own}, {field: other}, mask) == expected


def test_account_names_what_differs() -> None:
    test = "tests/models/gpt_oss/test_modeling_gpt_oss.py::A::test_b"
    record = Record([Comparison(test, "fixed", False, {"logits": "off by 1"})], [("t", "static")])
    lines = list(record.lines())
    assert "gpt_oss      fixed                       0        1        0        0" in lines
    assert f"  {test} [fixed] logits: off by 1" in lines
    assert "     1  static" in lines


TEST = """
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from tests.generation.test_utils import LENGTH

@pytest.mark.parametrize("fails", [False, True])
def test_generates(fails):
    config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, eos_token_id=None)
    torch.manual_seed(0)
    ids = torch.arange(LENGTH)[None]
    assert LlamaForCausalLM(config).eval().generate(ids, max_new_tokens=3).shape == (1, LENGTH + 3)
    assert not fails

def test_other():
    raise AssertionError("not to be run")
"""


def _checkout(folder: Path, version: str = transformers.__version__) -> Path:
    files = {
        "src/transformers/__init__.py": f'__version__ = "{version}"\n',
        "tests/__init__.py": "",
        "tests/generation/__init__.py": "",
        "tests/generation/test_utils.py": "LENGTH = 17\n",
        "tests/models/__init__.py": "",
        "tests/models/llama/__init__.py": "",
        "tests/models/llama/test_modeling_llama.py": TEST,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


def test_command_runs_a_checkouts_tests(tmp_path: Path) -> None:
    """A test that fails of its own does not count; this repository's `tests` is not in the way."""
    command = [sys.executable, run.__file__, _checkout(tmp_path), "--models", "llama"]
    done = subprocess.run(
        [*map(str, command), "--out", str(tmp_path / "out.json")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 failed, 1 passed, 1 deselected" in done.stdout
    assert "llama        full_context                2        0        0        0" in done.stdout
    assert '"outcome": "same"' in (tmp_path / "out.json").read_text()


def test_command_refuses_another_version_and_half_a_checkout(tmp_path: Path) -> None:
    checkout = _checkout(tmp_path, version="5.0.0")
    with pytest.raises(ValueError, match=r"installed, .*, got 5\.0\.0; run `git checkout v"):
        run.check_version(checkout)
    with pytest.raises(ValueError, match=r"has no tests/models/qwen2/test_modeling_qwen2\.py"):
        run.test_files(checkout, ["llama", "qwen2"])
    assert run.test_files(checkout, ["llama"]) == [
        Path("tests/models/llama/test_modeling_llama.py")
    ]
