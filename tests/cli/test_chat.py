"""Conversations with a tiny random model: the commands, and the remarks on answers."""

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_hybrid_cache import HybridCache, saved_token_ids
from hf_hybrid_cache.cli.app import app
from hf_hybrid_cache.cli.chat.chat_template import LastTurn, SystemMessage, last_turn
from hf_hybrid_cache.cli.console import without_controls
from hf_hybrid_cache.cli.runs import timed_run
from hf_hybrid_cache.cli.runs.prompts import PromptError, conversation_text

from models.byte_tokenizer import byte_tokenizer, model_in
from models.tiny_models import FAMILIES

TEXT = "It was signed by Ada in London."


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "report.txt"
    path.write_text(TEXT)
    return path


def converse(model: Path, source: list[str | Path], *lines: str):
    options = ["chat", "--model", model, "--device", "cpu", "--max-new-tokens", "5", *source]
    typed = "".join(f"{line}\n" for line in lines)
    result = CliRunner().invoke(app, [str(option) for option in options], input=typed)
    assert result.exit_code == 0, result.stderr
    return result


def saved(model: Path, report: Path, path: Path, *lines: str) -> list[str | Path]:
    """Options that go on with a conversation."""
    converse(model, ["--document", report], *lines, f"/save {path}")
    return ["--load-cache", path]


def answer_to(model: Path, system: str, question: str) -> str:
    """Return the model's answer to the whole prompt."""
    tokenizer, plain = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"{TEXT}\n\n{question}"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt")
    tokens = plain.generate(**inputs, max_new_tokens=5, do_sample=False)
    return without_controls(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


# Commands


def test_undo_when_a_question_was_asked_then_goes_on_as_if_it_had_not_been(model: Path, report: Path):
    source = ["--document", report]
    wrong, right = (converse(model, source, question).stdout for question in ("Who?", "Where?"))
    talk = converse(model, source, "Who?", "/undo", "Where?")
    assert talk.stdout == wrong + right
    assert "taken back: Who?" in talk.stderr


def test_undo_when_layers_have_a_window_then_reads_nothing_again(report: Path, tmp_path: Path):
    model = model_in(tmp_path, 2**16)
    config = FAMILIES["gemma3"]()
    config.vocab_size = len(byte_tokenizer())
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    test_undo_when_a_question_was_asked_then_goes_on_as_if_it_had_not_been(model, report)
    talk = converse(model, ["--document", report], "Who?", "Where?", "/undo", "/stats", "/undo", "/stats")
    assert "read before the next answer" not in talk.stderr
    few = converse(model, ["--document", report], *["Who?"] * 6, *["/undo"] * 4, "/stats", "/forget", "/stats")
    assert few.stderr.count("read before the next answer") == 1


@pytest.mark.parametrize("command", ["/undo", "/retry"])
def test_undo_and_retry_when_nothing_was_asked_then_say_so(command: str, model: Path, report: Path):
    assert "Nothing was asked yet." in converse(model, ["--document", report], command).stderr


def test_retry_when_limit_is_raised_then_answer_is_longer_and_undo_works(model: Path, report: Path):
    source = ["--document", report]
    once = converse(model, source, "Who?").stdout.removesuffix("\n")
    talk = converse(model, source, "Who?", "/set max_new_tokens 6", "/retry", "/undo", "/undo")
    assert talk.stdout.startswith(f"{once}\n{once}")
    assert "temperature 0 takes the likeliest tokens again" in talk.stderr
    assert talk.stderr.count("taken back: Who?") == 1
    assert "Nothing was asked yet." in talk.stderr


def test_a_turn_when_it_was_saved_then_can_be_taken_back(model: Path, report: Path, tmp_path: Path):
    source = saved(model, report, tmp_path / "talk.kv", "Who?", "Where?")
    talk = converse(model, source, "/undo", "Where?")
    assert talk.stdout == converse(model, source, "/retry").stdout
    assert converse(model, ["--document", report], "Who?", "Where?").stdout.endswith(talk.stdout)


def test_undo_when_all_loaded_turns_are_undone_then_leaves_the_document(model: Path, report: Path, tmp_path: Path):
    source = saved(model, report, tmp_path / "talk.kv", "/system Be brief.", "Who?\n\nAnd so?", "Where?", "Why?")
    talk = converse(model, source, "/undo", "/undo", "/undo", "/undo", "What?")
    assert re.findall("taken back: (.*)", talk.stderr) == ["Why?", "Where?", "And so?", "Who?"]
    assert talk.stdout.removesuffix("\n") == answer_to(model, "Be brief.", "What?")
    document = saved(model, report, tmp_path / "document.kv")
    assert "Nothing was asked yet." in converse(model, document, "/undo").stderr


def test_the_first_question_when_it_was_saved_then_is_asked_again(model: Path, report: Path, tmp_path: Path):
    source = saved(model, report, tmp_path / "talk.kv", '"""Who?\n\nAnd where?"""')
    talk = converse(model, source, "/retry", "/undo", "/undo")
    assert talk.stdout == converse(model, ["--document", report], '"""Who?\n\nAnd where?"""').stdout
    assert "taken back: Who?\n\nAnd where?" in talk.stderr
    assert "Nothing was asked yet." in talk.stderr


def test_the_document_when_it_holds_turns_of_its_own_then_is_left(model: Path, tmp_path: Path):
    path = tmp_path / "talk.txt"
    path.write_text("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n" * 2)
    talk = converse(model, saved(model, path, tmp_path / "talk.kv", "Who?"), "/undo", "/undo")
    assert talk.stderr.count("taken back: ") == 1
    assert "Nothing was asked yet." in talk.stderr


def test_forget_when_a_conversation_is_loaded_then_leaves_the_document(model: Path, report: Path, tmp_path: Path):
    source = saved(model, report, tmp_path / "talk.kv", "Who?", "Where?")
    talk = converse(model, source, "Why?", "/forget", "/undo", "Who?")
    assert "Nothing was asked yet." in talk.stderr
    assert talk.stdout.endswith(converse(model, ["--document", report], "Who?").stdout)


def test_undo_when_a_file_does_not_tell_its_document_then_says_the_way_out(model: Path, report: Path, tmp_path: Path):
    path = tmp_path / "talk.kv"
    source = saved(model, report, path, "Who?", "Where?")
    HybridCache.load(path, AutoConfig.from_pretrained(model)).save(path, saved_token_ids(path))
    talk = converse(model, source, "/undo", "/undo", "/retry")
    assert re.findall("taken back: (.*)", talk.stderr) == ["Where?"]
    assert talk.stderr.count("is neither taken back nor asked again. Start anew with --document.") == 2


def test_system_message_when_set_then_answers_equal_the_whole_prompts(model: Path, report: Path, tmp_path: Path):
    expected = answer_to(model, "Be brief.", "Who?")
    talk = converse(model, ["--document", report], "/system Be very long.", "/system Be brief.", "Who?")
    assert talk.stdout.removesuffix("\n") == expected
    assert "so the document is read again" in talk.stderr
    source = saved(model, report, tmp_path / "talk.kv", "/system Be very long.")
    assert converse(model, source, "/system Be brief.", "Who?").stdout.removesuffix("\n") == expected


def test_system_message_when_set_between_questions_then_undo_still_works(model: Path, report: Path):
    one, other = (answer_to(model, "Be brief.", question) for question in ("Where?", "Why?"))
    talk = converse(model, ["--document", report], "Who?", "/system Be brief.", "/undo", "Where?", "/forget", "Why?")
    assert talk.stdout.endswith(f"{one}\n{other}\n")


def test_a_system_message_when_it_does_not_fit_then_is_not_set(model: Path, report: Path):
    talk = converse(model, ["--document", report], f"/system {'brief ' * 12_000}", "Who?")
    assert "context is 65,536: the message is not set" in talk.stderr
    assert talk.stdout == converse(model, ["--document", report], "Who?").stdout


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ m['content'] if m['role'] != 'system' }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] if m['role'] != 'system' else raise_exception('no') }}{% endfor %}",
    ],
    ids=["none", "left out", "refused"],
)
def test_a_system_message_when_the_chat_template_has_none_then_is_refused(template: str | None):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(PromptError, match=r"no system message|refuses a system message"):
        SystemMessage(tokenizer)


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_document_when_template_adds_system_message_then_is_found_after_it(system: str | None, is_saved: bool):
    tokenizer = byte_tokenizer()
    default = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    tokenizer.chat_template = default + tokenizer.chat_template
    token_ids = tokenizer(conversation_text(tokenizer, [TEXT, "Yes.", "Why?"], system))["input_ids"]
    message = SystemMessage(tokenizer)
    if system is None or is_saved:
        before = tokenizer.decode(token_ids[: message.num_tokens(token_ids, is_saved)])
        assert before == f"<|im_start|>system\n{system or 'Be kind.'}<|im_end|>\n<|im_start|>user\n"
    else:  # nobody has set one
        with pytest.raises(PromptError, match="It cannot be told where the document"):
            message.num_tokens(token_ids, is_saved)


def test_system_message_when_unmarked_in_saved_chat_then_is_not_set():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n\n{% endfor %}"
    token_ids = tokenizer(conversation_text(tokenizer, [TEXT], "Be brief."))["input_ids"]
    assert SystemMessage(tokenizer).num_tokens(token_ids, is_saved=False) == 0
    with pytest.raises(PromptError, match="It cannot be told where the document"):
        SystemMessage(tokenizer).num_tokens(token_ids, is_saved=True)


def test_settings_when_set_then_hold_and_unknown_ones_are_refused(model: Path, report: Path):
    lines = ["/set max_new_tokens 2", "Who?", "/set top_k 5", "/set temperature hot", "/set max_new_tokens 0", "/set"]
    talk = converse(model, ["--document", report], *lines)
    assert "ended at --max-new-tokens 2: /set max_new_tokens 4 allows more" in talk.stderr
    assert "There is no setting 'top_k': max_new_tokens, temperature can be set." in talk.stderr
    assert "temperature must be a number from 0 on, got 'hot'." in talk.stderr
    assert "max_new_tokens must be a whole number from 1 on, got '0'." in talk.stderr
    assert talk.stderr.count("max_new_tokens 2, temperature 0.0") == 2


def test_question_when_in_triple_quotes_then_may_look_like_a_command(model: Path, report: Path):
    talk = converse(model, ["--document", report], '"""', "/quit", "now", '"""', "/undo")
    assert "taken back: /quit\nnow" in talk.stderr


def test_stats_when_an_answer_was_given_then_speak_of_one_number_of_tokens(model: Path, report: Path):
    talk = converse(model, ["--document", report], "Who?", "/stats")
    held, taken = re.search(r"; ([\d,]+) tokens[,)][^\n]*\n([\d,]+) of 65,536 tokens are taken", talk.stderr).groups()
    assert held == taken
    assert "are read before the next answer" not in talk.stderr


# Earlier turns


def test_a_conversation_when_it_is_loaded_then_shows_its_last_turn(model: Path, report: Path, tmp_path: Path):
    for lines in (["Who?"], ["Who?", "What else\nis there?"]):
        typed = [f'"""{line}"""' for line in lines]
        said = converse(model, ["--document", report], *typed).stdout
        again = converse(model, saved(model, report, tmp_path / "talk.kv", *typed)).stderr
        shown = again[again.index("last question: ") : again.index("\nask something")]
        question, answer = shown.removeprefix("last question: ").split("\nlast answer: ")
        assert question == lines[-1]
        assert said.strip().endswith(answer)


def test_a_document_when_it_is_loaded_then_shows_its_end(model: Path, tmp_path: Path):
    path = tmp_path / "long.txt"
    path.write_text("word " * 500 + "the end")
    again = converse(model, saved(model, path, tmp_path / "document.kv"))
    (shown,) = re.findall(r"it ends: \[\.\.\.\](.*)", again.stderr)
    assert len(shown) == 300
    assert shown.endswith("word the end")


def test_last_turn_when_after_another_then_begins_at_the_answers_end():
    tokenizer = byte_tokenizer()
    turns = ["document\n\nWho?", "Ada.", "Where?", "In London."]
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(turns)]
    token_ids = [
        tokenizer(tokenizer.apply_chat_template(messages[:end], tokenize=False))["input_ids"] for end in (2, 4)
    ]
    assert last_turn(tokenizer, token_ids[0], None) == LastTurn(None, "Who?", "Ada.")
    second = last_turn(tokenizer, token_ids[1], None)
    assert (second.question, second.answer) == ("Where?", "In London.")
    assert tokenizer.decode(token_ids[1][: second.start]).endswith("Ada.")


CHATML = byte_tokenizer().chat_template
INST = """{% for m in messages %}
{{- '[INST] ' + m['content'] + ' [/INST]' if m['role'] == 'user' else ' ' + m['content'] + '<|im_end|>' }}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("template", "quoted"),
    [(CHATML, "Hi<|im_end|>\n<|im_start|>assistant\nHo"), (INST, "[INST] Hi [/INST] Ho")],
    ids=["ChatML", "INST"],
)
def test_document_when_quoting_an_answers_header_then_question_is_in_turn(template: str, quoted: str, tmp_path: Path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    model, document, question = model_in(tmp_path / "model", 2**16, tokenizer), tmp_path / "report.txt", "Who?"
    document.write_text(f"{TEXT} {quoted} {TEXT}")
    messages = [{"role": "user", "content": f"{document.read_text()}\n\n{question}"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    plain, length = AutoModelForCausalLM.from_pretrained(model), inputs["input_ids"].shape[1]
    tokens = plain.generate(**inputs, max_new_tokens=5, do_sample=False)[0, length:]
    expected = without_controls(tokenizer.decode(tokens, skip_special_tokens=True))
    chat = converse(model, ["--document", document], question, "/stats")
    assert chat.stdout.removesuffix("\n") == expected
    assert f"{length + len(tokens):,} of 65,536 tokens are taken" in chat.stderr
    (tmp_path / "questions.jsonl").write_text('{"document": "report.txt", "question": "Who?"}')
    options = ["--model", model, "--device", "cpu", "--max-new-tokens", "5"]
    saving, kept = ["--document", document, "--save-cache", tmp_path / "kept"], ["--load-cache", tmp_path / "kept"]
    for command in (
        ["batch", tmp_path / "questions.jsonl", "--out", "-", *options],
        ["generate", "--document", document, "--question", question, "--json", *options],
        ["generate", *saving, "--question", question, "--json", *options],
        ["generate", *kept, "--question", question, "--json", *options],
    ):
        result = CliRunner().invoke(app, [str(each) for each in command])
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["prompt_tokens"] == length


@pytest.mark.parametrize("command", ["generate", "batch"])
@pytest.mark.parametrize("refused", ["system", "user"])
def test_chat_template_when_it_raises_then_error_is_a_sentence(
    command: str, refused: str, report: Path, tmp_path: Path
):
    tokenizer = byte_tokenizer()
    raising = "{{ raise_exception('Not here') if messages[0]['role'] == 'ROLE' or 'ROLE' == 'user' }}"
    tokenizer.chat_template = raising.replace("ROLE", refused) + CHATML
    options = ["--model", model_in(tmp_path, 2**16, tokenizer), "--device", "cpu", "--system", "Be brief."]
    if command == "generate":
        options += ["--document", report, "--question", "Who?"]
    else:
        (tmp_path / "questions.jsonl").write_text(f'{{"document": "{report}", "question": "Who?"}}')
        options += [tmp_path / "questions.jsonl", "--out", "-"]
    result = CliRunner().invoke(app, [str(each) for each in [command, *options]])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("error: The model's chat template refuses ")
    assert "Not here" in result.stderr


# Files that are there


def test_save_when_another_file_is_there_then_needs_force(model: Path, report: Path, tmp_path: Path):
    notes, kept = tmp_path / "notes.txt", tmp_path / "talk.kv"
    notes.write_text("Precious, and no cache.")
    talk = converse(model, ["--document", report], f"/save {notes}", f"/save {kept}", f"/save {kept}")
    assert f"It is not replaced: use another name, or /save! {notes}." in talk.stderr
    assert notes.read_text() == "Precious, and no cache."
    assert f"are in {kept}\n" in talk.stderr
    assert f"are in {kept}, in place of the cache that was kept there" in talk.stderr
    talk = converse(model, ["--document", report], f"/save! {notes}")
    assert f"are in {notes}, in place of the file that was there" in talk.stderr
    assert converse(model, ["--load-cache", notes], "Who?").stdout


def test_save_cache_when_another_file_is_there_then_needs_force(model: Path, report: Path, tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("Precious, and no cache.")
    command = ["generate", "--model", model, "--device", "cpu", "--document", report, "--save-cache", path]
    first, forced, again = (
        CliRunner().invoke(app, [str(each) for each in [*command, *more]]) for more in ([], ["--force"], [])
    )
    assert first.exit_code == 2
    assert "It is not replaced: use another name, or --force." in first.stderr
    assert (forced.exit_code, again.exit_code) == (0, 0)
    assert f"{path} will take the place of the file that was there" in forced.stderr
    assert f"{path} will take the place of the cache that was kept there" in again.stderr


def test_force_when_nothing_is_saved_then_is_refused():
    result = CliRunner().invoke(app, ["generate", "--force"])
    assert result.exit_code == 2
    assert "--force is for --save-cache: drop it." in result.stderr


# Why an answer ended


def test_an_answer_when_it_ends_itself_then_nothing_is_said_of_its_end(report: Path, tmp_path: Path):
    ends = model_in(tmp_path, 2**16, eos_token_id=list(range(len(byte_tokenizer()))))
    assert "ended" not in converse(ends, ["--document", report], "Who?").stderr


def test_context_when_nearly_full_then_warns_once_until_more_is_left(report: Path, tmp_path: Path):
    short = model_in(tmp_path, 700)
    talk = converse(
        short, ["--document", report], "/set max_new_tokens 60", "Who?" * 30, "Why?", "/forget", "What?" * 30,
        "/set max_new_tokens 1000", "And?",
    )  # fmt: skip
    assert len(re.findall(r"(\d+) tokens of context left", talk.stderr)) == 2
    assert "ended at --max-new-tokens 60: /set max_new_tokens 120 allows more" in talk.stderr
    assert "ended at the model's context of 700 tokens: /undo takes back the last question" in talk.stderr


# Memory


def test_question_when_memory_ends_then_is_taken_back_and_the_chat_goes_on(
    model: Path, report: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = converse(model, ["--document", report], "Who?", "Where?").stdout
    begun = []

    class Recorder(timed_run._Recorder):
        """Memory ends with the second token of the second and the third answer."""

        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.tokens) == 2:
                begun.append(self)
                if len(begun) in (2, 3):
                    raise MemoryError("no room")

    monkeypatch.setattr(timed_run, "_Recorder", Recorder)
    talk = converse(model, ["--document", report], "Who?", "Why?", "/retry", "Where?")
    first, *_, last = talk.stdout.splitlines()
    assert f"{first}\n{last}\n" == expected
    assert talk.stderr.count("no room\nThe question is taken back.") == 2
    assert "the answer before stays" in talk.stderr


# At a terminal


def test_ctrl_c_when_at_a_terminal_then_ends_only_the_answer(tmp_path: Path):
    terminals = pytest.importorskip("cli.terminals", reason="needs POSIX terminals", exc_type=ImportError)
    # Every token is a word, which is shown at once.
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    model = model_in(tmp_path, 2**16, PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0"))
    (tmp_path / "report.txt").write_text("w1 w2 " * 50)
    options = ["--document", str(tmp_path / "report.txt"), "--device", "cpu", "--max-new-tokens", "40000"]
    command = ["-m", "hf_hybrid_cache.cli", "chat", "--model", str(model), *options]
    with terminals.Terminal(*command, HF_HYBRID_CACHE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for("/help lists what else can be typed")
        for _ in range(3):
            terminal.wait_for(terminals.PROMPT)
            terminal.type(terminals.CTRL_C)
            terminal.wait_for("Ctrl-D or /quit ends the conversation, /save FILE keeps it")
        terminal.wait_for(terminals.PROMPT)
        terminal.type("w3" + terminals.ENTER)
        terminal.wait_for("\n")
        terminal.wait_for("w")
        terminal.type(terminals.CTRL_C)
        terminal.wait_for("the answer was ended")
        terminal.wait_for(terminals.PROMPT)
        terminal.type("/stats" + terminals.ENTER)
        terminal.wait_for("last answer: first token after ")
        terminal.wait_for(terminals.PROMPT)
        terminal.type(terminals.CTRL_D)
        assert terminal.exit_code() == 0
