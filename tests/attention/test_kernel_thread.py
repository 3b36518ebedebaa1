"""The thread for kernels that run beside an accelerator."""

import os
import threading

import pytest

from hf_hybrid_cache.attention.host_attention import KernelThread


def test_kernel_thread_when_given_jobs_then_runs_them_in_order():
    thread, done = KernelThread(), []
    results = [
        thread.submit(lambda number=number: (done.append(number), threading.get_ident())[1]) for number in range(5)
    ]
    threads = {result.result() for result in results}
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert done == list(range(5))


def test_kernel_thread_when_a_job_fails_then_waiter_gets_the_error():
    with pytest.raises(ZeroDivisionError):
        KernelThread().submit(lambda: 1 // 0).result()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_a_thread_of_its_own():
    thread = KernelThread()
    thread.submit(lambda: None).result()
    child = os.fork()
    if child == 0:
        os._exit(thread.submit(lambda: 7).result(timeout=20))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
