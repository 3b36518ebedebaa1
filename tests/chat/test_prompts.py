"""The tokens of prompts: documents are cut so that all fits, and chat templates of every kind."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_hybrid_cache.chat import AnswerSettings, ChatTemplate, PromptError
from hf_hybrid_cache.documents import Document, Documents

from chat.talks import (
    QUESTIONS,
    REPORT,
    TEXT,
    chat_of,
    generated,
    model_of,
    prompt_of,
    prompt_tokens,
    said,
    tokenizer_of_tests,
)
from common.soak import search_at_random

SEVERAL = Documents(tuple(Document(f"{name}.txt", f"{name} wrote: {TEXT}") for name in ("Ada", "Bob", "Cy")), ())
CHATML = tokenizer_of_tests().chat_template
FRAGMENTS = ("<|im_start|>", "<|im_end|>", "<|im_", "end|>", "<|pad|>", "user", "\n", " ", "\n\n", "Ada", "<unk>")
REFUSING = "{{ raise_exception('Not here') if CONDITION }}" + CHATML


class CountingTokenizer(PreTrainedTokenizerFast):
    """Counts the characters that are tokenized."""

    characters = 0

    def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
        CountingTokenizer.characters += len(text)
        return super().__call__(text, *args, **options)


def merging_tokenizer() -> CountingTokenizer:
    """A tokenizer whose tokens have several characters, and can be others where a text is cut."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special, alphabet = ["<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT, "\n\nuser assistant Bob wrote"] * 3, trainer)
    return CountingTokenizer(
        tokenizer_object=backend, eos_token=special[1], model_max_length=4096, chat_template=CHATML
    )


def templates(template: str | None) -> PreTrainedTokenizerFast:
    """Return the tokenizer of these tests with another chat template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of_tests().backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("documents", [REPORT, SEVERAL], ids=["one", "several"])
def test_as_much_of_documents_as_fits_is_in_the_prompt(documents: Documents):
    tokenizer = merging_tokenizer()
    template = ChatTemplate(tokenizer)
    whole = template.document(documents, 10_000)
    assert not whole.is_estimate
    assert whole.token_ids == template.start(documents.text)
    assert (whole.read_tokens, len(whole.parts)) == (whole.tokens, len(documents.files))
    before = len(whole.token_ids)
    for most in range(len(whole.token_ids) + 1, len(template.start()) + 1, -1):
        prompt = template.document(documents, most)
        text = tokenizer.decode(prompt.token_ids).removeprefix(tokenizer.decode(template.start()))
        assert documents.text.startswith(text)
        assert most - 4 <= len(prompt.token_ids) <= min(most, before)
        assert [part.tokens for part in prompt.parts] == [part.tokens for part in whole.parts]
        reads = [part.read_tokens / part.tokens for part in prompt.parts]
        assert sorted(reads, reverse=True) == reads
        assert sum(0 < read < 1 for read in reads) <= 1
        before = len(prompt.token_ids)
    with pytest.raises(PromptError, match="tokens are left for the document, and the prompt takes"):
        template.document(documents, len(template.start()))


def test_a_document_leaves_room_for_an_answer_and_more():
    for leave in range(100, 130):
        chat = chat_of(model_of("llama", 300), leave=leave)
        assert leave <= chat.num_free <= leave + 4
    longest = Documents((Document("longest.txt", TEXT * 30),), ())
    for most, new_tokens, left in ((4096, 9, 9 + 256), (4096, 4000, 512 + 256), (2048, 4000, 512 + 128)):
        chat = chat_of(model_of("llama", most), longest, settings=AnswerSettings(new_tokens))
        assert left <= chat.num_free <= left + 4
    chat = chat_of(context=50)
    assert chat.document.read_tokens == 50
    with pytest.raises(PromptError, match="400 tokens are left to questions and answers, and the context is"):
        chat_of(model_of("llama", 300), leave=400)


def test_a_very_long_document_is_tokenized_only_as_far_as_it_can_fit():
    long = "".join(f"{number} {TEXT}" for number in range(45_000))
    tokenizer, CountingTokenizer.characters = merging_tokenizer(), 0
    documents = Documents((Document("long.txt", long), Document("after.txt", TEXT)), ())
    prompt = ChatTemplate(tokenizer).document(documents, 1000)
    assert len(long) > 10_000_000
    assert CountingTokenizer.characters < 100_000
    assert prompt.is_estimate
    assert 996 <= len(prompt.token_ids) <= 1000
    assert [part.read_tokens for part in prompt.parts] == [prompt.read_tokens, 0]
    counts = re.findall(r"(about )?\b\d+,\d{3},\d{3}", prompt.notice("the context is 1,000"))
    assert counts == ["about "] * 3  # of all, of the one that is cut, and of what is not read
    assert prompt.tokens == pytest.approx(len(tokenizer(long[:100_000])["input_ids"]) * len(long) / 100_000, rel=0.05)


LEFT_OUT = "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}"
REFUSED = REFUSING.replace("CONDITION", "messages[0]['role'] == 'system'")


@pytest.mark.parametrize("template", [None, LEFT_OUT, REFUSED], ids=["none", "left out", "refused"])
def test_system_messages_without_a_place_are_refused(template: str | None):
    tokenizer = templates(template)
    with pytest.raises(PromptError, match=r"no chat template with a system message|refuses a system message.*Not here"):
        chat_of(tokenizer=tokenizer, system="Be brief.")
    chat = chat_of(tokenizer=tokenizer)
    before = list(chat.token_ids)
    with pytest.raises(PromptError):
        chat.system = "Be brief."
    assert (chat.system, chat.token_ids) == (None, before)


def test_templates_that_refuse_answers_or_change_questions_are_told():
    chat = chat_of(tokenizer=templates(REFUSING.replace("CONDITION", "messages | length > 1")))
    first = said(chat, "Who?")
    with pytest.raises(PromptError, match=r"refuses this conversation \(Not here\)"):
        chat.ask("Why?")
    chat.undo()
    assert said(chat, "Who?") == first
    with pytest.raises(PromptError, match="changes the question, so it cannot follow a document"):
        chat_of(tokenizer=templates(LEFT_OUT.replace("}}", "| upper }}")))


@pytest.mark.parametrize(
    "template",
    [CHATML.replace("message['content']", "message['content'] | trim"), "Be kind.\n" + CHATML, None],
    ids=["trims", "adds a message", "none"],
)
@pytest.mark.default("values")
@pytest.mark.parametrize("has_document", [True, False], ids=["document", "none"])
def test_any_template_has_answers_of_generate(has_document: bool, template: str | None):
    tokenizer = templates(template)
    chat = chat_of(documents=REPORT if has_document else (), tokenizer=tokenizer)
    prompts = []
    for question in (f"  {QUESTIONS[0]}\n", QUESTIONS[1]):
        answer = said(chat, question)
        prompts.append(tokenizer.decode(prompt_of(chat)))
        assert answer == generated(model_of(), prompt_of(chat))
    text = (TEXT.strip() + "\n\n" if has_document else "") + f"  {QUESTIONS[0]}\n"
    assert text.strip() in prompts[0]
    if template is None:
        assert prompts[0] == f"{text}\nAnswer:"
    assert (chat.undo(), chat.undo()) == (QUESTIONS[1], f"  {QUESTIONS[0]}\n")


@search_at_random(40)
@given(st.lists(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=5).map("".join), min_size=1, max_size=4))
@pytest.mark.parametrize("strips", [False, True])
def test_special_tokens_come_from_the_template_alone(strips: bool, texts: list[str]):
    tokenizer = merging_tokenizer()
    tokenizer.add_special_tokens({"pad_token": AddedToken("<|pad|>", lstrip=strips, rstrip=strips, special=True)})
    messages = [(("user", "assistant")[index % 2], text) for index, text in enumerate(texts)]
    template = ChatTemplate(tokenizer)
    token_ids, shared = template.request(messages)
    assert token_ids == prompt_tokens(messages, tokenizer)
    assert tokenizer.decode(token_ids[:shared]) in tokenizer.decode(token_ids)
    # A document is tokenized up to its end, and what follows by itself.
    document = template.start(texts[0])
    asked = template.conversation(["Who?"], document)
    after_question = prompt_tokens([("user", "")], tokenizer)[len(tokenizer("user\n")["input_ids"]) + 1 :]
    whole = prompt_tokens([("user", texts[0].strip())], tokenizer)
    assert document == whole[: -len(after_question)]
    assert asked[len(document) :] == tokenizer("\n\nWho?")["input_ids"] + after_question
