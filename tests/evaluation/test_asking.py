"""Questions as token ids: by a chat template or plainly, each part encoded by itself."""

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.evaluation.asking import Asker, check_fits
from kvpolicy.evaluation.tasks.question import Question
from tests.evaluation.tokenizers import CHAT, TOKENIZERS, tiny_tokenizer
from tests.integrations.lm_eval.support import char_tokenizer
from tests.reference import tiny_model

QUESTION = Question(
    document="They love the value.  ",
    question="What do they love?",
    answers=("value", "the value"),
    kind="word",
)
PREFIXED = attrs.evolve(QUESTION, prefix="They love the", expected=" value")
PLAIN = attrs.evolve(QUESTION, question=" They love", plain=True, expected=" the value")
# By tokenizer: the texts of document, question and answer.
FORMS: dict[tuple[str, str], tuple[str, str, str]] = {
    ("chat", "asked"): (
        "<s>[user]\nThey love the value.  ",
        "\n\nWhat do they love?</s>\n[assistant]\n",
        "value",
    ),
    ("chat", "prefixed"): (
        "<s>[user]\nThey love the value.  ",
        "\n\nWhat do they love?</s>\n[assistant]\nThey love the",
        " value",
    ),
    ("chat", "plain"): ("<s>They love the value.  ", " They love", " the value"),
    ("special", "asked"): (
        "<s>They love the value.  ",
        "\n\nQuestion: What do they love?\nAnswer:",
        " value",
    ),
    ("special", "prefixed"): (
        "<s>They love the value.  ",
        "\n\nQuestion: What do they love?\nAnswer: They love the",
        " value",
    ),
    ("bare", "asked"): (
        "They love the value.  ",
        "\n\nQuestion: What do they love?\nAnswer:",
        " value",
    ),
    ("bare", "plain"): ("They love the value.  ", " They love", " the value"),
}
QUESTIONS = {"asked": QUESTION, "prefixed": PREFIXED, "plain": PLAIN}


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_the_texts_of_each_form(name: str, form: str) -> None:
    tokenizer = TOKENIZERS[name]
    asked = Asker(tokenizer).ask(QUESTIONS[form])
    parts = (asked.document_ids, asked.question_ids, asked.answer_ids)
    assert tuple(tokenizer.decode(list(ids)) for ids in parts) == FORMS[name, form]
    assert asked.prompt_len == len(asked.document_ids) + len(asked.question_ids)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def test_no_token_crosses_a_boundary() -> None:
    """The document's ids are its own, although tokens of both parts would merge."""
    tokenizer = TOKENIZERS["bare"]
    question = attrs.evolve(PLAIN, document="the va", question="lue is", expected=" the value")
    asked = Asker(tokenizer).ask(question)
    assert list(asked.document_ids) == ids_of(tokenizer, "the va")
    assert list(asked.question_ids) == ids_of(tokenizer, "lue is")
    together = ids_of(tokenizer, "the value is")
    assert [*asked.document_ids, *asked.question_ids] != together


def test_a_chat_template_does_not_cross_a_boundary_either() -> None:
    tokenizer = tiny_tokenizer(chat="<s>the v{{ messages[0]['content'] }}lue of the v")
    question = attrs.evolve(PREFIXED, document="alue", question="the va", prefix="alue")
    asked = Asker(tokenizer).ask(question)
    document, after = ["<s>the v", "alue"], ["\n\nthe va", "lue of the v", "alue"]
    for ids, parts in ((asked.document_ids, document), (asked.question_ids, after)):
        assert list(ids) == [each for part in parts for each in ids_of(tokenizer, part)]
        assert list(ids) != ids_of(tokenizer, "".join(parts))


TEXTS = st.text("the value\n12.", min_size=1, max_size=20).filter(lambda text: bool(text.strip()))


@given(TEXTS, TEXTS, TEXTS, st.sampled_from(sorted(TOKENIZERS)), st.booleans())
def test_the_document_does_not_depend_on_the_question(
    document: str, one: str, other: str, name: str, plain: bool
) -> None:
    asker = Asker(TOKENIZERS[name])
    first, second = (
        asker.ask(attrs.evolve(QUESTION, document=document, question=each, plain=plain))
        for each in (one, other)
    )
    assert first.document_ids == second.document_ids
    assert TOKENIZERS[name].decode(list(first.document_ids)).endswith(document)


def test_the_answer_can_be_cut_and_lengthens_the_prompt() -> None:
    asker = Asker(TOKENIZERS["bare"])
    question = attrs.evolve(QUESTION, expected="12 and 34")
    whole = asker.ask(question)
    cut = asker.ask(attrs.evolve(question, expected_tokens=2, new_tokens=9))
    assert len(cut.answer_ids) == 2
    assert cut.answer_ids == whole.answer_ids[:2]
    assert whole.total_len == whole.prompt_len + len(whole.answer_ids)
    assert cut.total_len == cut.prompt_len + 9


def test_options_of_thinking_models() -> None:
    thinking = CHAT + "{% if enable_thinking is false %}<think></think>\n{% endif %}"
    tokenizer = tiny_tokenizer(chat=thinking)
    asked = Asker(tokenizer).ask(QUESTION)
    assert tokenizer.decode(list(asked.question_ids)).endswith("[assistant]\n<think></think>\n")


@pytest.mark.parametrize(
    "template", ["no message", "{{ messages[0]['content'] * 2 }}", "{{ messages | upper }}"]
)
def test_a_template_that_changes_the_text_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="must contain a user's message once and unchanged"):
        Asker(tiny_tokenizer(chat=template))


def test_texts_without_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="the document must have words that the tokenizer knows"):
        Asker(TOKENIZERS["chat"]).ask(attrs.evolve(QUESTION, document=""))
    unknown = char_tokenizer()
    unknown.unk_token = "?"
    with pytest.raises(ValueError, match="the answer must have only words that the tokenizer"):
        Asker(unknown).ask(attrs.evolve(QUESTION, expected="größer"))
    with pytest.raises(ValueError, match=r"answers must be texts that are not blank.*got \(\)"):
        Question(document="a", question="b", answers=(), kind="c", expected="d")
    with pytest.raises(ValueError, match="answers must be texts that are not blank"):
        attrs.evolve(QUESTION, expected=" \n")


def test_a_prompt_that_is_too_long_is_refused() -> None:
    model = tiny_model("llama", seed=0)
    limit = model.config.max_position_embeddings
    asker = Asker(char_tokenizer())
    short = asker.ask(attrs.evolve(QUESTION, new_tokens=3))
    room = limit - short.total_len
    fits = asker.ask(attrs.evolve(QUESTION, document=QUESTION.document + room * "x", new_tokens=3))
    assert fits.total_len == limit
    check_fits(model, [short, fits])
    longer = asker.ask(attrs.evolve(fits.question, document=fits.question.document + "x"))
    with pytest.raises(ValueError, match=f"the model's {limit:,} positions, got one of .* tokens"):
        check_fits(model, [short, longer, fits])
    with pytest.raises(ValueError, match="questions must be at least one, got none"):
        check_fits(model, [])
