"""Streams of outputs, whoever ends them: the reader, an error, or the garbage collector."""
