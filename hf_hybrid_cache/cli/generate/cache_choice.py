"""The options that say which cache `generate` uses, and how it is set up."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...layers import Selection
from ..choices import CACHES
from ..console import UsageError
from ..distributed.ranks import num_processes
from ..earlier_console import check_bits, check_choice
from ..runs.timed_run import DISTRIBUTED_CACHES, CacheOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_OFFLOADED_ONLY = ("prefetch_layers", "resident_layers", "device_tokens")


@dataclass(frozen=True)
class CacheChoice:
    """
    One cache, or all of them.

    Attributes:
        cache: one of `CACHES`; `None` for the cache that the other options are for.
        compare: whether every cache answers.
        bits: of keys and values.
        prefetch_layers: layers that an offloaded cache fetches ahead.
        resident_layers: layers of an offloaded cache that stay on the device.
        device_tokens: tokens of each layer of an offloaded cache on the device.
        cpu_decode: "yes", "no", "auto", or the fraction of the tokens that the CPU attends to.
        page_top_p: the part of the attention's weight that pages must carry to be read; `None` reads all pages.
            `None` of any other option leaves it at its default.

    Raises:
        UsageError: a value is out of its range, or the cache would ignore it.
    """

    cache: str | None = None
    compare: bool = False
    bits: int | None = None
    prefetch_layers: int | None = None
    resident_layers: int | None = None
    device_tokens: int | None = None
    cpu_decode: str | None = None
    page_top_p: float | None = None

    def __post_init__(self) -> None:
        if self.cache is not None:
            check_choice("--cache", self.cache, CACHES)
        if self.compare and self.cache:
            raise UsageError("--compare takes every cache: drop --cache.")
        check_bits(self.bits)
        if num_processes() > 1:
            self._check_one_process()
        self._parsed_cpu_decode()
        if not self.compare:
            self._check_ignored()
        self._selection()

    @property
    def name(self) -> str:
        """The cache that is used, if not all are."""
        if self.cache is not None:
            return self.cache
        if self.bits is not None:
            return "quantized"
        is_divided = self.cpu_decode not in (None, "yes", "no")
        is_offloaded = is_divided or any(getattr(self, field) is not None for field in _OFFLOADED_ONLY)
        return "offloaded" if is_offloaded else "dynamic"

    @property
    def given(self) -> dict[str, Any]:
        """The options of a cache that were given, by their fields of `CacheOptions`."""
        fields = {name: getattr(self, name) for name in ("bits", *_OFFLOADED_ONLY)}
        fields["cpu_decode"] = self._parsed_cpu_decode()
        return {name: value for name, value in fields.items() if value is not None}

    def options(self, group: "ProcessGroup | None") -> CacheOptions:
        """The options of the cache, whose tokens a group of processes divides."""
        return CacheOptions(**self.given, group=group, selection=self._selection())

    def _check_one_process(self) -> None:
        """Raise an error if several processes cannot have this cache."""
        if self.compare:
            raise UsageError("--compare is for one process: start it without torchrun.")
        if self.name not in DISTRIBUTED_CACHES:
            raise UsageError(
                f"--cache {self.name} is for one process: with torchrun use one of {', '.join(DISTRIBUTED_CACHES)}."
            )

    def _check_ignored(self) -> None:
        """Raise an error if the cache would ignore an option."""
        for field in self.given:
            kind = "quantized" if field == "bits" else "offloaded"
            if self.name != kind and field != "cpu_decode":
                raise UsageError(
                    f"{option_of(field)} is for --cache {kind}, and the cache is {self.name}: drop one of them."
                )

    def _parsed_cpu_decode(self) -> bool | float | Literal["auto"] | None:
        """The value of `--cpu-decode` as a cache takes it; `None` without the option."""
        text, name = self.cpu_decode, self.name
        if text is None:
            return None
        if self.compare or name == "stock":
            which = "--compare is of caches as they are" if self.compare else "--cache stock is transformers' own"
            raise UsageError(f"{which}: drop --cpu-decode.")
        if text in ("yes", "no"):
            return text == "yes"
        if name != "offloaded":
            raise UsageError(f"--cpu-decode {text} is for --cache offloaded, and the cache is {name}: use yes or no.")
        if text == "auto":
            return "auto"
        try:
            return float(text)
        except ValueError:
            raise UsageError(f"--cpu-decode must be yes, no, auto or a share such as 0.6, got {text!r}.") from None

    def _selection(self) -> Selection | None:
        """The top-p selection of pages; `None` without `--page-top-p`."""
        if self.page_top_p is None:
            return None
        if self.compare:
            raise UsageError("--compare is of caches that read all: drop --page-top-p.")
        if self.name == "stock":
            raise UsageError("--cache stock is transformers' own, which reads all: drop --page-top-p, or --cache.")
        if num_processes() > 1:
            raise UsageError("--page-top-p is for one process: start it without torchrun.")
        try:
            return Selection(self.page_top_p)
        except ValueError as error:
            raise UsageError(str(error).replace("top_p", "--page-top-p", 1)) from error


def option_of(field: str) -> str:
    """The option of the command line that sets a field."""
    return f"--{field.replace('_', '-')}"
