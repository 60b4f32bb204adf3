"""What makes and checks things around the project: the bundled model, the protocol page, a GPU host."""
