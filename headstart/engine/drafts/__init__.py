"""Drafts: tokens that probably follow, verified together in one step."""
