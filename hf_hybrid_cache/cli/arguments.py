"""The arguments of a command before they are parsed: a file has defaults, and some options take several values."""

import difflib
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from ..documents import is_on_the_web
from .console import UsageError, consoles, fail, note
from .options import EXCLUDING

# Commands whose options stand in the file outside of a table.
_COMMANDS_OF_MODELS = ("generate", "chat", "batch", "serve")
# Options of which one that is given sets aside the other's default.
_SET_ASIDE = (*((first, second) for first, second, _ in EXCLUDING), ("--cache", "--bits"))
# Options that take several values, and what tells whether a further word is one of them.
_MANY: dict[str, Callable[[str], bool]] = {
    "--document": lambda given: given == "-" or os.path.exists(given) or is_on_the_web(given),
    "--choices": lambda given: not given.startswith("-"),
}


def defaults_path() -> Path | None:
    """The file with defaults, which need not exist; `None` where there is no home folder, or none is wanted."""
    given = os.environ.get("HF_HYBRID_CACHE_DEFAULTS")
    if given == "":
        return None
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config", "hf_hybrid_cache")
    try:
        return Path(given or folder / "defaults.toml").expanduser()
    except RuntimeError:
        return None


class Command(TyperCommand):
    """
    A command with defaults of a file.

    Its `--document` takes each file, folder and address that follows it, its `--choices` each word up to an option.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments, with the option before each of several values; the file says what they do not."""
        try:
            if "--help" not in args:
                ctx.default_map = _defaults(ctx.parent.command.commands, str(self.name), args)
            ctx.allow_extra_args = True  # what is meant is said here
            if left := super().parse_args(ctx, _with_each_value_named(args)):
                takes_documents = any("--document" in each.opts for each in self.params)
                more = ", and documents come after --document" * takes_documents
                raise UsageError(f"{left[0]!r} is one argument too many: a text of several words is quoted{more}.")
            return left
        except UsageError as error:
            raise fail(str(error)) from error
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # pydantic's words for any ValueError
            raise


def _with_each_value_named(args: Sequence[str]) -> list[str]:
    named: list[str] = []
    of = ""  # the option whose value came last
    for before, given in zip(["", *args], args, strict=False):
        is_next = before not in _MANY and of in _MANY and _MANY[of](given)
        named += [of, given] if is_next else [given]
        of = before if before in _MANY else of if is_next else given.partition("=")[0] if "=" in given else ""
    return named


def _defaults(commands: Mapping[str, Any], command: str, args: Sequence[str]) -> dict[str, Any]:
    """
    The values of a command's parameters in the file, but for those that are given, and what these exclude.

    Raises:
        UsageError: the file cannot be read, or has what is no option.
    """
    path = defaults_path()
    if path is None or not path.is_file():
        return {}
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    known = {name: {option: each for each in of.params for option in each.opts} for name, of in commands.items()}
    of_models = {option for name in _COMMANDS_OF_MODELS for option in known[name]}
    tables = {name: values for name, values in tree.items() if isinstance(values, dict)}
    for_all = {name: value for name, value in tree.items() if name not in tables}
    _require_known(path, "a command", tables, known)
    _require_known(path, "an option", map(_option, for_all), of_models)
    for name, values in tables.items():
        _require_known(path, f"an option of {name}", map(_option, values), known[name])
    given, chosen, said = {each.partition("=")[0] for each in args}, dict[str, Any](), list[str]()
    aside = {pair[not index] for pair in _SET_ASIDE for index in range(2) if pair[index] in given}
    wanted = (for_all if command in _COMMANDS_OF_MODELS else {}) | tables.get(command, {})
    for name, value in wanted.items():
        option = _option(name)
        parameter = known[command].get(option)
        if parameter is None or {*parameter.opts, *parameter.secondary_opts} & given or option in aside:
            continue
        if parameter.is_flag and not isinstance(value, bool):
            raise UsageError(f"{path}: {name} is true or false, got {value!r}.")
        if parameter.multiple:
            chosen[parameter.name] = [str(each) for each in (value if isinstance(value, list) else [value])]
        else:
            chosen[parameter.name] = value if parameter.is_flag else str(value)
        said.append(f"{name} = {value}")
    if said:
        note(consoles("--quiet" in args)[1], f"{path}: {', '.join(said)}")
    return chosen


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _require_known(path: Path, what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `UsageError` for the first name that is not known, with one that is nearly the same."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f" Did you mean {near[0].removeprefix('--')}?" if near else ""
            raise UsageError(f"{path}: {name.removeprefix('--')} is not {what}.{meant}")
