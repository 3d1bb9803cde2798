"""Models in GGUF files, the format of llama.cpp. The package `gguf` reads them."""
