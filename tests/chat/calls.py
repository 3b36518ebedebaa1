"""Chat templates that write calls of functions as published ones do, and tokenizers with them."""

import json
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from models.byte_tokenizer import tokenizer_for


@dataclass(frozen=True)
class Form:
    """
    The form of calls in a published chat template: what it writes around each, as parts of a template.

    Attributes:
        begin: before the first call.
        name: before a name.
        arguments: between a name and arguments.
        call: after arguments.
        separator: between calls.
        end: after the last one.
        turn: before an answer, where it begins, and after it.
        thought: before the last answer.
        special: tokens that a tokenizer leaves out of a text.
        tokens: others that are one token.
        has_one: whether it refuses several calls.
        argument: before the name of each argument, between it and its value, and after that; `None` for JSON.
    """

    begin: str
    name: str
    arguments: str
    call: str
    separator: str = ""
    end: str = ""
    turn: tuple[str, str, str] = ("<|im_start|>assistant\n", "", "<|im_end|>\n")
    thought: str = ""
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")
    tokens: tuple[str, ...] = ()
    has_one: bool = False
    argument: tuple[str, str, str] | None = None

    @property
    def template(self) -> str:
        """The template: functions, and messages of all roles, with their calls."""
        begin, mark, end = self.turn
        arguments = "{{ call.function.arguments | tojson }}"
        if self.argument:
            value = self.text("{{ key }}", "{{ value if value is string else value | tojson }}")
            arguments = "{% for key, value in call.function.arguments | items %}" + value + "{% endfor %}"
        call = self.name + "{{ call.function.name }}" + self.arguments + arguments + self.call
        return "".join(
            (
                "{% if tools %}{{ tools | tojson }}\n{% endif %}",
                "{% for m in messages %}{% if m.role == 'assistant' %}" + begin,
                "{% if m.thinking and loop.last %}" + self.thought + "{% endif %}",
                "{% if m.tool_calls %}" + self.begin,
                "{{ raise_exception('one call') if m.tool_calls | length > 1 }}" if self.has_one else "",
                "{% for call in m.tool_calls %}" + call,
                "{% if not loop.last %}" + self.separator + "{% endif %}{% endfor %}" + self.end,
                "{% else %}" + mark + "{{ m.content }}{% endif %}" + end,
                "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}",
                "{% if add_generation_prompt %}" + begin + "{% endif %}",
            )
        )

    def text(self, name: str, value: str) -> str:
        """Return an argument that is a text."""
        begin, equals, end = self.argument or ("", "", "")
        return f"{begin}{name}{equals}{value}{end}" if self.argument else json.dumps({name: value})


_MISTRAL = ("<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_MISTRAL_TURN = ("", "", "<|im_end|>")
_KIMI = tuple(
    f"<|tool_call{each}|>" for each in ("s_section_begin", "s_section_end", "_begin", "_end", "_argument_begin")
)
_GLM = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|end|>", "<|im_end|>")
# As the templates in the files tokenizer_config.json, or chat_template.jinja, of these models write them.
FORMS = {
    # Qwen/Qwen3-0.6B, NousResearch/Hermes-3-Llama-3.1-8B, HuggingFaceTB/SmolLM3-3B
    "Hermes": Form(
        "",
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        "}\n</tool_call>",
        "{{ '\\n' }}",
        thought="<think>\n{{ m.thinking }}\n</think>\n\n",
        tokens=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "Hermes, of many tokens": Form("", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "{{ '\\n' }}"),
    # meta-llama/Llama-3.2-3B-Instruct
    "Llama": Form("", '{"name": "', '", "parameters": ', "}", has_one=True),
    # mistralai/Mistral-Nemo-Instruct-2407
    "Mistral Nemo": Form(
        "[TOOL_CALLS][",
        '{"name": "',
        '", "arguments": ',
        ', "id": "{{ call.id }}"}',
        ", ",
        "]",
        turn=_MISTRAL_TURN,
        special=_MISTRAL,
    ),
    # mistralai/Mistral-Small-3.2-24B-Instruct-2506; Devstral is without the id
    "Mistral Small": Form("", "[TOOL_CALLS]", "[CALL_ID]{{ call.id }}[ARGS]", "", turn=_MISTRAL_TURN, special=_MISTRAL),
    # moonshotai/Kimi-K2-Thinking
    "Kimi": Form(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.",
        ":{{ loop.index0 }}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
        thought="<think>{{ m.thinking }}</think>",
        tokens=("<think>", "</think>"),
        special=("<|im_start|>", "<|im_end|>", *_KIMI),
    ),
    # openai/gpt-oss-120b
    "gpt-oss": Form(
        "",
        " to=functions.",
        "<|channel|>commentary json<|message|>",
        "<|call|>",
        turn=("<|start|>assistant", "<|channel|>final<|message|>", "<|im_end|>"),
        thought="<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant",
        special=_HARMONY,
        has_one=True,
    ),
    # Qwen/Qwen3-Coder-30B-A3B-Instruct
    "Qwen3-Coder": Form(
        "",
        "<tool_call>\n<function=",
        ">\n",
        "</function>\n</tool_call>",
        "{{ '\\n' }}",
        tokens=("<tool_call>", "</tool_call>"),
        argument=("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    # zai-org/GLM-4.6; 4.7 has no line ends
    "GLM": Form(
        "",
        "<tool_call>",
        "\n",
        "</tool_call>",
        "{{ '\\n' }}",
        thought="<think>{{ m.thinking }}</think>\n",
        tokens=("<tool_call>", "</tool_call>", *_GLM, "<think>", "</think>"),
        argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    # MiniMaxAI/MiniMax-M2; Jinja drops the first line end
    "MiniMax": Form(
        "\n\n<minimax:tool_call>\n",
        '<invoke name="',
        '">\n',
        "</invoke>\n",
        end="</minimax:tool_call>",
        special=("<|im_start|>", "<|im_end|>", "<minimax:tool_call>", "</minimax:tool_call>"),
        argument=('<parameter name="', '">', "</parameter>\n"),
    ),
    # No model's: what marks are is seen from the template alone.
    "odd": Form("", "((call ", " with ", "))", " "),
    "odd, marked": Form("", "((call ", " with ", " ))", " ", argument=("@", " is ", ";")),
    "deep": Form("", '(({"name": "', '", "input": {"of": ', "}}))", " "),
}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one of these forms."""
    form = FORMS[name]
    return tokenizer_for(form.template, form.special, "<|im_end|>", form.tokens)


def function(name: str, **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, "required": [*parameters], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"It is {name}.", "parameters": schema}}


def called(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
