"""Ask for a line out of a list of many that are alike: line retrieval.

Source: Li et al., "How Long Can Open-Source LLMs Truly Promise on Context Length?", 2023, the
authors of LongChat.
"""

from random import Random
from typing import ClassVar

import attrs

from kvpolicy.evaluation.tasks.needles import PLACES, WORDS
from kvpolicy.evaluation.tasks.question import Question
from kvpolicy.evaluation.tasks.task import SizedTask, depth_of


@attrs.frozen
class Lines(SizedTask):
    """Questions for the number in one line of a list, at evenly spread depths.

    The unit of a document is a line: ``line falcon: REGISTER_CONTENT is <24169>``.
    """

    name: ClassVar[str] = "lines"
    smallest: ClassVar[int] = 2

    def draft(self, size: int, index: int, rng: Random) -> Question:
        """Make one question; the unit is a line."""
        few, many = [*WORDS, *PLACES], [f"{word}-{place}" for word in WORDS for place in PLACES]
        rng.shuffle(few)
        rng.shuffle(many)
        chosen = [*few, *many][:size]
        numbers = [rng.randrange(10**4, 10**5) for _ in chosen]
        asked = int(depth_of(index) * len(chosen))
        lines = [
            f"line {name}: REGISTER_CONTENT is <{number}>"
            for name, number in zip(chosen, numbers, strict=True)
        ]
        return Question(
            document="Here is a list of lines, each with its REGISTER_CONTENT.\n\n"
            + "\n".join(lines),
            question=f"What is the REGISTER_CONTENT in line {chosen[asked]}?",
            answers=(str(numbers[asked]),),
            kind="lines",
            prefix=f"line {chosen[asked]}: REGISTER_CONTENT is <",
            expected=f"{numbers[asked]}>",
            new_tokens=8,
        )
