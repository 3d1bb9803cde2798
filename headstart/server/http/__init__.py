"""HTTP itself: its bytes, and the bodies of its requests."""
