"""`headstart demo` and its flags: each demo is a run of a real engine, shown as a table."""
