"""What `docs/protocol.md` and `tests/golden` are made from: the code itself. `python -m tools.protocol_reference`."""
