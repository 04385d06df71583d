"""Make a tokenizer whose tokens are the 256 bytes and three chat markers, so that it can encode every text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

PADDING: Final = 256
START_OF_TURN: Final = 257
END_OF_TURN: Final = 258
VOCABULARY: Final = 259
_MARKS: Final = {PADDING: "<|endoftext|>", START_OF_TURN: "<|im_start|>", END_OF_TURN: "<|im_end|>"}
BYTE_LEVEL: Final[Mapping[str, Any]] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer_files() -> dict[str, dict[str, Any]]:
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    vocabulary |= {text: token_id for token_id, text in _MARKS.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _MARKS[END_OF_TURN],
        "pad_token": _MARKS[PADDING],
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "chat_template": _TEMPLATE,
    }
    return {"tokenizer.json": make_tokenizer(vocabulary, _MARKS), "tokenizer_config.json": config}


def make_tokenizer(
    vocabulary: Mapping[str, int],
    marks: Mapping[int, str],
    merges: Sequence[str] = (),
    pre_tokenizer: Mapping[str, Any] = BYTE_LEVEL,
) -> dict[str, Any]:
    """Return ``tokenizer.json`` of a byte-level BPE tokenizer, in which each of ``marks`` is one token."""
    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, "content": text, **flags} for token_id, text in marks.items()],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": list(merges),
        },
    }


def _byte_characters() -> list[str]:
    """Return the character for each byte, as in https://github.com/openai/gpt-2/blob/master/src/encoder.py."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters = []
    num_others = 0
    for byte in range(256):
        characters.append(chr(byte if byte in printable else 256 + num_others))
        num_others += byte not in printable
    return characters
