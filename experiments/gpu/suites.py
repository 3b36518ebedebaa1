"""
The tests that need a GPU, with the transformers that is installed and with other versions of it.

What fails is a result, with its name, and ends nothing. Warnings fail no test here: versions of other packages are
those that the machine has.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from experiments.common import records
from experiments.gpu.machine import gpu_parser, has_gpu, parsed

# The first fill the device, or count what is on it; the others can run beside each other.
ALONE = ("tests/memory/test_cuda.py",)
TOGETHER = ("tests/accelerator", "tests/device_kernels", "tests/attention/test_torch_attention.py")
_MOST_PROCESSES = 12  # so many share one GPU
_TEST_SECONDS = 300
_SECONDS_TO_REPORT = 10
_INTERRUPTED = 2  # of pytest, which the tests that have ended come from
_VERSION = "import transformers; print(transformers.__version__)"


def suites(is_rehearsal: bool) -> list[list[str]]:
    """Arguments of pytest; in a rehearsal only of what skips without a GPU."""
    together = list(TOGETHER[:1] if is_rehearsal else TOGETHER)
    if importlib.util.find_spec("xdist"):
        together += ["-n", str(min(_MOST_PROCESSES, records.num_cores())), "--dist", "loadgroup"]
    return [list(ALONE), together]


def run(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run the tests, and return the outcomes in the report of pytest."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-o", "filterwarnings=default", "--disable-warnings"]
        if importlib.util.find_spec("pytest_timeout"):
            command.append(f"--timeout={_TEST_SECONDS}")
        command += [f"--junitxml={report}", *arguments]
        with subprocess.Popen(command, cwd=records.RESULTS.parent, env=environment) as process:
            try:
                process.wait()
            except KeyboardInterrupt:  # of pytest, too, which then reports the tests that have ended
                process.wait(_SECONDS_TO_REPORT)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "tests": " ".join(arguments),
        "exit_status": process.returncode,
        "passed": len(cases) - len(failed) - len(skipped),
        "skipped": len(skipped),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
        "seconds": time.perf_counter() - start,
    }


def version_in(environment: dict[str, str]) -> str:
    """Return the version of transformers, or the reason why it cannot be imported."""
    command = [sys.executable, "-c", _VERSION]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return (found.stdout if found.returncode == 0 else found.stderr).strip().splitlines()[-1]


def environments(others: list[Path]) -> list[dict[str, str]]:
    """Return environment variables for the installed transformers, and for each folder with another version."""
    plain = dict(os.environ)
    before = [path for path in (plain.get("PYTHONPATH"),) if path]
    return [plain] + [plain | {"PYTHONPATH": os.pathsep.join([str(folder), *before])} for folder in others]


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
    runs = []
    for environment in environments(given.other_transformers):
        version = version_in(environment)
        for arguments in suites(given.rehearse and not has_gpu()):
            runs.append({"transformers": version, **run(arguments, environment)})
            path = records.save("gpu/suites", {"rehearsal": given.rehearse, "runs": runs}, given.out)
            for name in runs[-1]["failed"]:
                print(f"failed: {name}", flush=True)
            if runs[-1]["exit_status"] == _INTERRUPTED:
                sys.exit(1)
    print(f"record: {path}")
    answers = [
        {"transformers": run["transformers"], "passed": run["passed"], "failed": len(run["failed"])} for run in runs
    ]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
