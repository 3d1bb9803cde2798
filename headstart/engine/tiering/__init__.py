"""The pool's blocks and their tiers: what is offered to a store, and what is loaded from it."""
