"""Which special and added tokens the files beside `tokenizer.json` name, by the precedence of transformers 5. Pure.

    tokenizer_config.json       names `bos_token`, `eos_token`, ...; if it has `added_tokens_decoder`, the next two are
                                ignored, else
    special_tokens_map.json     overrides those names,
    added_tokens.json           adds tokens, though tokenizer.json's own win where ids are equal

The rules are those of `PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend.__init__`, even where they look
odd: folders are published when they work there. Called by `directory.py`; `vocabulary.py` adds the tokens.
"""

from typing import Any, Final, NamedTuple, cast

import msgspec

from nodes.models.errors import ModelDamaged
from nodes.models.spec import AddedText

TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_MAP: Final = "special_tokens_map.json"
ADDED: Final = "added_tokens.json"
_STANDARD: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA: Final = "extra_special_tokens"
_OLD_EXTRA: Final = "additional_special_tokens"
_OF_MAP: Final = "__special_tokens_map"
_DECODER: Final = "added_tokens_decoder"
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MAX_ID: Final = 1 << 31
"""Ids go as i32 through steps and kernels."""


class TokenFiles(NamedTuple):
    """`named`: texts by the names under which templates know them; `said_by`: the file of each. `added` are the tokens
    to add, in order; with `own_ids_win`, none whose id `tokenizer.json` gives to a token of its own.
    """

    named: dict[str, str]
    said_by: dict[str, str]
    added: tuple[AddedText, ...]
    own_ids_win: bool
    split_special_tokens: bool


def read_token_files(config: dict[str, Any], special_map: dict[str, Any], added: dict[str, Any]) -> TokenFiles:
    """The tokens of the three files, each an empty object if there is no such file. Raises ModelDamaged."""
    fields = dict(config)
    if _OLD_EXTRA in fields and not fields.get(_EXTRA):
        fields[_EXTRA] = fields.pop(_OLD_EXTRA)
    # What the config says of names beyond the standard ones, such as `image_token`, no other file overrides.
    settled = {name: fields.pop(name) for name in list(fields) if _is_specific(name) and isinstance(fields[name], str)}
    if isinstance(fields.get(_EXTRA), dict):
        settled |= fields.pop(_EXTRA)
    said_by = dict.fromkeys((*fields, *settled), TOKENIZER_CONFIG)
    has_decoder = fields.get(_DECODER) is not None
    if not has_decoder:
        settled |= _override(fields, special_map, said_by)
    values = {name: fields[name] for name in _STANDARD if fields.get(name) is not None}
    values |= {name: value for name, value in fields.items() if _is_specific(name) and _is_token(value)}
    named = {name: _token(value, name, said_by[name]) for name, value in (values | settled).items()}
    extra = [_token(value, _EXTRA, TOKENIZER_CONFIG) for value in _extra_of(fields)]
    if has_decoder:
        listed = _listed(fields[_DECODER])
    else:
        # Compared as texts: objects of the config, and extra tokens under their older name, do not count yet.
        given = [fields.get(name) for name in _STANDARD if name in named]
        given += _extra_of(fields) if _EXTRA in fields else []
        listed = _legacy(added, {_token(value, "", "").content for value in given if _is_final(value)})
    texts = {name: token.content for name, token in named.items()}
    # What is listed and has a standard name has the flags of the list, even if an own token takes the listed id. Under
    # another name it keeps its own flags, which count if nothing adds the listed one.
    flags = {token.content: msgspec.structs.replace(token, id=-1) for token in listed}
    names = (flags.get(token.content, token) if name in _STANDARD else token for name, token in named.items())
    in_order = (*sorted(listed, key=lambda token: token.id), *names, *extra)
    split = fields.get("split_special_tokens") or False
    if not isinstance(split, bool):
        raise _damaged(TOKENIZER_CONFIG, f"split_special_tokens should be true or false, not {_shown(split)}")
    return TokenFiles(texts, {name: said_by[name] for name in texts}, in_order, not has_decoder, split)


def _override(fields: dict[str, Any], special_map: dict[str, Any], said_by: dict[str, str]) -> dict[str, Any]:
    """Let special_tokens_map.json override `fields`. Returns the further names that it settles."""
    for name, value in special_map.items():
        if name == _EXTRA and isinstance(value, list):
            known = _list(fields.get(_EXTRA), _EXTRA, TOKENIZER_CONFIG)
            fields[_EXTRA] = [*known, *(token for token in map(_final, cast("list[Any]", value)) if token not in known)]
        else:
            fields[name] = value if name == _EXTRA else _final(value)
            said_by[name] = SPECIAL_MAP
    if not isinstance(fields.get(_EXTRA), dict):
        return {}
    settled = cast("dict[str, Any]", fields.pop(_EXTRA))
    said_by |= dict.fromkeys(settled, SPECIAL_MAP)
    return settled


def _extra_of(fields: dict[str, Any]) -> list[Any]:
    name = _EXTRA if _EXTRA in fields else _OLD_EXTRA
    return _list(fields.get(name), name, TOKENIZER_CONFIG)


def _listed(decoder: Any) -> list[AddedText]:
    """`added_tokens_decoder`: ids as strings, each with a token."""
    if not isinstance(decoder, dict):
        raise _damaged(TOKENIZER_CONFIG, f"{_DECODER} should be an object, not {_shown(decoder)}")
    entries = cast("dict[str, Any]", decoder)
    found = [
        msgspec.structs.replace(
            _token(value, f"{_DECODER}.{number}", TOKENIZER_CONFIG, special=False),
            id=_id(int(number) if number.isascii() and number.isdigit() else number, TOKENIZER_CONFIG),
        )
        for number, value in entries.items()
    ]
    by_text: dict[str, int] = {}
    for token in found:
        if by_text.setdefault(token.content, token.id) != token.id:
            what = f"lists {_shown(token.content)} as {by_text[token.content]} and as {token.id}"
            raise _damaged(TOKENIZER_CONFIG, f"{_DECODER} {what}, so nobody can say which of them is meant")
    return found


def _legacy(added: dict[str, Any], special: set[str]) -> list[AddedText]:
    """added_tokens.json: texts with their ids."""
    by_id = {_id(number, ADDED): text for text, number in added.items()}
    if len(by_id) < len(added):
        raise _damaged(ADDED, "it gives one id to several tokens, so nobody can say which of them is meant")
    return [
        AddedText(content=text, id=number, special=text in special, normalized=text not in special)
        for number, text in by_id.items()
    ]


def _final(value: Any) -> Any:
    """A token of special_tokens_map.json, which is special whatever its flags say."""
    forced = {"__type": "AddedToken", "special": True, _OF_MAP: True}
    return {**cast("dict[str, Any]", value), **forced} if isinstance(value, dict) else value


def _is_final(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and _OF_MAP in value)


def _is_specific(name: str) -> bool:
    return name.endswith("_token") and name not in _STANDARD


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "__type" in value)


def _token(value: Any, name: str, file: str, *, special: bool = True) -> AddedText:
    """A token given as its text or as an object with flags. `special`: whether an object without that flag is."""
    if isinstance(value, str):
        return AddedText(content=value)
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    content = fields.get("content")
    if not isinstance(content, str):
        raise _damaged(file, f"{name} should be a token's text, or an object with its `content`, not {_shown(value)}")
    flags = {flag: fields[flag] for flag in _FLAGS if fields.get(flag) is not None}
    for flag, given in flags.items():
        if not isinstance(given, bool):
            raise _damaged(file, f"{flag} of {name} should be true or false, not {_shown(given)}")
    # An object that was saved with its type is one of `tokenizers.AddedToken`, which is not special by itself.
    flags.setdefault("special", special and "__type" not in fields)
    return AddedText(content=content, **flags)


def _id(number: Any, file: str) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < _MAX_ID:
        raise _damaged(file, f"{_shown(number)} is not a token id")
    return number


def _list(value: Any, name: str, file: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise _damaged(file, f"{name} should be a list of tokens, or an object that names them, not {_shown(value)}")
    return cast("list[Any]", value or [])


def _shown(value: Any) -> str:
    return repr(value)[:80]


def _damaged(file: str, what: str) -> ModelDamaged:
    return ModelDamaged(f"{file}: {what}. Download the file again, or correct it.")
