"""The commands that can be typed into a conversation."""

from ..console import UsageError
from ..terminal import is_encodable
from .chat_input import QUOTES, Typed
from .conversation import Conversation

HELP = f"""\
/save FILE         keep the conversation, computed, in a file for --load-cache; /save! FILE replaces any file
/stats             tokens, memory, and the speed of the last answer
/retry             ask the last question again
/undo              take back the last question and its answer
/forget            go back to the document alone
/system TEXT       set the system message; the document is read again
/set NAME VALUE    for the next answers: max_new_tokens, temperature
/help              this list
/quit              end, as Ctrl-D does
{QUOTES}                begins and ends a question of several lines, or one that begins with /"""


def take(conversation: Conversation, typed: Typed) -> bool:
    """Answer a question or run a command; returns whether the conversation goes on."""
    if not typed.text:
        return True
    if not is_encodable(typed.text):
        conversation.remark("That is not UTF-8 text.")
        return True
    if typed.is_quoted or not typed.text.startswith("/"):
        conversation.ask(typed.text)
        return True
    command, _, argument = typed.text.partition(" ")
    if command == "/quit":
        return False
    _do(conversation, command, argument.strip())
    return True


def _do(conversation: Conversation, command: str, argument: str) -> None:
    plain = {
        "/stats": conversation.tell,
        "/retry": conversation.retry,
        "/undo": conversation.undo,
        "/forget": conversation.forget,
        "/help": lambda: conversation.remark(HELP),
    }
    if command in plain:
        plain[command]()
    elif command in ("/save", "/save!"):
        if argument:
            conversation.save(argument, is_forced=command == "/save!")
        else:
            conversation.remark(f"Name a file: {command} FILE")
    elif command == "/system":
        if argument:
            conversation.set_system(argument)
        else:
            conversation.remark("Say what the message is: /system TEXT")
    elif command == "/set":
        _set(conversation, argument)
    else:
        conversation.remark(f"There is no {command}.\n{HELP}")


def _set(conversation: Conversation, argument: str) -> None:
    name, _, value = argument.partition(" ")
    try:
        if name:
            conversation.settings.set(name, value.strip())
    except UsageError as error:
        conversation.remark(str(error))
    else:
        conversation.remark(str(conversation.settings))
