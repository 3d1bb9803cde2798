"""The pool's blocks and their tiers: offers to stores, and loads from them."""
