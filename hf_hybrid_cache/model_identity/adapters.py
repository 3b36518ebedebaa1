"""The adapters of PEFT that are in effect: weights of all are parameters, but not all take part."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from .digests import canonical, digest_of


def adapters_of(modules: Mapping[str, nn.Module]) -> str:
    """
    Return the names of the adapters in effect, with a digest of how each module uses them; "none" without any.

    Modules with adapters are known by what PEFT gives them: the properties `active_adapter` and `disable_adapters`,
    perhaps `merged_adapters`, and `scaling` for LoRA.
    """
    uses: dict[str, Any] = {}
    names: set[str] = set()
    for name, module in modules.items():
        # A model of transformers has a method of this name.
        if not isinstance(getattr(type(module), "disable_adapters", None), property):
            continue
        given: Any = module
        active, merged = _as_names(given.active_adapter), _as_names(getattr(given, "merged_adapters", ()))
        is_disabled = bool(given.disable_adapters)
        scaling = {str(each): repr(value) for each, value in (getattr(given, "scaling", None) or {}).items()}
        uses[name] = [active, is_disabled, merged, scaling]
        names.update(f"{each} merged" for each in merged)
        names.update(() if is_disabled else set(active).difference(merged))
    return f"{', '.join(sorted(names)) or 'disabled'} ({digest_of(canonical(uses))})" if uses else "none"


def _as_names(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else [str(each) for each in given]
