"""Programs that make the bundled model and the protocol page, count lines, and check coverage or a GPU host."""
