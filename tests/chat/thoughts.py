"""Chat templates that write thoughts as published ones do, and tokenizers with them."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from models.byte_tokenizer import tokenizer_for


@dataclass(frozen=True)
class Form:
    """
    The form of thoughts in a published chat template, without tools and system messages.

    Attributes:
        template: written anew for these tests.
        special: tokens that a tokenizer leaves out of a text.
        begin: what the model writes to begin a thought.
        end: what it writes after it.
        tokens: others that are one token.
    """

    template: str
    special: tuple[str, ...]
    begin: str
    end: str
    tokens: tuple[str, ...] = ("<think>", "</think>")


CHATML = ("<|im_start|>", "<|im_end|>")
# tokenizer_config.json of Qwen/Qwen3-0.6B; later ones begin the thought in the prompt.
QWEN3 = """\
{%- set last = messages | map(attribute='role') | list | length - 1 -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}{{ '\\n' }}
{%- if m.role == 'assistant' and loop.index0 == last -%}
<think>{{ '\\n' + (m.reasoning_content or '') + '\\n' }}</think>{{ '\\n\\n' }}
{%- endif -%}
{{ m.content }}<|im_end|>{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant{{ '\\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}
<think>{{ '\\n\\n' }}</think>{{ '\\n\\n' }}
{%- endif -%}
{%- endif -%}"""
_END = "{%- endif -%}\n{%- endif -%}"
BEGUN = QWEN3.removesuffix(_END) + "{%- else -%}<think>{{ '\\n' }}" + _END
# deepseek-ai/DeepSeek-R1-Distill-Qwen-32B: what an answer has up to the mark goes. (Its bars are wider.)
R1 = """\
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|User|>{{ m.content }}{%- endif -%}
{%- if m.role == 'assistant' -%}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|Assistant|><think>{{ '\\n' }}{%- endif -%}"""
# zai-org/GLM-4.5: earlier answers have an empty thought, and the switch is a word of each question.
GLM = """\
[gMASK]
{%- for m in messages -%}
{%- if m.role == 'user' -%}
<|user|>{{ '\\n' + m.content }}
{{- '/nothink' if enable_thinking is defined and not enable_thinking else '' }}
{%- else -%}
<|assistant|>{{ '\\n' }}<think>{{ m.reasoning_content or '' if loop.last else '' }}</think>{{ '\\n' + m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{ '\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}
{%- endif -%}"""
# openai/gpt-oss-120b: messages have channels, of which one is for thoughts.
GPT_OSS = """\
<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if loop.last and 'thinking' in m -%}
<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
{%- endif -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}
{%- else -%}
<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
# No model's: what marks are is seen from the template alone.
ODD = QWEN3.replace("<think>", "((ponder:").replace("</think>", ":ponder))")
FORMS = {
    "Qwen3": Form(QWEN3, CHATML, "<think>\n", "\n</think>\n\n"),
    "Qwen3, begun": Form(BEGUN, CHATML, "", "\n</think>\n\n"),
    "R1": Form(R1, ("<|User|>", "<|Assistant|>", "<|end|>"), "", "\n</think>\n\n"),
    "R1, of many tokens": Form(R1, ("<|User|>", "<|Assistant|>", "<|end|>"), "", "\n</think>\n\n", ()),
    "GLM": Form(GLM, ("[gMASK]", "<|user|>", "<|assistant|>", "<|end|>"), "\n<think>", "</think>\n"),
    "gpt-oss": Form(
        GPT_OSS,
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        (),
    ),
    "odd": Form(ODD, CHATML, "((ponder:\n", "\n:ponder))\n\n", ()),
}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one of these forms."""
    form = FORMS[name]
    return tokenizer_for(form.template, form.special, form.special[-1], form.tokens)
