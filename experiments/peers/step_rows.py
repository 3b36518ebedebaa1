"""Rows of `experiments.peers.whole_step`: their list, groups that fit into memory together, and ratios."""

from collections.abc import Mapping
from dataclasses import dataclass

LIBRARIES = ("llama.cpp", "ik_llama.cpp")
OURS = ("ours", "fused")


@dataclass(frozen=True)
class Row:
    """
    A way to decode.

    Attributes:
        engine: `stock` (transformers' `DynamicCache`), `ours`, `fused` (ours with a step in one call), or one of
            `LIBRARIES`.
        weight_bits: of the weights.
        kv_bits: of keys and values.
    """

    engine: str
    weight_bits: int
    kv_bits: int

    @property
    def name(self) -> str:
        return f"{self.engine} W{self.weight_bits}/KV{self.kv_bits}"

    @property
    def holder(self) -> str:
        """Name the cache of a row: those of ours that differ in weights alone share one."""
        return f"{self.engine} KV{self.kv_bits}" if self.engine in OURS else self.name


_BITS = {
    "stock": ((16, 16),),
    "ours": ((16, 16), (16, 4), (8, 8), (8, 4), (4, 4)),
    "fused": ((16, 16), (8, 8), (4, 4)),
    **dict.fromkeys(LIBRARIES, ((8, 8), (4, 4), (8, 16), (4, 16))),
}
ROWS = {row.name: row for row in [Row(engine, *each) for engine, bits in _BITS.items() for each in bits]}
# Ours, and what its seconds are divided by.
COMPARED = [
    ("ours W8/KV4", "ours W16/KV4"),
    ("ours W4/KV4", "ours W16/KV4"),
    *((f"fused {bits}", f"ours {bits}") for bits in ("W16/KV16", "W8/KV8", "W4/KV4")),
    *((f"{engine} {bits}", "stock W16/KV16") for engine in OURS for bits in ("W16/KV16", "W4/KV4")),
    *(
        (f"{engine} {bits}", f"{library} {theirs}")
        for engine in OURS
        for library in LIBRARIES
        for bits, theirs in (("W8/KV8", "W8/KV8"), ("W4/KV4", "W4/KV4"), ("W4/KV4", "W4/KV16"))
    ),  # the last, because few bits of keys and values may be slower there than many
]


def reference_of(rows: list[Row]) -> Row:
    """Return the row that is measured in each group, because it takes the least memory."""
    return min(rows, key=lambda row: (row.kv_bits, row.weight_bits, row.engine != "ours"))


def fitting(rows: list[Row], sizes: Mapping[str, float], room: float) -> list[Row]:
    """Return the rows that fit into `room` bytes beside the reference; `sizes` are by holder."""
    holder = reference_of(rows).holder
    return [row for row in rows if sum(sizes[each] for each in {row.holder, holder}) <= room]


def groups(rows: list[Row], sizes: Mapping[str, float], room: float) -> list[list[Row]]:
    """Group the rows that fit into memory together; each group begins with the reference, to compare them by."""
    reference = reference_of(rows)
    found = [[reference]]
    for row in rows:
        holders = {each.holder for each in found[-1]} | {row.holder}
        if sum(sizes[holder] for holder in holders) > room:
            found.append([reference])
        if row != reference:
            found[-1].append(row)
    return found


def over_reference(medians: list[dict[str, float]], reference: str) -> dict[str, float]:
    """Return the seconds of each row over those of the reference in the same group."""
    return {name: seconds / group[reference] for group in medians for name, seconds in group.items()}


def ratios(relative: Mapping[str, float]) -> dict[str, float]:
    """Return the time of our rows over that of the rows they are compared with, where both were measured."""
    return {
        f"{ours} / {other}": relative[ours] / relative[other]
        for ours, other in COMPARED
        if ours in relative and other in relative
    }
