"""The thread for kernels that run beside an accelerator."""

import os

import pytest

from hf_hybrid_cache.attention.host_attention import KernelThread


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_a_thread_of_its_own():
    thread = KernelThread()
    thread.submit(lambda: None).result()
    child = os.fork()
    if child == 0:
        os._exit(thread.submit(lambda: 7).result(timeout=20))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
