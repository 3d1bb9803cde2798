"""Checks that a loaded model gives the same logits over paged K/V."""
