"""headstart's own decoder: one module for all families of `headstart.models.families`."""
