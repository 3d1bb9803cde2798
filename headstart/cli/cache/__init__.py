"""`headstart cache`: what is kept on disk, and the line that says so."""
