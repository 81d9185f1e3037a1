"""What became of each call of `generate`, and the account of it at the end."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs


@attrs.frozen
class Comparison:
    """A call with a policy's cache beside the same call with its own.

    Args:
        test: The test that made the call.
        policy: The name of the policy.
        moved: Whether padding on the right was moved to the left first, for both.
        differs: By field, how the outputs differ. None: the library refused the call.
        refused: Why, where it did.
        given: Whether a `DynamicCache` that is given differs in these fields from `generate`'s own
            as well, so that the policy has nothing to do with it.
    """

    test: str
    policy: str
    moved: bool
    differs: dict[str, str] | None = None
    refused: str | None = None
    given: bool = False

    @property
    def outcome(self) -> str:
        """In a word."""
        if self.refused is not None:
            return "refused"
        if not self.differs:
            return "same"
        return "given" if self.given else "differs"

    @property
    def model(self) -> str:
        """The model type, from the file's name."""
        found = re.search(r"test_modeling_(\w+)\.py", self.test)
        return found[1] if found else "other"


@attrs.define
class Record:
    """All calls of a run.

    Attributes:
        comparisons: One for each call and policy.
        left_out: Calls that no cache could be put into, by test and reason.
    """

    comparisons: list[Comparison] = attrs.Factory(list)
    left_out: list[tuple[str, str]] = attrs.Factory(list)

    @property
    def exit_status(self) -> int:
        """1 where a call differs, 2 where none was compared, else 0."""
        outcomes = {each.outcome for each in self.comparisons}
        if "differs" in outcomes:
            return 1
        return 0 if outcomes & {"same", "given"} else 2

    def lines(self) -> Iterator[str]:
        """The account."""
        outcomes = Counter(each.outcome for each in self.comparisons)
        yield (
            f"{outcomes.total() - outcomes['refused']} comparisons, {outcomes['differs']} of them "
            f"differing; {outcomes['refused']} refused, {len(self.left_out)} calls left out"
        )
        yield from self._table()
        moved = sum(each.moved and each.refused is None for each in self.comparisons)
        yield f"{moved} of the comparisons with the padding moved from the right to the left"
        for title, outcome in (
            ("differing", "differs"),
            ("differing, but with a DynamicCache that is given as well", "given"),
        ):
            found = [each for each in self.comparisons if each.outcome == outcome]
            yield f"{title}: {len(found)}"
            for each in found:
                how = "; ".join(f"{field}: {way}" for field, way in (each.differs or {}).items())
                yield f"  {each.test} [{each.policy}] {how}"
        refused = Counter(each.refused for each in self.comparisons if each.refused is not None)
        yield f"refused by the library: {refused.total()}"
        yield from (f"  {count:4d}  {reason}" for reason, count in refused.most_common())
        reasons = Counter(reason for _, reason in self.left_out)
        yield f"calls no cache could be put into: {reasons.total()}"
        yield from (f"  {count:4d}  {reason}" for reason, count in reasons.most_common())

    def _table(self) -> Iterator[str]:
        counts = Counter((each.model, each.policy, each.outcome) for each in self.comparisons)
        outcomes = ("same", "differs", "given", "refused")
        yield f"{'model':12} {'policy':20}" + "".join(f"{each:>9}" for each in outcomes)
        for model, policy in sorted({(model, policy) for model, policy, _ in counts}):
            row = "".join(f"{counts[model, policy, each]:9d}" for each in outcomes)
            yield f"{model:12} {policy:20}{row}"

    def write(self, path: Path) -> None:
        """Write all of it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{**attrs.asdict(each), "outcome": each.outcome} for each in self.comparisons]
        left_out = [{"test": test, "reason": reason} for test, reason in self.left_out]
        path.write_text(json.dumps({"comparisons": rows, "left_out": left_out}, indent=1) + "\n")
