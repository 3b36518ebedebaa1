"""What `from_pretrained` is told so that weights are coded while they are loaded."""

from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .loading_quantizer import QUANT_METHOD, CodedWeightsQuantizer
from .width import GROUP_SIZE, HEAD_BITS, Width


class CodedWeightsConfig(QuantizationConfigMixin):
    """
    Load a model on the CPU with weights of few bits, without ever holding all of them as they are in the files.

    The model is the same as after `quantize_weights`, bit for bit. Each weight is coded as soon as it has been read,
    experts that files keep one by one each by itself, and what was read is given back. `model.hf_quantizer.report`, a
    `WeightsReport`, says what was coded and which matrices stay as they are.

    The model cannot be saved or trained. Of checkpoints that are quantized already `from_pretrained` says that it does
    not load them so. The first config that is made tells transformers about this way to quantize.

    Args:
        bits: 8 or 4, of a weight.
        group_size: weights of a row that share a scale: 32, 64 or 128.
        head_bits: 8 or 4, of the output head, and so of the embedding that is tied to it.
        only_experts: code the stacked experts of a mixture-of-experts model, and leave all else as it is.

    Raises:
        TypeError: one of the numbers is not an integer.
        ValueError: they are others. From `from_pretrained`: the model is not to be on the CPU, or none of its weights
            can be of few bits.
        HostMemoryError: from `from_pretrained`, before anything is read: host memory would not suffice for the codes.

    Example:
        >>> config = CodedWeightsConfig(bits=4)
        >>> model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", quantization_config=config)
        >>> print(model.hf_quantizer.report)
    """

    def __init__(self, bits: int, group_size: int = GROUP_SIZE, head_bits: int = HEAD_BITS, only_experts: bool = False):
        self.quant_method = QUANT_METHOD  # type: ignore[assignment] # transformers' own are an enumeration of strings
        self.bits, self.group_size, self.head_bits = Width.checked(bits, group_size, head_bits)
        if not isinstance(only_experts, bool):
            raise TypeError(f"only_experts must be True or False, got {only_experts!r}.")
        self.only_experts = only_experts
        if QUANT_METHOD not in AUTO_QUANTIZER_MAPPING:
            register_quantizer(QUANT_METHOD)(CodedWeightsQuantizer)
