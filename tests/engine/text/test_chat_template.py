"""Chat templates: whose they are, what they refuse, and that conversations are data to them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from engine.config import ConfigError, EngineConfig
from engine.text.tokenizer import TextError, Tokenizer, load_tokenizer

USER = {"role": "user", "content": "Hi"}


def with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    hf = copy.deepcopy(tokenizer._hf)
    hf.chat_template = template
    return Tokenizer(hf)


def test_without_a_template_the_option_is_named(demo: Tokenizer) -> None:
    with pytest.raises(TextError, match="chat_template=FILE"):
        with_template(demo, None).apply_chat_template([USER])


def test_a_templates_objection_reaches_the_client_in_one_line(demo: Tokenizer) -> None:
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('A system message\ncomes first') }}{% endif %}"
    with pytest.raises(TextError, match=r"A system message$"):
        with_template(demo, template).apply_chat_template([USER])


@pytest.mark.parametrize("template", ["{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{{ messages[9].content.x }}"])
def test_a_template_that_fails_is_no_traceback(demo: Tokenizer, template: str) -> None:
    with pytest.raises(TextError, match="chat template"):
        with_template(demo, template).apply_chat_template([USER])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ namespace.__init__.__globals__.keys() }}",
        "{% for i in range(1000000000) %}{% endfor %}",
    ],
)
def test_templates_run_in_a_sandbox(demo: Tokenizer, attack: str) -> None:
    with pytest.raises(TextError):
        with_template(demo, attack).apply_chat_template([USER])


def test_conversations_are_never_templates(demo: Tokenizer) -> None:
    content = "{{ 7 * 7 }}{% for x in y %}{{ ''.__class__ }}"
    assert content in demo.apply_chat_template([{"role": "user", "content": content}])


def test_variables_reach_the_template_but_not_the_tokenizers_own_arguments(demo: Tokenizer) -> None:
    thinking = with_template(demo, "{{ 'thinking' if enable_thinking else 'plain' }}")
    assert thinking.apply_chat_template([USER], enable_thinking=True) == "thinking"
    for name in ("chat_template", "tokenize", "messages"):
        with pytest.raises(TextError, match=name):
            demo.apply_chat_template([USER], **{name: "{{ 1 }}"})


def test_a_final_message_can_be_continued(demo: Tokenizer) -> None:
    begun = [USER, {"role": "assistant", "content": "Hello"}]
    text = demo.apply_chat_template(begun, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("Hello")
    with pytest.raises(TextError, match="continue_final_message"):
        demo.apply_chat_template(begun, add_generation_prompt=True, continue_final_message=True)


def test_the_option_replaces_the_models_template(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    tokenizer = load_tokenizer(EngineConfig(chat_template=str(file)))
    assert tokenizer.apply_chat_template([USER]) == "user: Hi\n"


def test_a_template_file_that_is_missing_or_wrong_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat_template=.*nothing\.jinja can't be read: No such file"):
        load_tokenizer(EngineConfig(chat_template=str(tmp_path / "nothing.jinja")))
    file = tmp_path / "broken.jinja"
    file.write_text("Hello\n{% if %}")
    with pytest.raises(ConfigError, match=r"broken\.jinja, line 2: "):
        load_tokenizer(EngineConfig(chat_template=str(file)))
