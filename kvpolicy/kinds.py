"""`TokenKind`: text, image, video or sound."""

import enum


class TokenKind(enum.IntEnum):
    """The kind of a prompt token: text, or part of an image, a video or a sound.

    The source of a token's embedding decides its kind: the placeholders that image features
    replace are of the kind image, the tokens that mark an image's beginning and end are text. Text,
    image and video have the numbers of Transformers' ``mm_token_type_ids``.

    Example:
        >>> int(TokenKind.IMAGE)
        1
    """

    TEXT = 0
    IMAGE = 1
    VIDEO = 2
    AUDIO = 3


VISUAL = (TokenKind.IMAGE, TokenKind.VIDEO)
