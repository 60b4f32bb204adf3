"""Loads a model's tokenizer. Called by the tokenizer and detokenizer roles and by `meshctl up`'s check."""

from tokenizers import AddedToken, Tokenizer

from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.model_spec.checkpoint_files import TOKENIZER_FILE
from nodes.model_spec.token_files import ADDED, TOKENIZER_CONFIG
from nodes.models.errors import ModelDamaged
from nodes.models.fill_in import fill_in_of
from nodes.models.spec import AddedText, ModelSpec, VocabularyFacts


def vocabulary_facts(spec: ModelSpec) -> VocabularyFacts:
    """Load the tokenizer of a model and describe it. Raises ModelDamaged as `load_tokenizer` does."""
    return facts_of(load_tokenizer(spec), spec)


def facts_of(tokenizer: Tokenizer, spec: ModelSpec) -> VocabularyFacts:
    """Describe a model's tokenizer."""
    named = spec.special_tokens.get("eos_token")
    return VocabularyFacts(
        num_tokens=tokenizer.get_vocab_size(with_added_tokens=True),
        eos_token_id=None if named is None else tokenizer.token_to_id(named),
        fill_in=fill_in_of(lambda token: tokenizer.token_to_id(token) is not None),
    )


def load_tokenizer(spec: ModelSpec) -> Tokenizer:
    """The tokenizer of `tokenizer.json`, or the byte tokenizer for models without files; with the tokens that other
    files add. It may have more tokens than the model has embeddings. Raises ModelDamaged if the file is no
    tokenizer, or has another id for a token than the other files.
    """
    if not spec.tokenizer_path:
        return Tokenizer.from_str(byte_tokenizer_json(spec.vocab_size))
    try:
        tokenizer = Tokenizer.from_file(spec.tokenizer_path)
    except Exception as error:  # the library raises plain Exception for every malformed file
        raise ModelDamaged(f"{spec.tokenizer_path} cannot be loaded: {error}. Download it again.") from error
    # Truncation or padding left in the file would change prompts behind the user's back.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.add_tokens(_missing_tokens(tokenizer, spec))
    tokenizer.encode_special_tokens = spec.split_special_tokens
    return tokenizer


def _missing_tokens(tokenizer: Tokenizer, spec: ModelSpec) -> list[AddedToken]:
    """What `TokenizersBackend.__init__` of transformers 5 changes: tokens listed with an id, in the order of their ids,
    then those that are only named and that neither tokenizer.json nor a list has.
    """
    own = tokenizer.get_added_tokens_decoder()
    listed: dict[int, AddedToken] = {}
    for one in spec.added_tokens:
        if one.id >= 0 and not (spec.own_ids_win and one.id in own):
            _check_id(one, tokenizer.token_to_id(one.content), spec)
            listed[one.id] = _added(one)
    if spec.own_ids_win:
        listed |= own
    wanted = [listed[i] for i in sorted(listed)]
    known = {token.content for token in (*own.values(), *wanted)}
    wanted += [_added(one) for one in dict.fromkeys(spec.added_tokens) if one.id < 0 and one.content not in known]
    # Special by name, even if no flag says so: encoded as one token, and hidden when decoded.
    named = set(spec.special_tokens.values())
    for token in wanted:
        token.special = token.special or token.content in named
    # Adding again what is there already takes seconds for thousands of tokens.
    same = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    return [token for token in wanted if repr(token) not in same]


def _added(token: AddedText) -> AddedToken:
    flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word, "special": token.special}
    # Given only if a file gives it: otherwise the library derives it from `special`, which may still change.
    return AddedToken(token.content, **flags, **({} if token.normalized is None else {"normalized": token.normalized}))


def _check_id(token: AddedText, found: int | None, spec: ModelSpec) -> None:
    if found is not None and found != token.id:
        file = ADDED if spec.own_ids_win else TOKENIZER_CONFIG
        raise ModelDamaged(
            f"{spec.path}: {file} says that the token {token.content!r} has id {token.id}, "
            f"{TOKENIZER_FILE} says {found}. Only one of them is what the model was trained with: download both again."
        )
