"""Answers in a given form: JSON schemas, regular expressions, choices, grammars."""
