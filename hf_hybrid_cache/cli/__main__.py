"""`python -m hf_hybrid_cache.cli`."""

from . import main

main()
