"""The thread for kernels that run beside an accelerator."""

import os
import threading

import pytest

from hf_hybrid_cache.attention.host_attention import KernelThread


def test_jobs_run_in_order_on_a_thread_of_their_own_and_may_fail():
    thread, done = KernelThread(), []
    jobs = [thread.submit(lambda number=number: done.append((number, threading.get_ident()))) for number in range(5)]
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result()
    assert [job.result() for job in jobs] == [None] * 5
    (other,) = {name for _, name in done} - {threading.get_ident()}
    assert done == [(number, other) for number in range(5)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_a_thread_of_its_own():
    thread = KernelThread()
    thread.submit(lambda: None).result()
    child = os.fork()
    if child == 0:
        os._exit(thread.submit(lambda: 7).result(timeout=20))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
