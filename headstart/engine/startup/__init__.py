"""From the name of a model to a running engine."""
