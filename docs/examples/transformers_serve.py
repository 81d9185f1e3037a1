"""Apply a policy to every request to `transformers serve`."""

from openai import OpenAI
from transformers.cli.serve import Serve

from kvpolicy.evaluation.default_model import default_model
from kvpolicy.evaluation.tasks.needles import Needles
from kvpolicy.integrations.transformers import apply_policy
from kvpolicy.policies import ReplayKV

name = str(default_model())  # SmolLM2-135M-Instruct, or the name of a model on the Hub
server = Serve(force_model=name, port=8017, device="cpu", non_blocking=True)
# A private attribute: Transformers has no public way to the server's models.
(loaded,) = server._model_manager.loaded_models.values()
client = OpenAI(base_url="http://localhost:8017/v1", api_key="none", max_retries=9)
right, asked = 0, Needles(("number",)).questions(loaded.processor, 300, 4)
try:
    with apply_policy(loaded.model, ReplayKV(retention_rate=0.3)) as applied:
        for question in (each.question for each in asked):
            text = f"{question.document}\n\n{question.question}"
            reply = client.chat.completions.create(
                model=name, max_tokens=20, messages=[{"role": "user", "content": text}]
            )
            right += question.answers[0] in (reply.choices[0].message.content or "")
finally:
    server.kill_server()

share = applied.reports[-1].total.share
print(f"{right} of {len(asked)} answers right, from {share:.0%} of the cache")
