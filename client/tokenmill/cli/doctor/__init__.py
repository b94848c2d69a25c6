"""`tokenmill doctor`: what is wrong, how bad it is, how one knows, and what to do about it."""
