"""Ask for the value of a key in a JSON object of random keys and values.

Source: Liu et al., "Lost in the Middle", arXiv:2307.03172.
"""

import json
from random import Random
from typing import ClassVar
from uuid import UUID

import attrs
from attrs.validators import in_

from kvpolicy.evaluation.tasks.question import Question
from kvpolicy.evaluation.tasks.task import SizedTask, depth_of

_UUID = 32


@attrs.frozen
class Pairs(SizedTask):
    """Questions for the value of one key, at evenly spread depths.

    Keys and values have 4, 8 or 16 hexadecimal ``digits``, or 32, which are written as UUIDs as in
    the paper. Small models copy short ones only.
    """

    name: ClassVar[str] = "pairs"
    smallest: ClassVar[int] = 2
    digits: int = attrs.field(default=8, validator=in_((4, 8, 16, _UUID)))

    def draft(self, size: int, index: int, rng: Random) -> Question:
        """Make one question; the unit is a pair."""
        found = dict[str, str]()
        while len(found) < size:
            found[self._drawn(rng)] = self._drawn(rng)
        key = list(found)[int(depth_of(index) * size)]
        return Question(
            document=json.dumps(found, indent=0),
            question=f'What is the value of the key "{key}" in the JSON object?',
            answers=(found[key],),
            kind=f"{self.digits} digits",
            prefix=f'"{key}": "',
            expected=f'{found[key]}"',
            new_tokens=self.digits + 8,
        )

    def _drawn(self, rng: Random) -> str:
        bits = rng.getrandbits(4 * self.digits)
        return str(UUID(int=bits)) if self.digits == _UUID else f"{bits:0{self.digits}x}"
