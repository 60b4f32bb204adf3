"""The models that are computed here, one file for each architecture, and what they share. Needs no torch.

    spec             `ModelSpec`: the shape of one model
    config_fields    reads the fields of a `config.json`
    parts            what networks are made of, with the names, shapes and cuts of their tensors
    ops              what computes them: the seam to the worker
    decoder          the frame of all architectures
    registry         finds the architectures in this folder

Files and presets are read in `nodes.model_spec`, which knows this folder; this folder does not know it.
"""
