"""Conversations about images, each turn against `generate` over all of it without a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from kvpolicy.integrations.transformers import Conversation, PolicyCache, RereadingWarning
from kvpolicy.policies import FastKV, FullContext, SnapKV
from kvpolicy.policy import CachePolicy
from tests.integrations.lm_eval.support import char_tokenizer
from tests.integrations.vision.models import FAMILIES, VisionFamily
from tests.integrations.vision.prompts import Part, Picture, model_inputs
from tests.integrations.vision.rows import model_of

ANSWER = 5
NAMES = ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3"]
# The tokenizer has the letters from z on where the models have what stands around images.
PLACE = "zx{"


class Processor:
    """Lays out chats with images for a family, as processors of Transformers do."""

    chat_template = "in Python"

    def __init__(self, family: VisionFamily) -> None:
        self.family, self.tokenizer = family, char_tokenizer()

    def __call__(self) -> None:
        raise AssertionError

    def apply_chat_template(
        self, messages: Any, *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> Any:
        said: list[Any] = []
        for message in messages:
            said.append(f"[{message['role']}]")
            for part in message["content"]:
                said.append(part.get("image") if part["type"] == "image" else part["text"])
            said.append("\n")
        said += ["[assistant]"] * add_generation_prompt
        if not tokenize:
            return "".join(each if isinstance(each, str) else PLACE for each in said)
        assert options == {"return_dict": True, "return_tensors": "pt"}
        return model_inputs(self.family, [[self.part(said)]])

    def part(self, said: list[Any]) -> Part:
        """Texts and images as a row's part."""
        found: list[int | Picture] = []
        for each in said:
            if isinstance(each, str):
                found += self.tokenizer(each, add_special_tokens=False)["input_ids"]
            else:
                found.append(picture(each))
        return found


def image(seed: int, grid: tuple[int, int] = (4, 6)) -> Image.Image:
    return Image.new("L", grid, seed)


def picture(shown: Image.Image) -> Picture:
    return Picture(int(shown.getpixel((0, 0))), shown.size)


class Whole:
    """A conversation of which every turn is `generate` over all of it, in a cache or in none."""

    def __init__(self, name: str, cache: PolicyCache | None = None) -> None:
        self.name, self.cache = name, cache
        self.processor = Processor(FAMILIES[name])
        self.parts: list[Part] = []

    def ask(self, *said: Any) -> str:
        family, tokenizer = FAMILIES[self.name], self.processor.tokenizer
        self.parts.append(self.processor.part(list(said)))
        model = model_of(self.name)
        last = None if self.cache is None else 1
        inputs = model_inputs(family, [self.parts], last=last)
        output = model.generate(**inputs, cache=self.cache, max_new_tokens=ANSWER)
        answer = output[0, inputs["input_ids"].shape[1] :].tolist()
        self.parts.append(answer)
        return str(tokenizer.decode(answer, skip_special_tokens=True))


@pytest.mark.parametrize("policy", [FullContext(), SnapKV(0.5, window_size=4)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_an_image_and_later_questions(name: str, policy: CachePolicy) -> None:
    """Two conversations in turn: a model may remember positions of the last one it read."""
    model = model_of(name)
    shown = [image(1), image(2, (5, 3))]
    chats, wholes = [], []
    for _ in shown:
        chats.append(Conversation(model, Processor(FAMILIES[name]), policy))
        wholes.append(Whole(name, None if policy == FullContext() else PolicyCache(policy)))
    for chat, each in zip(chats, shown, strict=True):
        chat.add_image(each)
    wanted = []
    for each, whole in zip(shown, wholes, strict=True):  # one after another
        wanted.append([whole.ask("[user]", each, "what is it?\n[assistant]")])
        wanted[-1].append(whole.ask("\n[user]and its colour?\n[assistant]"))
        wanted[-1].append(whole.ask("\n[user]so be it\n[assistant]"))
    for turn, question in enumerate(["what is it?", "and its colour?", "so be it"]):
        for chat, answers in zip(chats, wanted, strict=True):
            assert chat.ask(question, max_new_tokens=ANSWER) == answers[turn]
    for chat, whole in zip(chats, wholes, strict=True):
        if whole.cache is not None:
            for own, other in zip(chat.cache.layers, whole.cache.layers, strict=True):
                assert torch.equal(own.positions, other.positions)
        assert chat.rereadings == 0


@pytest.mark.parametrize("policy", [FullContext(), FastKV(tsp_rate=0.6, window_size=4)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_an_image_in_a_later_turn_is_read_with_all_before(name: str, policy: CachePolicy) -> None:
    chat = Conversation(model_of(name), Processor(FAMILIES[name]), policy)
    chat.ask("what now?", max_new_tokens=ANSWER)
    first = chat.messages[-1]["content"][0]["text"]
    chat.add_image(image(1))
    with pytest.warns(RereadingWarning, match="its images have changed"):
        second = chat.ask("what is it?", max_new_tokens=ANSWER)
    assert chat.rereadings == 1
    whole = Whole(name, None if policy == FullContext() else PolicyCache(policy))
    said = f"[user]what now?\n[assistant]{first}\n[user]"
    assert whole.ask(said, image(1), "what is it?\n[assistant]") == second
    third = chat.ask("so be it", max_new_tokens=ANSWER)
    assert whole.ask("\n[user]so be it\n[assistant]") == third
    assert chat.rereadings == 1


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_saved_with_its_images(name: str, tmp_path: Path) -> None:
    policy, path = SnapKV(0.5, window_size=4), tmp_path / "chat.safetensors"
    model, processor = model_of(name), Processor(FAMILIES[name])
    chat = Conversation(model, processor, policy)
    chat.add_image(image(1, (5, 3)))
    chat.ask("what is it?", max_new_tokens=ANSWER)
    chat.add_image(image(2))
    chat.save(path)
    chat._added.clear()
    Conversation(model, processor, policy).ask("else", max_new_tokens=1)  # other positions
    loaded = Conversation.load(path, model, processor)
    waiting = loaded._added.pop()
    assert picture(waiting["image"]) == picture(image(2))
    wanted = chat.ask("and its colour?", max_new_tokens=ANSWER)
    assert loaded.ask("and its colour?", max_new_tokens=ANSWER) == wanted
    assert loaded.rereadings == 0
    for each in (chat, loaded):
        each.messages[0]["content"][1]["text"] = "what was it?"
        with pytest.warns(RereadingWarning):
            wanted = each.ask("so be it", max_new_tokens=ANSWER)
    assert [each["content"] for each in chat.messages[1:]] == [
        each["content"] for each in loaded.messages[1:]
    ]
    chat.add_image(torch.ones(3, 4, 4))
    with pytest.raises(
        TypeError, match="image must consist of .* PIL images to be saved, got tensor"
    ):
        chat.save(path)
