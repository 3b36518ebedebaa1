"""The conversation that `chat --resume` goes on with."""

from rich.console import Console

from ...prefix_store import KeptPrompt, PrefixStore
from ..console import UsageError, note
from ..kept import Numbered, chosen, numbered, table_of
from .chat_input import ChatInput


def resumed(prompts: PrefixStore, which: str | None, lines: ChatInput, notes: Console) -> KeptPrompt | None:
    """
    Choose a conversation.

    Args:
        prompts: in their folder.
        which: its number in the list, or its id; `None` for the only one, or to choose at a terminal: elsewhere it is
            the one used last.
        lines: the choice is typed there.
        notes: receives the list.

    Returns:
        the conversation; `None` where none was chosen.

    Raises:
        UsageError: there is no conversation, or `which` names none, or several.
        PrefixFolderError: the folder cannot be read.
    """
    listed = numbered(prompts)
    talks = [each for each in listed if each.kept.is_conversation]
    if which is not None:
        return _conversation(listed, which)
    if not talks:
        raise UsageError(f"{prompts.path} has no conversation: begin one without --resume.")
    if len(talks) == 1 or not lines.is_terminal:
        return talks[0].kept
    note(notes, table_of(talks))
    note(notes, "which one? its number, or Enter for the one used last")
    while (typed := lines.next_line()) is not None:
        try:
            return _conversation(listed, typed.text) if typed.text else talks[0].kept
        except UsageError as error:
            note(notes, str(error))
    return None


def _conversation(listed: list[Numbered], which: str) -> KeptPrompt:
    """
    Return the conversation that a number or an id names.

    Raises:
        UsageError: it names none, or a prompt.
    """
    named = chosen(listed, which)
    if not named.kept.is_conversation:
        raise UsageError(f"{which!r} is a prompt, and no conversation: ask about its document with --document.")
    return named.kept
