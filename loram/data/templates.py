"""Chat templates to choose by name, for base models that bring none. `eos_token` ends every assistant turn."""

ALPACA = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}"
    "{{ '### Instruction:\n' + message['content'] + '\n\n### Response:\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + '\n' }}"
    "{% endif %}{% endfor %}"
)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ (eos_token if message['role'] == 'assistant' else '<|im_end|>') + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEMPLATES = {"alpaca": ALPACA, "chatml": CHATML}
