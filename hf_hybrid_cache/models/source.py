"""Loading what `from_pretrained` can load, with errors of one sentence."""

import difflib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub import constants, get_session, is_offline_mode
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..errors import HybridCacheError

logger = logging.getLogger(__name__)

HUB_TIMEOUT_SECONDS = 3.0  # to decide that the Hub does not answer; a download itself may take as long as it likes

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase | None]
Device = str | torch.device
Quantization = QuantizationConfigMixin | None
_T = TypeVar("_T")


class ModelLoadError(HybridCacheError, RuntimeError):
    """A model could not be loaded; the message says why and what to do."""


def load_by_name(
    name: str, dtype: torch.dtype | None, device_map: Device, quantization_config: Quantization, built_in: Sequence[str]
) -> Loaded:
    """
    Load a local folder or a model of the Hub.

    Args:
        name: a folder, or `owner/model`.
        dtype: of the weights; None means the checkpoint's own.
        device_map: a device, or "auto".
        quantization_config: of `from_pretrained`.
        built_in: the names that always work, for messages.

    Raises:
        ModelLoadError: it cannot be had; the message says what to do.
    """

    def loader(source: str, local_files_only: bool) -> Loaded:
        return from_pretrained(source, dtype or "auto", device_map, local_files_only, quantization_config)

    return _load(name, loader, built_in)


def load_config_by_name(name: str, built_in: Sequence[str]) -> PreTrainedConfig:
    """The config of a local folder or a model of the Hub; arguments and errors are those of `load_by_name`."""
    return _load(
        name,
        lambda source, local: AutoConfig.from_pretrained(source, local_files_only=local, trust_remote_code=False),
        built_in,
    )


def _load(name: str, loader: Callable[[str, bool], _T], built_in: Sequence[str]) -> _T:
    """Load a folder or a name of the Hub by `loader`, which is told whether it may only look at local files."""
    try:
        folder = Path(name).expanduser()
        is_folder = folder.is_dir()
        has_config = is_folder and (folder / "config.json").is_file()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a name too long, a zero in it
        raise ModelLoadError(f"{name!r} cannot be a folder here: {first_line(error)}") from error
    if is_folder and not has_config:
        raise ModelLoadError(f"{folder.absolute()} has no config.json: pass the folder that save_pretrained() wrote.")
    if not is_folder:
        _check_hub_name(name, folder, built_in)
    local_files_only = is_folder or not hub_answers()
    try:
        return loader(str(folder) if is_folder else name, local_files_only)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises many kinds, of which the cause matters
        raise ModelLoadError(_explain(name, error, local_files_only, built_in)) from error


def from_pretrained(
    source: str,
    dtype: torch.dtype | str,
    device_map: Device,
    local_files_only: bool,
    quantization_config: Quantization = None,
) -> Loaded:
    # trust_remote_code=False instead of the default, which asks on a terminal
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local_files_only, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=dtype,
        device_map=device_map,
        local_files_only=local_files_only,
        trust_remote_code=False,
        quantization_config=quantization_config,
    )
    return model.eval(), tokenizer


def hub_answers() -> bool:
    """Whether the Hub (or the mirror in HF_ENDPOINT) answers within HUB_TIMEOUT_SECONDS; False in offline mode."""
    if is_offline_mode():
        return False
    answered = threading.Event()

    def ask() -> None:
        try:
            if get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_SECONDS).status_code < 500:
                answered.set()
        except Exception as error:
            logger.info("The Hugging Face Hub does not answer: %s", error)

    # A thread, because the time of looking up a host name cannot be limited.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_SECONDS)
    return answered.is_set()


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide the bars of transformers for work that takes a second."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _check_hub_name(name: str, folder: Path, built_in: Sequence[str]) -> None:
    try:
        if name.startswith((".", "~", os.sep)):
            raise ModelLoadError(f"There is no folder {folder.absolute()}.")
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelLoadError(
            f"{name!r} is neither a folder nor a name on the Hugging Face Hub (owner/model). {_known(name, built_in)}"
        ) from error


def _explain(name: str, error: Exception, local_files_only: bool, built_in: Sequence[str]) -> str:
    """Explain in one sentence the error that `from_pretrained` raised."""
    chain = list(_causes(error))
    if any(isinstance(cause, GatedRepoError) for cause in chain):
        page = f"{constants.ENDPOINT}/{name}"
        return f"{name} is gated: accept its licence at {page}, then run `hf auth login` or set HF_TOKEN."
    if any(isinstance(cause, RepositoryNotFoundError) for cause in chain):
        return (
            f"The Hugging Face Hub has no model {name}, or it is private: check the spelling, or run `hf auth login`. "
            f"{_known(name, built_in)}"
        )
    if any(isinstance(cause, LocalEntryNotFoundError) for cause in chain):
        why = "HF_HUB_OFFLINE is set" if is_offline_mode() else "the Hugging Face Hub does not answer"
        return (
            f"{name} is not a folder here, not complete in {constants.HF_HUB_CACHE}, and {why}. "
            f"Pass a folder. {_known(name, built_in)}"
        )
    if any(isinstance(cause, ImportError) for cause in chain):
        return f"Loading {name} needs a package that is not installed: {first_line(error)}"
    return f"{name} does not load: {first_line(error)}"


def _known(name: str, built_in: Sequence[str]) -> str:
    """List ways that need no Hub, first the name that may have been meant."""
    short_names = {each.rpartition("/")[2].lower(): each for each in built_in}
    like = difflib.get_close_matches(name.rpartition("/")[2].lower(), short_names, n=1, cutoff=0.75)
    meant = f"Did you mean {short_names[like[0]]}? " if like else ""
    return f"{meant}Built in are {', '.join(built_in)}."


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
