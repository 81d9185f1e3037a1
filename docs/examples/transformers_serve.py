"""Apply a policy to every request to `transformers serve`."""

import tempfile

from openai import OpenAI
from transformers.cli.serve import Serve

from kvpolicy.evaluation.needle import NeedleTask, load_model, load_tokenizer
from kvpolicy.integrations.transformers import apply_policy
from kvpolicy.policies import FastKV

folder = tempfile.mkdtemp()  # in place of the name of a model on the Hub
tokenizer = load_tokenizer()
tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
tokenizer.save_pretrained(folder)
load_model().save_pretrained(folder)

server = Serve(force_model=folder, port=8017, device="cpu", non_blocking=True)
# A private attribute: Transformers has no public way to the server's models.
model, _ = server._model_manager.load_model_and_processor(f"{folder}@main")
client = OpenAI(base_url="http://localhost:8017/v1", api_key="none", max_retries=9)
prompts = NeedleTask(context_len=512).prompts(4)
right = 0
try:
    with apply_policy(model, FastKV(tsp_layer=3, tsp_rate=0.2, retention_rate=0.1)) as applied:
        for prompt in prompts:
            text = tokenizer.decode(prompt.input_ids)
            reply = client.chat.completions.create(
                model=folder, max_tokens=3, messages=[{"role": "user", "content": text}]
            )
            answer = reply.choices[0].message.content or ""
            right += answer.strip().startswith(tokenizer.decode(prompt.answer))
finally:
    server.kill_server()

share = applied.reports[-1].total.share
print(f"{right} of {len(prompts)} answers right, from {share:.0%} of the cache")
