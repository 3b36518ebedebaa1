"""Comparisons with other engines: llama.cpp, ik_llama.cpp, and caches of transformers."""
