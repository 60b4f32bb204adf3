"""Ships with the package: the model `tiny`, and the tokenizer for models without files."""
