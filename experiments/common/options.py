"""The options that several measurements have."""

import argparse
import textwrap
from pathlib import Path

from hf_hybrid_cache.scalars import parse_bytes


def plain_parser(experiment: str, description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the option of every measurement: where its record goes."""
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(description or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help=f"folder of the record (default: in results/{experiment})")
    return parser


def experiment_parser(experiment: str, description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options of measurements that are compared with the read bandwidth."""
    parser = plain_parser(experiment, description)
    parser.add_argument(
        "--buffer-mib",
        type=int,
        help="what is read to learn the read bandwidth (default: twice the last-level cache, at least 512)",
    )
    return parser


def byte_size(text: str) -> int:
    """Parse a size such as 24GiB, as the type of an option."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
