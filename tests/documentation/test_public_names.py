"""Every public name and every option of a cache is in a table, so that the next one is added on purpose."""

import inspect
import re
from pathlib import Path

import hf_hybrid_cache
from hf_hybrid_cache import DynamicHybridCache, HybridCache, OffloadedHybridCache, QuantizedHybridCache

TABLE = Path(__file__).with_suffix(".txt")
CACHES = (HybridCache, DynamicHybridCache, OffloadedHybridCache, QuantizedHybridCache)


def first_line(text: str | None) -> str:
    return inspect.cleandoc(text or "").partition("\n")[0]


def names() -> list[str]:
    found = {name: getattr(hf_hybrid_cache, name) for name in hf_hybrid_cache.__all__ if name != "__version__"}
    return [f"{name}: {first_line(each.__doc__)}" for name, each in found.items()]


def options(cache: type[HybridCache]) -> list[str]:
    """List the options beside the config, with their descriptions in the docstring, up to the end of the line."""
    said = dict(re.findall(r"^    (\w+): (.+)$", inspect.cleandoc(cache.__doc__ or ""), re.MULTILINE))
    given = [name for name in inspect.signature(cache.__init__).parameters if name not in ("self", "config")]
    return [f"{cache.__name__}({name}): {said.get(name)}" for name in given]


def table() -> list[str]:
    return [*names(), *(line for cache in CACHES for line in options(cache))]


def test_public_names_and_options_of_caches_are_those_in_the_table():
    assert TABLE.read_text().splitlines() == table()


def test_the_caches_have_few_options():
    assert len(options(QuantizedHybridCache)) <= 7
    assert sum(len(options(cache)) for cache in CACHES) <= 21


if __name__ == "__main__":  # python -m tests.documentation.test_public_names writes the table
    TABLE.write_text("\n".join(table()) + "\n")
