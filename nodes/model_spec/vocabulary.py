"""Loads a model's tokenizer. Called by the tokenizer and detokenizer roles and by `meshctl up`'s check."""

from tokenizers import AddedToken, Tokenizer

from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.models.errors import ModelDamaged
from nodes.models.spec import ModelSpec, VocabularyFacts


def vocabulary_facts(spec: ModelSpec) -> VocabularyFacts:
    """Load the tokenizer of a model and describe it. Raises ModelDamaged as `load_tokenizer` does."""
    tokenizer = load_tokenizer(spec)
    named = spec.special_tokens.get("eos_token")
    return VocabularyFacts(
        num_tokens=tokenizer.get_vocab_size(with_added_tokens=True),
        eos_token_id=None if named is None else tokenizer.token_to_id(named),
    )


def load_tokenizer(spec: ModelSpec) -> Tokenizer:
    """The tokenizer of `tokenizer.json`, or the byte tokenizer for models without files.

    Raises ModelDamaged if the file is not a tokenizer, or has ids that the model has no embedding for.
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
    # Special by name, even if tokenizer.json does not say so: encoded as one token, and hidden when decoded.
    named = [token for token in spec.special_tokens.values() if tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named])
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    if vocab_size > spec.vocab_size:
        raise ModelDamaged(
            f"{spec.tokenizer_path} has {vocab_size} tokens, but the model has embeddings for {spec.vocab_size}."
            " Tokenizer and weights belong to different models: download both again."
        )
    return tokenizer
