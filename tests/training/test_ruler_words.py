"""The training of the word tasks' model: rows have their answers, and it starts as the needle's."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.evaluation.tasks.needle import load_model
from kvpolicy.evaluation.tasks.needle.vocabulary import KEY, QUERY
from kvpolicy.evaluation.tasks.ruler_words.questions import KINDS
from kvpolicy.evaluation.tasks.ruler_words.vocabulary import TOKEN_IDS, token_names
from tests.evaluation.tasks.word_reader import read_answer
from training.batches import IGNORED
from training.ruler_words.batches import MAX_POSITION, row_batch
from training.ruler_words.curriculum import LOOKUPS, STAGES, Stage
from training.ruler_words.rows import NamesRow, Row, list_row
from training.ruler_words.start import SHAPE, started_network

ROWS = st.builds(
    lambda seed, length, listed: list_row(random.Random(seed), length)
    if listed
    else NamesRow(random.Random(seed), length, LOOKUPS, 0.5).draw(),
    seed=st.integers(0, 10**6), length=st.sampled_from([64, 128, 257]), listed=st.booleans(),
)  # fmt: skip


def words_of(row: Row) -> list[str]:
    """Return the words of a row, without ``<bos>``."""
    pieces = [*row.document]
    for asked in row.asked:
        pieces += [asked.question.words, asked.question.answer]
    return [word for piece in pieces for word in piece]


@given(row=ROWS)
def test_questions_of_a_row_are_what_a_reader_answers(row: Row) -> None:
    document = " ".join(word for sentence in row.document for word in sentence)
    assert len(words_of(row)) + 1 in (64, 128, 257)
    for asked in row.asked:
        question = asked.question
        assert read_answer(document, " ".join(question.words)) == set(question.outputs)
        assert set(question.outputs) <= set(question.answer)


@given(row=ROWS)
def test_answers_of_a_batch_are_the_next_tokens_of_the_answers(row: Row) -> None:
    words = words_of(row)
    batch = row_batch(random.Random(0), [row], len(words) + 1)
    ids = batch.input_ids[0].tolist()
    assert [token_names()[token] for token in ids] == ["<bos>", *words]
    chosen = (batch.answers[0] != IGNORED).nonzero()[:, 0].tolist()
    expected = [word for asked in row.asked for word in asked.question.answer]
    assert [token_names()[ids[at + 1]] for at in chosen] == expected
    assert [token_names()[batch.answers[0, at]] for at in chosen] == expected
    counted = (batch.kinds[0] != IGNORED).nonzero()[:, 0].tolist()
    outputs = [
        (KINDS.index(asked.kind), word)
        for asked in row.asked
        for word in asked.question.answer
        if word in asked.question.outputs
    ]
    assert [(int(batch.kinds[0, at]), token_names()[ids[at + 1]]) for at in counted] == outputs


@given(stage=st.sampled_from(STAGES), seed=st.integers(0, 10**6))
def test_positions_ascend_within_the_models_span(stage: Stage, seed: int) -> None:
    positions = stage.draw(random.Random(seed)).positions
    assert positions.diff(dim=1).min() >= 1
    assert positions.min() >= 0
    assert positions.max() < MAX_POSITION


def test_the_network_starts_as_the_needle_models_layers() -> None:
    torch.manual_seed(0)
    network, needle = started_network(), load_model()
    with torch.no_grad():
        hidden = torch.randn(1, 37, SHAPE.hidden)
        output = needle.model(inputs_embeds=hidden).last_hidden_state
        # The needle's network reads token ids: rows of the embedding take the place of the states.
        network.embedding.weight[:37] = hidden[0]
        state = network(torch.arange(37)[None], torch.arange(37)[None])[-1]
        torch.testing.assert_close(network.norm(state), output, atol=1e-3, rtol=1e-3)


def test_marks_take_the_embedding_of_what_has_their_part() -> None:
    embeddings = started_network().embedding.weight
    needle = load_model().get_input_embeddings().weight
    assert torch.equal(embeddings[TOKEN_IDS["call"]], needle[KEY])
    assert torch.equal(embeddings[TOKEN_IDS["name"]], needle[QUERY])
