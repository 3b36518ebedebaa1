"""
The divergence of a model's next token with quantized weights, from that with the weights as they are.

SmolLM2-135M in float32 over English text: the KL divergence in nats, and how often both have the same token first. A
window is read as a prompt is, and its head gets few tokens at a time, as the end of a prompt does; also with tokens
that are not rounded to 8 bits. Weights in 4 bits prove little here, because they come from a file of 4 bits.
"""

from collections.abc import Mapping
from statistics import fmean

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from experiments.common.harness import Cell, publish
from experiments.common.options import plain_parser
from experiments.common.texts import TEXTS, english_ids
from experiments.quality.perplexity import divergence
from hf_hybrid_cache import quantize_weights
from hf_hybrid_cache.kernels.vector.processor import set_integer_kernels
from hf_hybrid_cache.models import load

MODEL = "smollm2-135m"
BITS = ((8, 8), (4, 8), (4, 4))  # of the layers and of the head
GROUPS = (32, 64, 128)
TOKENS = 32  # few


@torch.inference_mode()
def log_probabilities(model: PreTrainedModel, window: torch.Tensor) -> torch.Tensor:
    """Logarithms of the next token's probabilities, `[tokens, vocabulary]`."""
    hidden = model.get_decoder()(window[None]).last_hidden_state[0]
    logits = torch.cat([model.get_output_embeddings()(few) for few in hidden.split(TOKENS)])
    log_probs: torch.Tensor = logits.log_softmax(-1)
    return log_probs


def measure(model: PreTrainedModel, texts: Mapping[str, torch.Tensor]) -> list[Cell]:
    """Return a cell for each text, `[windows, tokens]`, by bits of the layers and the head, and sizes of groups."""
    expected = {text: [log_probabilities(model, window) for window in windows] for text, windows in texts.items()}
    cells: dict[str, Cell] = {text: {"text": text, "kl_nats": {}, "same_top_token": {}} for text in texts}

    def add(name: str) -> None:
        for text, windows in texts.items():
            pairs = zip(windows, expected[text], strict=True)
            found = [divergence(log_probabilities(model, window), wanted) for window, wanted in pairs]
            for key in found[0]:
                cells[text][key][name] = fmean(each[key] for each in found)

    for bits, head_bits in BITS:
        for group in GROUPS:
            with quantize_weights(model, bits, group, head_bits, temporary=True):
                name = f"ours-{bits}, head in {head_bits}, groups of {group}"
                add(name)
                set_integer_kernels(False)
                try:
                    add(f"{name}, exact tokens")
                finally:
                    set_integer_kernels(None)
    return list(cells.values())


def main() -> None:
    parser = plain_parser("weight_error", __doc__)
    parser.add_argument("--windows", type=int, default=4, help="of each text (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window (default: %(default)s)")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    model, tokenizer = load(MODEL, torch.float32, "cpu")
    assert tokenizer is not None

    count, length = arguments.windows, arguments.length
    texts = {text: english_ids(tokenizer, count * length, text).view(count, length) for text in TEXTS}
    told = {"model": MODEL, "windows": count, "window_tokens": length}
    cells = ((cell["text"], cell) for cell in measure(model, texts))
    publish("weight_error", cells, arguments.out, lambda cell: cell["kl_nats"], **told)


if __name__ == "__main__":
    main()
