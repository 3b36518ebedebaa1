"""Random sequences of everything a cache can be asked, on an accelerator that runs its work in any order."""

from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import initialize

from hf_hybrid_cache.layers import layer_stores
from hf_hybrid_cache.storage.runs.streams import Streams

from accelerator.orders import DEVICE, ORDERS, in_order, kept, sent
from operations.setups import setups
from operations.test_stateful import PROMPTS, USES, CacheMachine, Use, run


class AcceleratorMachine(CacheMachine):
    """A machine that compares states only at the end, so that comparing does not order the work."""

    device = DEVICE
    order: str

    @initialize(data=st.data(), batch=st.integers(1, 3), new_tokens=st.just(0) | PROMPTS, use=USES, seed=st.integers(0))
    def start(self, data: st.DataObject, batch: int, new_tokens: int, use: Use, seed: int) -> None:
        self.given: list[tuple[torch.Tensor, torch.Tensor, float, float]] = []
        self.surroundings.enter_context(in_order(self.order, seed % 2**31))
        if seed % 4 == 0:  # a device may have no streams: then the host waits for copies
            self.surroundings.enter_context(mock.patch.object(layer_stores, "streams_for", Streams))
        super().start(data, batch, new_tokens, use)

    def sent(self, tensor: torch.Tensor) -> torch.Tensor:
        return sent(tensor.pin_memory())

    def require_same(self, ours: torch.Tensor, theirs: torch.Tensor, rtol: float = 0.0, atol: float = 0.0) -> None:
        self.given.append((kept(ours), theirs, rtol, atol))

    def hold(self, tensor: torch.Tensor) -> None:
        """Hold nothing: a copy to compare with would order the work."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep nothing, as in `hold`."""

    def take_back(self, tensors: list[torch.Tensor]) -> None:
        """Write nothing: copies of them may be under way."""

    def reports_what_it_holds(self) -> None:
        """Skip the comparison, which would order the work of the device."""

    def teardown(self) -> None:
        try:
            if hasattr(self, "held"):
                torch.accelerator.synchronize()
                for ours, theirs, rtol, atol in self.given:
                    super().require_same(ours, theirs, rtol, atol)
                self.ours.to("cpu")
        finally:
            super().teardown()


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Attention asks for the keys and values")
@pytest.mark.parametrize("order", ORDERS)
def test_cache_on_accelerator_when_any_operations_then_as_dynamic_cache(order: str):
    # A device decodes codes with other last bits than the CPU.
    run(AcceleratorMachine, examples=8, order=order, setups=setups(torch.float32, is_quantized=False))
