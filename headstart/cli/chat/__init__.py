"""`headstart chat`: a conversation in the terminal."""
