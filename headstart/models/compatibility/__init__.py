"""Checks of a loaded model: does it give the same logits over paged K/V?"""
