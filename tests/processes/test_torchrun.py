"""The script of the page on several processes, started with `torchrun`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hf_hybrid_cache.cache_argument import cache_argument

from .groups import NEEDS_GROUPS, SECONDS_TO_ANSWER, free_port
from common.caches import stock
from common.programs import environment
from documentation.test_documentation import OTHER_NAMES, REPORT, REPOSITORY, as_installed, hub_with
from models.byte_tokenizer import byte_tokenizer
from models.tiny_models import COMMON, random_model

pytestmark = [pytest.mark.xdist_group("groups"), NEEDS_GROUPS]


@pytest.mark.slow
def test_script_of_the_page_on_two_processes_answers_as_one_process(tmp_path: Path):
    tokenizer, folder = byte_tokenizer(), tmp_path / "model"
    sizes = COMMON | {"vocab_size": len(tokenizer), "num_hidden_layers": 4, "max_position_embeddings": 4096}
    random_model(LlamaConfig(**sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (tmp_path / "report.txt").write_text(REPORT)
    page = as_installed((REPOSITORY / "docs" / "many-processes.md").read_text())
    script = re.search(r"```python\n(# shared_cache\.py\n.*?)```", page, re.DOTALL)
    assert script is not None
    (tmp_path / "shared_cache.py").write_text(script[1])
    hub = str(hub_with(tmp_path / "hub", folder, *OTHER_NAMES))
    options = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, "shared_cache.py"],
        cwd=tmp_path,
        env=environment(HF_HUB_CACHE=hub, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_ANSWER,
    )
    assert ended.returncode == 0, ended.stderr
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = AutoTokenizer.from_pretrained(folder)(REPORT, return_tensors="pt")
    (answer,) = model.generate(**inputs, **cache_argument(stock(model.config)), max_new_tokens=20)
    assert ended.stdout == tokenizer.decode(answer) + "\n"
