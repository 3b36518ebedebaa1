"""The versions of transformers that the package supports, and those that were tested."""

import configparser
from pathlib import Path

import transformers
from packaging.requirements import Requirement
from packaging.version import Version

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
    assert f"transformers {oldest} or newer, below {end}" in (REPOSITORY / "README.md").read_text()
    page = (REPOSITORY / "docs" / "choosing.md").read_text()
    assert f"transformers from {oldest} and below {end}, tried up to {NEWEST_TRIED}" in page
