"""The versions of transformers that are supported and were tested, and the name that each has for a cache."""

import configparser
from pathlib import Path

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from packaging.version import Version
from transformers.utils import logging as transformers_logging

from hf_hybrid_cache import DecodeOnCPU, DynamicHybridCache
from hf_hybrid_cache.cache_argument import CACHE_ARGUMENT, cache_argument, passed_cache

from models.tiny_models import random_prompt, tiny_model

REPOSITORY = Path(__file__).parents[2]
# Raise it when `make test-newest` passes: then all tests once, with constraints.txt, and docs/choosing.md.
NEWEST_TRIED = Version("5.24")


def test_this_minor_version_of_transformers_was_tried():
    installed = Version(transformers.__version__)
    assert (installed.major, installed.minor) <= (NEWEST_TRIED.major, NEWEST_TRIED.minor), (
        f"transformers {installed} was never tried, {NEWEST_TRIED} is the newest that was. Run `make test-newest`, "
        "mend what fails, then raise NEWEST_TRIED in tests/compatibility/test_versions.py."
    )


def test_what_make_installs_is_the_newest_that_was_tried():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    (pinned,) = (Version(line.partition("==")[2]) for line in lines if line.startswith("transformers=="))
    assert (pinned.major, pinned.minor) == (NEWEST_TRIED.major, NEWEST_TRIED.minor)


def test_pages_name_the_range_that_the_package_asks_for():
    settings = configparser.ConfigParser()
    settings.read(REPOSITORY / "setup.cfg")
    requirements = map(Requirement, settings["options"]["install_requires"].split())
    (specifiers,) = (each.specifier for each in requirements if each.name == "transformers")
    oldest, end = (next(each.version for each in specifiers if each.operator == operator) for operator in (">=", "<"))
    assert f"transformers from {oldest} to below {end}" in (REPOSITORY / "README.md").read_text()
    page = (REPOSITORY / "docs" / "choosing.md").read_text()
    assert f"transformers from {oldest} and below {end}, tried up to {NEWEST_TRIED}" in page


# Names of the argument


def test_a_cache_is_found_by_any_name_and_given_back_by_that_of_the_model():
    cache, model = DynamicHybridCache(tiny_model("llama").config), tiny_model("llama")
    for name in ("cache", "past_key_values", "cache_params"):
        assert passed_cache({"use_cache": True, name: cache}) is cache
        assert passed_cache({name: None}) is None
    with torch.no_grad():
        assert model(random_prompt(1, 20), **cache_argument(cache))[CACHE_ARGUMENT] is cache


# transformers says that the older name is deprecated, to whoever uses it.
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_decode_on_cpu_takes_the_cache_by_each_name_of_generate():
    model, ids = tiny_model("llama"), random_prompt(1, 20)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    for name in {CACHE_ARGUMENT, "past_key_values"}:
        given = {name: DynamicHybridCache(model.config), "custom_generate": DecodeOnCPU(dtype=torch.float64)}
        assert torch.equal(model.generate(ids, **given, max_new_tokens=5, do_sample=False), expected)
        assert given[name].get_seq_length() == expected.shape[1] - 1


def test_transformers_has_nothing_to_say_of_names(caplog: pytest.LogCaptureFixture):
    model, ids, logger = tiny_model("llama"), random_prompt(1, 20), transformers_logging._get_library_root_logger()
    logger.addHandler(caplog.handler)
    # The warning is given once, and may have been given.
    transformers_logging.warning_once.cache_clear()
    try:
        for custom in (None, DecodeOnCPU(), DecodeOnCPU(dtype=torch.float64)):
            given = cache_argument(DynamicHybridCache(model.config))
            model.generate(ids, **given, custom_generate=custom, max_new_tokens=3, return_dict_in_generate=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert "deprecated" not in caplog.text
