"""Compare policies on your own model and prompts; `kvpolicy compare` does it in a shell."""

import json
import tempfile
from pathlib import Path

from kvpolicy.evaluation import load, measure_accuracy, needle_prompts, read_prompts, variants

loaded = load("needle")  # or a folder, or the name of a model on the Hugging Face Hub
decode = loaded.tokenizer.decode

# One line for each prompt: {"prompt": "...", "answer": "..."}. Here: the bundled model's prompts.
file = Path(tempfile.mkdtemp()) / "questions.jsonl"
with file.open("w", encoding="utf-8") as lines:
    for each in needle_prompts(context_len=256, count=8):
        line = {"prompt": decode(each.input_ids), "answer": decode(each.answers[0])}
        lines.write(json.dumps(line) + "\n")

prompts = read_prompts(file, loaded.tokenizer)
for variant in variants(["full_context", "snapkv", "streamingllm"], rates=[0.2], tsp_layer=2):
    (score,) = measure_accuracy(loaded.model, prompts, variant.policy).values()
    print(f"{variant.label:<18} {score.matches} of {score.count}")
