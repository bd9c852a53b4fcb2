"""Chat templates: where a folder keeps its own, and some to choose by name for base models that bring none."""

from __future__ import annotations

import json
from pathlib import Path

from loram.errors import RecipeError, did_you_mean

TEMPLATE_NAME = "chat_template.jinja"

ALPACA = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}"
    "{{ '### Instruction:\n' + message['content'] + '\n\n### Response:\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + '\n' }}"
    "{% endif %}{% endfor %}"
)

CHATML = (
    "{% if tools %}"
    "{{ '<|im_start|>system\n' }}"
    "{% if messages and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "{{ 'You may call these functions, each call as JSON between <tool_call> and </tool_call>:\n' }}"
    "{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\n' if message['content'] or not loop.first }}"
    "{{ '<tool_call>\n' + ({'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson) }}"
    "{{ '\n</tool_call>' }}"
    "{% endfor %}"
    "{{ eos_token + '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# `eos_token` ends every assistant turn in each; tools are shown and called in chatml only.
TEMPLATES = {"alpaca": ALPACA, "chatml": CHATML}


def known_template(name: str) -> str | None:
    """The Jinja text of a named template or a file; None for `auto`.

    Raises:
        RecipeError: neither a known name nor a file.
    """
    if name == "auto":
        return None
    if name in TEMPLATES:
        return TEMPLATES[name]
    if Path(name).is_file():
        try:
            return Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise RecipeError(f"data.chat_template: {name} is not UTF-8 text.", fix="Convert the file.") from error
    raise RecipeError(
        f"data.chat_template '{name}' is neither a file nor one of {sorted(TEMPLATES)}{did_you_mean(name, TEMPLATES)}."
    )


def stored_template(folder: Path) -> str | None:
    """The chat template of a model or adapter folder: a file of its own, or inside tokenizer_config.json."""
    own = folder / TEMPLATE_NAME
    if own.is_file():
        return own.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    return template if isinstance(template, str) else None
