"""Where files are kept between runs."""

import os
from pathlib import Path


def cache_home() -> Path:
    """
    Folder for converted models and measured speeds.

    `$HF_HYBRID_CACHE_HOME`, else `$XDG_CACHE_HOME/hf_hybrid_cache`, else `~/.cache/hf_hybrid_cache`.
    """
    if home := os.environ.get("HF_HYBRID_CACHE_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_hybrid_cache"
