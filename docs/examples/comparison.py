"""Compare policies on your own model and questions; `kvpolicy compare` does it in a shell."""

import json
import tempfile
from pathlib import Path

from kvpolicy.evaluation import cells_of, load, outcomes
from kvpolicy.evaluation.tasks.files import Files
from kvpolicy.evaluation.tasks.needles import Needles
from kvpolicy.policies import ReplayKV, SnapKV, StreamingLLM

loaded = load()  # SmolLM2-135M-Instruct, or the folder or Hub name of another model

# One line for each question about a document. Here: facts hidden in Python's documentation.
file = Path(tempfile.mkdtemp()) / "questions.jsonl"
with file.open("w", encoding="utf-8") as lines:
    for each in Needles(("number",)).questions(loaded.tokenizer, 300, 4):
        question = each.question
        entry = {"context": question.document, "question": f"\n\n{question.prefix}", "plain": True}
        entry["answer"] = question.expected  # with the space that comes before it
        print(json.dumps(entry), file=lines)

asked = Files(file, new_tokens=9).questions(loaded.tokenizer, tokens=400, count=4)
policies = {"ReplayKV": ReplayKV(0.2), "SnapKV": SnapKV(0.2), "StreamingLLM": StreamingLLM(0.2)}
for cell in cells_of(outcomes(loaded.model, loaded.tokenizer, asked, policies)):
    print(f"{cell.policy:<13} {cell.score:4.0%} right, {cell.kept:4.0%} of the tokens held")
