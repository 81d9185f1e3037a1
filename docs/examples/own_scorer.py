"""Write a scorer, check it against the contract, and use it on a prompt."""

import attrs
import torch
from torch import Tensor

from kvpolicy import CachePolicy, LayerContext, Scorer
from kvpolicy.evaluation import load
from kvpolicy.evaluation.tasks.needles import Needles
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import GQAGroupSelector, PassAllPropagation
from kvpolicy.testing import check_scorer


@attrs.frozen
class LastQueryMaximum(Scorer):
    """Keep the tokens that any query head of the last token attends to."""

    @property
    def num_queries(self) -> int:
        """One: the last query."""
        return 1

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 ``[batch, kv_heads, key_len]``."""
        queries = context.queries[:, :, -1].float().unflatten(1, (context.kv_heads, -1))
        products = torch.einsum("bhgd,bhkd->bhgk", queries, context.keys.float())
        return products.amax(dim=2)  # over the query heads of a group


check_scorer(LastQueryMaximum())  # padding, turns, shares of heads; raises what is wrong
loaded = load()  # SmolLM2-135M-Instruct, or the folder or Hub name of another model
(asked,) = Needles(("word",)).questions(loaded.tokenizer, 500, 1)  # a fact hidden in documentation
cache = PolicyCache(CachePolicy(LastQueryMaximum(), GQAGroupSelector(0.2), PassAllPropagation()))
ids = torch.tensor([asked.document_ids + asked.question_ids])
output = loaded.model.generate(ids, cache=cache, max_new_tokens=2, do_sample=False)
answer = loaded.tokenizer.decode(output[0, ids.shape[1] :])
print(f"{cache.report().total.share:.0%} of the cache kept:{answer}")
