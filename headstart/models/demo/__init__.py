"""Small models made on the spot, to try headstart with and to test it: no download."""
