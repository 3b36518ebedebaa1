"""Mistakes of a user: a line that names each and says the way out, exit code 2, and nothing is made or imported."""

import os
import shlex
from pathlib import Path

import pytest

from .commands import error_of, without_heavy

LLAMA = "plan --model meta-llama/llama-3.2-1b --context 128K --gpu-memory 8GiB --host-memory 32GiB "
BATCH = "batch questions.jsonl --out answers.jsonl --model none --device cpu "
ASKED = "generate --question Who? "
MISTAKES = {
    # Of options that several commands have.
    ASKED + "--cache static": "'static' is not one of 'stock', 'dynamic'",
    ASKED + "--cache offloaded --bits 4": "error: --bits is for --cache quantized, and the cache is offloaded",
    ASKED + "--bits 3": "Invalid value for '--bits': '3' is not one of '8', '4', '2'.",
    ASKED + "--cache stock --cpu-decode yes": "error: --cache stock is transformers' own: drop --cpu-decode.",
    ASKED + "--device abacus": "--device 'abacus' is not here: this machine has cpu",
    ASKED + "--model ./no/such/folder": "There is no folder",
    ASKED + "--top-p 0.9": "error: --top-p is for sampling",
    ASKED + "--max-new-tokens 0": "error: --max-new-tokens must be 1 or more, got 0.",
    ASKED + "--system \udcff": "error: --system '\\udcff' is not UTF-8 text.",
    ASKED + "--store-max 20GiB": "error: --store-max is the limit of a prefix store: name its folder with --store.",
    ASKED + "--store f --store-max many": "error: --store-max: 'many' is not a size in bytes",
    ASKED + "--schema none.json": "error: --schema none.json cannot be read: No such file",
    ASKED + "--choices a --regex b": "error: --regex is a form of answers, and choices another one: drop one of them.",
    # Of `generate`.
    "generate": "Ask something, such as ",
    "generate --document a.txt b.txt": "There is no file b.txt. If that is the question: --question b.txt",
    ASKED + "--document a.txt b.txt": "'b.txt' is no document that is here, and --question asks already: drop one",
    ASKED
    + "--document https:/a.org": "https:/a.org: of addresses those of http and https are read, and they begin with "
    "https://",
    "generate a.txt Who?": "'Who?' is one argument too many: a text of several words is quoted, and documents come",
    "store a b c": "'b' is one argument too many: a text of several words is quoted.",
    "generate https:/a.org": "https:/a.org is an address: ask about it by --document",
    "generate https://a.org": "https://a.org is an address: ask about it by --document",
    ASKED + "--document file:///a.txt": "file:///a.txt: of addresses those of http and https are read, not of file.",
    "generate --document a.txt": "--store keeps a document without.",
    "generate --document a.txt --store prompts --json": "--json is of an answer: ask something with --question",
    "generate --document a.txt --store .": " is no store and has other files (a.pdf): give a folder of its own.",
    "generate --document a.pdf --document b.txt --question Who?": "error: Cannot read b.txt: No such file",
    ASKED + "--explain": "--explain is about a prefix store: name its folder with --store, or drop it.",
    ASKED + "--store prompts --cache stock": "--cache stock is transformers' own, and --store needs one of ours: drop",
    "generate --choices yes no Who?": "--choices takes all words that follow it: ask before it, or by --question.",
    "generate --question= --compare": "--question is empty.",
    # Of `chat`.
    "chat --document -": "Questions come from standard input: give the document as a file.",
    "chat --resume": "--resume goes on with a conversation of a prefix store: name its folder with --store.",
    "chat 2": "'2' names a conversation to go on with: add --resume, or --document before it.",
    "chat --resume --store missing": "There is no folder missing",
    "chat --cache stock": "--cache stock is transformers' own, and chat needs one of ours: drop",
    # Of `batch`.
    BATCH + "--cache stock": "--cache stock is transformers' own, and batch needs one of ours: drop",
    BATCH.replace("questions", "wrong")
    + "--out -": "  line 10: not an object\n  and 2 more\nA question is a line such as",
    BATCH + "--at-once 0": "Invalid value for '--at-once': ",
    BATCH + "--shard 3/2": "--shard must be K/N, such as 2/8 for the second of 8 processes, got '3/2'.",
    BATCH + f"--out {os.devnull}": f"--out {os.devnull} is no regular file: name one, or - for standard output.",
    BATCH + "--out nowhere/answers.jsonl": "There is no folder nowhere for --out.",
    BATCH + "--out - --csv answers.csv": "--csv is a table of what is in the file --out: name one instead of -.",
    BATCH + "--csv nowhere/answers.csv": "There is no folder nowhere for --csv.",
    BATCH + "--csv answers.jsonl": "--csv answers.jsonl is no file of its own: name another one.",
    # Of `plan`.
    LLAMA + "--host-memory 32": "--host-memory: 32 is 32 bytes, which is less than 1MiB. Write 32GiB if these are",
    LLAMA + "--context 129K": "has a context of 131,072 tokens, and 132,096 were asked for",
    LLAMA + "--model someone/something": "HF_HUB_OFFLINE is set",
    LLAMA + "--model lama-3.2-1b": "Did you mean meta-llama/Llama-3.2-1B?",
    # Of `store`.
    "store missing": "There is no folder missing: name the one that generate, batch or chat had as --store.",
    "store a.txt": "There is no folder a.txt: name the one",
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A folder with a document and questions, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("It was signed by Ada.")
    Path("a.pdf").write_bytes(b"%PDF-1.4")
    Path("questions.jsonl").write_text('{"document": "a.txt", "question": "Who?"}\n')
    Path("wrong.jsonl").write_text("[]\n" * 12)
    Path("of_missing.jsonl").write_text('{"document": "missing", "question": "Who?"}\n')
    return {path.name: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_named_on_stderr_and_nothing_is_made(command: str, files: dict[str, bytes]):
    assert MISTAKES[command] in error_of(*shlex.split(command))
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == files


def test_what_needs_no_model_imports_nothing_heavy():
    codes = {
        "--help": 0,
        "store missing": 2,
        "plan --model a --context much": 2,
        "generate --bits 5": 2,
        "generate --document missing --question Who?": 2,
        "generate --document a.txt --store .": 2,
        "chat --top-k 0 --temperature 1": 2,
        "batch missing.jsonl --out -": 2,
        "batch questions.jsonl --out questions.jsonl": 2,
        "batch of_missing.jsonl --out answers.jsonl --store prompts": 1,
    }
    for (command, code), ended in zip(codes.items(), without_heavy(*map(str.split, codes)), strict=True):
        assert ended.code == code, command
        assert "error: " in ended.stderr.lower() or code != 2
