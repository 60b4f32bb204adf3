"""The supported model architectures, one file each, and the code that they share. Needs no torch.

    spec             `ModelSpec`: the shape of one model
    config_fields    reads the fields of a `config.json`
    parts            the building blocks of networks, with the names, shapes and cuts of their tensors
    ops              the operations that compute them: the seam to the worker
    architecture     the base class of all models
    decoder          that of models that write: rotary embedding, RMS norms, a head
    encoder          that of encoders, which make vectors
    registry         finds the architectures in this folder

`nodes.model_spec` reads files and presets. It imports this folder; this folder never imports it.
"""
