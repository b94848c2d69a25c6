"""The command line. Needs the extra `cli` (click, rich); `app.tokenmill` is the whole of it."""
