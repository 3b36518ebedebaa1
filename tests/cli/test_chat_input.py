"""Input of a conversation, at a real terminal and from a pipe."""

import io
import stat
import sys
from pathlib import Path

import pytest

from hf_hybrid_cache.cli.chat_commands import chat_input

from .terminals import CTRL_C, CTRL_D, ENTER, PROMPT, UP, Terminal

# Says what it was given, and is busy for as long as a file is not there.
PROGRAM = """
import sys, time
from pathlib import Path
from hf_hybrid_cache.cli.chat_commands import chat_input
lines = chat_input(sys.argv[1] == "kept", lambda said: print("said", said))
while True:
    try:
        typed = lines.next_line()
    except KeyboardInterrupt:
        print("interrupted")
        continue
    print("given", repr(typed))
    if typed is None:
        break
    while typed in ("read", "answer") and not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    if typed == "answer":
        print("dropped", lines.drop(False), lines.drop(False))
    if typed == "ended":
        print("dropped all", lines.drop(True))
"""


def given(text: str) -> str:
    return f"given {text!r}"


def program(folder: Path, history: str = "kept") -> Terminal:
    return Terminal("-c", PROGRAM, history, str(folder / "go"), HF_HYBRID_CACHE_HOME=str(folder))


PIPED = {
    " Who? \n\n/stats\n": ["Who?", "", "/stats"],
    '"""\n/a\n\nb\n"""\nWho?\n': ['"""\n/a\n\nb\n"""', "Who?"],
    '"""/a\n\nb"""\n': ['"""/a\n\nb"""'],
    ' """ /a\n\nb\n """ \n': ['""" /a\n\nb\n """'],
    'Who?\n"""\nWhere?\n': ["Who?"],
}


def test_piped_lines_are_questions_and_commands(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    for text, expected in PIPED.items():
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        lines = chat_input(True, said.append)
        assert (list(iter(lines.next_line, None)), lines.is_terminal) == (expected, False)
    assert said == ['""" began a text that nothing ended: it is not asked.']


def test_ctrl_c_clears_a_line_early_keys_are_kept_and_ctrl_d_ends(tmp_path: Path):
    (tmp_path / "chat_history").mkdir()
    with program(tmp_path) as terminal:
        terminal.wait_for("said What is typed is not kept for the next time: ")
        for _ in range(3):
            terminal.wait_for(PROMPT)
            terminal.type("never asked" + CTRL_C)
            terminal.wait_for("interrupted")
        terminal.enter("/sta\t")
        terminal.wait_for(given("/stats"))
        terminal.enter("/doc\ta.txt")
        terminal.wait_for(given("/document a.txt"))
        terminal.enter("read")
        terminal.wait_for(given("read"))
        later = [f"later {number} {'.' * 90}" for number in range(30)]  # more than is read at once
        terminal.type("\n".join(["early", "answer", *later, "at l"]))
        terminal.wait_for("at l")  # the terminal has them
        (tmp_path / "go").touch()
        terminal.wait_for(given("early"))
        (tmp_path / "go").unlink()
        terminal.wait_for(given("answer"))
        terminal.type("too early\nstill too early")
        terminal.wait_for("still too early")
        (tmp_path / "go").touch()
        terminal.wait_for("dropped True False")
        for text in later:
            terminal.wait_for(given(text))
        terminal.enter("ast")
        terminal.wait_for(given("at last"))
        terminal.enter(ENTER.join(["ended", "never", "asked"]))
        terminal.wait_for("dropped all True")
        terminal.enter(ENTER.join(['"""', "/a", "b", '"""']))
        assert "given" not in terminal.wait_for(given('"""\n/a\nb\n"""'))
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        terminal.wait_for("given None")
        assert terminal.exit_code() == 0


def test_input_history_when_chat_restarts_then_is_back_unless_not_kept(tmp_path: Path):
    history = tmp_path / "chat_history"
    for kept in ("not", "kept"):
        with program(tmp_path, kept) as terminal:
            terminal.enter(f"{kept} this time")
            terminal.wait_for(given(f"{kept} this time"))
            terminal.wait_for(PROMPT)
        assert history.exists() == (kept == "kept")
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "not this time" not in history.read_text()
    with program(tmp_path) as terminal:
        terminal.enter(UP)
        terminal.wait_for(given("kept this time"))
