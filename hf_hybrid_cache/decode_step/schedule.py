"""The order of a program: what is ready runs together, and what nobody reads not at all."""

from collections.abc import Iterable

from ..cache import HybridCache
from ..kernels import Attend, Instruction, Multiply, Place
from .recording import Array, PythonCall, Recording, Step

# In the place of a storage, and downwards: what the cache holds of a layer.
_FIRST_LAYER = -10
_CLASSES = (Instruction, Multiply, Attend, PythonCall)


def reads_of(step: Step) -> set[int]:
    """The storages that a step reads."""
    if isinstance(step, Multiply):
        return {each.tokens.storage for each in step.products}
    if isinstance(step, PythonCall):
        return {each.storage for each in step.leaves if isinstance(each, Array)}
    if isinstance(step, Attend):
        given = {each.storage for each in (step.query, step.keys, step.values) if each is not None}
        return given | {_FIRST_LAYER - step.layer}
    return {each.storage for each in step.operands if isinstance(each, Place)}


def writes_of(step: Step) -> set[int]:
    """The storages that a step writes to."""
    if isinstance(step, Multiply):
        return {each.out.storage for each in step.products}
    if isinstance(step, PythonCall):
        return {each.storage for each in step.outs if each is not None} | (reads_of(step) if step.writes else set())
    if isinstance(step, Attend) and step.keys is not None:
        return {step.out.storage, _FIRST_LAYER - step.layer}
    return {step.out.storage}


def schedule(recording: Recording) -> list[Step]:
    """
    Order the steps of a recording.

    All instructions that are ready come next, then all products that are ready, as one step, then attention, then a
    call of Python. Storages that a step reads and writes decide what is ready.
    """
    steps = _without_idle(recording)
    waits, follow = _dependences(steps)
    ready: dict[type, list[int]] = {kind: [] for kind in _CLASSES}
    ordered: list[Step] = []

    def finish(done: Iterable[int]) -> None:
        for index in done:
            for after in follow[index]:
                waits[after] -= 1
                if not waits[after]:
                    ready[type(steps[after])].append(after)

    for index, number in enumerate(waits):
        if not number:
            ready[type(steps[index])].append(index)
    while kind := next((kind for kind in _CLASSES if ready[kind]), None):
        together = sorted(ready[kind])
        if kind is PythonCall:
            together = together[:1]
        ready[kind] = [index for index in ready[kind] if index not in together]
        if kind is Multiply:
            ordered.append(Multiply(tuple(each for index in together for each in steps[index].products)))  # type: ignore
        else:
            ordered += [steps[index] for index in together]
        finish(together)
    return ordered


def _without_idle(recording: Recording) -> list[Step]:
    """The steps whose results are read, and those that write to the cache."""
    assert recording.result is not None
    live, kept = {recording.result.storage}, list[Step]()
    for step in reversed(recording.steps):
        to_cache = isinstance(step, Attend) or (isinstance(step, PythonCall) and HybridCache in step.leaves)
        if to_cache or writes_of(step) & live:
            if isinstance(step, PythonCall):
                read = [None if each is None or each.storage not in live else each for each in step.outs]
                step = step._replace(outs=tuple(read))
            kept.append(step)
            live |= reads_of(step)
    return kept[::-1]


def _dependences(steps: list[Step]) -> tuple[list[int], list[list[int]]]:
    """Return for each step the number of those that it waits for, and those that wait for it."""
    waits, follow = [0] * len(steps), [list[int]() for _ in steps]
    written: dict[int, int] = {}
    read: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        reads, writes = reads_of(step), writes_of(step)
        before = {written[each] for each in reads | writes if each in written}
        before |= {reader for each in writes for reader in read.get(each, ())}
        for each in before - {index}:
            follow[each].append(index)
            waits[index] += 1
        for each in reads:
            read.setdefault(each, []).append(index)
        for each in writes:
            written[each], read[each] = index, []
    return waits, follow
