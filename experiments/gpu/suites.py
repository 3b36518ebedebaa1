"""
The tests that need a GPU, with the transformers that is installed and with other versions of it.

What fails is a result, with its name, and ends nothing. Warnings fail no test here: versions of other packages are
those that the machine has. What was run to its end at this revision is not run again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from experiments.common import records
from experiments.gpu.decode import begun, gpu_parser, parsed

# The first fill the device, or count what is on it; the others can run beside each other.
ALONE = "tests/memory/test_cuda.py"
TOGETHER = "tests/accelerator tests/device_kernels tests/attention/test_torch_attention.py"
_MOST_PROCESSES = 12  # so many share one GPU
_SECONDS_TO_REPORT = 10
_INTERRUPTED = 2  # of pytest, which then reports the tests that have ended


def run(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run the tests, and return the outcomes in the report of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-o", "filterwarnings=default", "--disable-warnings"]
        command += ["--timeout=300"] if find_spec("pytest_timeout") else []
        command += [f"--junitxml={report}", *arguments]
        with subprocess.Popen(command, cwd=records.RESULTS.parent, env=environment) as process:
            try:
                process.wait()
            except KeyboardInterrupt:  # pytest gets it too
                process.wait(_SECONDS_TO_REPORT)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "tests": " ".join(arguments),
        "exit_status": process.returncode,
        "passed": len(cases) - len(failed) - skipped,
        "skipped": skipped,
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
    }


def version_in(environment: dict[str, str]) -> str:
    """Return the version of transformers, or the reason why it cannot be imported."""
    command = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return (found.stdout if found.returncode == 0 else found.stderr).strip().splitlines()[-1]


def add_other_transformers(parser: argparse.ArgumentParser) -> None:
    """Add the option that names folders with other versions of transformers."""
    parser.add_argument(
        "--other-transformers",
        type=_folder_with_transformers,
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="other versions for the tests, each as `pip install --target FOLDER` puts it there",
    )


def _folder_with_transformers(text: str) -> Path:
    folder = Path(text).absolute()
    if not (folder / "transformers").is_dir():
        advice = f"pip install --target {text} transformers==VERSION"
        raise argparse.ArgumentTypeError(f"{text} holds no transformers: {advice}")
    return folder


def main() -> None:
    parser = gpu_parser("suites", __doc__)
    add_other_transformers(parser)
    given = parsed(parser)
    together = TOGETHER.split()
    if given.rehearse and not torch.cuda.is_available():
        together = together[:1]  # only what skips without a GPU
    if find_spec("xdist"):
        together += ["-n", str(min(_MOST_PROCESSES, records.num_cores())), "--dist", "loadgroup"]
    folder = given.out or records.RESULTS / "gpu" / "suites"
    record: dict[str, Any] = {"rehearsal": given.rehearse}
    if not given.force:
        record = begun(folder / f"{records.machine_name()}.json", record)
    runs = [each for each in record.get("runs", []) if each["exit_status"] != _INTERRUPTED]
    record["runs"] = runs
    paths = [None, *given.other_transformers]
    for other in paths:
        first = [] if other is None else [str(other)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*first, os.environ.get("PYTHONPATH", "")])}
        version = version_in(environment)
        for arguments in ([ALONE], together):
            if any((each["transformers"], each["tests"]) == (version, " ".join(arguments)) for each in runs):
                continue
            runs.append({"transformers": version, **run(arguments, environment)})
            records.save("gpu/suites", record, folder)
            for name in runs[-1]["failed"]:
                print(f"failed: {name}", flush=True)
            if runs[-1]["exit_status"] == _INTERRUPTED:
                sys.exit(1)
    print(f"record: {folder}")
    print(json.dumps([[each["transformers"], each["passed"], len(each["failed"])] for each in runs]))


if __name__ == "__main__":
    main()
