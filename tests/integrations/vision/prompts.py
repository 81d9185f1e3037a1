"""Prompts with images, as a family's processor would lay them out, built without one.

A row is a list of parts, one for each stretch that all rows of a batch have: a prompt, an answer, a
further prompt. Parts are padded on the left to the longest of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.reference.vision import VisionRow

from .models import FIRST_SPECIAL, IMAGE, PAD, VisionFamily


@dataclass(frozen=True)
class Picture:
    """An image."""

    seed: int  # of its pixels
    # Tokens by height and width, for families whose images have grids of their own.
    grid: tuple[int, int] = (4, 6)


Part = Sequence[int | Picture]


def words(seed: int, count: int) -> list[int]:
    """Draws `count` tokens of text."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, FIRST_SPECIAL, (count,), generator=generator).tolist()


def grid_of(family: VisionFamily, picture: Picture) -> tuple[int, int]:
    """Tokens of an image, by height and width."""
    side = None if family.side is None else family.side // family.merge
    return picture.grid if side is None else (side, side)


def pixels(family: VisionFamily, picture: Picture) -> Tensor:
    """What the processor makes of an image: `[channels, height, width]`, or patches in a row."""
    generator = torch.Generator().manual_seed(picture.seed)
    if family.side is None:
        height, width = picture.grid
        patches = height * width * family.merge**2
        return torch.randn(patches, 3 * 2 * family.patch**2, generator=generator)
    length = family.side * family.patch
    return torch.randn(3, length, length, generator=generator)


def grid_thw(family: VisionFamily, picture: Picture) -> list[int]:
    """Patches of an image in time, height and width, before they are merged."""
    height, width = grid_of(family, picture)
    return [1, height * family.merge, width * family.merge]


def image_inputs(family: VisionFamily, rows: Sequence[Sequence[Picture]]) -> dict[str, Tensor]:
    """What the model is given of the rows' images, beside their tokens."""
    every = [picture for row in rows for picture in row]
    if not every:
        return {}
    if family.side is None:
        return {
            "pixel_values": torch.cat([pixels(family, each) for each in every]),
            "image_grid_thw": torch.tensor([grid_thw(family, each) for each in every]),
        }
    if family.model_type in ("smolvlm", "idefics3"):  # rows with fewer images are filled with 0
        most = max(len(row) for row in rows)
        length = (family.side or 0) * family.patch
        filled = torch.zeros(len(rows), most, 3, length, length)
        for index, row in enumerate(rows):
            for place, picture in enumerate(row):
                filled[index, place] = pixels(family, picture)
        return {"pixel_values": filled}
    return {"pixel_values": torch.stack([pixels(family, each) for each in every])}


def tokens_of(family: VisionFamily, part: Part) -> list[int]:
    """The part's tokens, an image's placeholders among them."""
    tokens: list[int] = []
    for each in part:
        if isinstance(each, Picture):
            height, width = grid_of(family, each)
            before, after = family.around
            tokens += [*before, *[IMAGE] * (height * width), *after]
        else:
            tokens.append(each)
    return tokens


def types_of(family: VisionFamily, part: Part, *, first: bool) -> list[int]:
    """For each token what the input named `family.types` says of it."""
    tokens = tokens_of(family, part)
    if family.both_ways == "prompt":  # 0 is the prompt, 1 what follows it
        return [0 if first else 1] * len(tokens)
    return [int(token == IMAGE) for token in tokens]


def model_inputs(
    family: VisionFamily, rows: Sequence[Sequence[Part]], *, last: int | None = None
) -> dict[str, Tensor]:
    """What `generate` is given for a batch.

    Args:
        family: of the model.
        rows: as many parts each.
        last: only the images of so many last parts are given, the others have been read already;
            None for all.
    """
    ids: list[list[int]] = [[] for _ in rows]
    mask: list[list[int]] = [[] for _ in rows]
    types: list[list[int]] = [[] for _ in rows]
    for number, parts in enumerate(zip(*rows, strict=True)):
        tokens = [tokens_of(family, part) for part in parts]
        width = max(map(len, tokens))
        for index, (part, own) in enumerate(zip(parts, tokens, strict=True)):
            fill = width - len(own)
            ids[index] += [PAD] * fill + own
            mask[index] += [0] * fill + [1] * len(own)
            types[index] += [0] * fill + types_of(family, part, first=number == 0)
    inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    if family.types is not None:
        inputs[family.types] = torch.tensor(types)
    shown = [row if last is None else row[len(row) - last :] for row in rows]
    return inputs | image_inputs(family, [pictures(row) for row in shown])


def pictures(row: Sequence[Part]) -> list[Picture]:
    """The images of a row in order."""
    return [each for part in row for each in part if isinstance(each, Picture)]


def rotary_positions(family: VisionFamily, row: Sequence[Part]) -> list[tuple[int, ...]]:
    """Positions of each token of a row, for each axis.

    With three axes (time, height, width) the tokens of an image share their time and lie on a grid
    that begins at it, and the text goes on one behind the largest.
    """
    now, positions = family.first, []
    for part in row:
        for each in part:
            if not isinstance(each, Picture):
                positions.append((now,) * family.axes)
                now += 1
                continue
            before, after = (len(tokens) for tokens in family.around)
            height, width = grid_of(family, each)
            positions += [(now + step,) * family.axes for step in range(before)]
            now += before
            if family.axes == 1:
                positions += [(now + step,) for step in range(height * width)]
                now += height * width
            else:
                positions += [(now, now + y, now + x) for y in range(height) for x in range(width)]
                now += max(height, width)
            positions += [(now + step,) * family.axes for step in range(after)]
            now += after
    return positions


@torch.no_grad()
def reference_row(family: VisionFamily, model: PreTrainedModel, row: Sequence[Part]) -> VisionRow:
    """What the slow reference reads of a row: embeddings, with the images' features in place.

    Every image goes through the encoder alone.
    """
    tokens = [token for part in row for token in tokens_of(family, part)]
    outer: Any = model.model
    decoder = outer.text_model if hasattr(outer, "text_model") else outer.language_model
    embeddings = decoder.embed_tokens(torch.tensor(tokens))
    places = [index for index, token in enumerate(tokens) if token == IMAGE]
    features, deep = [], []
    for picture in pictures(row):
        given = image_inputs(family, [[picture]])
        output = outer.get_image_features(**given, return_dict=True)
        features.append(flat(output.pooler_output))
        deep.append([flat(each) for each in getattr(output, "deepstack_features", None) or []])
    added: dict[int, Tensor] = {}
    if places:
        embeddings[places] = torch.cat(features)
        for layer, each in enumerate(zip(*deep, strict=True)):
            added[layer] = torch.zeros_like(embeddings)
            added[layer][places] = torch.cat(each)
    return VisionRow(
        decoder,
        model.lm_head,
        embeddings,
        torch.tensor(rotary_positions(family, row)).T,
        blocks_of(family, row),
        added,
        family.windows,
    )


def flat(features: Any) -> Tensor:
    """Features of one image, `[tokens, hidden]`, however the family returns them."""
    if isinstance(features, list | tuple):
        (features,) = features
    return features.reshape(-1, features.shape[-1])


def blocks_of(family: VisionFamily, row: Sequence[Part]) -> list[int]:
    """For each token the number of what it sees both ways; -1 where it sees earlier ones only."""
    blocks: list[int] = []
    images = 0
    for number, part in enumerate(row):
        tokens = tokens_of(family, part)
        if family.both_ways == "prompt":
            blocks += [0 if number == 0 else -1] * len(tokens)
            continue
        for each in part:
            own = tokens_of(family, [each])
            if family.both_ways == "image" and isinstance(each, Picture):
                blocks += [images if token == IMAGE else -1 for token in own]
                images += 1
            else:
                blocks += [-1] * len(own)
    return blocks
