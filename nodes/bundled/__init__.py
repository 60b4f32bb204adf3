"""What ships with the package: the model `tiny` and the tokenizer of the models that have no files."""
