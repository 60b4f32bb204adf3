"""Everything that makes the bundled model `tiny`: grammar, tokenizer, training and evaluation.

The package is used offline, by people who want to rebuild or check the weights in
``nodes/bundled/tiny``. Nothing in the serving system imports it.
"""
