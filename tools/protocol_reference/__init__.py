"""Makes `docs/protocol.md` and `tests/golden` from the code itself. `python -m tools.protocol_reference`."""
