"""Texts and token ids: encoding, decoding, and where an answer ends."""
